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

Dims: R sampled rows, s keys, b batch, h query heads, G key/value heads, d head size, r predictor rank.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import FunctionCtx, once_differentiable

from megatron_dsv.kernels.lengths import Length, key_lengths
from megatron_dsv.kernels.predictor_loss.api import check_shapes, row_gradients, row_sums, row_terms

ReduceRows = Callable[[Tensor], Tensor]
"""Adds sums over keys, one tensor, over the ranks that hold parts of the keys."""


def predictor_loss(q_lr_rows: Tensor, k_lr: Tensor, q_rows: Tensor, k: Tensor, *, softmax_scale: float,
                   kv_length: Length = None, row_mask: Tensor | None = None, cosine_weight: float = 0.95,
                   norm_weight: float = 0.05, reduce_rows: ReduceRows | None = None,
                   backend: str = "auto") -> Tensor:
    """The loss as a differentiable scalar whose graph holds no scores, only the two gradients.

    The gradients are computed along with the value, so the backward costs next to nothing and cannot be differentiated
    again. ``q_rows`` and ``k`` get no gradient.

    Args and errors: see ``predictor_loss_and_grads``.

    Returns:
        fp32 scalar (fp64 for fp64 inputs).
    """
    options = {"softmax_scale": softmax_scale, "kv_length": kv_length, "row_mask": row_mask,
               "cosine_weight": cosine_weight, "norm_weight": norm_weight, "reduce_rows": reduce_rows,
               "backend": backend}
    return _PredictorLoss.apply(q_lr_rows, k_lr, q_rows.detach(), k.detach(), options)


def predictor_loss_and_grads(q_lr_rows: Tensor, k_lr: Tensor, q_rows: Tensor, k: Tensor, *, softmax_scale: float,
                             kv_length: Length = None, row_mask: Tensor | None = None, cosine_weight: float = 0.95,
                             norm_weight: float = 0.05, reduce_rows: ReduceRows | None = None,
                             backend: str = "auto") -> tuple[Tensor, Tensor, Tensor]:
    """The loss and its exact gradients, by formula.

    A row whose true scores are all equal ranks nothing and is left out of the mean. A row whose predicted scores are
    all equal has cosine 0 and gradient 0. Equal means: they vary by less than 2^-20 of their root mean square.

    Args:
        q_lr_rows: [R, b, h, r], predictor queries of the sampled rows.
        k_lr: [s, b, G, r], predictor keys of the whole sequence, or of this rank's part of it.
        q_rows: [R, b, h, d], true queries of the same rows, as they enter the attention.
        k: [s, b, G, d], true keys.
        softmax_scale: factor on q k^T.
        kv_length: real keys: None for all, an int, or an integer tensor [b] or [b, G].
        row_mask: bool [R, b]; False leaves a row out (padding). None takes all.
        cosine_weight: weight of 1 - cos.
        norm_weight: weight of the difference of norms.
        reduce_rows: where the keys are spread over ranks that all hold the same rows: the sum over those ranks of an
            fp64 tensor. The loss is then that of all keys, on every rank, and the gradient by ``q_lr_rows`` is this
            rank's share. None where every key is at hand.
        backend: of ``kernels.predictor_loss``.

    Returns:
        loss, fp32 scalar (fp64 for fp64 inputs); gradients like ``q_lr_rows`` and ``k_lr``, in their dtypes. All zero
        if no row counts. Nothing waits for the device; non-finite inputs show up in the results.

    Raises:
        ValueError: shapes that do not fit.
        NotImplementedError: an explicit backend cannot serve the request.
    """
    check_shapes(q_lr_rows, k_lr, q_rows, k)
    if row_mask is not None and (row_mask.shape != q_rows.shape[:2] or row_mask.dtype != torch.bool):
        raise ValueError(f"row_mask must be bool {list(q_rows.shape[:2])}, "
                         f"got {row_mask.dtype} {list(row_mask.shape)}")
    lengths = key_lengths(kv_length, batch=k.shape[1], num_kv_heads=k.shape[2], num_keys=k.shape[0], device=k.device)
    scores = (q_lr_rows, k_lr, q_rows, k, lengths)
    sums = row_sums(*scores, backend=backend)
    if reduce_rows is not None:
        sums = reduce_rows(sums)
    loss, coefficients = row_terms(sums, row_mask, q_lr_rows.shape[-1]**-0.5, softmax_scale, cosine_weight, norm_weight)
    loss = loss if k_lr.dtype == torch.float64 else loss.float()
    return loss, *row_gradients(*scores, coefficients, backend=backend)


class _PredictorLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: FunctionCtx, q_lr_rows: Tensor, k_lr: Tensor, q_rows: Tensor, k: Tensor,
                options: dict[str, Any]) -> Tensor:
        loss, grad_q, grad_k = predictor_loss_and_grads(q_lr_rows, k_lr, q_rows, k, **options)
        ctx.save_for_backward(grad_q, grad_k)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor) -> tuple[Tensor | None, ...]:
        grad_q, grad_k = ctx.saved_tensors
        return (grad_q * grad_loss).to(grad_q.dtype), (grad_k * grad_loss).to(grad_k.dtype), None, None, None
