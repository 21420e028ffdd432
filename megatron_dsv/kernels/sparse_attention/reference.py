"""Sparse attention in eager torch, exact in fp32 or fp64, with memory bounded by chunks of query groups.

Dims: s query tokens, sk key tokens, b batch, h query heads, G key/value heads, Nq query groups, Nk key blocks, d head
dim, n = h / G.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_dsv.kernels.eager_attention import ChunkMask, chunked_backward, chunked_forward
from megatron_dsv.kernels.selection import DENSE_ROW, KVSelection


def forward(q: Tensor, k: Tensor, v: Tensor, selection: KVSelection, *, softmax_scale: float) -> tuple[Tensor, Tensor]:
    """out [s, b, h, d] and lse [b, h, s] of q [s, b, h, d] over the selected keys of k, v [sk, b, G, d]."""
    valid = _valid_keys(selection)
    return chunked_forward(q, k, v, valid, _chunk_mask(selection, valid), softmax_scale=softmax_scale,
                           row_step=selection.q_block_size)


def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, selection: KVSelection, *,
             softmax_scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """dq [s, b, h, d], dk and dv [sk, b, G, d]; sums run in a fixed order, so repeats agree bitwise."""
    valid = _valid_keys(selection)
    return chunked_backward(dout, q, k, v, out, lse, valid, _chunk_mask(selection, valid), softmax_scale=softmax_scale,
                            row_step=selection.q_block_size)


def _valid_keys(selection: KVSelection) -> Tensor:
    """bool [b, G, sk]."""
    return torch.arange(selection.num_keys, device=selection.kv_length.device) < selection.kv_length[..., None]


def _chunk_mask(selection: KVSelection, valid: Tensor) -> ChunkMask:
    """The selection as token masks [b, G', n, r, sk] of chunks whose rows begin at a query group."""
    heads_kv = selection.kv_length.shape[1]
    ratio = selection.row_start.shape[1] // heads_kv
    group, block = selection.q_block_size, selection.kv_block_size

    def mask(heads: slice, rows: slice) -> Tensor:
        query_heads = slice(heads.start * ratio, heads.stop * ratio)
        groups = slice(rows.start // group, -(-rows.stop // group))
        part = replace(selection, row_start=selection.row_start[:, query_heads, groups],
                       row_count=selection.row_count[:, query_heads, groups], kv_length=selection.kv_length[:, heads],
                       num_queries=rows.stop - rows.start, transposed=None)
        blocks = part.block_mask() | (part.row_start == DENSE_ROW)[..., None]
        tokens = blocks.repeat_interleave(block, dim=-1)[..., : selection.num_keys]
        tokens = tokens.repeat_interleave(group, dim=-2)[..., : rows.stop - rows.start, :]
        return tokens.unflatten(1, (-1, ratio)) & valid[:, heads, None, None, :]

    return mask
