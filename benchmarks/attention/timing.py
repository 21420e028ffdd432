"""Sustained times of several iterations in turns, and peak memory.

A power-limited card slows down under load, so every contender gets its seconds of work in alternation with the others:
all of them see the card as warm as it gets.
"""

from __future__ import annotations

import itertools
import math
import statistics
import time
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch

from attention.pipeline import Mark

SLICE_SECONDS = 0.5
SHORT_MS = 50.0
"""Below this, the time to enqueue an iteration on an idle device is seen in it."""


class Run(Protocol):
    """Something to time: ``iterate`` calls ``mark`` once before, between and after its ``stages``."""

    stages: tuple[str, ...]

    def iterate(self, mark: Mark) -> None: ...


@dataclass
class Times:
    """Milliseconds of every iteration, a list a stage and one for the whole."""

    stages: dict[str, list[float]] = field(default_factory=dict)
    total: list[float] = field(default_factory=list)

    def add(self, stages: tuple[str, ...], rows: list[list[float]]) -> None:
        """Iterations, each with the times of its stages."""
        for row in rows:
            self.total.append(sum(row))
            for stage, ms in zip(stages, row, strict=True):
                self.stages[stage].append(ms)

    def median(self, stage: str | None = None) -> float:
        """Median of one stage, or of the whole."""
        return statistics.median(self.total if stage is None else self.stages[stage])

    @property
    def seconds(self) -> float:
        """Work timed."""
        return sum(self.total) / 1e3


class Clock:
    """Marks on the device's timeline, read once the device is idle; wall-clock marks on a CPU."""

    def __init__(self, device: torch.device) -> None:
        self.cuda = device.type == "cuda"

    def mark(self) -> Any:
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def wait(self) -> None:
        if self.cuda:
            torch.cuda.synchronize()

    def milliseconds(self, start: Any, end: Any) -> float:
        return start.elapsed_time(end) if self.cuda else (end - start) * 1e3


def interleaved(runs: dict[str, Run], clock: Clock, seconds: float) -> dict[str, Times]:
    """At least ``seconds`` of back-to-back iterations of every run, in slices, one run after the other.

    Each run is warmed up first. The first iteration of a slice is not counted where iterations are short: the device
    idles while it is enqueued.
    """
    results = {name: Times({stage: [] for stage in run.stages}) for name, run in runs.items()}
    estimates = {}
    for name, run in runs.items():
        _slice(run, clock, 1)
        rows = _slice(run, clock, 1)
        estimates[name] = max(1e-3, sum(rows[0]))
        if estimates[name] >= SLICE_SECONDS * 1e3:
            results[name].add(run.stages, rows)
    while pending := [name for name in runs if results[name].seconds < seconds]:
        for name in pending:
            count = max(1, math.ceil(min(SLICE_SECONDS, seconds) * 1e3 / estimates[name]))
            spare = int(estimates[name] < SHORT_MS)
            rows = _slice(runs[name], clock, count + spare)
            results[name].add(runs[name].stages, rows[spare:])
    return results


def _slice(run: Run, clock: Clock, count: int) -> list[list[float]]:
    """Stage times of ``count`` iterations that run back to back."""
    clock.wait()
    rows: list[list[Any]] = []
    for _ in range(count):
        marks: list[Any] = []
        run.iterate(lambda marks=marks: marks.append(clock.mark()))
        rows.append(marks)
    clock.wait()
    return [[clock.milliseconds(start, end) for start, end in itertools.pairwise(marks)] for marks in rows]


def peak_mib(run: Run, inputs: int) -> float | None:
    """Peak MiB of one warmed-up iteration beyond what was allocated before it, plus its ``inputs`` bytes.

    None on a CPU.
    """
    if not torch.cuda.is_available():
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run.iterate(lambda: None)
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before + inputs) / 2**20
