"""What measured block times say about the cost model, and how far the planner believes it.

A kind of split whose blocks take longer than predicted, against the other kinds that were measured, is made dearer by
as much, within bounds. Only ratios between kinds act: what all kinds have in common cannot change a choice, and a kind
that never ran is taken to be off as those that ran are on average, so that nothing is chosen for being unknown.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

from megatron_dsv.context_parallel.geometry import Split

BOUND = 2.0
"""Largest factor between what was measured and what is believed: one slow rank must not turn every plan over."""


@dataclass(frozen=True)
class Correction:
    """Measured over predicted block time, as a run goes on.

    Attributes:
        factor: running mean of measured over predicted.
        momentum: share of the old mean.
        tolerance: logarithm of a factor beyond which the constants no longer hold.
        patience: observations running beyond it after which the cost model should be calibrated anew.
        beyond: observations running so far.
    """

    factor: float = 1.0
    momentum: float = 0.9
    tolerance: float = 0.3
    patience: int = 50
    beyond: int = 0

    def observe(self, measured_ms: float, predicted_ms: float) -> Correction:
        """With one more block's time."""
        if not (measured_ms > 0 and predicted_ms > 0):
            raise ValueError(f"times must be above 0, got measured {measured_ms} and predicted {predicted_ms}")
        factor = self.momentum * self.factor + (1 - self.momentum) * measured_ms / predicted_ms
        beyond = self.beyond + 1 if abs(math.log(factor)) > self.tolerance else 0
        return replace(self, factor=factor, beyond=beyond)

    @property
    def stale(self) -> bool:
        """Whether to calibrate anew."""
        return self.beyond >= self.patience


def kind_of(split: Split, sparse: bool) -> str:
    """The kind of split whose blocks share a correction: "heads", "sequence" or "hybrid", sparse or dense."""
    shape = "heads" if split.g_s == 1 else "sequence" if split.g_h == 1 else "hybrid"
    return f"{'sparse' if sparse else 'dense'} {shape}"


@dataclass(frozen=True)
class Corrections:
    """Measured over predicted times by kind of split.

    Attributes:
        by_kind: (kind, its running ratio), ascending by kind.
    """

    by_kind: tuple[tuple[str, Correction], ...] = ()

    def observe(self, kind: str, measured_ms: float, predicted_ms: float) -> Corrections:
        """With one more time; the first of a kind is taken whole. Raises ValueError for a time that is not above 0."""
        known = dict(self.by_kind)
        before = known.get(kind)
        seen = Correction(momentum=0.0).observe(measured_ms, predicted_ms)
        known[kind] = replace(seen, momentum=Correction.momentum) if before is None else \
            before.observe(measured_ms, predicted_ms)
        return Corrections(tuple(sorted(known.items())))

    def thousandths(self, split: Split, sparse: bool) -> int:
        """1,000 times the factor on predicted times of a split; 1,000 for a kind that never ran."""
        kind = kind_of(split, sparse)
        rivals = {name: entry.factor for name, entry in self.by_kind if name.split()[0] == kind.split()[0]}
        if kind not in rivals:
            return 1000
        mean = math.exp(sum(map(math.log, rivals.values())) / len(rivals))
        return round(1000 * min(BOUND, max(1 / BOUND, rivals[kind] / mean)))

    @property
    def stale(self) -> tuple[str, ...]:
        """Kinds whose measured times have left the predicted ones for good: calibrate anew."""
        return tuple(kind for kind, entry in self.by_kind if entry.stale)

    def to_data(self) -> dict[str, list[float]]:
        """For JSON: kind -> factor, observations beyond the tolerance."""
        return {kind: [entry.factor, entry.beyond] for kind, entry in self.by_kind}

    @classmethod
    def from_data(cls, data: Any) -> Corrections:
        """Inverse of ``to_data``; raises ValueError for anything else."""
        try:
            entries = [(str(kind), Correction(factor=float(factor), beyond=int(beyond)))
                       for kind, (factor, beyond) in data.items()]
        except (AttributeError, TypeError, ValueError) as error:
            raise ValueError(f"corrections must be {{kind: [factor, observations]}}: {error}") from None
        if not all(entry.factor > 0 and math.isfinite(entry.factor) for _, entry in entries):
            raise ValueError(f"factors of corrections must be above 0, got {data}")
        return cls(tuple(sorted(entries)))


NO_CORRECTIONS = Corrections()
"""Predictions as the cost model makes them."""
