"""Input and output layers of a video DiT: patches, timestep, text, and the output head.

Dims: b batch, C latent channels, T, Y, X latent frames, rows, columns; p = C x patch volume; S tokens in raster order;
H hidden; L text tokens.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn
from torch.nn import functional


def token_grid(latent_shape: tuple[int, int, int], patch: tuple[int, int, int]) -> tuple[int, int, int]:
    """(frames, rows, columns) in tokens of a latent video (T, Y, X); ragged edges get a token of their own."""
    frames, rows, columns = (-(-size // step) for size, step in zip(latent_shape, patch, strict=True))
    return frames, rows, columns


def patchify(latents: Tensor, patch: tuple[int, int, int]) -> Tensor:
    """latents [b, C, T, Y, X] -> patches [S, b, p]; sizes that the patch does not divide are padded with zeros."""
    grid = token_grid(tuple(latents.shape[2:]), patch)  # type: ignore[arg-type]
    padding = [pad for size, n, step in zip(reversed(latents.shape[2:]), reversed(grid), reversed(patch), strict=True)
               for pad in (0, n * step - size)]
    latents = functional.pad(latents, padding)
    (t, y, x), (pt, py, px) = grid, patch
    cells = latents.reshape(latents.shape[0], latents.shape[1], t, pt, y, py, x, px)
    return cells.permute(2, 4, 6, 0, 1, 3, 5, 7).reshape(t * y * x, latents.shape[0], -1)


def unpatchify(patches: Tensor, latent_shape: tuple[int, int, int], patch: tuple[int, int, int]) -> Tensor:
    """patches [S, b, p] -> latents [b, C, T, Y, X], cropped to ``latent_shape``: the inverse of ``patchify``."""
    (t, y, x), (pt, py, px) = token_grid(latent_shape, patch), patch
    cells = patches.reshape(t, y, x, patches.shape[1], -1, pt, py, px).permute(3, 4, 0, 5, 1, 6, 2, 7)
    latents = cells.reshape(patches.shape[1], -1, t * pt, y * py, x * px)
    frames, rows, columns = latent_shape
    return latents[:, :, :frames, :rows, :columns]


def sinusoid(timesteps: Tensor, dim: int, max_period: float = 10000.0, scale: float = 1000.0) -> Tensor:
    """Cosines, then sines, of fp32 timesteps [b] in [0, 1], scaled to [0, 1000] -> fp32 [b, dim]."""
    half = dim // 2
    exponent = torch.arange(half, dtype=torch.float64, device=timesteps.device) / half
    angle = timesteps.double()[:, None] * scale * torch.exp(-math.log(max_period) * exponent)
    return torch.cat((angle.cos(), angle.sin()), dim=-1).float()


class TimestepEmbedding(nn.Module):
    """Sinusoid, two linear layers, and adaLN-single's one projection to the six vectors of a block.

    Args:
        frequency_dim: width of the sinusoid.
        hidden_size: H.
    """

    def __init__(self, frequency_dim: int, hidden_size: int) -> None:
        super().__init__()
        self.frequency_dim = frequency_dim
        self.linear_in = nn.Linear(frequency_dim, hidden_size)
        self.linear_out = nn.Linear(hidden_size, hidden_size)
        self.projection = nn.Linear(hidden_size, 6 * hidden_size)

    def forward(self, timesteps: Tensor) -> tuple[Tensor, Tensor]:
        """timesteps fp32 [b] -> embedding [b, H] for the output head and [b, 6, H] for the blocks."""
        frequencies = sinusoid(timesteps, self.frequency_dim).to(self.linear_in.weight.dtype)
        emb = self.linear_out(functional.silu(self.linear_in(frequencies)))
        return emb, self.projection(functional.silu(emb)).unflatten(-1, (6, -1))


class TextProjection(nn.Module):
    """Two linear layers from text embeddings to the hidden width.

    Args:
        text_dim: width of the text encoder.
        hidden_size: H.
    """

    def __init__(self, text_dim: int, hidden_size: int) -> None:
        super().__init__()
        self.linear_in = nn.Linear(text_dim, hidden_size)
        self.linear_out = nn.Linear(hidden_size, hidden_size)

    def forward(self, text: Tensor) -> Tensor:
        """text [b, L, text_dim] -> context [L, b, H]."""
        hidden = self.linear_in(text.to(self.linear_in.weight.dtype))
        return self.linear_out(functional.gelu(hidden, approximate="tanh")).transpose(0, 1)
