"""Dense attention: out = softmax(softmax_scale * q k^T over the valid keys) v. Not causal; MHA and GQA.

Dims: s query tokens, sk key tokens, b batch, h query heads, G key/value heads (h % G == 0), d head dim.
q, out, dout [s, b, h, d]; k, v [sk, b, G, d]; lse [b, h, s] natural log, fp32 (fp64 for fp64 inputs).
Any strides with a last stride of 1; sk may differ from s.

``kv_length`` says where padding keys begin: None (none are padding), an int, or an int32 tensor [b]. A tensor on the
CPU is read on the host and k, v are sliced, which is the fast path; a tensor on the device is never waited for and
becomes a mask. A batch item with length 0 gets out 0, lse -inf and zero gradients.

Backends: ``reference`` (eager, exact, fp32 or fp64), ``sdpa`` (torch's fused kernels), ``flash4`` (flash-attn-4 on
Hopper), ``auto`` (of the last two that can serve the request, the fastest measured for the pass, or flash4 where
gradients must repeat bitwise; logged once).
"""

from __future__ import annotations

import functools
import logging

import torch
from torch import Tensor

from megatron_dsv.kernels import timings
from megatron_dsv.kernels.attention_layout import check_backward, check_qkv, resolve_scale
from megatron_dsv.kernels.dense_attention import flash4, reference, sdpa
from megatron_dsv.kernels.library import device_name

logger = logging.getLogger(__name__)
_logged: set[tuple[str, tuple[str, ...], str]] = set()

BACKENDS = ("auto", "reference", "sdpa", "flash4")


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
    match _resolve(backend, ("forward", "backward"), q, kv_length, deterministic):
        case "reference":
            return reference.attention(q, k, v, kv_length, softmax_scale=scale)
        case "sdpa":
            return sdpa.attention(q, k, v, kv_length, softmax_scale=scale, deterministic=deterministic)
        case "flash4":
            return flash4.attention(q, k, v, kv_length, softmax_scale=scale, deterministic=deterministic)
        case _:
            raise _unknown(backend)


@torch.no_grad()
def forward(q: Tensor, k: Tensor, v: Tensor, *, kv_length: int | Tensor | None = None,
            softmax_scale: float | None = None, backend: str = "auto",
            deterministic: bool = False) -> tuple[Tensor, Tensor]:
    """out [s, b, h, d] and lse [b, h, s], without autograd. Arguments and errors as in ``dense_attention``.

    With ``deterministic``, ``auto`` takes the backend of the deterministic backward.
    """
    scale = _check(q, k, v, kv_length, softmax_scale)
    match _resolve(backend, ("forward",), q, kv_length, deterministic):
        case "reference":
            return reference.forward(q, k, v, kv_length, softmax_scale=scale)
        case "sdpa":
            return sdpa.forward(q, k, v, kv_length, softmax_scale=scale)
        case "flash4":
            return flash4.forward(q, k, v, kv_length, softmax_scale=scale)
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
    match _resolve(backend, ("backward",), q, kv_length, deterministic):
        case "reference":
            return reference.backward(dout, q, k, v, out, lse, kv_length, softmax_scale=scale)
        case "sdpa":
            return sdpa.backward(dout, q, k, v, out, lse, kv_length, softmax_scale=scale, deterministic=deterministic)
        case "flash4":
            return flash4.backward(dout, q, k, v, out, lse, kv_length, softmax_scale=scale,
                                   deterministic=deterministic)
        case _:
            raise _unknown(backend)


def _check(q: Tensor, k: Tensor, v: Tensor, kv_length: int | Tensor | None, softmax_scale: float | None) -> float:
    check_qkv(q, k, v)
    sk, b = k.shape[:2]
    if isinstance(kv_length, Tensor):
        if kv_length.dtype != torch.int32 or kv_length.shape != (b,):
            raise ValueError(f"kv_length must be an int32 tensor of shape {(b,)}, "
                             f"got {kv_length.dtype} {tuple(kv_length.shape)}")
        if kv_length.device.type == "cpu" and b and not 0 <= int(kv_length.min()) <= int(kv_length.max()) <= sk:
            raise ValueError(f"kv_length must lie in [0, {sk}] for {sk} keys, got {kv_length.tolist()}")
    elif kv_length is not None and not isinstance(kv_length, int):
        raise ValueError(f"kv_length must be None, an int or an int32 tensor [b], got {type(kv_length).__name__}")
    elif kv_length is not None and not 0 <= kv_length <= sk:
        raise ValueError(f"kv_length must lie in [0, {sk}] for {sk} keys, got {kv_length}")
    return resolve_scale(softmax_scale, q)


def _resolve(backend: str, passes: tuple[str, ...], q: Tensor, kv_length: int | Tensor | None,
             deterministic: bool) -> str:
    """``backend``, or what ``auto`` means for these passes together. Raises where flash4 cannot serve."""
    if backend not in ("auto", "flash4"):
        return backend
    reason = flash4.limit(q, kv_length)
    if backend == "flash4":
        if reason:
            raise NotImplementedError(f"backend='flash4' {reason}; use backend='sdpa'")
        return backend
    if reason:
        _log_choice("sdpa", passes, f"flash4 {reason}")
        return "sdpa"
    if deterministic:
        # sdpa repeats on CUDA in torch's deterministic mode at most, and as one of two plain passes never.
        _log_choice("flash4", passes, "its gradients repeat bitwise")
        return "flash4"
    chosen, reason = _fastest(passes, device_name(q.device), q.shape[-1])
    _log_choice(chosen, passes, reason)
    return chosen


def _fastest(passes: tuple[str, ...], device: str, head_dim: int) -> tuple[str, str]:
    """(backend, reason), compared at one large shape, so that no new length changes the kernel."""
    return _compare(passes, device, head_dim)


# What torch.compiler.assume_constant_result sets; importing that loads triton.
_fastest._dynamo_marked_constant = True  # type: ignore[attr-defined]


@functools.cache
def _compare(passes: tuple[str, ...], device: str, head_dim: int) -> tuple[str, str]:
    if device not in timings.DENSE:
        return "sdpa", f"nothing was measured on {device}"

    def cost(backend: str) -> float:
        measured = timings.dense_ms(device, tokens=65536, heads=24, head_dim=head_dim, backends=(backend,))
        return sum(getattr(measured, name) for name in passes)

    times = {backend: cost(backend) for backend in ("flash4", "sdpa")}
    numbers = ", ".join(f"{backend} {ms:.3g} ms" for backend, ms in times.items())
    return (min(times, key=lambda backend: times[backend]),
            f"it is the fastest at 65536 tokens, 24 heads of {head_dim} on {device} ({numbers})")


def _log_choice(chosen: str, passes: tuple[str, ...], reason: str) -> None:
    if not torch.compiler.is_compiling() and (chosen, passes, reason) not in _logged:
        _logged.add((chosen, passes, reason))
        logger.info("dense_attention: backend='auto' took %r for the %s because %s", chosen, " and ".join(passes),
                    reason)


def _unknown(backend: str) -> ValueError:
    return ValueError(f"backend of dense_attention must be one of {', '.join(BACKENDS)}, got {backend!r}")
