"""Sparse attention through FlashAttention-4's block-sparse kernels for Hopper (package flash-attn-4, CuTe DSL).

Dims: s query tokens, sk key tokens, b batch, h query heads, G key/value heads, Nq query groups, Nk key blocks, d head
dim. The library wants [b, s, h, d] and rectangles of block numbers; the permutations here are views.

A block that ``kv_length`` cuts in two is the only one that is masked: the library takes such blocks in a list of their
own, with a mask that reads the length. It multiplies masked probabilities, which are 0, with the keys and values there:
padding within such a block must be finite.

Its kernels are compiled once for each dtype, head dim and h / G, and apart for sequences of one tile; other lengths,
counts and strides are run-time values. The rectangle of the backward has Nq entries a row, so heads go through in
chunks that bound it.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor

from megatron_dsv.kernels.library import hopper_limit
from megatron_dsv.kernels.selection import KVSelection
from megatron_dsv.kernels.sparse_attention.head_chunks import head_chunks

BLOCK = 128
HEAD_DIMS = (64, 96, 128, 256)


def limit(q: Tensor, selection: KVSelection, *, deterministic: bool = False) -> str | None:
    """What keeps this backend from serving the request, or None."""
    return hopper_limit("flash4", q) or limit_of_kind(
        dtype=q.dtype, head_dim=q.shape[-1], q_block_size=selection.q_block_size,
        kv_block_size=selection.kv_block_size, deterministic=deterministic)


def limit_of_kind(*, dtype: torch.dtype, head_dim: int, q_block_size: int, kv_block_size: int,
                  deterministic: bool) -> str | None:
    """What keeps this backend from serving any request of this kind, or None."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"takes torch.bfloat16 and torch.float16, got {dtype}"
    if head_dim not in HEAD_DIMS:
        return f"takes head dims {', '.join(map(str, HEAD_DIMS))}, got {head_dim}"
    if (q_block_size, kv_block_size) != (BLOCK, BLOCK):
        return f"takes query groups and key blocks of {BLOCK} tokens, got {q_block_size} and {kv_block_size}"
    return "has no deterministic backward" if deterministic else None


def forward(q: Tensor, k: Tensor, v: Tensor, selection: KVSelection, *, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """out [s, b, h, d] and lse fp32 [b, h, s] of q [s, b, h, d] over the selected keys of k, v [sk, b, G, d]."""
    from flash_attn.cute.interface import _flash_attn_fwd

    from megatron_dsv.kernels.sparse_attention.triton import rectangle

    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[1], q.shape[2], q.shape[0]), dtype=torch.float32, device=q.device)
    split = _split(q)
    row_entries = q.shape[1] * selection.num_query_groups * selection.max_row_count * split
    for heads, kv_heads in head_chunks(q.shape[2], k.shape[2], row_entries=row_entries):
        lists = rectangle.by_query(selection, heads, split=split)
        _flash_attn_fwd(
            *_batch_first(q[:, :, heads], k[:, :, kv_heads], v[:, :, kv_heads]), softmax_scale=softmax_scale,
            out=out[:, :, heads].transpose(0, 1), lse=lse[:, heads],
            **_sparse_arguments(lists, selection, heads, split))
    return out, lse


def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, selection: KVSelection, *,
             softmax_scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """dq [s, b, h, d], dk and dv [sk, b, G, d]; dq sums in fp32 with atomics, so repeats differ in rounding."""
    from flash_attn.cute.interface import _flash_attn_bwd

    from megatron_dsv.kernels.sparse_attention.triton import rectangle

    selection = selection.with_transposed()
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    split = _split(q)
    row_entries = q.shape[1] * selection.num_query_groups * selection.num_kv_blocks * split
    for heads, kv_heads in head_chunks(q.shape[2], k.shape[2], row_entries=row_entries):
        lists = rectangle.by_key(selection, heads, split=split)
        grads = _batch_first(dq[:, :, heads], dk[:, :, kv_heads], dv[:, :, kv_heads])
        _flash_attn_bwd(
            *_batch_first(q[:, :, heads], k[:, :, kv_heads], v[:, :, kv_heads], out[:, :, heads], dout[:, :, heads]),
            lse[:, heads], softmax_scale=softmax_scale, dq=grads[0], dk=grads[1], dv=grads[2],
            **_sparse_arguments(lists, selection, heads, split))
    return dq, dk, dv


def _split(q: Tensor) -> int:
    """List blocks per selected block: tiles of head dim 256 span 64 keys."""
    return 2 if q.shape[-1] > 128 else 1


def _batch_first(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.transpose(0, 1) for x in tensors)


def _sparse_arguments(lists: Any, selection: KVSelection, heads: slice, split: int) -> dict[str, Any]:
    """The library's arguments for a ``Rectangle`` of these query heads."""
    from flash_attn.cute.block_sparsity import BlockSparseTensorsTorch

    ratio = selection.row_start.shape[1] // selection.kv_length.shape[1]
    lengths = selection.kv_length.repeat_interleave(ratio, dim=1)[:, heads].contiguous()
    # One compiled mask for every shape: without the hint, lengths of a single head would be another kind of tensor.
    lengths.__leading_dim__ = 1  # type: ignore[attr-defined]
    blocks = BlockSparseTensorsTorch(
        mask_block_cnt=lists.cut, mask_block_idx=lists.cut_indices, full_block_cnt=lists.whole,
        full_block_idx=lists.indices, block_size=(BLOCK, BLOCK // split))
    return {"block_sparse_tensors": blocks, "mask_mod": _below_length(), "aux_tensors": [lengths]}


@functools.cache
def _below_length() -> Any:
    """The library's mask hook: True where a key lies before the length of its batch item and head."""
    import cutlass
    from cutlass import cute
    from flash_attn.cute import utils

    @cute.jit
    def below_length(batch, head, query, key, seqlen_info, aux_tensors):
        length = aux_tensors[0][batch[0], head[0]]
        return key < utils.scalar_to_ssa(length, cutlass.Int32)

    # The library would hash the paths of the modules above; with a name, its on-disk cache serves other hosts, too.
    below_length.__cute_hash__ = "megatron_dsv.below_length.1"
    return below_length
