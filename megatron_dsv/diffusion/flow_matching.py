"""Rectified flow: x_t = (1 - t) x_0 + t noise, and the velocity noise - x_0 that the model predicts.

t = 0 is data, t = 1 is noise. Everything is fp32 whatever the model computes in.

Dims: b samples; the other dimensions are the latents'.
"""

from __future__ import annotations

from torch import Tensor


def interpolate(latents: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
    """Latents on the straight path to noise.

    Args:
        latents: x_0 [b, ...].
        noise: [b, ...], standard normal.
        timesteps: fp32 [b] in [0, 1].

    Returns:
        x_t fp32 [b, ...].

    Raises:
        ValueError: shapes that do not fit.
    """
    if latents.shape != noise.shape or timesteps.shape != latents.shape[:1]:
        raise ValueError("latents and noise must have one shape [b, ...] and timesteps [b], got "
                         f"{tuple(latents.shape)}, {tuple(noise.shape)} and {tuple(timesteps.shape)}")
    t = timesteps.float().reshape(-1, *[1] * (latents.dim() - 1))
    return (1 - t) * latents.float() + t * noise.float()


def velocity(latents: Tensor, noise: Tensor) -> Tensor:
    """The training target d x_t / d t = noise - x_0, fp32 [b, ...]."""
    return noise.float() - latents.float()
