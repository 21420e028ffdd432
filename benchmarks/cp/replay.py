"""Exchanges replaced by local copies of the same bytes: a real pass is recorded, later ones are served from the record.

Every exchange then delivers exactly what the real one did, in one copy on the device, so the block computes the same
numbers and only what the links add is missing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from megatron_dsv.context_parallel.comm import ExchangeWork, SubGroup
from megatron_dsv.context_parallel.geometry import Split
from megatron_dsv.context_parallel.groups import CPGroupManager, Family

LIVE, RECORD, REPLAY = "live", "record", "replay"


@dataclass
class Tape:
    """What exchanges delivered, in order.

    Attributes:
        mode: LIVE exchanges, RECORD exchanges and keeps, REPLAY copies from what was kept.
        kept: (exchange, output).
        place: next to be replayed.
    """

    mode: str = LIVE
    kept: list[tuple[str, Tensor]] = field(default_factory=list)
    place: int = 0

    def record(self) -> None:
        """From here on, exchanges are kept; what was kept before is dropped."""
        self.mode, self.kept, self.place = RECORD, [], 0

    def replay(self) -> None:
        """From here on, the kept exchanges are delivered from the first on, again and again."""
        self.mode, self.place = REPLAY, 0

    def live(self) -> None:
        """From here on, exchanges are real."""
        self.mode = LIVE

    def clear(self) -> None:
        """Frees what was kept."""
        self.mode, self.kept, self.place = LIVE, [], 0

    def next(self, what: str, output: Tensor) -> Tensor:
        """The kept output of the exchange that comes next.

        Raises:
            RuntimeError: the block exchanges something else than what was recorded.
        """
        name, kept = self.kept[self.place]
        if name != what or kept.shape != output.shape:
            raise RuntimeError(f"recorded {name} of {tuple(kept.shape)}, replayed {what} of {tuple(output.shape)}")
        self.place = (self.place + 1) % len(self.kept)
        return kept


@dataclass(frozen=True)
class TapedGroup(SubGroup):
    """A subgroup whose exchanges a tape keeps or delivers."""

    tape: Tape

    def all_to_all(self, output: Tensor, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int],
                   what: str) -> ExchangeWork:
        """As ``SubGroup.all_to_all``; a replayed one is done when this returns."""
        if self.communicator is not None and self.tape.mode == REPLAY:
            output.copy_(self.tape.next(what, output))
            return ExchangeWork(None, what)
        arrival = super().all_to_all(output, input, output_splits, input_splits, what)
        if self.communicator is not None and self.tape.mode == RECORD:
            arrival.wait()
            self.tape.kept.append((what, output.clone()))
        return arrival


class TapedManager(CPGroupManager):
    """A manager whose groups share one tape."""

    def __init__(self, *args, tape: Tape, **options) -> None:
        super().__init__(*args, **options)
        self.tape = tape

    def _prepared(self, family: Family, split: Split) -> SubGroup:
        group = super()._prepared(family, split)
        return TapedGroup(group.family, group.ranks, group.me, group.communicator, group.log, self.tape)
