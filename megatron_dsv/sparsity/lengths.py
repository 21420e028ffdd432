"""Valid lengths: the spellings of ``kv_length`` and ``query_length`` that this package accepts, made into tensors.

Dims: b batch, G key/value heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dsv.kernels.host_values import on_device

Length = int | Tensor | None
"""None (everything is real), an int (the same for all), or an integer tensor [b] (keys also: [b, G]), in tokens."""


def key_lengths(kv_length: Length, *, batch: int, num_kv_heads: int, num_keys: int, device: torch.device) -> Tensor:
    """Real keys of every (batch, key/value head), in tokens.

    Args:
        kv_length: None for ``num_keys``, an int, or an integer tensor [b] or [b, G]. Keys at or after it are padding.

    Returns:
        int32 [b, G] on ``device``. Nothing waits for the device; lengths that lie there are clamped to 0..num_keys.

    Raises:
        ValueError: a length outside 0..num_keys that is known on the host, or a tensor of another shape or dtype.
    """
    if kv_length is None:
        kv_length = num_keys
    if isinstance(kv_length, int):
        _check_host_length("kv_length", kv_length, num_keys)
        return torch.full((batch, num_kv_heads), kv_length, dtype=torch.int32, device=device)
    _check_integer("kv_length", kv_length)
    if kv_length.shape not in ((batch,), (batch, num_kv_heads)):
        raise ValueError(f"kv_length must be an int, [b] or [b, G] with b={batch}, G={num_kv_heads}, "
                         f"got shape {tuple(kv_length.shape)}")
    if kv_length.device.type == "cpu" and kv_length.numel():
        _check_host_length("kv_length", int(kv_length.min()), num_keys)
        _check_host_length("kv_length", int(kv_length.max()), num_keys)
    lengths = _int32_on(kv_length, device)
    if kv_length.device.type != "cpu":
        # Kernels take a length at its word.
        lengths = lengths.clamp(0, num_keys)
    return (lengths[:, None] if lengths.dim() == 1 else lengths).expand(batch, num_kv_heads).contiguous()


def query_lengths(query_length: Length, *, batch: int, num_queries: int, device: torch.device) -> Tensor:
    """Real queries of every batch element, in tokens: int32 [b] on ``device``.

    Args:
        query_length: None for ``num_queries``, an int, or an integer tensor [b].

    Raises:
        ValueError: a negative length that is known on the host, or a tensor of another shape or dtype.
    """
    if query_length is None:
        query_length = num_queries
    if isinstance(query_length, int):
        if query_length < 0:
            raise ValueError(f"query_length must be at least 0, got {query_length}")
        return torch.full((batch,), query_length, dtype=torch.int32, device=device)
    _check_integer("query_length", query_length)
    if query_length.shape != (batch,):
        raise ValueError(f"query_length must be an int or [b] with b={batch}, got shape {tuple(query_length.shape)}")
    return _int32_on(query_length, device)


def longest_on_host(kv_length: Length, num_keys: int) -> int:
    """Largest number of real keys that the host can know without waiting for the device, in tokens."""
    if kv_length is None:
        return num_keys
    if isinstance(kv_length, int):
        return min(kv_length, num_keys)
    if kv_length.device.type == "cpu" and kv_length.numel():
        return min(int(kv_length.max()), num_keys)
    return num_keys


def _int32_on(lengths: Tensor, device: torch.device) -> Tensor:
    if lengths.device.type == "cpu":
        return on_device(lengths, torch.int32, device)
    return lengths.to(device=device, dtype=torch.int32)


def _check_host_length(name: str, length: int, limit: int) -> None:
    if not 0 <= length <= limit:
        raise ValueError(f"{name} must be between 0 and the {limit} keys passed, got {length}")


def _check_integer(name: str, length: Tensor) -> None:
    if length.dtype not in (torch.int32, torch.int64):
        raise ValueError(f"{name} must be int32 or int64, got {length.dtype}")
