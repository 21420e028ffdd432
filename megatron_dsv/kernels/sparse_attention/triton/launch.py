"""From tensors and a selection to kernel launches.

Dims: s query tokens, sk key tokens, b batch, h query heads, G key/value heads, Nq query groups, Nk key blocks, d head
dim.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from megatron_dsv.kernels.launching import (
    Launch,
    Tile,
    check_reach,
    check_triton,
    kind_limit,
    launch_device,
    padded_dim,
)
from megatron_dsv.kernels.selection import KVSelection
from megatron_dsv.kernels.sparse_attention.triton.backward_dkv import _sparse_attention_bwd_dkv_kernel
from megatron_dsv.kernels.sparse_attention.triton.backward_dq import _sparse_attention_bwd_dq_kernel
from megatron_dsv.kernels.sparse_attention.triton.forward import _sparse_attention_fwd_kernel
from megatron_dsv.kernels.sparse_attention.triton.lists import Lists, Rows
from megatron_dsv.kernels.sparse_attention.triton.order import heavy_first
from megatron_dsv.kernels.sparse_attention.triton.tiles import HOPPER_BLOCK, pick_hopper_tile, pick_tile

_KERNELS = {"forward": _sparse_attention_fwd_kernel, "dq": _sparse_attention_bwd_dq_kernel,
            "dkv": _sparse_attention_bwd_dkv_kernel}
_HOPPER_HEAD_DIM = 64
"""The narrowest tile that the kernels written for Hopper lay out in shared memory."""
_TMA_ALIGNMENT = 16
"""Bytes: addresses and strides that the tensor memory accelerator takes."""


def forward(q: Tensor, k: Tensor, v: Tensor, selection: KVSelection, *, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """out [s, b, h, d] and lse fp32 [b, h, s] of q [s, b, h, d] over the selected keys of k, v [sk, b, G, d]."""
    check_triton("sparse_attention", q.device, limit(q, k))
    if selection.kv_block_size == 1:
        from megatron_dsv.kernels.sparse_attention.triton.tokens import launch as tokens
        with launch_device(q):
            return tokens.forward(q, k, v, selection, softmax_scale=softmax_scale)
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[1], q.shape[2], q.shape[0]), dtype=torch.float32, device=q.device)
    with launch_device(q):
        plan_forward(q, k, v, out, lse, selection, softmax_scale, hopper=_fits_hopper(selection, q, k, v)).run()
    return out, lse


def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, selection: KVSelection, *,
             softmax_scale: float, deterministic: bool) -> tuple[Tensor, Tensor, Tensor]:
    """dq [s, b, h, d], dk and dv [sk, b, G, d].

    Blocks run over the selection's key-major twin, which is built when absent; only single tokens need to be asked to
    repeat bitwise.
    """
    check_triton("sparse_attention", q.device, limit(q, k))
    if selection.kv_block_size == 1:
        from megatron_dsv.kernels.sparse_attention.triton.tokens import launch as tokens
        with launch_device(q):
            return tokens.backward(dout, q, k, v, out, lse, selection, softmax_scale=softmax_scale,
                                   deterministic=deterministic)
    lse = lse.contiguous()
    stats = new_stats(q)
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk, dv = (torch.empty(k.shape, dtype=k.dtype, device=k.device) for _ in range(2))
    selection = selection.with_transposed()
    hopper = _fits_hopper(selection, q, k, v, dout)
    with launch_device(q):
        plan_dq(dout, q, k, v, out, lse, stats, dq, selection, softmax_scale, hopper=hopper).run()
        plan_dkv(dout, q, k, v, stats, dk, dv, selection, softmax_scale, hopper=hopper).run()
    return dq, dk, dv


def limit(q: Tensor, k: Tensor) -> str | None:
    """What keeps these kernels from a request, or None."""
    return kind_limit((q, k), widths="head dims")


def new_stats(q: Tensor) -> Tensor:
    """Room for what the dQ pass leaves to the dK/dV pass: fp32 [2, b * h, s rounded up to whole TMA rows]."""
    s, b, h, _ = q.shape
    per_row = _TMA_ALIGNMENT // 4
    return torch.empty((2, b * h, _tiles(s, per_row) * per_row), dtype=torch.float32, device=q.device)


def plan_forward(q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, selection: KVSelection,
                 softmax_scale: float, *, hopper: bool = False) -> Launch:
    """The forward; writes out and lse [b, h, s] contiguous."""
    kernel, tile, constants = _kernel_tile_constants("forward", q, selection, hopper)
    arguments = {"q": _rows(q), "k": _rows(k), "v": _rows(v), "out": _rows(out),
                 **_tile_loads(tile.block_n, constants, k_tiles=k, v_tiles=v), "lse_ptr": lse,
                 **_query_major(selection), "kv_length_ptr": selection.kv_length.contiguous(),
                 **_sizes(q, k, selection), "scale_log2": softmax_scale * math.log2(math.e)}
    grid = (selection.row_start.numel() * _tiles(selection.q_block_size, tile.block_m),)
    return Launch(kernel, grid, arguments, constants, tile)


def plan_dq(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, stats: Tensor, dq: Tensor,
            selection: KVSelection, softmax_scale: float, *, hopper: bool = False) -> Launch:
    """The pass over query rows; reads lse [b, h, s] contiguous, writes dq and ``new_stats``."""
    kernel, tile, constants = _kernel_tile_constants("dq", q, selection, hopper)
    arguments = {"q": _rows(q), "k": _rows(k), "v": _rows(v), "out": _rows(out), "dout": _rows(dout), "dq": _rows(dq),
                 **_tile_loads(tile.block_n, constants, k_tiles=k, v_tiles=v), "lse_ptr": lse,
                 **_stats(stats), "stats_rows": stats.shape[1], **_query_major(selection),
                 "kv_length_ptr": selection.kv_length.contiguous(), **_sizes(q, k, selection),
                 **_scales(softmax_scale)}
    grid = (selection.row_start.numel() * _tiles(selection.q_block_size, tile.block_m),)
    return Launch(kernel, grid, arguments, constants, tile)


def plan_dkv(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, stats: Tensor, dk: Tensor, dv: Tensor,
             selection: KVSelection, softmax_scale: float, *, hopper: bool = False) -> Launch:
    """The key-major pass over ``selection.transposed``; writes dk and dv."""
    assert selection.transposed is not None, "the key-major pass runs over the twin"
    kernel, tile, constants = _kernel_tile_constants("dkv", q, selection, hopper)
    loads = _tile_loads(tile.block_m, constants, q_tiles=q, dout_tiles=dout)
    by_tma = loads["q_tiles"] is not None and loads["dout_tiles"] is not None
    twin = _lists(selection.transposed)
    order = heavy_first(twin.start, twin.count, kv_heads=k.shape[2], dense_count=selection.num_query_groups)
    stats_tiles = _descriptor(stats.flatten(0, 1), [1, tile.block_m], constants) if by_tma else None
    arguments = {"q": _rows(q), "k": _rows(k), "v": _rows(v), "dout": _rows(dout), "dk": _rows(dk), "dv": _rows(dv),
                 **loads, "stats_tiles": stats_tiles, **_stats(stats), "stats_rows": stats.shape[1],
                 "twin": twin, "order_ptr": order,
                 "kv_length_ptr": selection.kv_length.contiguous(), "num_queries": q.shape[0], "num_keys": k.shape[0],
                 "num_blocks": selection.num_kv_blocks, "heads": q.shape[2], "kv_heads": k.shape[2],
                 **_scales(softmax_scale)}
    grid = (k.shape[1] * k.shape[2] * selection.num_kv_blocks * _tiles(selection.kv_block_size, tile.block_n),)
    return Launch(kernel, grid, arguments, constants, tile)


def _kernel_tile_constants(pass_name: str, q: Tensor, selection: KVSelection,
                           hopper: bool) -> tuple[Any, Tile, dict[str, Any]]:
    """Of one pass; the constants are shared by all launches alike, and not to be written."""
    return _of_kind(pass_name, selection.q_block_size, selection.kv_block_size, q.shape[-1], q.element_size(), hopper)


@functools.cache
def _of_kind(pass_name: str, q_block: int, kv_block: int, head_dim: int, itemsize: int,
             hopper: bool) -> tuple[Any, Tile, dict[str, Any]]:
    constants = {"Q_BLOCK": q_block, "KV_BLOCK": kv_block, "HEAD_DIM": head_dim,
                 "BLOCK_D": padded_dim(head_dim)}
    tile = pick_hopper_tile(pass_name, q_block_size=q_block, kv_block_size=kv_block,
                            head_dim=head_dim) if hopper else None
    if tile is not None:
        constants |= {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n, "STAGES": tile.num_stages}
        return _hopper_kernel(pass_name), tile, constants
    tile = pick_tile(pass_name, q_block_size=q_block, kv_block_size=kv_block, head_dim=head_dim,
                     itemsize=itemsize)
    constants |= {"BLOCK_M": tile.block_m, "BLOCK_N": tile.block_n}
    key_major = pass_name == "dkv"
    walked, step = (q_block, tile.block_m) if key_major else (kv_block, tile.block_n)
    constants["GATHER"] = gather = walked % step != 0
    # Where most steps need no mask, those that do are kept narrow: they must not cost the others registers.
    tail = step if gather else min(step, tile.tail)
    constants |= {"TAIL_M" if key_major else "TAIL_N": tail, "TAIL_STAGES": tile.num_stages if gather else 1}
    return _KERNELS[pass_name], tile, constants


def _hopper_kernel(pass_name: str) -> Any:
    from megatron_dsv.kernels.sparse_attention.triton.hopper import backward_dkv, backward_dq, forward

    return {"forward": forward._sparse_attention_hopper_fwd_kernel,
            "dq": backward_dq._sparse_attention_hopper_bwd_dq_kernel,
            "dkv": backward_dkv._sparse_attention_hopper_bwd_dkv_kernel}[pass_name]


def _tile_loads(step: int, constants: dict[str, Any], **tensors: Tensor) -> dict[str, Any]:
    """A descriptor for tiles [step, BLOCK_D] of each tensor, or None where the kernel is to load by address."""
    shape, by_address = [1, 1, step, constants["BLOCK_D"]], constants.get("GATHER", False)
    return {name: None if by_address or not _fits_tma(x) else _descriptor(x.permute(1, 2, 0, 3), shape, constants)
            for name, x in tensors.items()}


def _descriptor(x: Tensor, block_shape: list[int], constants: dict[str, Any]) -> Any:
    """What the tensor memory accelerator needs to know of x, as Triton or as Gluon (Hopper kernels) spells it."""
    if "STAGES" not in constants:
        return TensorDescriptor.from_tensor(x, block_shape)
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

    return GluonDescriptor.from_tensor(x, block_shape, _shared_layout(x.element_size(), len(block_shape)))


@functools.cache
def _shared_layout(itemsize: int, rank: int) -> Any:
    from triton.experimental.gluon.language import NVMMASharedLayout

    swizzle, bits = (128, 16) if itemsize == 2 else (0, 32)
    return NVMMASharedLayout(swizzle, bits, rank=rank)


def _fits_hopper(selection: KVSelection, *tensors: Tensor) -> bool:
    """Whether the kernels written for Hopper serve: there, in 16 bits, for blocks and head dims of whole tiles."""
    q = tensors[0]
    whole_tiles = selection.q_block_size % HOPPER_BLOCK == 0 and selection.kv_block_size % HOPPER_BLOCK == 0
    return (q.is_cuda and torch.cuda.get_device_capability(q.device)[0] == 9 and whole_tiles
            and q.shape[-1] > _HOPPER_HEAD_DIM // 2 and all(_fits_tma(x) for x in tensors))


def _fits_tma(x: Tensor) -> bool:
    """Whether the tensor memory accelerator can read x; fp32 has no use for it."""
    itemsize = x.element_size()
    aligned = all(stride > 0 and stride * itemsize % _TMA_ALIGNMENT == 0 for stride in x.stride()[:-1])
    return (itemsize == 2 and x.numel() > 0 and aligned and (x.is_meta or x.data_ptr() % _TMA_ALIGNMENT == 0)
            and x.shape[-1] * itemsize >= _TMA_ALIGNMENT)


def _rows(x: Tensor) -> Rows:
    check_reach(1, x)
    return Rows(x, *x.stride()[:-1])


def _lists(selection: KVSelection) -> Lists:
    indices = selection.kv_indices
    if indices.numel() == 0:
        indices = torch.zeros(1, dtype=torch.int32, device=indices.device)
    return Lists(indices.contiguous(), selection.row_start.contiguous(), selection.row_count.contiguous())


def _query_major(selection: KVSelection) -> dict[str, Any]:
    lists = _lists(selection)
    order = heavy_first(lists.start, lists.count, kv_heads=lists.start.shape[1], dense_count=selection.num_kv_blocks)
    return {"lists": lists, "order_ptr": order}


def _stats(stats: Tensor) -> dict[str, Any]:
    return {"stats_ptr": stats, "stride_stats": stats.stride(1)}


def _scales(softmax_scale: float) -> dict[str, float]:
    return {"scale": softmax_scale, "scale_log2": softmax_scale * math.log2(math.e)}


def _sizes(q: Tensor, k: Tensor, selection: KVSelection) -> dict[str, int]:
    return {"num_queries": q.shape[0], "num_keys": k.shape[0], "num_groups": selection.num_query_groups,
            "heads": q.shape[2], "kv_heads": k.shape[2]}


def _tiles(block: int, step: int) -> int:
    return -(-block // step)
