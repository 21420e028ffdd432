"""Dense attention through torch's scaled_dot_product_attention and the aten ops beneath it.

Dims: s query tokens, sk key tokens, b batch, h query heads, G key/value heads, d head dim. torch wants [b, h, s, d];
the permutations here are views.

Key padding costs nothing where the host knows the lengths: k and v are sliced. Lengths that lie on the device take a
mask, which only torch's memory-efficient kernel serves.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from megatron_dsv.kernels.dense_attention.lengths import host_lengths, join_batch, on_host, slice_batch

_FUSED = [SDPBackend.CUDNN_ATTENTION, SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION]


def attention(q: Tensor, k: Tensor, v: Tensor, kv_length: int | Tensor | None, *, softmax_scale: float,
              deterministic: bool) -> Tensor:
    """out [s, b, h, d] of q [s, b, h, d] over k, v [sk, b, G, d], differentiable in q, k and v."""
    if deterministic and q.is_cuda and not torch.are_deterministic_algorithms_enabled():
        raise NotImplementedError(
            "backend='sdpa' is deterministic on CUDA only under torch.use_deterministic_algorithms(True) "
            "(Megatron: --deterministic-mode); set that, or use backend='reference'")
    if isinstance(kv_length, int) and kv_length == 0:
        kv_length = torch.zeros(q.shape[1], dtype=torch.int32)
    if isinstance(kv_length, Tensor) and (not on_host(kv_length) or not bool(kv_length.all())):
        return _attention_masked(q, k, v, kv_length, softmax_scale, deterministic)
    parts = [_attention_whole(*slice_batch(batch, length, q, k, v), softmax_scale, deterministic)
             for batch, length in host_lengths(k, kv_length)]
    return join_batch(parts, 1)


def forward(q: Tensor, k: Tensor, v: Tensor, kv_length: int | Tensor | None, *,
            softmax_scale: float) -> tuple[Tensor, Tensor]:
    """out [s, b, h, d] and lse [b, h, s] of q [s, b, h, d] over k, v [sk, b, G, d]; records no gradient."""
    outs, lses = [], []
    for batch, length in _nonzero_lengths(q, k, kv_length):
        queries, keys, values = (x.permute(1, 2, 0, 3) for x in slice_batch(batch, length, q, k, v))
        out, lse = _choose_pair(queries, keys)[0](queries, keys, values, softmax_scale)
        outs.append(out.permute(2, 0, 1, 3))
        lses.append(lse.reshape(lse.shape[0], q.shape[2], q.shape[0]))
    return join_batch(outs, 1), join_batch(lses, 0)


def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, kv_length: int | Tensor | None,
             *, softmax_scale: float, deterministic: bool) -> tuple[Tensor, Tensor, Tensor]:
    """dq [s, b, h, d], dk and dv [sk, b, G, d] (0 at padding keys) from the given out and lse."""
    if deterministic and q.is_cuda:
        raise NotImplementedError("backward of backend='sdpa' is not repeatable on CUDA; use backend='reference', or "
                                  "dense_attention under torch.use_deterministic_algorithms(True)")
    grads = []
    for batch, length in _nonzero_lengths(q, k, kv_length):
        queries, keys, values, douts, outs = (
            x.permute(1, 2, 0, 3) for x in (*slice_batch(batch, length, q, k, v), dout[:, batch], out[:, batch]))
        dq, dk, dv = _choose_pair(queries, keys)[1](douts, queries, keys, values, outs, lse[batch], softmax_scale)
        padding = (0, 0, 0, k.shape[0] - length)
        grads.append([dq, F.pad(dk, padding), F.pad(dv, padding)])
    dq, dk, dv = (torch.cat(parts).permute(2, 0, 1, 3) for parts in zip(*grads))
    return dq, dk, dv


def _nonzero_lengths(q: Tensor, k: Tensor, kv_length: int | Tensor | None) -> list[tuple[slice, int]]:
    """``host_lengths``, of which none may be 0, nor may q be empty: torch's kernel for CPUs divides by its size."""
    if q.numel() == 0:
        raise NotImplementedError("forward and backward of backend='sdpa' need at least one query, got q "
                                  f"{tuple(q.shape)}; use backend='reference'")
    if not on_host(kv_length):
        raise NotImplementedError("forward and backward of backend='sdpa' need kv_length on the host; pass an int or a "
                                  "CPU tensor, or use backend='reference'")
    lengths = host_lengths(k, kv_length)
    if not all(length for _, length in lengths):
        raise NotImplementedError("forward and backward of backend='sdpa' need at least one key, got kv_length 0; "
                                  "use backend='reference'")
    return lengths


