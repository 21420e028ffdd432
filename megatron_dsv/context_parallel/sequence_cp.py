"""sequence_cp: attention of one rank's queries over the keys of its whole sequence group, stage by stage.

While the keys of one stage travel, attention over those of the stage before is computed; two stages' keys at most are
held at a time. Partial results are merged by their lse. The backward sends the same rows again, and returns the
rows' gradients to their owners, which add them in a fixed order.

Dims: m query and key tokens of this rank, b batch, h query heads, n key/value heads, d head dim, T stages.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from megatron_dsv.context_parallel.comm import ExchangeWork, SubGroup
from megatron_dsv.context_parallel.key_stages import KeyStages
from megatron_dsv.context_parallel.merge import RunningMerge
from megatron_dsv.context_parallel.partial_attention import Kernels, Keys


class Shipment(NamedTuple):
    """Rows to send by place of the sequence group.

    Attributes:
        rows: [sum(sent), ...].
        sent: rows for every place.
        received: rows from every place.
    """

    rows: Tensor
    sent: list[int]
    received: list[int]


class Exchange(Protocol):
    """What travels in which stage. Stage 0 is this rank's own k and v and never travels."""

    stages: KeyStages
    group: SubGroup

    def keys(self, stage: int) -> Keys | None:
        """What the queries attend to in a stage's buffer; None for nothing."""

    def send(self, stage: int, k: Tensor, v: Tensor) -> Shipment:
        """The part of k, v [m, b, n, d] that goes out in a stage."""

    def receive(self, stage: int, rows: Tensor) -> tuple[Tensor, Tensor]:
        """The stage's k and v, [tokens, b, n, d], of the rows that came in."""

    def send_gradients(self, stage: int, dk: Tensor, dv: Tensor) -> Shipment:
        """Gradients of the stage's k and v, to the owners."""

    def add_gradients(self, stage: int, rows: Tensor, total: Tensor) -> None:
        """Adds what came back to ``total`` [b, n, m, 2, d]."""


@dataclass(frozen=True)
class SequenceAttention:
    """The staged loop of one block.

    Attributes:
        exchange: what travels.
        kernels: what computes.
        softmax_scale: factor on the logits.
        what: names the exchange.
    """

    exchange: Exchange
    kernels: Kernels
    softmax_scale: float
    what: str

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """q [m, b, h, d], k, v [m, b, n, d] -> out [m, b, h, d] and lse [b, h, m]."""
        merged = RunningMerge()
        coming = self._fetch(1, k, v)
        for stage in range(self._count + 1):
            keys, values = k, v
            if stage:
                rows = self._arrived(coming)
                coming = self._fetch(stage + 1, k, v)
                keys, values = self.exchange.receive(stage, rows)
            self._attend(merged, stage, q, keys, values)
        return merged.result(q)

    def backward(self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
                 lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dq [m, b, h, d], dk and dv [m, b, n, d] from the merged out and lse."""
        m, b, n, d = k.shape
        dq: Tensor | None = None
        total = torch.zeros((b, n, m, 2, d), dtype=lse.dtype, device=k.device)
        coming = self._fetch(1, k, v)
        returning: tuple[int, ExchangeWork, Tensor] | None = None
        for stage in range(self._count + 1):
            keys, values = k, v
            if stage:
                rows = self._arrived(coming)
                coming = self._fetch(stage + 1, k, v)
                keys, values = self.exchange.receive(stage, rows)
            wanted = self.exchange.keys(stage)
            grads = None if wanted is None else self.kernels.backward(
                dout, q, keys, values, out, lse, wanted, self.softmax_scale)
            part, dkeys, dvalues = grads or (None, torch.zeros_like(keys), torch.zeros_like(values))
            if part is not None:
                # One part needs no sum: it is rounded once, by its kernel.
                dq = part if dq is None else dq.to(lse.dtype) + part.to(lse.dtype)
            if stage:
                self._add(returning, total)
                returning = self._return(stage, dkeys, dvalues)
            elif self._count == 0:
                return torch.zeros_like(q) if dq is None else dq, dkeys, dvalues
            else:
                total[..., 0, :], total[..., 1, :] = dkeys.permute(1, 2, 0, 3), dvalues.permute(1, 2, 0, 3)
        self._add(returning, total)
        dkv = total.to(k.dtype).permute(3, 2, 0, 1, 4)
        return torch.zeros_like(q) if dq is None else dq.to(q.dtype), dkv[0], dkv[1]

    @property
    def _count(self) -> int:
        return self.exchange.stages.count

    def _attend(self, merged: RunningMerge, stage: int, q: Tensor, k: Tensor, v: Tensor) -> None:
        keys = self.exchange.keys(stage)
        part = None if keys is None else self.kernels.forward(q, k, v, keys, self.softmax_scale)
        if part is not None:
            merged.add(*part)

    def _fetch(self, stage: int, k: Tensor, v: Tensor) -> tuple[ExchangeWork, Tensor] | None:
        """Starts the exchange of a stage's rows; None after the last stage."""
        if stage > self._count:
            return None
        return self._start(self.exchange.send(stage, k, v), f"keys and values {stage}")

    def _return(self, stage: int, dk: Tensor, dv: Tensor) -> tuple[int, ExchangeWork, Tensor]:
        return stage, *self._start(self.exchange.send_gradients(stage, dk, dv), f"their gradients {stage}")

    def _add(self, returning: tuple[int, ExchangeWork, Tensor] | None, total: Tensor) -> None:
        if returning is not None:
            stage, arrival, rows = returning
            arrival.wait()
            self.exchange.add_gradients(stage, rows, total)

    def _start(self, shipment: Shipment, what: str) -> tuple[ExchangeWork, Tensor]:
        received = shipment.rows.new_empty((sum(shipment.received), *shipment.rows.shape[1:]))
        arrival = self.exchange.group.all_to_all(received, shipment.rows.contiguous(), shipment.received, shipment.sent,
                                                 f"{self.what}, {what}")
        return arrival, received

    @staticmethod
    def _arrived(coming: tuple[ExchangeWork, Tensor] | None) -> Tensor:
        assert coming is not None
        coming[0].wait()
        return coming[1]
