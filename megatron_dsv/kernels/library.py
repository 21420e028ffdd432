"""Which kernel libraries are installed, and whether their Hopper kernels can run on a tensor or device.

Everything here is read by torch.compile as constants: no call of it breaks a graph.
"""

from __future__ import annotations

import importlib.metadata

import torch
from torch import Tensor

PACKAGES = {"flash4": "flash-attn-4", "cudnn": "nvidia-cudnn-frontend"}
"""Distribution that an optional backend needs."""


def _is_installed(distribution: str) -> bool:
    try:
        return bool(importlib.metadata.version(distribution))
    except importlib.metadata.PackageNotFoundError:
        return False


_INSTALLED = {backend: _is_installed(distribution) for backend, distribution in PACKAGES.items()}


def installed(backend: str) -> bool:
    """Whether the package that ``backend`` needs is installed; True for backends that need none."""
    return _INSTALLED.get(backend, True)


def device_name(device: torch.device) -> str:
    """Name of a CUDA device, the key of the table of measured times."""
    return torch.cuda.get_device_properties(device).name


def hopper_limit(backend: str, x: Tensor | torch.device) -> str | None:
    """What keeps a library's Hopper kernels from running on x, or on tensors of a device; None if nothing does."""
    device = x if isinstance(x, torch.device) else x.device
    if device.type != "cuda" or torch.cuda.get_device_properties(device).major != 9:
        return f"needs tensors on a Hopper GPU (compute capability 9.x), got {device}"
    if not installed(backend):
        return f"needs the package {PACKAGES[backend]} (pip install 'megatron-dsv[kernels]')"
    return None
