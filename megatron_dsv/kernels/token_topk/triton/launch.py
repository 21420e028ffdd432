"""From pooled queries and low-rank keys to the launches that select single keys.

Dims: sk key tokens, b batch, h query heads, G key/value heads, r predictor rank, P proxies per query group, Nq query
groups.
"""

from __future__ import annotations

import math
from dataclasses import replace

import torch
import triton
from torch import Tensor

from megatron_dsv.kernels.launching import (
    WAY_OUT,
    Launch,
    Tile,
    check_triton,
    kind_limit,
    launch_device,
    padded_dim,
    power_of_two,
)
from megatron_dsv.kernels.token_topk.triton.lists import _token_topk_lists_kernel, _token_topk_settle_kernel
from megatron_dsv.kernels.token_topk.triton.mark import _token_topk_lse_kernel, _token_topk_mark_kernel
from megatron_dsv.kernels.token_topk.triton.search import MOST_TILES, _token_topk_bracket_kernel

_SAMPLES = 512
_SPREAD = 6
"""One key in so many is counted to guess a row's bracket."""
_MOST_PLACES = 8192
_FEW_PLACES = 4096
"""Up to so many fit the registers of four warps."""
_SPAN = 8192
"""Keys that one program of a pass over all of them takes: enough programs for the device, whatever the groups."""
_SCRATCH_BYTES = 512 << 20
"""Most memory for bits and candidates at a time, as long as the rows of one head fit."""
_SETTLE_TILE = Tile(16, 256, 4, 1)
_LISTS_TILE = Tile(1, 1024, 4, 1)
"""Their block_n are candidates ranked at a time, and words of 32 keys."""


