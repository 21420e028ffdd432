"""From a row's sums over all keys to its loss, and to the four numbers that its gradient needs.

Dims: R sampled rows, b batch, h query heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dsv.kernels.fusion import fused_on_cuda

_FLAT = 2.0**-40
"""Share of a row's sum of squares that is rounding: variation below 2^-20 of its root mean square ranks nothing."""


@fused_on_cuda
def row_terms(sums: Tensor, row_mask: Tensor | None, student_scale: float, teacher_scale: float, cosine_weight: float,
              norm_weight: float) -> tuple[Tensor, Tensor]:
    """Mean loss over the rows that count, and the coefficients of its gradient by a row's unscaled student scores.

    dloss / da_j = alpha (a_j - mean_a) + beta (t_j - mean_t), for unscaled scores a of the student, t of the teacher.

    Args:
        sums: fp64 [6, b, h, R] over all keys of a row: their number, the sums of t, t^2, a, a^2 and a t.
        row_mask: bool [R, b] or None.

    Returns:
        loss, fp64 scalar; coefficients fp64 [4, b, h, R]: mean_a, mean_t, alpha, beta, all 0 for rows without gradient.
    """
    count, t, tt, a, aa, at = sums.unbind(0)
    count = count.clamp_min(1.0)
    mean_a, mean_t = a / count, t / count
    a_variance, t_variance = aa - a * mean_a, tt - t * mean_t
    # NaN compares false: a NaN row varies, and shows up.
    a_flat, t_flat = a_variance <= _FLAT * aa, t_variance <= _FLAT * tt
    a_norm = abs(student_scale) * a_variance.masked_fill(a_flat, 1.0).sqrt()
    t_norm = abs(teacher_scale) * t_variance.masked_fill(t_flat, 1.0).sqrt()
    counts = ~t_flat if row_mask is None else ~t_flat & row_mask.T[:, None]
    learns = counts & ~a_flat
    cosine = (student_scale * teacher_scale * (at - a * mean_t) / (a_norm * t_norm)).masked_fill(a_flat, 0.0)
    ratio = (a_norm / t_norm).masked_fill(a_flat, 0.0)
    losses = (cosine_weight * (1.0 - cosine) + norm_weight * (1.0 - ratio).abs()).masked_fill(~counts, 0.0)
    mean = 1.0 / counts.sum(dtype=sums.dtype).clamp_min(1.0)
    pull = cosine_weight * cosine / (a_norm * a_norm) + norm_weight * (ratio - 1.0).sign() / (a_norm * t_norm)
    alpha = student_scale**2 * mean * pull
    beta = -student_scale * teacher_scale * mean * cosine_weight / (a_norm * t_norm)
    coefficients = torch.stack((mean_a, mean_t, alpha, beta)).masked_fill(~learns, 0.0)
    return losses.sum() * mean, coefficients
