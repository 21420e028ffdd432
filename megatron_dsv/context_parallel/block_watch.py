"""Watches the blocks of one step: how long each took on this rank, and which keys its selections need.

Off except in the steps that a run profiles. Nothing waits for the device: on a GPU times are pairs of events, read when
the step is over.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_dsv.context_parallel.coverage import chunk_needs
from megatron_dsv.context_parallel.plan import BlockPlan
from megatron_dsv.kernels.selection import KVSelection

SELECT, FORWARD, BACKWARD = PASSES = "select", "forward", "backward"
"""Passes of a block; a recomputed forward is one more forward."""

_Mark = float | torch.cuda.Event


class Seen(NamedTuple):
    """What a block's first selection in a step needs.

    Attributes:
        plan: of the block.
        blocks: Nk, key blocks of the whole sequence.
        needs: uint8 [n, g_h, Nk] of this rank's heads (ascending) and chunks of queries; None for a rank without heads.
    """

    plan: BlockPlan
    blocks: int
    needs: Tensor | None


class BlockWatch:
    """Times and needs by block, while ``active``.

    Args:
        clock: seconds, for blocks on a CPU.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.active = False
        self.seen: dict[int, Seen] = {}
        self._clock = clock
        self._spans: list[tuple[int, str, _Mark, _Mark]] = []

    def start(self) -> None:
        """Forgets the last step and watches from now on."""
        self.active = True
        self.seen.clear()
        self._spans.clear()

    def stop(self) -> None:
        """Watches no more; what was seen stays until the next start."""
        self.active = False

    @contextmanager
    def span(self, layer: int, which: str, device: torch.device) -> Iterator[None]:
        """Times one pass of block ``layer``."""
        if not self.active:
            yield
            return
        before = self._mark(device)
        yield
        self._spans.append((layer, which, before, self._mark(device)))

    def see(self, plan: BlockPlan, selection: KVSelection | None, blocks: int) -> None:
        """Takes note of the first selection of a block in the step (``Seen``); None for a rank without heads."""
        if self.active and plan.layer not in self.seen:
            needs = None if selection is None else chunk_needs(selection, plan.g_h)
            self.seen[plan.layer] = Seen(plan, blocks, needs)

    def milliseconds(self) -> dict[int, dict[str, float]]:
        """Block -> pass -> mean time of what was seen. Waits for the device."""
        sums: dict[int, dict[str, list[float]]] = {}
        for layer, which, before, after in self._spans:
            sums.setdefault(layer, {}).setdefault(which, []).append(_elapsed_ms(before, after))
        return {layer: {which: sum(times) / len(times) for which, times in passes.items()}
                for layer, passes in sums.items()}

    def _mark(self, device: torch.device) -> _Mark:
        if device.type != "cuda":
            return self._clock()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event


def _elapsed_ms(before: _Mark, after: _Mark) -> float:
    if isinstance(before, torch.cuda.Event):
        assert isinstance(after, torch.cuda.Event)
        after.synchronize()
        return before.elapsed_time(after)
    assert isinstance(after, float)
    return 1e3 * (after - before)
