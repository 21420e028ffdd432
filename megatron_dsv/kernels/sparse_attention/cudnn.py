"""Sparse attention through the block-sparse kernels of nvidia-cudnn-frontend (cudnn.BSA, CuTe DSL) for Hopper.

Dims: s query tokens, sk key tokens, b batch, h heads, Nq query groups, Nk key blocks, d head dim. The library wants
rectangles of block numbers; the permutations here are views, and batch items go through one by one, heads in chunks
that bound the rectangle.

It reads how many tokens of each key block are valid, and multiplies masked probabilities, which are 0, with the keys
and values there: padding must be finite. It inverts the lists itself, so its backward needs no key-major twin. Counts
that differ between rows cost its forward at 128-token blocks about half its speed; at 64 they cost nothing.
Its kernels are compiled once, except for the inversion, which is compiled again when ``max_row_count`` reaches another
multiple of ``_WIDTH``. The backward sums in fp32 with atomics, in a workspace of three fp32 tensors of the shape of the
queries that it is given; its chunks of heads are so few that it is no larger than one of all queries (or 512 MiB).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from megatron_dsv.kernels.library import hopper_limit
from megatron_dsv.kernels.selection import KVSelection
from megatron_dsv.kernels.sparse_attention.head_chunks import head_chunks

HEAD_DIM = 128
BLOCKS = (64, 128)
_WIDTH = 64
_SMALL_WORKSPACE = 512 << 20


def limit(q: Tensor, k: Tensor, v: Tensor, selection: KVSelection, *, deterministic: bool = False) -> str | None:
    """What keeps this backend from serving the request, or None."""
    if reason := hopper_limit("cudnn", q) or limit_of_kind(
            dtype=q.dtype, head_dim=q.shape[-1], heads=q.shape[2], kv_heads=k.shape[2],
            q_block_size=selection.q_block_size, kv_block_size=selection.kv_block_size, deterministic=deterministic):
        return reason
    if selection.q_block_size == 64 and q.shape[0] % 64:
        return f"takes a multiple of 64 queries at 64-token blocks, got {q.shape[0]}"
    if not all(_aligned(x) for x in (q, k, v)):
        return "needs q, k and v whose rows begin at multiples of 16 bytes"
    return None


def limit_of_kind(*, dtype: torch.dtype, head_dim: int, heads: int, kv_heads: int, q_block_size: int,
                  kv_block_size: int, deterministic: bool) -> str | None:
    """What keeps this backend from serving any request of this kind, or None."""
    if dtype != torch.bfloat16:
        return f"takes torch.bfloat16, got {dtype}"
    if head_dim != HEAD_DIM:
        return f"takes a head dim of {HEAD_DIM}, got {head_dim}"
    if heads != kv_heads:
        return f"takes as many key/value heads as query heads, got {kv_heads} and {heads}"
    if q_block_size != kv_block_size or q_block_size not in BLOCKS:
        return (f"takes query groups and key blocks of 64 tokens or of 128 tokens, got {q_block_size} and "
                f"{kv_block_size}")
    return "has no deterministic backward" if deterministic else None


def forward(q: Tensor, k: Tensor, v: Tensor, selection: KVSelection, *, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """out [s, b, h, d] and lse fp32 [b, h, s] of q [s, b, h, d] over the selected keys of k, v [sk, b, h, d]."""
    from cudnn.block_sparse_attention import block_sparse_attention_forward

    def call(item: int, heads: slice) -> tuple[Tensor, Tensor]:
        indices, counts, valid = _lists(_item(selection, item), heads)
        queries, keys, values = (x[:, item, heads][None] for x in (q, k, v))
        result = block_sparse_attention_forward(
            queries, keys, values, indices, block_sizes=valid, q2k_block_nums=counts,
            sparse_block_size=selection.q_block_size, allow_empty_block_nums=True, softmax_scale=softmax_scale,
            layout="bshd")
        return result["o_tensor"].transpose(0, 1), result["lse_tensor"]

    calls = [(item, heads) for item in range(q.shape[1]) for heads in _head_chunks(q, selection)]
    if len(calls) == 1:
        return call(*calls[0])
    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[1], q.shape[2], q.shape[0]), dtype=torch.float32, device=q.device)
    for item, heads in calls:
        out[:, item:item + 1, heads], lse[item:item + 1, heads] = call(item, heads)
    return out, lse


def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, selection: KVSelection, *,
             softmax_scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """dq [s, b, h, d], dk and dv [sk, b, h, d]; repeats differ in rounding."""
    from cudnn.block_sparse_attention import block_sparse_attention_backward

    dout, out = (x if _aligned(x) else x.contiguous() for x in (dout, out))
    dq, dk, dv = (torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v))
    for item in range(q.shape[1]):
        part = _item(selection, item)
        for heads in _head_chunks(q, selection, _heads_within_workspace(q, k)):
            indices, counts, valid = _lists(part, heads)
            # Heads as batch items: only those may differ in their valid keys here.
            tensors = [x[:, item, heads].transpose(0, 1)[:, None] for x in (dout, q, k, v, out)]
            grads = [x[:, item, heads].transpose(0, 1)[:, None] for x in (dq, dk, dv)]
            block_sparse_attention_backward(
                *tensors, lse[item, heads][:, None], indices.transpose(0, 1), block_sizes=valid[0],
                q2k_block_nums=counts.transpose(0, 1), softmax_scale=softmax_scale, dq_tensor=grads[0],
                dk_tensor=grads[1], dv_tensor=grads[2], sparse_block_size=selection.q_block_size)
    return dq, dk, dv


def _aligned(x: Tensor) -> bool:
    """Whether the library's bulk copies can read x: rows, and the tensor itself, begin at multiples of 16 bytes."""
    strides = (stride for size, stride in zip(x.shape[:-1], x.stride()[:-1]) if size > 1)
    return x.stride(-1) == 1 and x.data_ptr() % 16 == 0 and all(s * x.element_size() % 16 == 0 for s in strides)


