"""Pretrained VAEs through diffusers' own classes, from a local folder: AutoencoderKLWan and AutoencoderKL.

Dims: C = 3 colours, T frames, H x W pixels; c latent channels, t latent frames, h x w latent positions.
AutoencoderKLWan: T = 4k+1, t = k+1. AutoencoderKL is an image VAE: it runs frame by frame, any T, t = T.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dsv.data.codecs.base import check_frame_count, check_frame_size
from megatron_dsv.data.fingerprints import folder_fingerprint

WAN_TEMPORAL_FACTOR = 4


class DiffusersCodec:
    """An AutoencoderKLWan or AutoencoderKL; the class is read from the folder's config.json.

    ``encode`` takes the mean of the latent distribution, so it is deterministic, and normalises it the way the model's
    pipelines do (``latents_mean`` and ``latents_std``, or ``scaling_factor`` and ``shift_factor``); ``decode`` undoes
    it. Weights and arithmetic are fp32.

    Args:
        folder: a folder with config.json and weights; never downloaded.
        device: where the VAE runs.

    Raises:
        ValueError: the folder or its config.json is missing, or unreadable.
        NotImplementedError: the folder holds another class of VAE.
    """

    name = "diffusers"

    def __init__(self, folder: str | Path, device: str | torch.device = "cpu") -> None:
        self.folder = Path(folder).resolve()
        self.vae_class = str(read_vae_config(self.folder).get("_class_name"))
        self._vae = _load(self.folder, self.vae_class).to(device)
        self._device = torch.device(device)
        self._temporal_factor, self._spatial_factor = _compression(self._vae.config, self.vae_class)
        shift, scale = _normalisation(self._vae.config, self.vae_class)
        self.latent_channels = shift.numel()
        self._shift = shift[:, None, None, None].to(device)
        self._scale = scale[:, None, None, None].to(device)

    @torch.no_grad()
    def encode(self, video: Tensor) -> Tensor:
        """Latents fp32 [c, t, h, w] of a video [3, T, H, W] in [-1, 1]; see ``VideoCodec.encode``."""
        if video.dim() != 4 or video.shape[0] != 3:
            raise ValueError(f"video must be [3, T, H, W], got {list(video.shape)}")
        self.latent_shape(*video.shape[1:])
        video = video.to(self._device, torch.float32)
        if self.vae_class == "AutoencoderKLWan":
            latents = self._vae.encode(video[None]).latent_dist.mode()[0]
        else:
            frames = [self._vae.encode(frame[None]).latent_dist.mode()[0] for frame in video.unbind(1)]
            latents = torch.stack(frames, dim=1)
        return ((latents - self._shift) / self._scale).cpu()

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """Video fp32 [3, T, H, W] of latents [c, t, h, w]; see ``VideoCodec.decode``."""
        if latents.dim() != 4 or latents.shape[0] != self.latent_channels:
            raise ValueError(f"latents must be [{self.latent_channels}, t, h, w], got {list(latents.shape)}")
        latents = latents.to(self._device, torch.float32) * self._scale + self._shift
        if self.vae_class == "AutoencoderKLWan":
            video = self._vae.decode(latents[None]).sample[0]
        else:
            video = torch.stack([self._vae.decode(frame[None]).sample[0] for frame in latents.unbind(1)], dim=1)
        return video.clamp(-1, 1).cpu()

    def latent_shape(self, frames: int, height: int, width: int) -> tuple[int, int, int, int]:
        """(c, t, h, w) by the compression that the VAE's config states; see ``VideoCodec.latent_shape``."""
        check_frame_count(self, frames, "4k+1" if self._temporal_factor > 1 else "at least 1")
        check_frame_size(self, height, width, self._spatial_factor)
        return (self.latent_channels, (frames - 1) // self._temporal_factor + 1,
                height // self._spatial_factor, width // self._spatial_factor)

    def valid_frames(self, frames: int) -> int:
        """Largest count of the form factor * k + 1 that is at most ``frames``; 0 if ``frames`` is below 1."""
        return 0 if frames < 1 else (frames - 1) // self._temporal_factor * self._temporal_factor + 1

    def describe(self) -> dict[str, Any]:
        """Name, class and content fingerprint of the VAE, and the folder that it was read from."""
        return {"name": self.name, "class": self.vae_class, "folder": str(self.folder),
                "fingerprint": folder_fingerprint(self.folder)}

    @classmethod
    def from_description(cls, description: dict[str, Any], folder: str | Path | None = None,
                         device: str | torch.device = "cpu") -> DiffusersCodec:
        """The codec that ``describe()`` described, read from ``folder`` if the weights have moved.

        Raises:
            ValueError: the folder holds other weights than the ones that made the latents.
        """
        folder = Path(folder or description["folder"])
        read_vae_config(folder)
        found = folder_fingerprint(folder)
        if found != description["fingerprint"]:
            raise ValueError(f"--codec-folder must hold the weights that made the latents (fingerprint "
                             f"{description['fingerprint'][:12]}), got {folder} (fingerprint {found[:12]})")
        return cls(folder, device=device)


def read_vae_config(folder: Path) -> dict[str, Any]:
    """The folder's config.json; ValueError that names --codec-folder if there is none."""
    path = folder / "config.json"
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ValueError("--codec-folder must be a folder with the config.json and weights of an AutoencoderKLWan or "
                         f"AutoencoderKL, got {folder} ({type(error).__name__} on config.json)") from error


def _load(folder: Path, vae_class: str) -> Any:
    try:
        import diffusers
    except ImportError as error:
        raise ValueError("--codec diffusers needs the package diffusers: pip install megatron-dsv[vae]") from error
    classes = {"AutoencoderKLWan": diffusers.AutoencoderKLWan, "AutoencoderKL": diffusers.AutoencoderKL}
    if vae_class not in classes:
        raise NotImplementedError(f"--codec-folder holds a {vae_class}; supported are {' and '.join(classes)}. "
                                  "Another VAE needs a codec file of its own in megatron_dsv/data/codecs")
    try:
        vae = classes[vae_class].from_pretrained(folder, local_files_only=True, torch_dtype=torch.float32)
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"--codec-folder {folder} cannot be loaded as {vae_class}: {reason}") from error
    return vae.eval().requires_grad_(False)


def _compression(config: Any, vae_class: str) -> tuple[int, int]:
    """(temporal, spatial) factors. Derived from the layers: the config's scale_factor_* keys are only a declaration."""
    if vae_class == "AutoencoderKL":
        return 1, 2 ** (len(config.block_out_channels) - 1)
    temporal = 2 ** sum(config.temperal_downsample)
    if temporal != WAN_TEMPORAL_FACTOR:
        raise NotImplementedError(f"--codec-folder holds an AutoencoderKLWan that compresses time {temporal} times; "
                                  f"diffusers runs it in chunks of {WAN_TEMPORAL_FACTOR} frames and supports only that")
    return temporal, 2 ** len(config.temperal_downsample) * (config.patch_size or 1)


def _normalisation(config: Any, vae_class: str) -> tuple[Tensor, Tensor]:
    """(shift, scale), fp32 [c] each: latents = (VAE output - shift) / scale."""
    if vae_class == "AutoencoderKLWan":
        return torch.tensor(config.latents_mean), torch.tensor(config.latents_std)
    channels = config.latent_channels
    if config.latents_mean is not None and config.latents_std is not None:
        return torch.tensor(config.latents_mean), torch.tensor(config.latents_std) / config.scaling_factor
    return torch.full((channels,), float(config.shift_factor or 0)), torch.full((channels,), 1 / config.scaling_factor)
