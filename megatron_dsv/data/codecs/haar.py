"""The embedded codec: an orthonormal 3-D Haar transform that keeps the lowest bands as latent channels.

It needs no weights, so a data set can be prepared, trained on and decoded on any host. The first frame stands alone,
as in causal video VAEs: latent frame 0 encodes video frame 0 only, latent frame i > 0 encodes frames 4i-3 .. 4i.

Dims: C = 3 colours, T = 4k+1 frames, H x W pixels; c kept bands, t = k+1, h = H/8, w = W/8.
A band is (p, kt, ky, kx): colour plane p of 3, Haar functions kt of 4 frames, ky and kx of 8 pixels; 768 in all.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dsv.data.codecs.base import check_frame_count, check_frame_size

SPATIAL_FACTOR = 8
TEMPORAL_FACTOR = 4
NUM_BANDS = 3 * TEMPORAL_FACTOR * SPATIAL_FACTOR * SPATIAL_FACTOR
DEFAULT_CHANNELS = 16
TRANSFORM_VERSION = 1

# Rows are orthogonal: lightness, red against blue, green against the rest.
_COLOUR_ROWS = ((1.0, 1.0, 1.0), (1.0, 0.0, -1.0), (-1.0, 2.0, -1.0))


class HaarCodec:
    """Keeps the ``channels`` lowest of the 768 bands of each block of 4 x 8 x 8 pixels.

    The transform is orthonormal. A latent channel is its band divided by ``band_rms``, a fixed factor that gives
    natural video about unit variance. Latent frame 0 sees frame 0 held for four frames, so that it has the scale of
    the others; its temporal bands are 0. With all 768 bands the codec loses nothing.

    Args:
        channels: bands to keep, 1 to 768; one latent channel each, lowest first.
        device: where the transform runs.
        dtype: arithmetic of the transform, float32 or float64.

    Raises:
        ValueError: ``channels`` is out of range.
    """

    name = "haar"

    def __init__(self, channels: int = DEFAULT_CHANNELS, device: str | torch.device = "cpu",
                 dtype: torch.dtype = torch.float32) -> None:
        if not 1 <= channels <= NUM_BANDS:
            raise ValueError(f"--codec-channels must be in 1..{NUM_BANDS} for codec haar, got {channels}")
        self.latent_channels = channels
        bands = lowest_bands(channels)
        scale = torch.tensor([band_rms(*band) for band in bands], dtype=torch.float64)
        kernels = torch.stack([_band_kernel(*band) for band in bands])
        self._analysis = (kernels / scale[:, None, None, None, None]).to(device, dtype)
        self._synthesis = (kernels * scale[:, None, None, None, None]).to(device, dtype)

    def encode(self, video: Tensor) -> Tensor:
        """Latents [c, t, h, w] of a video [3, T, H, W] in [-1, 1]; see ``VideoCodec.encode``."""
        if video.dim() != 4 or video.shape[0] != 3:
            raise ValueError(f"video must be [3, T, H, W], got {list(video.shape)}")
        self.latent_shape(*video.shape[1:])
        video = video.to(self._analysis.device, self._analysis.dtype)
        first = F.conv2d(video[:, 0], self._analysis.sum(2), stride=SPATIAL_FACTOR)[:, None]
        if video.shape[1] == 1:
            return first.cpu()
        stride = (TEMPORAL_FACTOR, SPATIAL_FACTOR, SPATIAL_FACTOR)
        return torch.cat([first, F.conv3d(video[:, 1:], self._analysis, stride=stride)], dim=1).cpu()

    def decode(self, latents: Tensor) -> Tensor:
        """Video [3, 4t-3, 8h, 8w] of latents [c, t, h, w]; see ``VideoCodec.decode``."""
        if latents.dim() != 4 or latents.shape[0] != self.latent_channels:
            raise ValueError(f"latents must be [{self.latent_channels}, t, h, w], got {list(latents.shape)}")
        latents = latents.to(self._synthesis.device, self._synthesis.dtype)
        # The mean over the held frames inverts frame 0: the temporal bands, which a model may fill, cancel out.
        first = F.conv_transpose2d(latents[:, 0], self._synthesis.mean(2), stride=SPATIAL_FACTOR)[:, None]
        if latents.shape[1] > 1:
            stride = (TEMPORAL_FACTOR, SPATIAL_FACTOR, SPATIAL_FACTOR)
            first = torch.cat([first, F.conv_transpose3d(latents[:, 1:], self._synthesis, stride=stride)], dim=1)
        return first.clamp(-1, 1).cpu()

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """(channels, (frames + 3) / 4, height / 8, width / 8); see ``VideoCodec.latent_shape``."""
        check_frame_count(self, frames, "4k+1")
        check_frame_size(self, height, width, SPATIAL_FACTOR)
        return (self.latent_channels, (frames - 1) // TEMPORAL_FACTOR + 1,
                height // SPATIAL_FACTOR, width // SPATIAL_FACTOR)

    def valid_frames(self, frames: int) -> int:
        """Largest 4k+1 that is at most ``frames``; 0 if ``frames`` is below 1."""
        return 0 if frames < 1 else (frames - 1) // TEMPORAL_FACTOR * TEMPORAL_FACTOR + 1

    def describe(self) -> dict[str, Any]:
        """Name, number of bands and the version of the transform."""
        return {"name": self.name, "channels": self.latent_channels, "version": TRANSFORM_VERSION}

    @classmethod
    def from_description(cls, description: dict[str, Any], device: str | torch.device = "cpu") -> HaarCodec:
        """The codec that ``describe()`` described.

        Raises:
            ValueError: the description is of another version of the transform.
        """
        if description.get("version") != TRANSFORM_VERSION:
            raise ValueError(f"the latents were made by version {description.get('version')} of codec haar, "
                             f"this is version {TRANSFORM_VERSION}; prepare the data set again")
        return cls(int(description["channels"]), device=device)


def band_level(kt: int, ky: int, kx: int) -> int:
    """How fine a band is: the Haar level (0 for the mean) summed over time and the two axes of space."""
    return sum(k.bit_length() for k in (kt, ky, kx))


def band_rms(plane: int, kt: int, ky: int, kx: int) -> float:
    """Fixed scale of a band: its typical root mean square over natural video in [-1, 1].

    A fit to real clips of several resolutions: 13 for mean lightness, 3 for mean colour, and details that fall by
    2.6 from level to level, six times weaker in colour.
    """
    level = band_level(kt, ky, kx)
    if level == 0:
        return 13.0 if plane == 0 else 3.0
    return (4.5 if plane == 0 else 0.75) / 2.6 ** level


def lowest_bands(count: int) -> list[tuple[int, int, int, int]]:
    """The ``count`` lowest bands (p, kt, ky, kx): coarse before fine, lightness before colour, space before time."""
    bands = [(plane, kt, ky, kx) for plane in range(3) for kt in range(TEMPORAL_FACTOR)
             for ky in range(SPATIAL_FACTOR) for kx in range(SPATIAL_FACTOR)]
    return sorted(bands, key=lambda band: (-band_rms(*band), band[1], band[0], band[2], band[3]))[:count]


def _haar_function(index: int, size: int) -> Tensor:
    """Orthonormal Haar function ``index`` of ``size`` (a power of two) samples, fp64 [size]; 0 is the mean."""
    if index == 0:
        return torch.full((size,), 1 / math.sqrt(size), dtype=torch.float64)
    level = index.bit_length() - 1
    support = size >> level
    start = (index - (1 << level)) * support
    function = torch.zeros(size, dtype=torch.float64)
    function[start:start + support // 2] = 1
    function[start + support // 2:start + support] = -1
    return function / math.sqrt(support)


def _band_kernel(plane: int, kt: int, ky: int, kx: int) -> Tensor:
    """Basis function of a band, fp64 [3, 4, 8, 8], of unit norm."""
    colour = torch.tensor(_COLOUR_ROWS[plane], dtype=torch.float64)
    return torch.einsum("c,t,y,x->ctyx", colour / colour.norm(), _haar_function(kt, TEMPORAL_FACTOR),
                        _haar_function(ky, SPATIAL_FACTOR), _haar_function(kx, SPATIAL_FACTOR))
