"""What every video codec offers, and the errors that they share.

Dims: C pixel channels (3, RGB), T frames, H x W pixels; c latent channels, t latent frames, h x w latent positions.
"""

from __future__ import annotations

from typing import Any, Protocol

from torch import Tensor


class VideoCodec(Protocol):
    """Turns pixels into latents of about unit variance and back.

    A codec is stateless between calls and deterministic. What it needs in order to be built again later is in
    ``describe()``, which a latent data set stores.
    """

    name: str
    latent_channels: int

    def encode(self, video: Tensor) -> Tensor:
        """Latents fp32 [c, t, h, w], on the CPU, of a video [C, T, H, W] with values in [-1, 1].

        Raises:
            ValueError: the frame count or the frame size does not fit the codec.
        """
        ...

    def decode(self, latents: Tensor) -> Tensor:
        """Video fp32 [C, T, H, W], on the CPU, clamped to [-1, 1], of latents [c, t, h, w]."""
        ...

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """Shape (c, t, h, w) that ``encode`` gives; raises the same ValueError without doing the work."""
        ...

    def valid_frames(self, frames: int) -> int:
        """Largest frame count that the codec takes and that is at most ``frames``; 0 if there is none."""
        ...

    def describe(self) -> dict[str, Any]:
        """JSON-ready description; equal descriptions mean equal latents."""
        ...


def check_frame_count(codec: VideoCodec, frames: int, rule: str) -> None:
    """Raises ValueError, naming the nearest smaller valid count, unless ``frames`` fits the codec."""
    valid = codec.valid_frames(frames)
    if valid != frames:
        hint = f"; the nearest smaller one is {valid}" if valid else ""
        raise ValueError(f"--frames must be {rule} for codec {codec.name}, got {frames}{hint}")


def check_frame_size(codec: VideoCodec, height: int, width: int, multiple: int) -> None:
    """Raises ValueError unless height and width are positive multiples of ``multiple`` pixels."""
    for flag, size in (("--height", height), ("--width", width)):
        if size < multiple or size % multiple:
            below = max(size // multiple, 1) * multiple
            nearest = f"{below} or {below + multiple}" if below < size else str(below)
            raise ValueError(f"{flag} must be a positive multiple of {multiple} for codec {codec.name}, got {size}; "
                             f"the nearest is {nearest}")
