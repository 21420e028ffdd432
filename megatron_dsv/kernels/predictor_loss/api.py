"""The predictor's loss on sampled rows of attention scores, in two steps, without scores in memory.

For a sampled query row i and the real keys j of its key/value head, unscaled,
    t_ij = q_i . k_j            the teacher
    a_ij = q_lr_i . k_lr_j      the student
and with scales tau and sigma the row's loss is
    cosine_weight (1 - cos(sigma a', tau t')) + norm_weight |1 - ||sigma a'|| / ||tau t'|||,    x' = x - mean x
``row_sums`` gives what it needs of a row as sums over keys: they add up over ranks that hold parts of the keys.
``row_terms`` turns the sums over all keys into the loss and four coefficients a row. ``row_gradients`` gives the
gradients by q_lr and k_lr for the coefficients: dk of the keys at hand, and these keys' share of dq.

Backends: ``reference`` (torch, any dtype and device, holds a tile of scores), ``triton`` (bf16, fp16, fp32; head dims
and ranks up to 256; bitwise repeatable; CUDA, or TRITON_INTERPRET=1 on the CPU), ``auto`` (on CUDA triton where it can
serve the request, reference elsewhere; logged once).

Dims: R sampled rows, s keys, b batch, h query heads, G key/value heads (h % G == 0), d head dim, r predictor rank.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from megatron_dsv.kernels.launching import choose_or_log
from megatron_dsv.kernels.predictor_loss import reference
from megatron_dsv.kernels.predictor_loss.terms import row_terms

__all__ = ["BACKENDS", "check_shapes", "row_gradients", "row_sums", "row_terms"]

BACKENDS = ("auto", "reference", "triton")


@torch.no_grad()
def row_sums(q_lr: Tensor, k_lr: Tensor, q: Tensor, k: Tensor, kv_length: Tensor, *, backend: str = "auto") -> Tensor:
    """Sums over the real keys of every sampled row.

    Args:
        q_lr: [R, b, h, r], predictor queries of the sampled rows.
        k_lr: [s, b, G, r], predictor keys.
        q: [R, b, h, d], true queries of the same rows.
        k: [s, b, G, d], true keys.
        kv_length: int32 [b, G]; keys at or after it are padding, whatever they hold.
        backend: one of ``BACKENDS``.

    Returns:
        fp64 [6, b, h, R]: number of keys, sums of t, t^2, a, a^2 and a t. Nothing waits for the device.

    Raises:
        ValueError: shapes or backend do not fit.
        NotImplementedError: ``triton`` cannot serve the request; the message names the way out.
    """
    _check(q_lr, k_lr, q, k, kv_length)
    match choose_or_log("predictor_loss", backend, k.device, lambda: _triton().limit(q_lr, k_lr, q, k)):
        case "reference":
            return reference.row_sums(q_lr, k_lr, q, k, kv_length)
        case "triton":
            return _triton().row_sums(q_lr, k_lr, q, k, kv_length)
        case _:
            raise ValueError(f"backend of predictor_loss must be one of {', '.join(BACKENDS)}, got {backend!r}")


@torch.no_grad()
def row_gradients(q_lr: Tensor, k_lr: Tensor, q: Tensor, k: Tensor, kv_length: Tensor, coefficients: Tensor, *,
                  backend: str = "auto") -> tuple[Tensor, Tensor]:
    """Gradients of the loss: sums of (alpha (a - mean_a) + beta (t - mean_t)) times k_lr or q_lr.

    Args:
        coefficients: [4, b, h, R] of ``row_terms``. Rows whose alpha and beta are 0 are not read.

    The other arguments and the errors are those of ``row_sums``.

    Returns:
        dq [R, b, h, r], these keys' share, and dk [s, b, G, r], in the dtypes of ``q_lr`` and ``k_lr``, accumulated in
        fp32 (fp64 for fp64).
    """
    _check(q_lr, k_lr, q, k, kv_length)
    rows, b, h, _ = q.shape
    if coefficients.shape != (4, b, h, rows):
        raise ValueError(f"coefficients must be [4, b, h, R] = {[4, b, h, rows]}, got {list(coefficients.shape)}")
    match choose_or_log("predictor_loss", backend, k.device, lambda: _triton().limit(q_lr, k_lr, q, k)):
        case "reference":
            return reference.gradients(q_lr, k_lr, q, k, kv_length, coefficients)
        case "triton":
            return _triton().gradients(q_lr, k_lr, q, k, kv_length, coefficients)
        case _:
            raise ValueError(f"backend of predictor_loss must be one of {', '.join(BACKENDS)}, got {backend!r}")


def check_shapes(q_lr: Tensor, k_lr: Tensor, q: Tensor, k: Tensor) -> None:
    """Raises ValueError where the four tensors of ``row_sums`` do not fit together."""
    if q_lr.dim() != 4 or q.dim() != 4 or q.shape[:3] != q_lr.shape[:3]:
        raise ValueError("q_lr_rows and q_rows must be [R, b, h, r] and [R, b, h, d] of the same rows, got "
                         f"{tuple(q_lr.shape)} and {tuple(q.shape)}")
    if k_lr.dim() != 4 or k.dim() != 4 or k.shape[:3] != k_lr.shape[:3]:
        raise ValueError("k_lr and k must be [s, b, G, r] and [s, b, G, d] of the same keys, got "
                         f"{tuple(k_lr.shape)} and {tuple(k.shape)}")
    if k.shape[3] != q.shape[3] or k_lr.shape[3] != q_lr.shape[3] or k.shape[1] != q.shape[1] \
            or k.shape[2] == 0 or q.shape[2] % k.shape[2]:
        raise ValueError("queries and keys must agree in b, d and r, and h must be a multiple of G, got "
                         f"q {tuple(q.shape)}, k {tuple(k.shape)}, q_lr {tuple(q_lr.shape)}, "
                         f"k_lr {tuple(k_lr.shape)}")


def _check(q_lr: Tensor, k_lr: Tensor, q: Tensor, k: Tensor, kv_length: Tensor) -> None:
    check_shapes(q_lr, k_lr, q, k)
    if kv_length.shape != k.shape[1:3] or kv_length.dtype != torch.int32:
        raise ValueError(f"kv_length must be int32 [b, G] = {list(k.shape[1:3])}, got {kv_length.dtype} "
                         f"{list(kv_length.shape)}")


def _triton() -> ModuleType:
    from megatron_dsv.kernels.predictor_loss.triton import launch
    return launch
