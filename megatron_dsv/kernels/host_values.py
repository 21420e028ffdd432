"""Small tables that the host knows, on the device: copied once for as long as their values stay."""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import Tensor


def on_device(values: tuple[Any, ...] | Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Integers, as (nested) tuples or a tensor on the CPU, as a tensor of ``dtype`` on ``device``; not to be written.

    A copy is ordered with the work of its stream alone, so that every stream gets its own.
    """
    if isinstance(values, Tensor):
        values = _tuples(values.tolist())
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _copied(values, dtype, device, stream)


@functools.lru_cache(maxsize=4096)
def _copied(values: tuple[Any, ...], dtype: torch.dtype, device: torch.device, _stream: int) -> Tensor:
    # Autograd must be able to save what a first call under inference mode made.
    with torch.inference_mode(False):
        return torch.tensor(values, dtype=dtype).to(device, non_blocking=True)


def _tuples(values: Any) -> Any:
    return tuple(_tuples(value) for value in values) if isinstance(values, list) else values
