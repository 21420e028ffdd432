"""The tensor layout that every attention op of this package takes, and its checks.

Dims: s query tokens, sk key tokens, b batch, h query heads, G key/value heads (h % G == 0), d head dim.
q, out [s, b, h, d]; k, v [sk, b, G, d]; lse [b, h, s], natural log, fp32 (fp64 when the inputs are fp64).
"""

from __future__ import annotations

import math

import torch
from torch import Tensor


def check_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Raises ValueError unless q [s, b, h, d] and k, v [sk, b, G, d] agree in batch, heads, head dim, dtype and device.

    Strides are free except for the last, which must be 1.
    """
    for name, x in (("q", q), ("k", k), ("v", v)):
        if x.dim() != 4:
            raise ValueError(f"{name} must have 4 dimensions [tokens, batch, heads, head_dim], got {tuple(x.shape)}")
        if x.dtype != q.dtype or not x.dtype.is_floating_point:
            raise ValueError(f"q, k and v must share one floating dtype, got {name} {x.dtype} and q {q.dtype}")
        if x.device != q.device:
            raise ValueError(f"q, k and v must lie on one device, got {name} on {x.device} and q on {q.device}")
        _check_last_stride(name, x)
    if k.shape != v.shape:
        raise ValueError(f"k and v must have one shape [sk, b, G, d], got {tuple(k.shape)} and {tuple(v.shape)}")
    if q.shape[1] != k.shape[1] or q.shape[3] != k.shape[3]:
        raise ValueError(f"q and k must agree in batch and head dim, got {tuple(q.shape)} and {tuple(k.shape)}")
    if k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError(f"query heads must be a multiple of key/value heads, got {q.shape[2]} and {k.shape[2]}")


def check_backward(dout: Tensor, q: Tensor, out: Tensor, lse: Tensor) -> None:
    """Raises ValueError unless dout and out have the shape and dtype of q, and lse is [b, h, s] in ``lse_dtype``.

    All on the device of q; the last stride of dout and out must be 1.
    """
    for name, x in (("dout", dout), ("out", out)):
        if x.shape != q.shape or x.dtype != q.dtype:
            raise ValueError(f"{name} must have the shape and dtype of q, {tuple(q.shape)} {q.dtype}, "
                             f"got {tuple(x.shape)} {x.dtype}")
        _check_last_stride(name, x)
    s, b, h, _ = q.shape
    if lse.shape != (b, h, s) or lse.dtype != lse_dtype(q):
        raise ValueError(f"lse must be {lse_dtype(q)} of shape {(b, h, s)}, got {lse.dtype} {tuple(lse.shape)}")
    for name, x in (("dout", dout), ("out", out), ("lse", lse)):
        if x.device != q.device:
            raise ValueError(f"{name} must lie on the device of q, {q.device}, got {x.device}")


def _check_last_stride(name: str, x: Tensor) -> None:
    if x.shape[-1] > 1 and x.stride(-1) != 1:
        raise ValueError(f"{name} must have a last stride of 1, got strides {x.stride()}; pass {name}.contiguous()")


def lse_dtype(q: Tensor) -> torch.dtype:
    """fp64 for fp64 inputs, fp32 otherwise."""
    return torch.float64 if q.dtype == torch.float64 else torch.float32


def resolve_scale(softmax_scale: float | None, q: Tensor) -> float:
    """``softmax_scale``, or 1 / sqrt(d) for None. Raises ValueError unless it is a positive, finite number."""
    if softmax_scale is None:
        return q.shape[-1] ** -0.5
    if not 0 < softmax_scale < math.inf:
        raise ValueError(f"softmax_scale must be positive and finite, got {softmax_scale}")
    return float(softmax_scale)
