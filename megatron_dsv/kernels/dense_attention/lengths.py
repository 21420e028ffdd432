"""Key lengths that the host knows: keys are sliced, not masked."""

from __future__ import annotations

import torch
from torch import Tensor


def on_host(kv_length: int | Tensor | None) -> bool:
    """Whether reading ``kv_length`` waits for no device."""
    return not isinstance(kv_length, Tensor) or kv_length.device.type == "cpu"


def host_lengths(k: Tensor, kv_length: int | Tensor | None) -> list[tuple[slice, int]]:
    """(batch slice, key length) pairs for k [sk, b, G, d], one for the whole batch when the lengths are equal."""
    if kv_length is None or isinstance(kv_length, int):
        return [(slice(None), k.shape[0] if kv_length is None else kv_length)]
    lengths = kv_length.tolist() or [k.shape[0]]
    if len(set(lengths)) > 1:
        return [(slice(i, i + 1), length) for i, length in enumerate(lengths)]
    return [(slice(None), lengths[0])]


def slice_batch(batch: slice, length: int, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The batch items of q [s, b, h, d] and k, v [sk, b, G, d], without the padding keys."""
    return q[:, batch], k[:length, batch], v[:length, batch]


def join_batch(parts: list[Tensor], dim: int) -> Tensor:
    """The inverse of slicing batch items."""
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=dim)
