"""The predictor's loss: how far predicted rows of attention scores are from the true ones.

For every sampled query row, over the real keys j,
    T_j = softmax_scale * q . k_j           the teacher, no gradient
    A_j = q_lr . k_lr_j / sqrt(r)           the student
    loss = cosine_weight * (1 - cos(A - mean A, T - mean T)) + norm_weight * |1 - ||A - mean A|| / ||T - mean T|||
and the mean over rows, heads and batch. Rows are centred first because a selection does not change when a constant is
added to a row, but a cosine does: uncentred, the student would spend itself on the rows' mean.

Why not the published norm term: DSV (section 4) adds a "norm loss" so that relative magnitudes are kept, and its
artifact computes the squared error of the two L2-normalised rows. That equals (2 / S) * (1 - cos) over S keys, the
cosine term once more at a weight that vanishes with S, and it ignores magnitudes. The ratio of the norms is used
instead.

Dims: R sampled rows, s keys, b batch, h query heads, G key/value heads, d head size, r predictor rank, n key/value
heads of a tile, rows = sampled rows of a tile x query heads of a key/value head.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from megatron_dsv.kernels.fusion import fused_on_cuda
from megatron_dsv.sparsity.lengths import Length, key_lengths

_TILE_ELEMENTS = 2**24
"""Scores of teacher or student held at once (64 MiB in fp32); a few such tiles live at a time."""


def predictor_loss(q_lr_rows: Tensor, k_lr: Tensor, q_rows: Tensor, k: Tensor, *, softmax_scale: float,
                   kv_length: Length = None, row_mask: Tensor | None = None, cosine_weight: float = 0.95,
                   norm_weight: float = 0.05) -> Tensor:
    """The loss as a differentiable scalar whose graph holds no scores, only the two gradients.

    The gradients are computed along with the value, so the backward costs next to nothing and cannot be differentiated
    again. ``q_rows`` and ``k`` get no gradient.

    Args and errors: see ``predictor_loss_and_grads``.

    Returns:
        fp32 scalar (fp64 for fp64 inputs).
    """
    return _PredictorLoss.apply(q_lr_rows, k_lr, q_rows.detach(), k.detach(), softmax_scale, kv_length, row_mask,
                                cosine_weight, norm_weight)


@torch.no_grad()
def predictor_loss_and_grads(q_lr_rows: Tensor, k_lr: Tensor, q_rows: Tensor, k: Tensor, *, softmax_scale: float,
                             kv_length: Length = None, row_mask: Tensor | None = None, cosine_weight: float = 0.95,
                             norm_weight: float = 0.05) -> tuple[Tensor, Tensor, Tensor]:
    """The loss and its exact gradients, by formula, a few heads or rows of a batch item at a time.

    A row whose true scores are all equal ranks nothing and is left out of the mean. A row whose predicted scores are
    all equal has cosine 0 and gradient 0.

    Args:
        q_lr_rows: [R, b, h, r], predictor queries of the sampled rows.
        k_lr: [s, b, G, r], predictor keys of the whole sequence.
        q_rows: [R, b, h, d], true queries of the same rows, as they enter the attention.
        k: [s, b, G, d], true keys.
        softmax_scale: factor on q k^T.
        kv_length: real keys: None for all, an int, or an integer tensor [b] or [b, G].
        row_mask: bool [R, b]; False leaves a row out (padding). None takes all.
        cosine_weight: weight of 1 - cos.
        norm_weight: weight of the difference of norms.

    Returns:
        loss, fp32 scalar (fp64 for fp64 inputs); gradients like ``q_lr_rows`` and ``k_lr``, in their dtypes. All zero
        if no row counts. Nothing waits for the device; non-finite inputs show up in the results.

    Raises:
        ValueError: shapes that do not fit.
    """
    _check(q_lr_rows, k_lr, q_rows, k, row_mask)
    rows, b, h, rank = q_lr_rows.shape
    s, _, g_kv, _ = k.shape
    ratio = h // g_kv
    dtype = torch.float64 if k_lr.dtype == torch.float64 else torch.float32
    lengths = key_lengths(kv_length, batch=b, num_kv_heads=g_kv, num_keys=s, device=k.device)
    total = torch.zeros((), dtype=dtype, device=k.device)
    counted = torch.zeros_like(total)
    grad_q = torch.zeros(q_lr_rows.shape, dtype=dtype, device=k.device)
    grad_k = torch.zeros(k_lr.shape, dtype=dtype, device=k.device)
    row_step = max(1, min(rows, _TILE_ELEMENTS // (s * ratio)))
    head_step = max(1, _TILE_ELEMENTS // (s * ratio * row_step))
    for batch in range(b):
        for first_head in range(0, g_kv, head_step):
            kv_heads = slice(first_head, min(first_head + head_step, g_kv))
            heads = slice(kv_heads.start * ratio, kv_heads.stop * ratio)
            real = torch.arange(s, device=k.device) < lengths[batch, kv_heads, None]
            true_keys, raw_keys = (x[:, batch, kv_heads].transpose(0, 1) for x in (k, k_lr))
            keys = raw_keys.to(dtype).masked_fill(~real[..., None], 0.0)
            for first in range(0, rows, row_step):
                tile = slice(first, min(first + row_step, rows))
                queries, true_queries = (_by_kv_head(x[tile, batch, heads], ratio) for x in (q_lr_rows, q_rows))
                wanted = None if row_mask is None else row_mask[tile, batch].repeat_interleave(ratio)
                loss, grad, counts = _row_losses(_products(queries, raw_keys, dtype), rank**-0.5,
                                                 _products(true_queries, true_keys, dtype), softmax_scale,
                                                 real[:, None], wanted, cosine_weight, norm_weight)
                total += loss.sum()
                counted += counts.sum()
                by_kv_head = (grad @ keys * rank**-0.5).unflatten(1, (-1, ratio))
                grad_q[tile, batch, heads] = by_kv_head.transpose(0, 1).flatten(1, 2)
                used = queries.to(dtype)
                used = used if wanted is None else used.masked_fill(~wanted[:, None], 0.0)
                grad_k[:, batch, kv_heads] += (grad.mT @ used * rank**-0.5).transpose(0, 1)
    mean = 1.0 / counted.clamp_min(1.0)
    return total * mean, (grad_q * mean).to(q_lr_rows.dtype), (grad_k * mean).to(k_lr.dtype)


def _by_kv_head(rows: Tensor, ratio: int) -> Tensor:
    """[R, n * ratio, x] -> [n, R * ratio, x]."""
    return rows.unflatten(1, (-1, ratio)).transpose(0, 1).flatten(1, 2)


def _products(queries: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, rows, x] by [n, s, x] -> [n, rows, s] in ``dtype``. Products of 16-bit numbers are exact in fp32."""
    if queries.is_cuda and queries.dtype == keys.dtype and keys.dtype in (torch.bfloat16, torch.float16):
        return torch.bmm(queries, keys.mT, out_dtype=torch.float32)
    return queries.to(dtype) @ keys.to(dtype).mT


