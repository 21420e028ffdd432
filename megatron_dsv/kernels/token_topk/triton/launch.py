"""From pooled queries and low-rank keys to the launches that select single keys.

Dims: sk key tokens, b batch, h query heads, G key/value heads, r predictor rank, P proxies per query group, Nq query
groups.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

from megatron_dsv.kernels.sparse_attention.triton.launch import Launch
from megatron_dsv.kernels.sparse_attention.triton.tiles import Tile
from megatron_dsv.kernels.token_topk.triton.compact import (
    _token_topk_draft_kernel,
    _token_topk_final_kernel,
    _token_topk_lse_kernel,
)
from megatron_dsv.kernels.token_topk.triton.search import _token_topk_bracket_kernel, _token_topk_resolve_kernel

MAX_RANK = 256
_CANDIDATES = 1024
"""Places for keys near a row's threshold: counting narrows its bracket until they fit."""
_SAMPLES = 512
_SCRATCH_BYTES = 512 << 20
"""Most memory for drafts at a time, as long as the rows of one head fit."""
_FINAL_STEP = 1024


def token_topk(q_pooled: Tensor, k_lr: Tensor, row_start: Tensor, kv_indices: Tensor, *, budgets: Tensor,
               kv_length: Tensor, query_length: Tensor, group_ids: Tensor, proxies: int, reduction: str,
               keep_own: bool, prefix: int, q_block_size: int, softmax_scale: float, longest: int) -> Tensor:
    """Writes kv_indices from row_start [b, h, Nq] on (rows with -1 store nothing); returns row_count int32 [b, h, Nq].

    q_pooled [Nq * P, b, h, r], k_lr [sk, b, G, r]; budgets int32 [h], kv_length int32 [b, G], query_length [b],
    group_ids [Nq]; longest: the largest budget of a row that stores its list, 0 for none.
    """
    _check_limits(q_pooled, k_lr)
    q_pooled, k_lr = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_pooled, k_lr))
    rows, b, h, rank = q_pooled.shape
    groups = rows // proxies
    device = q_pooled.device
    low, high, remaining, kept = torch.empty((4, b, h, groups), dtype=torch.int32, device=device)
    # With one proxy the order of its logits is the order of every reduction.
    reduction = "max" if proxies == 1 else reduction
    lse = torch.empty((b, h, rows) if reduction == "mass" else (1,), dtype=torch.float32, device=device)
    tile = pick_tile(q_pooled)
    common = {"q_ptr": q_pooled, "k_ptr": k_lr, "lse_ptr": lse, "kv_length_ptr": kv_length.contiguous(),
              **{f"stride_q{axis}": q_pooled.stride(i) for i, axis in enumerate("sbh")},
              **{f"stride_k{axis}": k_lr.stride(i) for i, axis in enumerate("sbg")},
              "heads": h, "kv_heads": k_lr.shape[2], "scale_log2": softmax_scale * math.log2(math.e)}
    sizes = {"RANK": rank, "BLOCK_R": max(16, 1 << (rank - 1).bit_length()), "BLOCK_M": tile.block_m,
             "BLOCK_N": tile.block_n}
    rules = {"PROXIES": proxies, "REDUCTION": reduction, "KEEP_OWN": keep_own, "Q_BLOCK": q_block_size, **sizes}
    groups_of = {"group_ids_ptr": group_ids.contiguous(), "num_groups": groups, "prefix": prefix}
    grid = (triton.cdiv(groups, tile.block_m), b * h)
    with torch.cuda.device(device) if q_pooled.is_cuda else nullcontext():
        if reduction == "mass":
            Launch(_token_topk_lse_kernel, (triton.cdiv(rows, tile.block_m), b * h), {**common, "num_rows": rows},
                   sizes, tile).run()
        Launch(_token_topk_bracket_kernel, grid,
               {**common, **groups_of, "budget_ptr": budgets, "query_length_ptr": query_length.contiguous(),
                "low_ptr": low, "high_ptr": high, "remaining_ptr": remaining, "kept_ptr": kept,
                "candidates": _CANDIDATES},
               {**rules, "SAMPLES": _SAMPLES}, tile).run()
        if longest:
            bracket = {"low_ptr": low, "high_ptr": high, "remaining_ptr": remaining, "row_start_ptr": row_start}
            _write_lists({**common, **groups_of}, bracket, rules, tile, kept, kv_indices, longest, groups, b * h)
    return kept


