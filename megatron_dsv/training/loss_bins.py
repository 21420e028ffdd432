"""The loss by timestep: equal bins of [0, 1], summed over micro-batches and ranks between two log lines."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dsv.platform import cpu


class LossBins:
    """Running (sum, count) of each bin.

    Args:
        bins: how many equal bins of [0, 1].
    """

    def __init__(self, bins: int) -> None:
        self.bins = bins
        self._running: Tensor | None = None

    def name(self, number: int) -> str:
        """``loss t in [0.25, 0.50)``."""
        return f"loss t[{number / self.bins:.2f},{(number + 1) / self.bins:.2f})"

    def sums(self, weighted_error: Tensor, weights: Tensor, timesteps: Tensor) -> Tensor:
        """Sums of errors and weights [b] by the bin of timesteps [b] -> [bins, 2]."""
        number = (timesteps * self.bins).long().clamp_(0, self.bins - 1)
        sums = torch.zeros(self.bins, 2, device=weights.device)
        return sums.index_add_(0, number, torch.stack((weighted_error, weights), dim=-1))

    def add(self, sums: Tensor) -> None:
        """Adds one micro-batch."""
        self._running = sums if self._running is None else self._running + sums

    def take(self, group: ProcessGroup) -> dict[str, float]:
        """Mean loss of every bin that was hit since the last call, summed over ``group``; every rank must call it."""
        running = torch.zeros(self.bins, 2, device=cpu.current_device()) if self._running is None else \
            self._running.clone()
        self._running = None
        torch.distributed.all_reduce(running, group=group)
        return {self.name(number): total / count for number, (total, count) in enumerate(running.tolist()) if count}
