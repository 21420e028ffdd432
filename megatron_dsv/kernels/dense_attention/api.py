"""Dense attention: out = softmax(softmax_scale * q k^T over the valid keys) v. Not causal; MHA and GQA.

Dims: s query tokens, sk key tokens, b batch, h query heads, G key/value heads (h % G == 0), d head dim.
q, out, dout [s, b, h, d]; k, v [sk, b, G, d]; lse [b, h, s] natural log, fp32 (fp64 for fp64 inputs).
Any strides with a last stride of 1; sk may differ from s.

``kv_length`` says where padding keys begin: None (none are padding), an int, or an int32 tensor [b]. A tensor on the
CPU is read on the host and k, v are sliced, which is the fast path; a tensor on the device is never waited for and
becomes a mask. A batch item with length 0 gets out 0, lse -inf and zero gradients.

Backends: ``reference`` (eager, exact, fp32 or fp64), ``sdpa`` (torch's fused kernels), ``auto`` (sdpa).
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dsv.kernels.attention_layout import check_backward, check_qkv, resolve_scale
from megatron_dsv.kernels.dense_attention import reference, sdpa

BACKENDS = ("auto", "reference", "sdpa")


def dense_attention(q: Tensor, k: Tensor, v: Tensor, *, kv_length: int | Tensor | None = None,
                    softmax_scale: float | None = None, backend: str = "auto", deterministic: bool = False) -> Tensor:
    """Attention over every valid key, differentiable in q, k and v.

    Args:
        q: [s, b, h, d].
        k, v: [sk, b, G, d].
        kv_length: keys at or after it are padding; see the module.
        softmax_scale: default 1 / sqrt(d).
        backend: one of ``BACKENDS``.
        deterministic: repeats must agree bitwise, gradients included.

    Returns:
        out [s, b, h, d] in q's dtype.

    Raises:
        ValueError: shapes, dtypes, kv_length or backend are wrong.
        NotImplementedError: the backend cannot serve the request; the message names the way out.
    """
    scale = _check(q, k, v, kv_length, softmax_scale)
    match backend:
        case "reference":
            return reference.attention(q, k, v, kv_length, softmax_scale=scale)
        case "sdpa" | "auto":
            return sdpa.attention(q, k, v, kv_length, softmax_scale=scale, deterministic=deterministic)
        case _:
            raise _unknown(backend)


@torch.no_grad()
def forward(q: Tensor, k: Tensor, v: Tensor, *, kv_length: int | Tensor | None = None,
            softmax_scale: float | None = None, backend: str = "auto") -> tuple[Tensor, Tensor]:
    """out [s, b, h, d] and lse [b, h, s], without autograd. Arguments and errors as in ``dense_attention``."""
    scale = _check(q, k, v, kv_length, softmax_scale)
    match backend:
        case "reference":
            return reference.forward(q, k, v, kv_length, softmax_scale=scale)
        case "sdpa" | "auto":
            return sdpa.forward(q, k, v, kv_length, softmax_scale=scale)
        case _:
            raise _unknown(backend)


@torch.no_grad()
def backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, *,
             kv_length: int | Tensor | None = None, softmax_scale: float | None = None, backend: str = "auto",
             deterministic: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """dq [s, b, h, d], dk and dv [sk, b, G, d].

    ``out`` and ``lse`` may be merged results over more keys than k, v hold: the gradients are then those of the
    merged softmax with respect to these k, v, and their share of dq. Other arguments and errors as in
    ``dense_attention``.
    """
    scale = _check(q, k, v, kv_length, softmax_scale)
    check_backward(dout, q, out, lse)
    match backend:
        case "reference":
            return reference.backward(dout, q, k, v, out, lse, kv_length, softmax_scale=scale)
        case "sdpa" | "auto":
            return sdpa.backward(dout, q, k, v, out, lse, kv_length, softmax_scale=scale, deterministic=deterministic)
        case _:
            raise _unknown(backend)


def _check(q: Tensor, k: Tensor, v: Tensor, kv_length: int | Tensor | None, softmax_scale: float | None) -> float:
    check_qkv(q, k, v)
    sk, b = k.shape[:2]
    if isinstance(kv_length, Tensor):
        if kv_length.dtype != torch.int32 or kv_length.shape != (b,):
            raise ValueError(f"kv_length must be an int32 tensor of shape {(b,)}, "
                             f"got {kv_length.dtype} {tuple(kv_length.shape)}")
        if kv_length.device.type == "cpu" and not 0 <= int(kv_length.min()) <= int(kv_length.max()) <= sk:
            raise ValueError(f"kv_length must lie in [0, {sk}] for {sk} keys, got {kv_length.tolist()}")
    elif kv_length is not None and not 0 <= kv_length <= sk:
        raise ValueError(f"kv_length must lie in [0, {sk}] for {sk} keys, got {kv_length}")
    return resolve_scale(softmax_scale, q)


def _unknown(backend: str) -> ValueError:
    return ValueError(f"backend of dense_attention must be one of {', '.join(BACKENDS)}, got {backend!r}")