def _write_lists(arguments: dict[str, Any], bracket: dict[str, Any], rules: dict[str, Any], tile: Tile, kept: Tensor,
                 kv_indices: Tensor, longest: int, groups: int, batch_heads: int) -> None:
    """Drafts of the lists, the choice among their candidates, and the lists, a run of heads at a time."""
    places = longest + _CANDIDATES
    step = min(batch_heads, max(1, _SCRATCH_BYTES // (4 * (places + _CANDIDATES) * max(1, groups))))
    rows = step * groups
    draft, candidate, drafted, found = (torch.empty(shape, dtype=torch.int32, device=kept.device) for shape in
                                        ((rows, places), (rows, _CANDIDATES), (rows,), (rows,)))
    drafts = {"draft_ptr": draft, "drafted_ptr": drafted, "candidate_ptr": candidate}
    lists = {"row_start_ptr": bracket["row_start_ptr"], "kept_ptr": kept, "kv_indices_ptr": kv_indices}
    sizes = {"places": places, "candidates": _CANDIDATES}
    for first in range(0, batch_heads, step):
        heads = min(step, batch_heads - first)
        Launch(_token_topk_draft_kernel, (triton.cdiv(groups, tile.block_m), heads),
               {**arguments, **bracket, **drafts, "found_ptr": found, **sizes, "first_batch_head": first}, rules,
               tile).run()
        Launch(_token_topk_resolve_kernel, (heads * groups, 1),
               {**bracket, "candidate_ptr": candidate, "found_ptr": found, "first_row": first * groups},
               {"CANDIDATES": _CANDIDATES}, Tile(1, _CANDIDATES, 4, 1)).run()
        Launch(_token_topk_final_kernel, (heads * groups, 1),
               {**drafts, **lists, **sizes, "first_row": first * groups}, {"BLOCK_N": _FINAL_STEP},
               Tile(1, _FINAL_STEP, 4, 1)).run()


def pick_tile(q_pooled: Tensor) -> Tile:
    """BLOCK_M query groups x BLOCK_N keys; few for fp32, which multiplies without tensor cores, and for high ranks."""
    if q_pooled.dtype == torch.float32:
        return Tile(16, 32, 4, 1)
    return Tile(16, 128, 4, 3) if q_pooled.shape[-1] <= 64 else Tile(16, 64, 4, 2)


def _check_limits(q_pooled: Tensor, k_lr: Tensor) -> None:
    way_out = "use backend='reference'"
    interpreted = triton.knobs.runtime.interpret
    if not q_pooled.is_cuda and not interpreted:
        raise NotImplementedError("backend='triton' of token_topk needs CUDA tensors (or TRITON_INTERPRET=1), got "
                                  f"{q_pooled.device.type}; {way_out}")
    dtypes = (torch.float16, torch.float32) if interpreted else (torch.float16, torch.bfloat16, torch.float32)
    if q_pooled.dtype not in dtypes:
        raise NotImplementedError(f"backend='triton' of token_topk takes {', '.join(map(str, dtypes))}"
                                  f"{' under TRITON_INTERPRET=1' if interpreted else ''}, got {q_pooled.dtype}; "
                                  f"{way_out}")
    if q_pooled.shape[-1] > MAX_RANK:
        raise NotImplementedError(f"backend='triton' of token_topk takes ranks up to {MAX_RANK}, got "
                                  f"{q_pooled.shape[-1]}; {way_out}")
    if k_lr.shape[0] >= 2**30:
        raise NotImplementedError("backend='triton' of token_topk takes fewer than 2^30 keys, got "
                                  f"{k_lr.shape[0]}; {way_out}")
