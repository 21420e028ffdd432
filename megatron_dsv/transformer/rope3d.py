"""3-D rotary position embedding over (frame, row, column), with interleaved pairs as in Wan 2.1.

Dims: s tokens in cube order, b batch, h heads, d head dim (even), p = d / 2 rotation pairs.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from megatron_dsv.kernels.fusion import fused_on_cuda


class RopeTables(NamedTuple):
    """Rotation tables of a sequence, fp32.

    ``cos``, ``sin`` [s, d/2] rotate queries and keys; ``predictor_cos``, ``predictor_sin`` [s, r/2] rotate the
    predictor's low-rank queries and keys, because relative position cannot be expressed by a linear map of the
    hidden state. ``row_cos``, ``row_sin`` [S, r/2] are those of the whole sequence, of which s tokens may be this
    rank's: sampled rows are looked up by their number.
    """

    cos: Tensor
    sin: Tensor
    predictor_cos: Tensor
    predictor_sin: Tensor
    row_cos: Tensor
    row_sin: Tensor


def axis_dims(dim: int) -> tuple[int, int, int]:
    """How many of ``dim`` channels rotate with frame, row and column: the split of Wan 2.1.

    Raises:
        ValueError: ``dim`` is odd.
    """
    if dim % 2:
        raise ValueError(f"3-D RoPE needs an even number of channels, got {dim}; use --dit-position sincos")
    spatial = 2 * (dim // 6)
    return dim - 2 * spatial, spatial, spatial


def rotation_table(positions: Tensor, dim: int, theta: float = 10000.0) -> tuple[Tensor, Tensor]:
    """cos and sin, fp32 [s, dim/2], of integer ``positions`` [s, 3] = (frame, row, column)."""
    angles = []
    for axis, width in enumerate(axis_dims(dim)):
        exponent = torch.arange(0, width, 2, dtype=torch.float64, device=positions.device) / max(width, 1)
        angles.append(positions[:, axis, None].double() * theta**-exponent)
    angle = torch.cat(angles, dim=-1)
    return angle.cos().float(), angle.sin().float()


def rope_tables(positions: Tensor, head_dim: int, predictor_rank: int, whole: Tensor | None = None) -> RopeTables:
    """Tables for heads of ``head_dim`` and predictors of ``predictor_rank``, 0 for none, at ``positions`` [s, 3].

    ``whole`` [S, 3] are the positions of the whole sequence; None if ``positions`` are.
    """
    predictor = rotation_table(positions, predictor_rank)
    rows = predictor if whole is None else rotation_table(whole, predictor_rank)
    return RopeTables(*rotation_table(positions, head_dim), *predictor, *rows)


@fused_on_cuda
def apply_rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotates x [s, b, h, d] by cos, sin [s, d/2] in fp32; returns x's dtype."""
    even, odd = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None, None, :], sin[:, None, None, :]
    rotated = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
    return rotated.flatten(-2).to(x.dtype)


def sincos_embedding(positions: Tensor, dim: int, theta: float = 10000.0) -> Tensor:
    """Absolute 3-D sin-cos embedding, fp32 [s, dim], of ``positions`` [s, 3]: sines, then cosines (DSV's models)."""
    cos, sin = rotation_table(positions, dim, theta)
    return torch.cat((sin, cos), dim=-1)
