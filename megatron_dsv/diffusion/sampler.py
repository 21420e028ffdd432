"""Euler sampler of a rectified flow, with classifier-free guidance.

Dims: b clips; the other dimensions are the latents'.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch
from torch import Tensor
from tqdm import tqdm

from megatron_dsv.diffusion.timestep_sampling import shift_timestep

VelocityModel = Callable[[Tensor, Tensor, bool], Tensor]
"""(x_t fp32 [b, ...], t fp32 [b], with caption?) -> velocity [b, ...], any dtype."""


def timestep_grid(steps: int, shift: float = 1.0) -> list[float]:
    """``steps`` + 1 timesteps from 1 (noise) to 0 (data), evenly spaced before the shift.

    Raises:
        ValueError: fewer than one step, or a shift that is not above 0.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    if not shift > 0:
        raise ValueError(f"shift must be above 0, got {shift}")
    return [shift_timestep(1 - number / steps, shift) for number in range(steps + 1)]


@torch.no_grad()
def sample(model: VelocityModel, noise: Tensor, *, steps: int, shift: float = 1.0,
           guidance_scale: float = 1.0, progress: bool = False) -> Tensor:
    """Follow the predicted velocity from noise to data.

    Args:
        model: predicts the velocity with or without the caption.
        noise: [b, ...], standard normal.
        steps: evaluations of the model (twice as many if guided).
        shift: of the timestep grid; the one trained with, or higher for larger frames.
        guidance_scale: v = v_without + scale (v_with - v_without); 1 evaluates only with the caption.
        progress: a bar of the steps on stderr, if that is a terminal.

    Returns:
        latents fp32 [b, ...].

    Raises:
        ValueError: as :func:`timestep_grid`.
    """
    grid = timestep_grid(steps, shift)
    x = noise.float()
    for now, following in tqdm(list(pairwise(grid)), desc="sample", unit="step", disable=None if progress else True):
        t = torch.full((x.shape[0],), now, dtype=torch.float32, device=x.device)
        v = model(x, t, True).float()
        if guidance_scale != 1.0:
            without = model(x, t, False).float()
            v = without + guidance_scale * (v - without)
        x = x + (following - now) * v
    return x
