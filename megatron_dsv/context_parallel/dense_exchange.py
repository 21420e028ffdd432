"""Exchange of all keys and values, for blocks that attend densely under the same plans. Every size is known beforehand.

Dims: P places of the sequence group, m tokens of a place, b batch, n key/value heads of this rank, d head dim, s tokens
of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

from megatron_dsv.context_parallel.comm import SubGroup
from megatron_dsv.context_parallel.key_stages import KeyStages
from megatron_dsv.context_parallel.sequence_cp import Shipment
from megatron_dsv.kernels.host_values import on_device


class DenseExchange:
    """Whole shards travel; a stage's buffer holds its chunks in the order of the sequence, padding at the end.

    Args:
        kv_length: int32 [b] on the CPU, real keys of the whole sequence.
        stages: which keys arrive when; its blocks are whole chunks.
        group: the sequence group.
    """

    def __init__(self, kv_length: Tensor, stages: KeyStages, group: SubGroup) -> None:
        self.stages, self.group, self._kv_length = stages, group, kv_length

    def keys(self, stage: int) -> Tensor:
        """int32 [b] on the CPU: real keys of a stage's buffer."""
        starts = torch.tensor(self.stages.stage_chunks(stage), dtype=torch.int32) * self.stages.block
        return (self._kv_length[:, None] - starts).clamp(0, self.stages.block).sum(1, dtype=torch.int32)

    def send(self, stage: int, k: Tensor, v: Tensor) -> Shipment:
        """Own k, v [m, b, n, d] to all targets of a stage."""
        targets, sources = self.stages.targets(stage), self.stages.sources(stage)
        both = torch.cat((k, v), 2)
        rows = torch.cat([both] * len(targets)) if len(targets) > 1 else both
        return Shipment(rows, self._sizes(targets, len(both)), self._sizes(sources, len(both)))

    def receive(self, stage: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Shards [sources * m, b, 2 n, d], place after place -> k and v in the order of the sequence."""
        order = self._order(stage)
        if order != sorted(order):
            by_chunk = rows.unflatten(0, (len(order), self.stages.block))
            back = tuple(sorted(range(len(order)), key=order.__getitem__))
            rows = by_chunk.index_select(0, on_device(back, torch.int64, rows.device)).flatten(0, 1)
        n = rows.shape[2] // 2
        return rows[:, :, :n], rows[:, :, n:]

    def send_gradients(self, stage: int, dk: Tensor, dv: Tensor) -> Shipment:
        """Gradients of a stage's k and v back to the shards' owners."""
        sources, targets = self.stages.sources(stage), self.stages.targets(stage)
        rows, order = torch.cat((dk, dv), 2), self._order(stage)
        if order != sorted(order):
            by_chunk = rows.unflatten(0, (len(order), self.stages.block))
            rows = by_chunk.index_select(0, on_device(tuple(order), torch.int64, rows.device)).flatten(0, 1)
        size = len(rows) // len(sources)
        return Shipment(rows, self._sizes(sources, size), self._sizes(targets, size))

    def add_gradients(self, stage: int, rows: Tensor, total: Tensor) -> None:
        """Adds returned gradients [targets * m, b, 2 n, d] to ``total`` [b, n, m, 2, d], place by place."""
        b, n, m, _, d = total.shape
        for part in rows.view(len(self.stages.targets(stage)), m, b, 2, n, d):
            total += part.permute(1, 3, 0, 2, 4).to(total.dtype)

    def _order(self, stage: int) -> list[int]:
        """For every chunk received, place after place, its number in the order of the sequence."""
        chunks = self.stages.stage_chunks(stage)
        return [chunks.index(chunk) for place in self.stages.sources(stage) for chunk in
                self.stages.split.chunks(place)]

    def _sizes(self, places: tuple[int, ...], tokens: int) -> list[int]:
        return [tokens if j in places else 0 for j in range(self.group.size)]

