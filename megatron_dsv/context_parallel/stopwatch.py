"""Sustained times of several programs in turns, on one rank or on many that exchange with each other.

A power-limited GPU slows down under load, so all programs take turns and see it equally warm. Ranks run the same number
of iterations: the slowest rank's estimate counts.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist

Mark = Callable[[], None]
"""Called once before, between and after the stages of an iteration."""
Program = Callable[[Mark], None]
_SLICE_MS = 300.0
_SHORT_MS = 50.0


@dataclass
class Times:
    """Milliseconds of iterations, each cut into its stages."""

    rows: list[list[float]] = field(default_factory=list)

    def total(self) -> float:
        """Median of whole iterations."""
        return statistics.median(map(sum, self.rows))

    def stage(self, number: int) -> float:
        """Median of one stage."""
        return statistics.median(row[number] for row in self.rows)

    @property
    def seconds(self) -> float:
        """Work timed."""
        return sum(map(sum, self.rows)) / 1e3


class Stopwatch:
    """Times programs on this rank's device; all ranks of ``group`` together, where there is one.

    Args:
        device: where the programs run.
        group: ranks whose programs exchange with each other; None for one rank.
    """

    def __init__(self, device: torch.device, group: dist.ProcessGroup | None = None) -> None:
        self.device, self.group = device, group

    def run(self, programs: dict[str, Program], seconds: float) -> dict[str, Times]:
        """At least ``seconds`` of iterations of every program, in slices in turn; two go first and do not count."""
        times = {name: Times() for name in programs}
        estimates = {}
        for name, program in programs.items():
            self._slice(program, 1)
            estimates[name] = max(1e-3, self.agreed(sum(self._slice(program, 1)[0])))
        rounds = max(1, math.ceil(seconds * 1e3 / _SLICE_MS))
        for _ in range(rounds):
            for name, program in programs.items():
                count = max(1, math.ceil(seconds * 1e3 / rounds / estimates[name]))
                # The device idles while the first iteration is queued, which shows where iterations are short.
                spare = int(estimates[name] < _SHORT_MS)
                times[name].rows += self._slice(program, count + spare)[spare:]
        return times

    def agreed(self, value: float) -> float:
        """The largest ``value`` of any rank."""
        if self.group is None or self.group.size() == 1:
            return value
        x = torch.tensor([value], dtype=torch.float64, device=self.device)
        dist.all_reduce(x, op=dist.ReduceOp.MAX, group=self.group)
        return float(x)

    def agreed_times(self, times: Times, stages: int) -> tuple[float, list[float]]:
        """(median of iterations, medians of their stages), each the slowest rank's."""
        return self.agreed(times.total()), [self.agreed(times.stage(number)) for number in range(stages)]

    def wait(self) -> None:
        """Until the device is idle."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def _slice(self, program: Program, count: int) -> list[list[float]]:
        # Ranks that come from programs of their own come apart; who waits for whom must not be timed.
        self.agreed(0.0)
        self.wait()
        rows: list[list[Any]] = []
        for _ in range(count):
            marks: list[Any] = []
            program(lambda marks=marks: marks.append(self._mark()))  # type: ignore[misc]
            rows.append(marks)
        self.wait()
        return [[self._between(*pair) for pair in itertools.pairwise(marks)] for marks in rows]

    def _mark(self) -> Any:
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _between(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) if self.device.type == "cuda" else (end - start) * 1e3