def token_topk(q_pooled: Tensor, k_lr: Tensor, row_start: Tensor, kv_indices: Tensor, *, budgets: Tensor,
               kv_length: Tensor, query_length: Tensor, group_ids: Tensor, proxies: int, reduction: str,
               keep_own: bool, prefix: int, q_block_size: int, softmax_scale: float, longest: int) -> Tensor:
    """Writes kv_indices from row_start [b, h, Nq] on (rows with -1 store nothing); returns row_count int32 [b, h, Nq].

    q_pooled [Nq * P, b, h, r], k_lr [sk, b, G, r]; budgets [h], kv_length int32 [b, G], query_length [b],
    group_ids [Nq]; longest: the largest budget of a row that stores its list, 0 for none.
    """
    check_triton("token_topk", k_lr.device, limit(q_pooled, k_lr))
    q_pooled, k_lr = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_pooled, k_lr))
    rows, b, h, rank = q_pooled.shape
    groups = rows // proxies
    device = q_pooled.device
    low, high, kept = torch.empty((3, b, h, groups), dtype=torch.int32, device=device)
    flag = torch.zeros((b, h, groups), dtype=torch.int32, device=device)
    # With one proxy the order of its logits is the order of every reduction.
    reduction = "max" if proxies == 1 else reduction
    spans = triton.cdiv(k_lr.shape[0], _SPAN)
    lse = torch.empty((spans, b, h, rows) if reduction == "mass" else (1,), dtype=torch.float32, device=device)
    tile, sweep = pick_tile(q_pooled), pick_sweep_tile(q_pooled)
    common = {"q_ptr": q_pooled, "k_ptr": k_lr, "lse_ptr": lse, "kv_length_ptr": kv_length.contiguous(),
              **{f"stride_q{axis}": q_pooled.stride(i) for i, axis in enumerate("sbh")},
              **{f"stride_k{axis}": k_lr.stride(i) for i, axis in enumerate("sbg")}, "num_keys": k_lr.shape[0],
              "num_groups": groups, "heads": h, "kv_heads": k_lr.shape[2],
              "scale_log2": softmax_scale * math.log2(math.e), "lse_stride": lse.stride(0)}
    sizes = {"RANK": rank, "BLOCK_R": padded_dim(rank)}
    rules = {"PROXIES": proxies, "REDUCTION": reduction, **sizes}
    forcing = {"KEEP_OWN": keep_own, "Q_BLOCK": q_block_size}
    spread = {"BLOCK_M": sweep.block_m, "BLOCK_N": sweep.block_n, "SPAN": _SPAN}
    sweeps = triton.cdiv(groups, sweep.block_m) * spans
    summed = {**common, "lse_spans": spans}
    forced = {"group_ids_ptr": group_ids.contiguous(), "prefix": prefix}
    bracket = {"low_ptr": low, "high_ptr": high, "flag_ptr": flag}
    places = _places(longest, k_lr.shape[0])
    settle = _SETTLE_TILE if places <= _FEW_PLACES else replace(_SETTLE_TILE, num_warps=8)

    def search(exact: bool) -> None:
        Launch(_token_topk_bracket_kernel, (triton.cdiv(groups, tile.block_m), b * h),
               {**summed, **forced, **bracket, "budget_ptr": budgets, "query_length_ptr": query_length.contiguous(),
                "kept_ptr": kept, "candidates": places},
               {**rules, **forcing, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "SAMPLES": _SAMPLES,
                "SPREAD": _SPREAD, "EXACT": exact}, tile).run()

    with launch_device(q_pooled):
        if reduction == "mass":
            Launch(_token_topk_lse_kernel, (sweeps, b * h), common, {"PROXIES": proxies, **sizes, **spread},
                   sweep).run()
        search(False)
        if not longest:
            return kept
        # Bits of both ends of the bracket, and the candidates with their ranks.
        words = triton.cdiv(k_lr.shape[0], sweep.block_n) * sweep.block_n // 32
        step = min(b * h, max(1, _SCRATCH_BYTES // (4 * max(1, groups) * 2 * (words + places))))
        step = triton.cdiv(b * h, triton.cdiv(b * h, step))
        above, reached = torch.empty((2, step * groups, words), dtype=torch.int32, device=device)
        token, candidate = torch.empty((2, step * groups, places), dtype=torch.int32, device=device)
        piece = torch.int32 if sweep.block_n == 128 else torch.int16
        pieces = {"above_ptr": above.view(piece), "reached_ptr": reached.view(piece),
                  "pieces": words * 128 // sweep.block_n}
        lists = {"above_ptr": above, "row_start_ptr": row_start, "kept_ptr": kept, "words_stride": words}
        candidates = {"reached_ptr": reached, "token_ptr": token, "rank_ptr": candidate}
        for first in range(0, b * h, step):
            heads = min(step, b * h - first)
            for exact in (False, True):
                if exact:
                    search(True)
                Launch(_token_topk_mark_kernel, (sweeps, heads),
                       {**summed, **forced, **bracket, **pieces, "row_start_ptr": row_start,
                        "first_batch_head": first}, {**rules, **forcing, **spread, "EXACT": exact}, sweep).run()
                Launch(_token_topk_settle_kernel, (heads * groups,),
                       {**summed, **bracket, **lists, **candidates, "first_row": first * groups},
                       {**rules, "CANDIDATES": places, "WORDS": _LISTS_TILE.block_n, "STEP": settle.block_n,
                        "EXACT": exact}, settle).run()
            Launch(_token_topk_lists_kernel, (heads * groups,),
                   {**lists, "kv_length_ptr": common["kv_length_ptr"], "kv_indices_ptr": kv_indices,
                    "num_keys": k_lr.shape[0], "num_groups": groups, "heads": h, "kv_heads": k_lr.shape[2],
                    "first_row": first * groups},
                   {"WORDS": _LISTS_TILE.block_n}, _LISTS_TILE).run()
    return kept


def _places(longest: int, keys: int) -> int:
    """Places for keys near a row's threshold: what a sampled bracket holds is known, give or take 9 deviations."""
    kept = min(longest, keys // 2)
    within = 9.0 * math.sqrt(_SPREAD * kept * max(0.0, 1.0 - kept / max(1, keys)))
    return min(_MOST_PLACES, max(256, power_of_two(int(1.15 * within) + 64)))


def pick_tile(q_pooled: Tensor) -> Tile:
    """BLOCK_M query groups x BLOCK_N keys; few for fp32, which multiplies without tensor cores, and for high ranks."""
    if q_pooled.dtype == torch.float32:
        return Tile(16, 32, 4, 1)
    return Tile(16, 128, 4, 3) if q_pooled.shape[-1] <= 64 else Tile(16, 64, 4, 2)


def pick_sweep_tile(q_pooled: Tensor) -> Tile:
    """BLOCK_M query groups x 64 or 128 keys, a quarter of them to a word of bits, for the passes over all keys."""
    if q_pooled.dtype == torch.float32 or q_pooled.shape[-1] > 64:
        return Tile(16, 64, 4, 1)
    return Tile(16, 64, 1, 3)


def limit(q_pooled: Tensor, k_lr: Tensor) -> str | None:
    """What keeps these kernels from a request, or None."""
    if (kind := kind_limit((q_pooled, k_lr), widths="ranks")) is not None:
        return kind
    most = MOST_TILES * pick_tile(q_pooled).block_n
    if k_lr.shape[0] <= most:
        return None
    return (f"takes up to {most} keys of {q_pooled.dtype} and rank {q_pooled.shape[-1]}, got {k_lr.shape[0]}; "
            f"{WAY_OUT}")