@fused_on_cuda
def _row_losses(student: Tensor, student_scale: float, teacher: Tensor, teacher_scale: float, real: Tensor,
                wanted: Tensor | None, cosine_weight: float, norm_weight: float) -> tuple[Tensor, Tensor, Tensor]:
    """Loss [n, rows], its gradient by the student's scores [n, rows, s] and which rows count [n, rows].

    ``student`` and ``teacher`` [n, rows, s] are products, scores before their scale; ``real`` [n, 1, s]; ``wanted``
    [rows] or None.
    """
    a, a_norm, a_varies = _centred(student * student_scale, real)
    t, t_norm, t_varies = _centred(teacher * teacher_scale, real)
    counts = t_varies if wanted is None else t_varies & wanted
    learns = counts & a_varies
    a_unit, t_unit = a / a_norm[..., None], t / t_norm[..., None]
    cosine = (a_unit * t_unit).sum(-1).masked_fill(~a_varies, 0.0)
    ratio = (a_norm / t_norm).masked_fill(~a_varies, 0.0)
    loss = cosine_weight * (1.0 - cosine) + norm_weight * (1.0 - ratio).abs()
    pull = cosine_weight * (cosine[..., None] * a_unit - t_unit) / a_norm[..., None]
    push = norm_weight * (ratio - 1.0).sign()[..., None] * a_unit / t_norm[..., None]
    return loss.masked_fill(~counts, 0.0), (pull + push).masked_fill(~learns[..., None], 0.0), counts