def _item(selection: KVSelection, item: int) -> KVSelection:
    """The selection of one batch item."""
    rows = slice(item, item + 1)
    return replace(selection, row_start=selection.row_start[rows], row_count=selection.row_count[rows],
                   kv_length=selection.kv_length[rows], transposed=None)


def _lists(selection: KVSelection, heads: slice) -> tuple[Tensor, Tensor, Tensor]:
    """Of one batch item: indices int32 [1, h', Nq, W], counts int32 [1, h', Nq], valid tokens int32 [1, h', Nk]."""
    from megatron_dsv.kernels.sparse_attention.triton import rectangle

    lists = rectangle.by_query(selection, heads, multiple=_WIDTH)
    block = selection.kv_block_size
    begins = torch.arange(0, selection.num_keys, block, dtype=torch.int32, device=lists.indices.device)
    valid = (selection.kv_length[:, heads, None] - begins).clamp(0, block)
    return lists.indices, lists.whole + lists.cut, valid


def _head_chunks(q: Tensor, selection: KVSelection, most_heads: int | None = None) -> Iterator[slice]:
    """Slices of heads, at most ``most_heads`` each, whose rectangle for one batch item stays within its bound."""
    width = -(-max(1, selection.max_row_count) // _WIDTH) * _WIDTH
    for heads, _ in head_chunks(q.shape[2], q.shape[2], row_entries=selection.num_query_groups * width,
                                most_heads=most_heads):
        yield heads


def _heads_within_workspace(q: Tensor, k: Tensor) -> int:
    """Heads whose fp32 workspace of the backward stays within its bound."""
    bound = max(_SMALL_WORKSPACE, 4 * HEAD_DIM * q.shape[0] * q.shape[2])
    return bound // (4 * HEAD_DIM * (q.shape[0] + 2 * k.shape[0]))