def _attention_whole(q: Tensor, k: Tensor, v: Tensor, softmax_scale: float, deterministic: bool) -> Tensor:
    """Attention over every key passed."""
    queries, keys, values = (x.permute(1, 2, 0, 3) for x in (q, k, v))
    if q.is_cuda and q.dtype in (torch.bfloat16, torch.float16):
        kernels = [SDPBackend.FLASH_ATTENTION] if deterministic else _FUSED
    else:
        kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(kernels, set_priority=True):
        out = F.scaled_dot_product_attention(queries, keys, values, scale=softmax_scale,
                                             enable_gqa=q.shape[2] != k.shape[2])
    return out.permute(2, 0, 1, 3)


def _attention_masked(q: Tensor, k: Tensor, v: Tensor, kv_length: Tensor, softmax_scale: float,
                      deterministic: bool) -> Tensor:
    """Attention with lengths that the host does not know."""
    if deterministic and q.is_cuda:
        raise NotImplementedError("backend='sdpa' with kv_length on the device is not deterministic; pass kv_length "
                                  "as an int or a CPU tensor, or use backend='reference'")
    length = kv_length.to(q.device, non_blocking=True)
    valid = torch.arange(k.shape[0], device=q.device) < length[:, None]
    padding = ~valid.t()[:, :, None, None]
    # Zeroed padding: a masked key's probability is 0, but 0 * NaN is NaN.
    keys, values = (_expand_heads(x.masked_fill(padding, 0).permute(1, 2, 0, 3), q.shape[2]) for x in (k, v))
    # An item without any key attends to zeros and is zeroed after, since a row without keys is NaN in some kernels.
    mask = (valid | (length[:, None] == 0))[:, None, None, :]
    kernels = [SDPBackend.EFFICIENT_ATTENTION]
    if q.dtype not in (torch.bfloat16, torch.float16) or not q.is_cuda:
        kernels += [SDPBackend.FLASH_ATTENTION, SDPBackend.MATH]
    with sdpa_kernel(kernels):
        out = F.scaled_dot_product_attention(q.permute(1, 2, 0, 3), keys, values, attn_mask=mask, scale=softmax_scale)
    return out.permute(2, 0, 1, 3).masked_fill((length == 0)[None, :, None, None], 0)


def _expand_heads(x: Tensor, heads: int) -> Tensor:
    """[b, G, sk, d] -> [b, h, sk, d]; query head i reads key/value head i // (h // G)."""
    return x if x.shape[1] == heads else x.repeat_interleave(heads // x.shape[1], dim=1)


def _sum_heads(x: Tensor, heads_kv: int) -> Tensor:
    """Transpose of ``_expand_heads``."""
    return x if x.shape[1] == heads_kv else x.unflatten(1, (heads_kv, -1)).sum(2)


def _choose_pair(q: Tensor, k: Tensor) -> tuple[Callable, Callable]:
    """The (forward, backward) of aten that returns and takes lse, for q [b, h, s, d] and k [b, G, sk, d]."""
    if not q.is_cuda:
        return _cpu_forward, _cpu_backward
    params = torch.backends.cuda.SDPAParams(q, k, k, None, 0.0, False, q.shape[1] != k.shape[1])
    if q.shape[1] == k.shape[1] and torch.backends.cuda.can_use_cudnn_attention(params):
        return _cudnn_forward, _cudnn_backward
    if torch.backends.cuda.can_use_flash_attention(params):
        return _flash_forward, _flash_backward
    raise NotImplementedError(f"no aten attention with lse takes {q.dtype} and head dim {q.shape[-1]} on this device; "
                              "use backend='reference'")


def _cpu_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    k, v = (_expand_heads(x, q.shape[1]) for x in (k, v))
    return torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, k, v, scale=scale)


def _cpu_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
                  scale: float) -> tuple[Tensor, Tensor, Tensor]:
    heads_kv = k.shape[1]
    k, v = (_expand_heads(x, q.shape[1]) for x in (k, v))
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        dout, q, k, v, out, lse, 0.0, False, scale=scale)
    return dq, _sum_heads(dk, heads_kv), _sum_heads(dv, heads_kv)


def _cudnn_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, scale=scale)
    return out, lse


def _cudnn_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
                    scale: float) -> tuple[Tensor, Tensor, Tensor]:
    unused = torch.empty((), dtype=torch.int64, device=q.device)
    return torch.ops.aten._scaled_dot_product_cudnn_attention_backward(
        dout, q, k, v, out, lse[..., None], unused, unused, None, None, None, q.shape[2], k.shape[2], 0.0, False,
        scale=scale)


def _flash_forward(q: Tensor, k: Tensor, v: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    out, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, scale=scale)
    return out, lse


def _flash_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
                    scale: float) -> tuple[Tensor, Tensor, Tensor]:
    unused = torch.empty((), dtype=torch.int64, device=q.device)
    return torch.ops.aten._scaled_dot_product_flash_attention_backward(
        dout, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, False, unused, unused, scale=scale)