def _centred(scores: Tensor, real: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Rows minus their mean over the real keys (0 elsewhere), their norms, and whether they vary beyond rounding.

    The norm of a row that does not vary is given as 1, so that nothing divides by zero. A NaN row counts as varying:
    it must not vanish.
    """
    scores = scores.masked_fill(~real, 0.0)
    mean = scores.sum(-1, keepdim=True) / real.sum(-1, keepdim=True).clamp_min(1)
    centred = (scores - mean).masked_fill(~real, 0.0)
    norm = torch.linalg.vector_norm(centred, dim=-1)
    rounding = 8 * torch.finfo(scores.dtype).eps * torch.linalg.vector_norm(scores, dim=-1)
    flat = norm <= rounding
    return centred, norm.masked_fill(flat, 1.0), ~flat


class _PredictorLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, q_lr_rows: Tensor, k_lr: Tensor, q_rows: Tensor, k: Tensor, softmax_scale: float,
                kv_length: Length, row_mask: Tensor | None, cosine_weight: float, norm_weight: float) -> Tensor:
        loss, grad_q, grad_k = predictor_loss_and_grads(
            q_lr_rows, k_lr, q_rows, k, softmax_scale=softmax_scale, kv_length=kv_length, row_mask=row_mask,
            cosine_weight=cosine_weight, norm_weight=norm_weight)
        ctx.save_for_backward(grad_q, grad_k)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grad_q, grad_k = ctx.saved_tensors
        return (grad_q * grad_loss).to(grad_q.dtype), (grad_k * grad_loss).to(grad_k.dtype), *[None] * 7


def _check(q_lr_rows: Tensor, k_lr: Tensor, q_rows: Tensor, k: Tensor, row_mask: Tensor | None) -> None:
    if q_lr_rows.dim() != 4 or q_rows.shape[:3] != q_lr_rows.shape[:3]:
        raise ValueError("q_lr_rows and q_rows must be [R, b, h, r] and [R, b, h, d] of the same rows, got "
                         f"{tuple(q_lr_rows.shape)} and {tuple(q_rows.shape)}")
    if k_lr.dim() != 4 or k.shape[:3] != k_lr.shape[:3]:
        raise ValueError("k_lr and k must be [s, b, G, r] and [s, b, G, d] of the same keys, got "
                         f"{tuple(k_lr.shape)} and {tuple(k.shape)}")
    if k.shape[3] != q_rows.shape[3] or k_lr.shape[3] != q_lr_rows.shape[3] or k.shape[1] != q_rows.shape[1] \
            or q_rows.shape[2] % k.shape[2]:
        raise ValueError("queries and keys must agree in b, d and r, and h must be a multiple of G, got "
                         f"q {tuple(q_rows.shape)}, k {tuple(k.shape)}, q_lr {tuple(q_lr_rows.shape)}, "
                         f"k_lr {tuple(k_lr.shape)}")
    if row_mask is not None and (row_mask.shape != q_rows.shape[:2] or row_mask.dtype != torch.bool):
        raise ValueError(f"row_mask must be bool {list(q_rows.shape[:2])}, "
                         f"got {row_mask.dtype} {list(row_mask.shape)}")
