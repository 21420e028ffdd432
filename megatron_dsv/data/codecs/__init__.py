"""Video codecs by name: pixels to latents and back. A new codec is one file here and one row in ``CODECS``."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_dsv.data.codecs.base import VideoCodec
from megatron_dsv.data.codecs.diffusers_vae import DiffusersCodec
from megatron_dsv.data.codecs.haar import DEFAULT_CHANNELS, HaarCodec
from megatron_dsv.suggestions import did_you_mean

__all__ = ["CODECS", "DEFAULT_CHANNELS", "DiffusersCodec", "HaarCodec", "VideoCodec", "build_codec",
           "codec_from_description"]


def _build_haar(channels: int | None, folder: str | Path | None, device: str | torch.device) -> VideoCodec:
    if folder is not None:
        raise ValueError(f"--codec-folder must be left out for --codec haar, which needs no weights, got {folder}")
    return HaarCodec(DEFAULT_CHANNELS if channels is None else channels, device=device)


def _build_diffusers(channels: int | None, folder: str | Path | None, device: str | torch.device) -> VideoCodec:
    if folder is None:
        raise ValueError("--codec-folder must name a folder with a VAE for --codec diffusers, got none")
    if channels is not None:
        raise ValueError(f"--codec-channels is set by the VAE for --codec diffusers; leave it out, got {channels}")
    return DiffusersCodec(folder, device=device)


CODECS: dict[str, Callable[[int | None, str | Path | None, str | torch.device], VideoCodec]] = {
    "haar": _build_haar,
    "diffusers": _build_diffusers,
}


def build_codec(name: str, *, channels: int | None = None, folder: str | Path | None = None,
                device: str | torch.device = "cpu") -> VideoCodec:
    """The codec called ``name``.

    Args:
        name: a key of ``CODECS``.
        channels: latent channels of ``haar``; None is its default.
        folder: local folder of the VAE of ``diffusers``.
        device: where the codec runs.

    Raises:
        ValueError: an unknown name, or an option that the codec does not take.
    """
    if name not in CODECS:
        raise ValueError(f"--codec must be one of {', '.join(CODECS)}, got {name}{did_you_mean(name, CODECS)}")
    return CODECS[name](channels, folder, device)


def codec_from_description(description: dict[str, Any], *, folder: str | Path | None = None,
                           device: str | torch.device = "cpu") -> VideoCodec:
    """The codec that made a data set, from the description that the data set stores.

    Args:
        description: what ``VideoCodec.describe`` gave.
        folder: where a pretrained VAE lies now, if it has moved since.
        device: where the codec runs.

    Raises:
        ValueError: an unknown codec, another version of it, or other weights.
    """
    name = description.get("name")
    if name == HaarCodec.name:
        return HaarCodec.from_description(description, device=device)
    if name == DiffusersCodec.name:
        return DiffusersCodec.from_description(description, folder=folder, device=device)
    raise ValueError(f"the data set's codec must be one of {', '.join(CODECS)}, got {name}")
