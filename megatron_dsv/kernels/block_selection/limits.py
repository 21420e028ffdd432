"""What decides a row of a selection, as the host knows it.

Dims: h query heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

THETA_UNIT = 2**22
"""Shares of the mass are whole multiples of its inverse: products with fixed-point masses stay exact."""


@dataclass(frozen=True)
class RowRule:
    """How the blocks of every row are chosen.

    Attributes:
        widths: [h] places a row of each head has; 0 makes the rows of a head dense.
        caps: [h] most blocks a row keeps; exactly as many without ``by_mass``, where as many are valid.
        floors: [h] fewest blocks a row keeps by mass.
        by_mass: keep the fewest best blocks whose mass reaches ``theta`` of the row's, within floor and cap.
        score_kind: what the scores are: ``mass``, ``lse`` or ``max``; the last does not go with ``by_mass``.
        theta: in (0, 1].
        keep_own_block: force the blocks that overlap the group's own tokens.
        prefix_blocks: force this many leading blocks.
        q_block_size, kv_block_size: tokens.

    Raises:
        ValueError: limits that do not fit each other: a row writes up to its cap of blocks, over its neighbour's where
            its width holds fewer.
    """

    widths: tuple[int, ...]
    caps: tuple[int, ...]
    floors: tuple[int, ...]
    by_mass: bool
    score_kind: str
    theta: float
    keep_own_block: bool
    prefix_blocks: int
    q_block_size: int
    kv_block_size: int

    def __post_init__(self) -> None:
        limits = (self.widths, self.caps, self.floors)
        if len({len(values) for values in limits}) != 1:
            raise ValueError("RowRule needs one width, cap and floor for each head, got "
                             f"{', '.join(str(len(values)) for values in limits)}")
        for width, cap, floor in zip(*limits, strict=True):
            if min(cap, floor) < 1 or (width != 0 and width < cap):
                raise ValueError("RowRule takes caps and floors of at least 1, and widths of 0 or at least the cap, "
                                 f"got width {width}, cap {cap}, floor {floor}")

    @property
    def theta_units(self) -> int:
        """``theta`` in units of 1 / THETA_UNIT."""
        return max(1, round(self.theta * THETA_UNIT))

    def capacity(self, rows_per_head: int) -> int:
        """Entries that the lists of all heads may need."""
        return rows_per_head * sum(self.widths)

    def table(self, rows_per_head: int) -> tuple[tuple[int, ...], ...]:
        """[4][h]: where the rows of each head begin, and its width, cap and floor."""
        starts = tuple(rows_per_head * sum(self.widths[:head]) for head in range(len(self.widths)))
        return starts, self.widths, self.caps, self.floors


def own_blocks(group: Tensor, q_block_size: int, kv_block_size: int) -> tuple[Tensor, Tensor]:
    """First and last block that overlap the tokens of a group."""
    return group * q_block_size // kv_block_size, ((group + 1) * q_block_size - 1) // kv_block_size
