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
        int32 [b, G] on ``device``, not to be written. Nothing waits for the device: what the host knows is copied once,
        and lengths that lie on a device are clamped to 0..num_keys there.

    Raises:
        ValueError: a length outside 0..num_keys that is known on the host, or a tensor of another shape or dtype.
    """
    shape = (batch, num_kv_heads)
    if isinstance(kv_length, Tensor):
        _check_tensor("kv_length", kv_length, (shape[:1], shape))
        if kv_length.device.type != "cpu":
            lengths = kv_length.to(device=device, dtype=torch.int32).clamp(0, num_keys)
            return (lengths[:, None] if lengths.dim() == 1 else lengths).expand(shape).contiguous()
        each = kv_length.flatten().tolist()
    else:
        each = [num_keys if kv_length is None else kv_length] * batch
    _check_range("kv_length", each, num_keys)
    if len(each) == batch:
        each = [length for length in each for _ in range(num_kv_heads)]
    return on_device(tuple(each), torch.int32, device).view(shape)


def query_lengths(query_length: Length, *, batch: int, num_queries: int, device: torch.device,
                  limit: int | None = None) -> Tensor:
    """Real queries of every batch element, in tokens: int32 [b] on ``device``, not to be written.

    Args:
        query_length: None for ``num_queries``, an int, or an integer tensor [b].
        limit: the largest that it may be, where the queries are the whole sequence.

    Raises:
        ValueError: a length below 0 or above ``limit`` that the host knows, or a tensor of another shape or dtype.
    """
    if isinstance(query_length, Tensor):
        _check_tensor("query_length", query_length, ((batch,),))
        if query_length.device.type != "cpu":
            return query_length.to(device=device, dtype=torch.int32)
        each = query_length.tolist()
    else:
        each = [num_queries if query_length is None else query_length] * batch
    _check_range("query_length", each, limit)
    return on_device(tuple(each), torch.int32, device)


def longest_on_host(kv_length: Length, num_keys: int) -> int:
    """Largest number of real keys that the host can know without waiting for the device, in tokens."""
    if kv_length is None:
        return num_keys
    if isinstance(kv_length, int):
        return min(kv_length, num_keys)
    if kv_length.device.type == "cpu" and kv_length.numel():
        return min(max(kv_length.flatten().tolist()), num_keys)
    return num_keys


def _check_range(name: str, lengths: list[int], limit: int | None) -> None:
    for length in lengths:
        if length < 0 or (limit is not None and length > limit):
            allowed = "be at least 0" if limit is None else f"lie in [0, {limit}]"
            raise ValueError(f"{name} must {allowed}, got {length}")


def _check_tensor(name: str, length: Tensor, shapes: tuple[tuple[int, ...], ...]) -> None:
    if length.dtype not in (torch.int32, torch.int64) or tuple(length.shape) not in shapes:
        raise ValueError(f"{name} must be an integer tensor of shape {' or '.join(map(str, shapes))}, or an int, got "
                         f"{length.dtype} {tuple(length.shape)}")
