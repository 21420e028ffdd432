"""What the planner knows about a block's heads: kept share of keys, and coverage of a peer's keys.

Symbols: H query heads and G key/value units of the whole model, r = H / G.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass

PATTERNS: dict[str, tuple[float, float]] = {
    # name: (c, p); a rank of n query groups acts as c n^p groups that select independently.
    "clustered": (3.5, 0.45),
    "local": (4.2, 0.0),
    "hub": (1.2, 0.0),
    "independent": (1.0, 1.0),
}
"""Coverage where none was recorded: u = 1 - (1 - density)^m with m = c n^p.

Fitted to synthetic selections of 15,360 tokens in cubes of 64 at density 0.1 over 2, 4, 8 and 16 sequence ranks, whose
coverage was .95 .92 .84 .69 (selected by content), .38 .42 .33 .30 (neighbours) and .13 .12 .12 .12 (the same keys for
every group).
"""


_LEAST = 1e-4
"""Work of a unit whose heads keep nothing; shares of a sum need one that is not zero."""


@dataclass(frozen=True)
class BlockStats:
    """Statistics of one block, of the whole model's heads: they do not depend on the layout of a job.

    Attributes:
        density: [H] kept keys over keys of every query head, in [0, 1].
        coverage: (g_s, [G]) for each number of sequence ranks that was recorded, ascending.

    Raises:
        ValueError: a share outside [0, 1], or an empty row.
    """

    density: tuple[float, ...]
    coverage: tuple[tuple[int, tuple[float, ...]], ...] = ()

    def __post_init__(self) -> None:
        rows = [("density", self.density), *((f"coverage of {g_s} ranks", row) for g_s, row in self.coverage)]
        for name, row in rows:
            if not row or not all(0.0 <= share <= 1.0 for share in row):
                raise ValueError(f"{name} must be shares in [0, 1], got {list(row)}")
        if [g_s for g_s, _ in self.coverage] != sorted({g_s for g_s, _ in self.coverage}):
            raise ValueError(f"coverage must list numbers of ranks once and ascending, "
                             f"got {[g_s for g_s, _ in self.coverage]}")

    def unit_density(self, unit: int, group: int) -> float:
        """Sum of the densities of a unit's ``group`` query heads: its work in dense heads, above 0."""
        return max(_LEAST, sum(self.density[unit * group:(unit + 1) * group]))

    def unit_coverage(self, unit: int, g_s: int) -> float:
        """u of a unit for ``g_s`` sequence ranks.

        Fewer ranks hold more queries each and cover more: what was recorded for fewer bounds it from above, and so
        does 1.
        """
        known = [row[unit] for ranks, row in self.coverage if ranks <= g_s]
        return known[-1] if known else 1.0


def modelled_coverage(density: Sequence[float], group: int, *, tokens: int, q_block: int, pattern: str,
                      sizes: Sequence[int]) -> tuple[tuple[int, tuple[float, ...]], ...]:
    """Coverage of a block whose selections follow one of ``PATTERNS``, for each number of sequence ranks in ``sizes``.

    Raises:
        ValueError: an unknown pattern.
    """
    if pattern not in PATTERNS:
        raise ValueError(f"pattern must be one of {', '.join(PATTERNS)}, got {pattern!r}")
    scale, power = PATTERNS[pattern]
    rows = []
    for g_s in sorted(set(sizes)):
        groups = max(1.0, scale * (tokens / g_s / q_block) ** power)
        rows.append((g_s, tuple(1.0 - (1.0 - max(density[unit:unit + group])) ** groups
                                for unit in range(0, len(density), group))))
    return tuple(rows)


def digest(stats: Sequence[BlockStats]) -> str:
    """sha256 of the statistics of all blocks, in hexadecimal, first 16 digits."""
    text = json.dumps([[block.density, block.coverage] for block in stats], separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:16]
