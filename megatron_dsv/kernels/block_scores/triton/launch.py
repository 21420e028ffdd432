"""From pooled queries and low-rank keys to the two launches.

Dims: sk key tokens, b batch, h query heads, G key/value heads, r predictor rank, P proxies per query group, Nq query
groups, Nk key/value blocks.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any

import torch
import triton
from torch import Tensor

from megatron_dsv.kernels.block_scores.triton.kernels import _block_scores_kernel, _block_scores_lse_kernel
from megatron_dsv.kernels.sparse_attention.triton.launch import Launch
from megatron_dsv.kernels.sparse_attention.triton.tiles import Tile

MAX_RANK = 256
_SPAN_TOKENS = 4096
"""Keys that one program scores: enough to bury its start, few enough that short grids fill the device."""


def block_scores(q_pooled: Tensor, k_lr: Tensor, kv_length: Tensor, *, kv_block_size: int, proxies: int,
                 reduction: str, softmax_scale: float) -> Tensor:
    """fp32 [b, h, Nq, Nk] of q_pooled [Nq * P, b, h, r] and k_lr [sk, b, G, r]; kv_length [b, G]."""
    _check_limits(q_pooled, k_lr)
    q_pooled, k_lr = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_pooled, k_lr))
    rows, b, h, _ = q_pooled.shape
    shape = (b, h, rows // proxies, -(-k_lr.shape[0] // kv_block_size))
    out = torch.empty(shape, dtype=torch.float32, device=q_pooled.device)
    lse = out
    with torch.cuda.device(q_pooled.device) if q_pooled.is_cuda else nullcontext():
        if reduction == "mass":
            partial = torch.empty((b, h, rows, num_spans(k_lr.shape[0])), dtype=torch.float32, device=out.device)
            plan_lse(q_pooled, k_lr, kv_length, partial, softmax_scale).run()
            lse = torch.logsumexp(partial, -1)
        plan_scores(q_pooled, k_lr, kv_length, lse, out, kv_block_size=kv_block_size, proxies=proxies,
                    reduction=reduction, softmax_scale=softmax_scale).run()
    return out


def num_spans(tokens: int) -> int:
    """Spans that the keys of a sequence are cut into."""
    return -(-tokens // _SPAN_TOKENS)


def plan_lse(q_pooled: Tensor, k_lr: Tensor, kv_length: Tensor, lse: Tensor, softmax_scale: float) -> Launch:
    """The pass over proxies; writes lse [b, h, rows, spans] contiguous."""
    tile = _lse_tile(q_pooled)
    rows, b, h, _ = q_pooled.shape
    spans = num_spans(k_lr.shape[0])
    arguments = {"q_ptr": q_pooled, "k_ptr": k_lr, "lse_ptr": lse, **_common(q_pooled, k_lr, kv_length, softmax_scale),
                 "num_rows": rows, "spans": spans}
    constants = {"SPAN": _SPAN_TOKENS, **_tile_constants(q_pooled, tile)}
    grid = (-(-rows // tile.block_m) * spans * b * h, 1)
    return Launch(_block_scores_lse_kernel, grid, arguments, constants, tile)


def plan_scores(q_pooled: Tensor, k_lr: Tensor, kv_length: Tensor, lse: Tensor, out: Tensor, *, kv_block_size: int,
                proxies: int, reduction: str, softmax_scale: float) -> Launch:
    """The pass over blocks; reads lse [b, h, rows] for ``mass`` alone; writes out [b, h, Nq, Nk] contiguous."""
    padded = 1 << (kv_block_size - 1).bit_length()
    tile = _scores_tile(q_pooled)
    rows, b, h, _ = q_pooled.shape
    groups, blocks = rows // proxies, -(-k_lr.shape[0] // kv_block_size)
    per_tile = -(-tile.block_n // padded)
    span = max(1, _SPAN_TOKENS // (per_tile * kv_block_size)) * per_tile
    spans = -(-blocks // span)
    arguments = {"q_ptr": q_pooled, "k_ptr": k_lr, "lse_ptr": lse, "out_ptr": out,
                 **_common(q_pooled, k_lr, kv_length, softmax_scale), "num_groups": groups, "num_blocks": blocks,
                 "spans": spans}
    constants: dict[str, Any] = {"REDUCTION": reduction, "PROXIES": proxies, "KV_BLOCK": kv_block_size,
                                 "KV_PADDED": padded, "SPAN": span, **_tile_constants(q_pooled, tile)}
    grid = (-(-groups // tile.block_m) * spans * b * h, 1)
    return Launch(_block_scores_kernel, grid, arguments, constants, tile)


def _lse_tile(q_pooled: Tensor) -> Tile:
    return _fp32_tile(q_pooled) if q_pooled.dtype == torch.float32 else Tile(64, 128, 4, 3)


def _scores_tile(q_pooled: Tensor) -> Tile:
    return _fp32_tile(q_pooled) if q_pooled.dtype == torch.float32 else Tile(64, 64, 4, 2)


def _fp32_tile(q_pooled: Tensor) -> Tile:
    """fp32 multiplies without tensor cores: small tiles keep it within registers, and compile within seconds."""
    return Tile(32, 32, 4, 1) if q_pooled.shape[-1] <= 64 else Tile(16, 32, 4, 1)


def _tile_constants(q_pooled: Tensor, tile: Tile) -> dict[str, int]:
    rank = q_pooled.shape[-1]
    return {"RANK": rank, "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
            "BLOCK_D": max(16, 1 << (rank - 1).bit_length())}


def _common(q_pooled: Tensor, k_lr: Tensor, kv_length: Tensor, softmax_scale: float) -> dict[str, Any]:
    strides = {f"stride_q{axis}": q_pooled.stride(i) for i, axis in enumerate("sbh")}
    strides |= {f"stride_k{axis}": k_lr.stride(i) for i, axis in enumerate("sbg")}
    return {"kv_length_ptr": kv_length.contiguous(), **strides, "num_keys": k_lr.shape[0],
            "heads": q_pooled.shape[2], "kv_heads": k_lr.shape[2], "scale_log2": softmax_scale * math.log2(math.e)}


def _check_limits(q_pooled: Tensor, k_lr: Tensor) -> None:
    way_out = "use backend='reference'"
    interpreted = triton.knobs.runtime.interpret
    if not q_pooled.is_cuda and not interpreted:
        raise NotImplementedError("backend='triton' of block_scores needs CUDA tensors (or TRITON_INTERPRET=1), got "
                                  f"{q_pooled.device.type}; {way_out}")
    dtypes = (torch.float16, torch.float32) if interpreted else (torch.float16, torch.bfloat16, torch.float32)
    if q_pooled.dtype not in dtypes:
        raise NotImplementedError(f"backend='triton' of block_scores takes {', '.join(map(str, dtypes))}"
                                  f"{' under TRITON_INTERPRET=1' if interpreted else ''}, got {q_pooled.dtype}; "
                                  f"{way_out}")
    if q_pooled.shape[-1] > MAX_RANK:
        raise NotImplementedError(f"backend='triton' of block_scores takes ranks up to {MAX_RANK}, got "
                                  f"{q_pooled.shape[-1]}; {way_out}")
    if torch.is_grad_enabled() and (q_pooled.requires_grad or k_lr.requires_grad):
        raise NotImplementedError("backend='triton' of block_scores has no backward; call it under torch.no_grad() or "
                                  f"{way_out}, which is differentiable")
