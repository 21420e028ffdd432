"""From scores to the launches that write a selection's rows, and from rows to those that write its twin.

Dims: b batch, h query heads, G key/value heads, Nq query groups, Nk key/value blocks.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from megatron_dsv.kernels import host_values
from megatron_dsv.kernels.block_scores.api import ChunkedScores, ScoreChunk
from megatron_dsv.kernels.block_selection import reference
from megatron_dsv.kernels.block_selection.limits import RowRule
from megatron_dsv.kernels.block_selection.triton.rows import _select_rows_kernel
from megatron_dsv.kernels.block_selection.triton.twin import _fill_twin_kernel, _mark_rows_kernel
from megatron_dsv.kernels.launching import WAY_OUT, Launch, Tile, check_triton, launch_device, power_of_two
from megatron_dsv.kernels.selection import KVSelection

MAX_BLOCKS = 16384
"""Blocks of a row that a program holds in registers."""
_MASK_WORDS = 2**24
"""Words of the bit mask that exist at once: 64 MiB."""


def select_rows(scores: Tensor | ChunkedScores, rule: RowRule, kv_length: Tensor, query_length: Tensor,
                query_group_ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(kv_indices, row_start, row_count) of scores fp32 [b, h, Nq, Nk]; kv_length [b, G], query_length [b]."""
    b, h, nq, nk = scores.shape
    device = scores.device
    check_triton("select_rows", device, limit(nk))
    if not any(rule.widths):
        return reference.select_rows(scores, rule, kv_length, query_length, query_group_ids)
    table = host_values.on_device(rule.table(b * nq), torch.int64, device)
    kv_indices = torch.empty(rule.capacity(b * nq), dtype=torch.int32, device=device)
    row_start = torch.empty((b, h, nq), dtype=torch.int64, device=device)
    row_count = torch.empty((b, h, nq), dtype=torch.int32, device=device)
    chunks = scores if isinstance(scores, ChunkedScores) else [ScoreChunk(0, 0, scores.contiguous().flatten(0, 1))]
    for chunk in chunks:
        with launch_device(row_start):
            plan_rows(chunk, rule, table, kv_length, query_length, query_group_ids, kv_indices, row_start,
                      row_count).run()
    return kv_indices, row_start, row_count


def limit(num_blocks: int) -> str | None:
    """What keeps these kernels from rows of so many blocks, or None."""
    if num_blocks <= MAX_BLOCKS:
        return None
    return f"takes rows of up to {MAX_BLOCKS} blocks, got {num_blocks}; {WAY_OUT} or longer blocks"


