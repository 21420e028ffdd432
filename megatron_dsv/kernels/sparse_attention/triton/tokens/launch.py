"""From tensors and a selection of single keys to kernel launches.

Dims: s query tokens, sk key tokens, b batch, h query heads, G key/value heads, Nq query groups, d head dim.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
import triton
from torch import Tensor

from megatron_dsv.kernels.launching import Launch, Tile, padded_dim
from megatron_dsv.kernels.selection import KVSelection
from megatron_dsv.kernels.sparse_attention.triton.tokens.backward_dkv import _token_attention_bwd_dkv_kernel
from megatron_dsv.kernels.sparse_attention.triton.tokens.backward_dq import _token_attention_bwd_dq_kernel
from megatron_dsv.kernels.sparse_attention.triton.tokens.forward import _token_attention_fwd_kernel
from megatron_dsv.kernels.sparse_attention.triton.tokens.ordered_sum import (
    _token_bounds_kernel,
    _token_ordered_sum_kernel,
)
from megatron_dsv.kernels.sparse_attention.triton.tokens.tiles import fuses_dq, pick_tile

_SCRATCH_BYTES = 4 << 30
"""Most memory that the ordered sum writes rows of dK and dV to at a time."""
_SUM_TILE = 64
_BOUNDS_LANES = 256


def forward(q: Tensor, k: Tensor, v: Tensor, selection: KVSelection, *, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """out [s, b, h, d] and lse fp32 [b, h, s] of q [s, b, h, d] over the selected keys of k, v [sk, b, G, d]."""
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[1], q.shape[2], q.shape[0]), dtype=torch.float32, device=q.device)
    plan_forward(q, k, v, out, lse, selection, softmax_scale).run()
    return out, lse


def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, selection: KVSelection, *,
             softmax_scale: float, deterministic: bool) -> tuple[Tensor, Tensor, Tensor]:
    """dq [s, b, h, d], dk and dv [sk, b, G, d]; fp32 atomics add up dk and dv unless ``deterministic``."""
    lse = lse.contiguous()
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.zeros(k.shape, dtype=torch.float32, device=k.device) for _ in range(2))
    delta = torch.empty_like(lse)
    if not _fused(q, selection):
        plan_dq(dout, q, k, v, out, lse, delta, dq, selection, softmax_scale).run()
    plan = partial(plan_dkv, dout, q, k, v, out, lse, delta, dq, selection=selection, softmax_scale=softmax_scale)
    if deterministic:
        _ordered_dkv(plan, dk, dv, selection, k.dtype)
    else:
        plan(dk, dv, first_row=0, rows=selection.row_start.numel(), apart=False).run()
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def _ordered_dkv(plan: Callable[..., Launch], dk: Tensor, dv: Tensor, selection: KVSelection,
                 dtype: torch.dtype) -> None:
    """Runs of rows in turn: each row's dk and dv to a place of its own, then added to dk and dv in order."""
    # A row with more entries than places would write over the next one's.
    selection.entries()
    sk, b, heads_kv, d = dk.shape
    places, rows = max(1, selection.max_row_count), selection.row_start.numel()
    step = max(1, min(rows, _SCRATCH_BYTES // (2 * places * d * dtype.itemsize)))
    rows_per_kv_head = rows // max(1, b * heads_kv)
    step = step // rows_per_kv_head * rows_per_kv_head if step > rows_per_kv_head > 0 else step
    parts = torch.empty((2, step, places, d), dtype=dtype, device=dk.device)
    bounds = torch.empty((step, -(-sk // _SUM_TILE) + 1), dtype=torch.int32, device=dk.device)
    for first in range(0, rows, step):
        count = min(step, rows - first)
        # [places, rows, 1, d] has the axes of dk.
        part_k, part_v = (part.transpose(0, 1)[:, :, None] for part in parts)
        plan(part_k, part_v, first_row=first, rows=count, apart=True).run()
        plan_bounds(bounds, dk, selection, first, count).run()
        for part, total in ((parts[0], dk), (parts[1], dv)):
            plan_sum(part, total, bounds, selection, first, count).run()


def plan_forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, selection: KVSelection,
                 softmax_scale: float) -> Launch:
    """The forward; writes out and lse [b, h, s] contiguous."""
    tile = _pick("forward", q, selection)
    arguments = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "out_ptr": out, "lse_ptr": lse, **_lists(selection),
                 **_strides("sbh", q=q), **_strides("sbg", k=k, v=v), **_strides("sbh", o=out),
                 **_sizes(q, k, selection), "scale_log2": softmax_scale * math.log2(math.e)}
    return Launch(_token_attention_fwd_kernel, _query_grid(q, selection, tile), arguments,
                  _constants(q, selection, tile), tile)


def plan_dq(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, delta: Tensor, dq: Tensor,
            selection: KVSelection, softmax_scale: float) -> Launch:
    """The pass over query rows; writes dq and delta [b, h, s] contiguous."""
    tile = _pick("dq", q, selection)
    arguments = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "out_ptr": out, "dout_ptr": dout, "lse_ptr": lse,
                 "delta_ptr": delta, "dq_ptr": dq, **_lists(selection), **_strides("sbh", q=q),
                 **_strides("sbg", k=k, v=v), **_strides("sbh", o=out, do=dout, dq=dq), **_sizes(q, k, selection),
                 "scale": softmax_scale, "scale_log2": softmax_scale * math.log2(math.e)}
    return Launch(_token_attention_bwd_dq_kernel, _query_grid(q, selection, tile), arguments,
                  _constants(q, selection, tile), tile)


def plan_dkv(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, delta: Tensor, dq: Tensor,
             dk: Tensor, dv: Tensor, selection: KVSelection, softmax_scale: float, *, first_row: int, rows: int,
             apart: bool) -> Launch:
    """The pass over keys for ``rows`` rows; adds to dk and dv, or writes [places, rows, 1, d] if ``apart``.

    Where ``_fused`` it writes dq as well, and does not read delta.
    """
    tile = _pick("dkv", q, selection)
    arguments = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "out_ptr": out, "dout_ptr": dout, "lse_ptr": lse,
                 "delta_ptr": delta, "dq_ptr": dq, "dk_ptr": dk, "dv_ptr": dv, **_lists(selection),
                 **_strides("sbh", q=q), **_strides("sbg", k=k, v=v), **_strides("sbh", o=out, do=dout, dq=dq),
                 **_strides("sbg", dk=dk, dv=dv), "first_row": first_row, **_sizes(q, k, selection),
                 "scale": softmax_scale, "scale_log2": softmax_scale * math.log2(math.e)}
    constants = {**_constants(q, selection, tile), "FUSED": _fused(q, selection), "PARTIAL": apart}
    return Launch(_token_attention_bwd_dkv_kernel, (rows, 1), arguments, constants, tile)


def plan_bounds(bounds: Tensor, k: Tensor, selection: KVSelection, first_row: int, rows: int) -> Launch:
    """Where each row's list enters each tile of keys: bounds int32 [rows, tiles + 1] contiguous."""
    tiles = bounds.shape[1] - 1
    arguments = {"bounds_ptr": bounds, **_lists(selection), "first_row": first_row, "num_keys": k.shape[0],
                 "num_groups": selection.num_query_groups, "heads": selection.row_start.shape[1],
                 "kv_heads": k.shape[2], "num_tiles": tiles}
    return Launch(_token_bounds_kernel, (rows, -(-(tiles + 1) // _BOUNDS_LANES)), arguments,
                  {"BLOCK_N": _SUM_TILE, "LANES": _BOUNDS_LANES}, Tile(1, _BOUNDS_LANES, 4, 1))


def plan_sum(part: Tensor, total: Tensor, bounds: Tensor, selection: KVSelection, first_row: int, rows: int) -> Launch:
    """Adds part [rows, places, d] of rows ``first_row`` on to total [sk, b, G, d]."""
    sk, b, heads_kv, d = total.shape
    rows_per_kv_head = selection.row_start.numel() // (b * heads_kv)
    first_kv_head = first_row // rows_per_kv_head
    kv_heads = (first_row + rows - 1) // rows_per_kv_head - first_kv_head + 1
    lists = _lists(selection)
    del lists["row_count_ptr"]
    arguments = {"part_ptr": part, "total_ptr": total, "bounds_ptr": bounds, **lists, "stride_ps": part.stride(1),
                 "stride_pb": part.stride(0), **_strides("sbg", t=total), "first_row": first_row, "num_rows": rows,
                 "num_groups": selection.num_query_groups, "heads": selection.row_start.shape[1],
                 "kv_heads": heads_kv, "num_keys": sk, "first_kv_head": first_kv_head,
                 "num_tiles": bounds.shape[1] - 1}
    wide = part.element_size() == 4
    constants = {"HEAD_DIM": d, "BLOCK_N": _SUM_TILE, "BLOCK_D": padded_dim(d), "ROWS": 4 if wide else 16, "LANES": 8}
    return Launch(_token_ordered_sum_kernel, (bounds.shape[1] - 1, kv_heads), arguments, constants,
                  Tile(1, _SUM_TILE, 4, 1))


def _pick(pass_name: str, q: Tensor, selection: KVSelection) -> Tile:
    return pick_tile(pass_name, q_block_size=selection.q_block_size, head_dim=q.shape[-1], itemsize=q.element_size())


def _fused(q: Tensor, selection: KVSelection) -> bool:
    return fuses_dq(_pick("dkv", q, selection), q_block_size=selection.q_block_size, head_dim=q.shape[-1])


def _constants(q: Tensor, selection: KVSelection, tile: Tile) -> dict[str, int]:
    return {"Q_BLOCK": selection.q_block_size, "HEAD_DIM": q.shape[-1], "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n, "BLOCK_D": padded_dim(q.shape[-1])}


def _query_grid(q: Tensor, selection: KVSelection, tile: Tile) -> tuple[int, int]:
    tiles = triton.cdiv(selection.q_block_size, tile.block_m)
    return selection.num_query_groups * tiles, q.shape[1] * q.shape[2]


def _lists(selection: KVSelection) -> dict[str, Tensor]:
    indices = selection.kv_indices
    if indices.numel() == 0:
        indices = torch.zeros(1, dtype=torch.int32, device=indices.device)
    return {"kv_indices_ptr": indices.contiguous(), "row_start_ptr": selection.row_start.contiguous(),
            "row_count_ptr": selection.row_count.contiguous(), "kv_length_ptr": selection.kv_length.contiguous()}


def _sizes(q: Tensor, k: Tensor, selection: KVSelection) -> dict[str, int]:
    return {"num_queries": q.shape[0], "num_keys": k.shape[0], "num_groups": selection.num_query_groups,
            "heads": q.shape[2], "kv_heads": k.shape[2]}


def _strides(axes: str, **tensors: Tensor) -> dict[str, int]:
    return {f"stride_{name}{axis}": x.stride(i) for name, x in tensors.items() for i, axis in enumerate(axes)}
