"""What a checkpoint keeps of planning: the plan in force, and what it was solved from.

It is text in the checkpoint's arguments, which Megatron stores once for all ranks. The densities of heads are buffers
of the layers and are not repeated here.
"""

from __future__ import annotations

import argparse
import json
import math
from dataclasses import dataclass, field, replace
from typing import Any

from megatron_dsv.context_parallel.corrections import NO_CORRECTIONS, Corrections
from megatron_dsv.context_parallel.plan import CPPlan
from megatron_dsv.context_parallel.planner import Hysteresis

SCHEMA = 1
_ARGUMENT = "_cp_planning"

Coverage = dict[int, dict[int, list[float]]]
"""Layer from 0 -> sequence ranks -> coverage of every key/value head of the whole model."""


@dataclass
class PlanningRecord:
    """State of planning between two steps, the same on every rank.

    Attributes:
        plan: in force.
        replanned_at: step of the last look for a better plan; -1 before the first.
        waited: [bucket][layer] of the hysteresis, empty before the first profile.
        coverage: running mean of what profiles measured.
        corrections: of the costs that ``calibration`` names.
        calibration: digest of the costs.
    """

    plan: CPPlan
    replanned_at: int = -1
    waited: list[list[int]] = field(default_factory=list)
    coverage: Coverage = field(default_factory=dict)
    corrections: Corrections = NO_CORRECTIONS
    calibration: str = ""

    def states(self, fresh: Hysteresis, buckets: int) -> tuple[Hysteresis, ...]:
        """Hysteresis of every bucket, with the limits of ``fresh``."""
        if len(self.waited) != buckets:
            return (fresh,) * buckets
        return tuple(replace(fresh, waited=tuple(waited)) for waited in self.waited)

    def keep(self, args: argparse.Namespace) -> None:
        """Leaves the record where the next checkpoint will store it."""
        data = {"schema": SCHEMA, "plan": self.plan.to_json(), "replanned_at": self.replanned_at,
                "waited": self.waited, "coverage": self.coverage,
                "corrections": self.corrections.to_data(), "calibration": self.calibration}
        setattr(args, _ARGUMENT, json.dumps(data, sort_keys=True))

    @classmethod
    def read(cls, text: str) -> PlanningRecord:
        """Inverse of ``keep``; raises ValueError, in one line, for anything else."""
        try:
            data: dict[str, Any] = json.loads(text)
            if data.pop("schema") != SCHEMA:
                raise ValueError(f"it is not of schema {SCHEMA}")
            # Records of earlier versions also held the step of every block's last change, which nothing reads.
            data.pop("changed", None)
            record = cls(**data)
            record.plan = CPPlan.from_json(data["plan"])
            record.corrections = Corrections.from_data(data["corrections"])
            record.coverage = {int(layer): {int(ranks): [float(share) for share in row] for ranks, row in rows.items()}
                               for layer, rows in data["coverage"].items()}
            for row in record.waited:
                if not all(type(number) is int for number in row):
                    raise ValueError("its counts are no whole numbers")
                if len(row) not in (0, len(record.plan.blocks[0])):
                    raise ValueError(f"its counts are of {len(row)} blocks, its plan of {len(record.plan.blocks[0])}")
            if type(record.replanned_at) is not int:
                raise ValueError("its step is no whole number")
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"the record of planning cannot be read: {' '.join(str(error).split())}") from None
        shares = [share for rows in record.coverage.values() for row in rows.values() for share in row]
        if not all(0.0 <= share <= 1.0 and math.isfinite(share) for share in shares):
            raise ValueError("the record of planning cannot be read: its coverage lies outside [0, 1]")
        return record


def stored_text(saved: Any) -> str | None:
    """The record among a checkpoint's arguments; None if there is none."""
    return getattr(saved, _ARGUMENT, None)


def carry(saved: Any, args: argparse.Namespace) -> None:
    """Keeps a checkpoint's record in a run that does not plan, for a later one that does."""
    text = stored_text(saved)
    if text is not None:
        setattr(args, _ARGUMENT, text)