def plan_rows(chunk: ScoreChunk, rule: RowRule, table: Tensor, kv_length: Tensor, query_length: Tensor,
              query_group_ids: Tensor | None, kv_indices: Tensor, row_start: Tensor, row_count: Tensor) -> Launch:
    """The rows of one chunk; writes them into kv_indices, row_start and row_count [b, h, Nq]."""
    pairs, groups, blocks = chunk.scores.shape
    _, h, nq = row_start.shape
    block = max(32, power_of_two(blocks))
    arguments = {
        "scores_ptr": chunk.scores, "limits_ptr": table, "kv_length_ptr": kv_length.contiguous(),
        "query_length_ptr": query_length.contiguous(),
        "group_ids_ptr": row_start if query_group_ids is None else query_group_ids.contiguous(),
        "indices_ptr": _never_empty(kv_indices), "row_start_ptr": row_start, "row_count_ptr": row_count,
        "first_pair": chunk.first_pair, "first_group": chunk.first_group, "chunk_groups": groups, "num_groups": nq,
        "num_blocks": blocks, "heads": h, "kv_heads": kv_length.shape[1], "theta": rule.theta_units,
        "prefix": rule.prefix_blocks}
    constants: dict[str, Any] = {
        "BY_MASS": rule.by_mass, "LSE": rule.score_kind == "lse", "OWN": rule.keep_own_block,
        "HAS_IDS": query_group_ids is not None, "Q_BLOCK": rule.q_block_size, "KV_BLOCK": rule.kv_block_size,
        "BLOCK": block}
    return Launch(_select_rows_kernel, (pairs * groups, 1), arguments, constants,
                  Tile(1, block, max(1, min(16, block // 1024)), 1))


def transpose(selection: KVSelection) -> KVSelection:
    """The key-major twin; entries ascend, in a buffer of ``max_entries``."""
    b, h, nq = selection.row_start.shape
    nk = selection.num_kv_blocks
    check_triton("with_transposed", selection.row_start.device, None)
    device = selection.row_start.device
    words = -(-nk // 32)
    capacity = selection.entries_bound
    twin_indices = torch.empty(capacity, dtype=torch.int32, device=device)
    twin_start = torch.empty((b, h, nk), dtype=torch.int64, device=device)
    fits = torch.empty((), dtype=torch.int32, device=device)
    rows = replace(selection, kv_indices=_never_empty(selection.kv_indices.contiguous()),
                   row_start=selection.row_start.contiguous(), row_count=selection.row_count.contiguous(),
                   kv_length=selection.kv_length.contiguous())
    step = max(1, min(b * h, _MASK_WORDS // max(1, words * nq)))
    # One clearing for all that the atomics count: totals (64 bits), the flag, counts and the mask.
    cleared = torch.zeros(2 * b * h + 2 + b * h * nk + step * words * nq, dtype=torch.int32, device=device)
    total, flag, count, mask = cleared.split([2 * b * h, 2, b * h * nk, step * words * nq])
    counts = {"mask_ptr": mask, "count_ptr": count, "total_ptr": total.view(torch.int64), "excess_ptr": flag}
    with launch_device(twin_start):
        for first in range(0, b * h, step):
            if first:
                mask.zero_()
            pairs = min(step, b * h - first)
            plan_mark(rows, counts, first, pairs).run()
            plan_fill(rows, counts, first, pairs, twin_indices, twin_start, fits).run()
    if b * h * nk:
        torch._assert_async(fits, "KVSelection.max_row_count must bound the entries of every row; a dense row has one "
                                  "for each valid block. max_entries must bound those of all rows")
    return replace(selection, kv_indices=twin_indices, row_start=twin_start, row_count=count.view(b, h, nk),
                   max_row_count=nq, transposed=None)


def plan_mark(rows: KVSelection, counts: dict[str, Tensor], first_pair: int, pairs: int) -> Launch:
    """Marks and counts the entries of the rows of some (batch, head) pairs."""
    _, h, nq = rows.row_start.shape
    arguments = {
        "indices_ptr": rows.kv_indices, "row_start_ptr": rows.row_start, "row_count_ptr": rows.row_count,
        "kv_length_ptr": rows.kv_length, **counts, "first_pair": first_pair, "num_groups": nq,
        "num_blocks": rows.num_kv_blocks, "words": -(-rows.num_kv_blocks // 32), "heads": h,
        "kv_heads": rows.kv_length.shape[1], "most": rows.max_row_count}
    step = min(256, max(32, power_of_two(rows.max_row_count)))
    return Launch(_mark_rows_kernel, (pairs * nq, 1), arguments, {"KV_BLOCK": rows.kv_block_size, "STEP": step},
                  Tile(1, step, max(1, step // 64), 1))


def plan_fill(rows: KVSelection, counts: dict[str, Tensor], first_pair: int, pairs: int, twin_indices: Tensor,
              twin_start: Tensor, fits: Tensor) -> Launch:
    """Writes the twin of some (batch, head) pairs, behind that of all earlier ones."""
    words = -(-rows.num_kv_blocks // 32)
    arguments = {**counts, "twin_indices_ptr": _never_empty(twin_indices), "twin_start_ptr": twin_start,
                 "fits_ptr": fits, "first_pair": first_pair, "num_groups": rows.row_start.shape[2],
                 "num_blocks": rows.num_kv_blocks, "words": words, "capacity": twin_indices.numel()}
    return Launch(_fill_twin_kernel, (pairs * words, 1), arguments, {"GROUPS": 128, "STEP": 256}, Tile(128, 32, 4, 1))


def _never_empty(indices: Tensor) -> Tensor:
    """A kernel wants a pointer even where it reads and writes nothing."""
    return indices if indices.numel() else torch.empty(1, dtype=torch.int32, device=indices.device)
