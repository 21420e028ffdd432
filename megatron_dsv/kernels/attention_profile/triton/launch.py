"""From query groups and keys to the launches.

Dims: n query groups of g tokens, s keys, b batch, h query heads, G key/value heads, d head dim, Nk key blocks.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from megatron_dsv.kernels.attention_profile.triton.kernels import (
    _attention_profile_lse_kernel,
    _attention_profile_mass_kernel,
    _attention_profile_smallest_set_kernel,
)
from megatron_dsv.kernels.launching import (
    WAY_OUT,
    Launch,
    Tile,
    check_triton,
    kind_limit,
    launch_device,
    padded_dim,
    power_of_two,
    reach_limit,
)

_SPAN_TOKENS = 4096
"""Keys that one program walks: enough to bury its start, few enough that few rows still fill the device."""
_ROW_ELEMENTS = 4096
"""Entries of a row that the search for its smallest set holds in registers; 2,048 and 8,192 are slower on an H200."""


def block_mass(q: Tensor, k: Tensor, valid_rows: Tensor, kv_length: Tensor, *, q_block_size: int, kv_block_size: int,
               softmax_scale: float) -> Tensor:
    """fp32 [b, h, n, Nk] of q [n * g, b, h, d], k [s, b, G, d], valid_rows [n * g, b] and kv_length [b, G]."""
    check_triton("block_mass", q.device, mass_limit(q, k, kv_block_size))
    q, k = (x if x.stride(-1) == 1 else x.contiguous() for x in (q, k))
    rows, b, h, _ = q.shape
    blocks = -(-k.shape[0] // kv_block_size)
    partial = torch.empty((b, h, rows, num_spans(k.shape[0])), dtype=torch.float32, device=q.device)
    out = torch.empty((b, h, rows // q_block_size, blocks), dtype=torch.float32, device=q.device)
    with launch_device(q):
        plan_lse(q, k, kv_length, partial, softmax_scale).run()
        plan_mass(q, k, valid_rows, kv_length, torch.logsumexp(partial, -1), out, q_block_size=q_block_size,
                  kv_block_size=kv_block_size, softmax_scale=softmax_scale).run()
    return out


def smallest_set(mass: Tensor, target: float) -> Tensor:
    """fp32 [...] of mass fp32 [..., width]."""
    check_triton("smallest_set", mass.device, set_limit(mass))
    mass = mass.contiguous()
    out = torch.empty(mass.shape[:-1], dtype=torch.float32, device=mass.device)
    with launch_device(mass):
        plan_smallest_set(mass, out, target).run()
    return out


def mass_limit(q: Tensor, k: Tensor, kv_block_size: int) -> str | None:
    """What keeps these kernels from ``block_mass``, or None."""
    return kind_limit((q, k), widths="head dims") or reach_limit(1, q) or reach_limit(kv_block_size, k)


def set_limit(mass: Tensor) -> str | None:
    """What keeps these kernels from ``smallest_set``, or None."""
    return None if mass.dtype == torch.float32 else f"takes torch.float32, got {mass.dtype}; {WAY_OUT}"


def num_spans(tokens: int) -> int:
    """Spans that the keys of a sequence are cut into."""
    return -(-tokens // _SPAN_TOKENS)


def plan_lse(q: Tensor, k: Tensor, kv_length: Tensor, lse: Tensor, softmax_scale: float) -> Launch:
    """The pass for the rows' denominators; writes lse [b, h, rows, spans] contiguous."""
    tile = _pick_tile(q)
    spans = num_spans(k.shape[0])
    arguments = {"lse_ptr": lse, **_common(q, k, kv_length, softmax_scale), "num_rows": q.shape[0], "spans": spans}
    grid = (-(-q.shape[0] // tile.block_m) * spans * q.shape[1] * q.shape[2], 1)
    return Launch(_attention_profile_lse_kernel, grid, arguments, {**_constants(q, tile), "SPAN": _SPAN_TOKENS}, tile)


def plan_mass(q: Tensor, k: Tensor, valid_rows: Tensor, kv_length: Tensor, lse: Tensor, out: Tensor, *,
              q_block_size: int, kv_block_size: int, softmax_scale: float) -> Launch:
    """The pass for the blocks' mass; reads lse [b, h, rows], writes out [b, h, n, Nk], all contiguous."""
    tile = _pick_tile(q)
    groups, blocks = out.shape[2], out.shape[3]
    group_padded, kv_padded = power_of_two(q_block_size), power_of_two(kv_block_size)
    per_tile = -(-tile.block_n // kv_padded)
    span = max(1, _SPAN_TOKENS // (per_tile * kv_block_size)) * per_tile
    spans = -(-blocks // span)
    arguments = {"lse_ptr": lse, "valid_ptr": valid_rows.contiguous().view(torch.int8), "out_ptr": out,
                 **_common(q, k, kv_length, softmax_scale), "num_groups": groups, "num_blocks": blocks,
                 "batches": q.shape[1], "spans": spans}
    constants = {**_constants(q, tile), "GROUP": q_block_size, "GROUP_PADDED": group_padded, "KV_BLOCK": kv_block_size,
                 "KV_PADDED": kv_padded, "SPAN": span}
    grid = (-(-groups // -(-tile.block_m // group_padded)) * spans * q.shape[1] * q.shape[2], 1)
    return Launch(_attention_profile_mass_kernel, grid, arguments, constants, tile)


def plan_smallest_set(mass: Tensor, out: Tensor, target: float) -> Launch:
    """One program a row of mass [..., width]; writes out [...]."""
    width = mass.shape[-1]
    block = max(16, min(_ROW_ELEMENTS, power_of_two(width)))
    return Launch(_attention_profile_smallest_set_kernel, (out.numel(), 1),
                  {"x_ptr": mass, "out_ptr": out, "target": float(target), "width": width}, {"BLOCK": block},
                  Tile(1, block, 8 if block == _ROW_ELEMENTS else 4, 2))


def _pick_tile(q: Tensor) -> Tile:
    if q.dtype == torch.float32:
        # fp32 multiplies without tensor cores: small tiles keep it within registers, and compile within seconds.
        return Tile(32, 32, 4, 1) if q.shape[-1] <= 128 else Tile(16, 32, 4, 1)
    return Tile(64, 64, 4, 3) if q.shape[-1] <= 128 else Tile(64, 64, 8, 1)


def _common(q: Tensor, k: Tensor, kv_length: Tensor, softmax_scale: float) -> dict[str, Any]:
    strides = {f"stride_{name}{axis}": x.stride(i) for name, x, axes in (("q", q, "sbh"), ("k", k, "sbg"))
               for i, axis in enumerate(axes)}
    return {"q_ptr": q, "k_ptr": k, "kv_length_ptr": kv_length.contiguous(), **strides, "num_keys": k.shape[0],
            "heads": q.shape[2], "kv_heads": k.shape[2], "scale_log2": softmax_scale * math.log2(math.e)}


def _constants(q: Tensor, tile: Tile) -> dict[str, int]:
    return {"HEAD_DIM": q.shape[-1], "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n,
            "BLOCK_D": padded_dim(q.shape[-1])}
