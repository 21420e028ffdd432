"""From tensors and a selection to kernel launches.

Dims: s query tokens, sk key tokens, b batch, h query heads, G key/value heads, Nq query groups, Nk key blocks, d head
dim.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
import triton
from torch import Tensor

from megatron_dsv.kernels.selection import KVSelection
from megatron_dsv.kernels.sparse_attention.triton.backward_dkv import (
    _sparse_attention_bwd_dkv_kernel,
    _sparse_attention_bwd_dkv_scatter_kernel,
)
from megatron_dsv.kernels.sparse_attention.triton.backward_dq import _sparse_attention_bwd_dq_kernel
from megatron_dsv.kernels.sparse_attention.triton.forward import _sparse_attention_fwd_kernel
from megatron_dsv.kernels.sparse_attention.triton.tiles import Tile, pick_tile

_MAX_HEAD_DIM = 256
_MAX_GRID_ROWS = 65535


@dataclass(frozen=True)
class Launch:
    """One kernel launch, complete; ``arguments`` are run-time values and ``constants`` compile-time ones, by name."""

    kernel: Any
    grid: tuple[int, int]
    arguments: dict[str, Any]
    constants: dict[str, int]
    tile: Tile

    def run(self) -> None:
        if 0 in self.grid:
            return
        self.kernel[self.grid](**self.arguments, **self.constants, num_warps=self.tile.num_warps,
                               num_stages=self.tile.num_stages)


def forward(q: Tensor, k: Tensor, v: Tensor, selection: KVSelection, *, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """out [s, b, h, d] and lse fp32 [b, h, s] of q [s, b, h, d] over the selected keys of k, v [sk, b, G, d]."""
    _check_limits(q, k)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[1], q.shape[2], q.shape[0]), dtype=torch.float32, device=q.device)
    with _on_device(q):
        plan_forward(q, k, v, out, lse, selection, softmax_scale).run()
    return out, lse


def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, selection: KVSelection, *,
             softmax_scale: float, deterministic: bool) -> tuple[Tensor, Tensor, Tensor]:
    """dq [s, b, h, d], dk and dv [sk, b, G, d].

    Token lists scatter with atomics unless ``deterministic``; everything else runs over the selection's key-major
    twin, which is built when absent.
    """
    _check_limits(q, k)
    lse = lse.contiguous()
    delta = torch.empty_like(lse)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    scatter = selection.kv_block_size == 1 and not deterministic
    new_kv = torch.zeros if scatter else torch.empty
    kv_dtype = torch.float32 if scatter else k.dtype
    dk, dv = (new_kv(k.shape, dtype=kv_dtype, device=k.device) for _ in range(2))
    with _on_device(q):
        plan_dq(dout, q, k, v, out, lse, delta, dq, selection, softmax_scale).run()
        plan = plan_dkv_scatter if scatter else plan_dkv
        selection = selection if scatter else selection.with_transposed()
        plan(dout, q, k, v, lse, delta, dk, dv, selection, softmax_scale).run()
    return dq, dk.to(k.dtype), dv.to(v.dtype)


def plan_forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, selection: KVSelection,
                 softmax_scale: float) -> Launch:
    """The forward; writes out and lse [b, h, s] contiguous."""
    tile, constants = _tile_and_constants("forward", q, selection)
    arguments = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "out_ptr": out, "lse_ptr": lse, **_rows(selection),
                 "kv_length_ptr": selection.kv_length.contiguous(), **_strides(q=q), **_kv_strides(k=k, v=v),
                 **_strides(o=out), **_sizes(q, k, selection), "scale_log2": softmax_scale * math.log2(math.e)}
    grid = (selection.num_query_groups * _tiles(selection.q_block_size, tile.block_m), q.shape[1] * q.shape[2])
    return Launch(_sparse_attention_fwd_kernel, grid, arguments, constants, tile)


def plan_dq(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, delta: Tensor, dq: Tensor,
            selection: KVSelection, softmax_scale: float) -> Launch:
    """The pass over query rows; writes dq and delta [b, h, s] contiguous."""
    tile, constants = _tile_and_constants("dq", q, selection)
    arguments = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "out_ptr": out, "dout_ptr": dout, "lse_ptr": lse,
                 "delta_ptr": delta, "dq_ptr": dq, **_rows(selection),
                 "kv_length_ptr": selection.kv_length.contiguous(), **_strides(q=q), **_kv_strides(k=k, v=v),
                 **_strides(o=out, do=dout, dq=dq), **_sizes(q, k, selection), "scale": softmax_scale,
                 "scale_log2": softmax_scale * math.log2(math.e)}
    grid = (selection.num_query_groups * _tiles(selection.q_block_size, tile.block_m), q.shape[1] * q.shape[2])
    return Launch(_sparse_attention_bwd_dq_kernel, grid, arguments, constants, tile)


def plan_dkv(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, dk: Tensor, dv: Tensor,
             selection: KVSelection, softmax_scale: float) -> Launch:
    """The key-major pass over ``selection.transposed``; writes dk and dv."""
    assert selection.transposed is not None, "the key-major pass runs over the twin"
    tile, constants = _tile_and_constants("dkv", q, selection)
    arguments = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "dout_ptr": dout, "lse_ptr": lse, "delta_ptr": delta,
                 "dk_ptr": dk, "dv_ptr": dv, **_rows(selection.transposed, indices="twin_indices_ptr", rows="twin"),
                 "kv_length_ptr": selection.kv_length.contiguous(), **_strides(q=q), **_kv_strides(k=k, v=v),
                 **_strides(do=dout), **_kv_strides(dk=dk, dv=dv), "num_queries": q.shape[0], "num_keys": k.shape[0],
                 "num_blocks": selection.num_kv_blocks, "heads": q.shape[2], "kv_heads": k.shape[2],
                 "scale": softmax_scale, "scale_log2": softmax_scale * math.log2(math.e)}
    grid = (selection.num_kv_blocks * _tiles(selection.kv_block_size, tile.block_n), k.shape[1] * k.shape[2])
    return Launch(_sparse_attention_bwd_dkv_kernel, grid, arguments, constants, tile)


def plan_dkv_scatter(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, lse: Tensor, delta: Tensor, dk: Tensor, dv: Tensor,
                     selection: KVSelection, softmax_scale: float) -> Launch:
    """The atomic pass of token lists; adds to dk and dv, fp32 and zeroed."""
    tile, constants = _tile_and_constants("scatter", q, selection)
    arguments = {"q_ptr": q, "k_ptr": k, "v_ptr": v, "dout_ptr": dout, "lse_ptr": lse, "delta_ptr": delta,
                 "dk_ptr": dk, "dv_ptr": dv, **_rows(selection), "kv_length_ptr": selection.kv_length.contiguous(),
                 **_strides(q=q), **_kv_strides(k=k, v=v), **_strides(do=dout), **_kv_strides(dk=dk, dv=dv),
                 **_sizes(q, k, selection), "scale": softmax_scale, "scale_log2": softmax_scale * math.log2(math.e)}
    return Launch(_sparse_attention_bwd_dkv_scatter_kernel, (selection.num_query_groups, q.shape[1] * q.shape[2]),
                  arguments, constants, tile)


def _check_limits(q: Tensor, k: Tensor) -> None:
    way_out = "use backend='reference'"
    interpreted = triton.knobs.runtime.interpret
    if not q.is_cuda and not interpreted:
        raise NotImplementedError(f"backend='triton' needs CUDA tensors (or TRITON_INTERPRET=1), got {q.device.type}; "
                                  f"{way_out}")
    dtypes = (torch.float16, torch.float32) if interpreted else (torch.float16, torch.bfloat16, torch.float32)
    if q.dtype not in dtypes:
        raise NotImplementedError(f"backend='triton' takes {', '.join(map(str, dtypes))}"
                                  f"{' under TRITON_INTERPRET=1' if interpreted else ''}, got {q.dtype}; {way_out}")
    if q.shape[-1] > _MAX_HEAD_DIM:
        raise NotImplementedError(f"backend='triton' takes head dims up to {_MAX_HEAD_DIM}, got {q.shape[-1]}; "
                                  f"{way_out}")
    if q.shape[1] * q.shape[2] > _MAX_GRID_ROWS:
        raise NotImplementedError(f"backend='triton' takes batch x heads up to {_MAX_GRID_ROWS}, got "
                                  f"{q.shape[1] * q.shape[2]}; split the batch or {way_out}")


def _tile_and_constants(pass_name: str, q: Tensor, selection: KVSelection) -> tuple[Tile, dict[str, int]]:
    tile = pick_tile(pass_name, q_block_size=selection.q_block_size, kv_block_size=selection.kv_block_size,
                     head_dim=q.shape[-1], itemsize=q.element_size())
    if pass_name == "dkv":
        gather = selection.q_block_size % tile.block_m != 0
    else:
        gather = selection.kv_block_size % tile.block_n != 0
    block_d = max(16, 1 << (q.shape[-1] - 1).bit_length())
    return tile, {"Q_BLOCK": selection.q_block_size, "KV_BLOCK": selection.kv_block_size, "HEAD_DIM": q.shape[-1],
                  "BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "BLOCK_D": block_d, "GATHER": gather}


def _rows(selection: KVSelection, indices: str = "kv_indices_ptr", rows: str = "row") -> dict[str, Tensor]:
    buffer = selection.kv_indices
    if buffer.numel() == 0:
        buffer = torch.zeros(1, dtype=torch.int32, device=buffer.device)
    return {indices: buffer.contiguous(), f"{rows}_start_ptr": selection.row_start.contiguous(),
            f"{rows}_count_ptr": selection.row_count.contiguous()}


def _sizes(q: Tensor, k: Tensor, selection: KVSelection) -> dict[str, int]:
    return {"num_queries": q.shape[0], "num_groups": selection.num_query_groups, "heads": q.shape[2],
            "kv_heads": k.shape[2]}


def _strides(**tensors: Tensor) -> dict[str, int]:
    return {f"stride_{name}{axis}": x.stride(i) for name, x in tensors.items() for i, axis in enumerate("sbh")}


def _kv_strides(**tensors: Tensor) -> dict[str, int]:
    return {f"stride_{name}{axis}": x.stride(i) for name, x in tensors.items() for i, axis in enumerate("sbg")}


def _tiles(block: int, step: int) -> int:
    return -(-block // step)


def _on_device(q: Tensor):
    """Triton launches on the current device, which need not be the tensors'."""
    return torch.cuda.device(q.device) if q.is_cuda else nullcontext()
