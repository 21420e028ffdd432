"""Dense attention in eager torch, exact in fp32 or fp64: the oracle.

Dims: s query tokens, sk key tokens, b batch, h query heads, G key/value heads, d head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_dsv.kernels.eager_attention import chunked_backward, chunked_forward

_ROW_STEP = 16


def forward(q: Tensor, k: Tensor, v: Tensor, kv_length: int | Tensor | None, *,
            softmax_scale: float) -> tuple[Tensor, Tensor]:
    """out [s, b, h, d] and lse [b, h, s] of q [s, b, h, d] over k, v [sk, b, G, d]."""
    valid = valid_keys(k, kv_length)
    return chunked_forward(q, k, v, valid, lambda heads, rows: valid[:, heads, None, None, :],
                           softmax_scale=softmax_scale, row_step=_ROW_STEP)


def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kv_length: int | Tensor | None,
             *, softmax_scale: float) -> tuple[Tensor, Tensor, Tensor]:
    """dq [s, b, h, d], dk and dv [sk, b, G, d]; sums run in a fixed order, so repeats agree bitwise."""
    valid = valid_keys(k, kv_length)
    return chunked_backward(dout, q, k, v, out, lse, valid, lambda heads, rows: valid[:, heads, None, None, :],
                            softmax_scale=softmax_scale, row_step=_ROW_STEP)


def attention(q: Tensor, k: Tensor, v: Tensor, kv_length: int | Tensor | None, *, softmax_scale: float) -> Tensor:
    """out [s, b, h, d], differentiable in q, k and v."""
    return _ReferenceAttention.apply(q, k, v, kv_length, softmax_scale)


def valid_keys(k: Tensor, kv_length: int | Tensor | None) -> Tensor:
    """bool [b, G, sk] of k [sk, b, G, d]: False for keys at or after ``kv_length``."""
    sk, b, heads_kv, _ = k.shape
    if kv_length is None:
        return torch.ones((b, heads_kv, sk), dtype=torch.bool, device=k.device)
    length = torch.as_tensor(kv_length, device=k.device).expand(b)
    return (torch.arange(sk, device=k.device) < length[:, None])[:, None].expand(b, heads_kv, sk)


class _ReferenceAttention(torch.autograd.Function):
    @staticmethod
    def forward(ctx, q: Tensor, k: Tensor, v: Tensor, kv_length: int | Tensor | None, softmax_scale: float) -> Tensor:
        out, lse = forward(q, k, v, kv_length, softmax_scale=softmax_scale)
        length_tensor = kv_length if isinstance(kv_length, Tensor) else None
        ctx.save_for_backward(q, k, v, out, lse, length_tensor)
        ctx.kv_length, ctx.softmax_scale = None if length_tensor is not None else kv_length, softmax_scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx, dout: Tensor):
        q, k, v, out, lse, length_tensor = ctx.saved_tensors
        kv_length = ctx.kv_length if length_tensor is None else length_tensor
        dq, dk, dv = backward(dout, q, k, v, out, lse, kv_length, softmax_scale=ctx.softmax_scale)
        return dq, dk, dv, None, None
