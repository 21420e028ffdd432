"""Attention over a part of the keys, forward and backward, through the plain kernel pairs; what is empty costs nothing.

Dims: s query tokens, sk key tokens, b batch, h query heads, G key/value heads, d head dim.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dsv.kernels.dense_attention import api as dense
from megatron_dsv.kernels.selection import KVSelection
from megatron_dsv.kernels.sparse_attention import api as sparse

Keys = KVSelection | Tensor
"""What the queries attend to: a selection, or int32 [b] on the CPU, the length of a dense prefix."""


@dataclass(frozen=True)
class Kernels:
    """Which kernels serve the parts.

    Attributes:
        dense_backend, sparse_backend: as in ``dense_attention`` and ``sparse_attention``.
        deterministic: repeats and other head assignments must agree bitwise.
    """

    dense_backend: str = "auto"
    sparse_backend: str = "auto"
    deterministic: bool = False

    def forward(self, q: Tensor, k: Tensor, v: Tensor, keys: Keys,
                softmax_scale: float) -> tuple[Tensor, Tensor] | None:
        """out [s, b, h, d] and lse [b, h, s]; None where no query attends to any of these keys."""
        if not _anything(q, k, keys):
            return None
        if isinstance(keys, KVSelection):
            return sparse.forward(q, k, v, keys, softmax_scale=softmax_scale, backend=self.sparse_backend,
                                  deterministic=self.deterministic)
        parts = [dense.forward(q[:, items], k[:, items], v[:, items], kv_length=keys[items],
                               softmax_scale=softmax_scale, backend=self.dense_backend,
                               deterministic=self.deterministic)
                 if bool(keys[items].all()) else _nothing(q[:, items]) for items in _batches(keys)]
        if len(parts) == 1:
            return parts[0]
        return torch.cat([out for out, _ in parts], 1), torch.cat([lse for _, lse in parts])

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, keys: Keys,
                 softmax_scale: float) -> tuple[Tensor, Tensor, Tensor] | None:
        """dq, dk and dv from the out and lse of all keys; None where ``forward`` gives None."""
        if not _anything(q, k, keys):
            return None
        if isinstance(keys, KVSelection):
            return sparse.backward(dout, q, k, v, out, lse, keys, softmax_scale=softmax_scale,
                                   backend=self.sparse_backend, deterministic=self.deterministic)
        parts = []
        for items in _batches(keys):
            if bool(keys[items].all()):
                parts.append(dense.backward(
                    dout[:, items], q[:, items], k[:, items], v[:, items], out[:, items], lse[items],
                    kv_length=keys[items], softmax_scale=softmax_scale, backend=self.dense_backend,
                    deterministic=self.deterministic))
            else:
                parts.append((torch.zeros_like(q[:, items]), torch.zeros_like(k[:, items]),
                              torch.zeros_like(v[:, items])))
        dq, dk, dv = (torch.cat(grads, 1) if len(grads) > 1 else grads[0] for grads in zip(*parts))
        return dq, dk, dv


def _anything(q: Tensor, k: Tensor, keys: Keys) -> bool:
    return q.numel() > 0 and k.numel() > 0 and (isinstance(keys, KVSelection) or bool(keys.any()))


def _batches(lengths: Tensor) -> list[slice]:
    """The whole batch, or item by item where some item has no key: not every kernel takes a length of 0."""
    return [slice(None)] if bool(lengths.all()) else [slice(i, i + 1) for i in range(len(lengths))]


def _nothing(q: Tensor) -> tuple[Tensor, Tensor]:
    s, b, h, _ = q.shape
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    return torch.zeros_like(q), torch.full((b, h, s), -torch.inf, dtype=dtype, device=q.device)
