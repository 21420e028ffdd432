"""Dense attention through FlashAttention-4's kernels for Hopper (package flash-attn-4, CuTe DSL).

Dims: s query tokens, sk key tokens, b batch, h query heads, G key/value heads, d head dim. The library wants
[b, s, h, d]; the permutations here are views, of any strides that are multiples of 16 bytes (others are copied).

The two custom ops are opaque to torch.compile. Kernels are compiled once for each dtype, head dim and h / G, and apart
for sequences of one tile; other lengths and strides are run-time values. ``deterministic`` orders the sums of dq.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dsv.kernels.dense_attention.lengths import host_lengths, join_batch, on_host, slice_batch
from megatron_dsv.kernels.library import hopper_limit

_MAX_HEAD_DIM = 256


def limit(q: Tensor, kv_length: int | Tensor | None) -> str | None:
    """What keeps this backend from serving the request, or None."""
    if reason := hopper_limit("flash4", q) or limit_of_kind(q.dtype, q.shape[-1]):
        return reason
    if not on_host(kv_length):
        return "needs kv_length on the host, as an int or a CPU tensor"
    return None


def limit_of_kind(dtype: torch.dtype, head_dim: int) -> str | None:
    """What keeps this backend from serving any request of this kind, on the devices that it is for, or None."""
    if dtype not in (torch.bfloat16, torch.float16):
        return f"takes torch.bfloat16 and torch.float16, got {dtype}"
    if head_dim > _MAX_HEAD_DIM or head_dim % 8:
        return f"takes head dims up to {_MAX_HEAD_DIM} that are multiples of 8, got {head_dim}"
    return None


def attention(q: Tensor, k: Tensor, v: Tensor, kv_length: int | Tensor | None, *, softmax_scale: float,
              deterministic: bool) -> Tensor:
    """out [s, b, h, d] of q [s, b, h, d] over k, v [sk, b, G, d], differentiable in q, k and v."""
    parts = [flash4_forward(*slice_batch(batch, length, q, k, v), softmax_scale, deterministic)[0]
             for batch, length in host_lengths(k, kv_length)]
    return join_batch(parts, 1)


def forward(q: Tensor, k: Tensor, v: Tensor, kv_length: int | Tensor | None, *,
            softmax_scale: float) -> tuple[Tensor, Tensor]:
    """out [s, b, h, d] and lse [b, h, s] of q [s, b, h, d] over k, v [sk, b, G, d]; records no gradient."""
    parts = [flash4_forward(*slice_batch(batch, length, q, k, v), softmax_scale, False)
             for batch, length in host_lengths(k, kv_length)]
    outs, lses = zip(*parts)
    return join_batch(list(outs), 1), join_batch(list(lses), 0)


def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kv_length: int | Tensor | None,
             *, softmax_scale: float, deterministic: bool) -> tuple[Tensor, Tensor, Tensor]:
    """dq [s, b, h, d], dk and dv [sk, b, G, d] (0 at padding keys) from the given out and lse."""
    grads = []
    for batch, length in host_lengths(k, kv_length):
        queries, keys, values = slice_batch(batch, length, q, k, v)
        dq, dk, dv = flash4_backward(dout[:, batch], queries, keys, values, out[:, batch], lse[batch], softmax_scale,
                                     deterministic)
        padding = (0, 0, 0, 0, 0, 0, 0, k.shape[0] - length)
        grads.append((dq, dk, dv) if length == k.shape[0] else (dq, F.pad(dk, padding), F.pad(dv, padding)))
    dq, dk, dv = (join_batch(list(parts), 1) for parts in zip(*grads))
    return dq, dk, dv


@torch.library.custom_op(
    "megatron_dsv::flash4_forward", mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, float softmax_scale, bool deterministic) -> (Tensor, Tensor)")
def flash4_forward(q, k, v, softmax_scale, deterministic):
    """out [s, b, h, d] and lse [b, h, s] over every key; ``deterministic`` only travels on to the backward."""
    from flash_attn.cute.interface import _flash_attn_fwd

    out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    lse = torch.empty((q.shape[1], q.shape[2], q.shape[0]), dtype=torch.float32, device=q.device)
    _flash_attn_fwd(*(x.transpose(0, 1) for x in (q, k, v)), softmax_scale=softmax_scale, out=out.transpose(0, 1),
                    lse=lse)
    return out, lse


@flash4_forward.register_fake
def _(q, k, v, softmax_scale, deterministic):
    s, b, h, d = q.shape
    return q.new_empty((s, b, h, d)), q.new_empty((b, h, s), dtype=torch.float32)


@torch.library.custom_op(
    "megatron_dsv::flash4_backward", mutates_args=(),
    schema="(Tensor dout, Tensor q, Tensor k, Tensor v, Tensor out, Tensor lse, float softmax_scale, "
           "bool deterministic) -> (Tensor, Tensor, Tensor)")
def flash4_backward(dout, q, k, v, out, lse, softmax_scale, deterministic):
    """dq [s, b, h, d], dk and dv [sk, b, G, d]."""
    from flash_attn.cute.interface import _flash_attn_bwd

    grads = [torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)]
    dq, dk, dv = (x.transpose(0, 1) for x in grads)
    _flash_attn_bwd(*(x.transpose(0, 1) for x in (q, k, v, out, dout)), lse, softmax_scale=softmax_scale,
                    deterministic=deterministic, dq=dq, dk=dk, dv=dv)
    return tuple(grads)


@flash4_backward.register_fake
def _(dout, q, k, v, out, lse, softmax_scale, deterministic):
    return q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape)


def _setup_context(ctx, inputs, output) -> None:
    q, k, v, softmax_scale, deterministic = inputs
    out, lse = output
    ctx.mark_non_differentiable(lse)
    ctx.save_for_backward(q, k, v, out, lse)
    ctx.options = (softmax_scale, deterministic)


def _autograd_backward(ctx, dout: Tensor, _dlse: Tensor | None):
    q, k, v, out, lse = ctx.saved_tensors
    # Autograd may hand over an expanded gradient, whose last stride is 0.
    dout = dout if dout.stride(-1) == 1 else dout.contiguous()
    return *flash4_backward(dout, q, k, v, out, lse, *ctx.options), None, None


flash4_forward.register_autograd(_autograd_backward, setup_context=_setup_context)
