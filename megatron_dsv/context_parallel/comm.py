"""One subgroup of a context-parallel group and the one collective that all exchanges use: all-to-all, uneven splits.

A subgroup is a view: it may own its communicator, or share a larger one whose other members get zero splits. Every
member calls the same sequence whatever its splits are, zero included; a call is never skipped because there is nothing
to send. A subgroup of one rank copies and has no communicator.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist
from torch import Tensor


@dataclass
class CallLog:
    """What one rank called, for messages and for checks that all ranks called alike.

    Attributes:
        calls: (family, what) of every collective in order while ``recording``.
        recording: off in training.
        plan_version: the plan in force, named by errors.
    """

    calls: list[tuple[str, str]] = field(default_factory=list)
    recording: bool = False
    plan_version: int | None = None

    def add(self, family: str, what: str) -> None:
        """Notes one call."""
        if self.recording:
            self.calls.append((family, what))


@dataclass(frozen=True)
class Communicator:
    """A process group that subgroups share.

    Attributes:
        pg: the process group.
        ranks: its members as ranks of the context-parallel group, in the order of ``pg``.
        name: for messages.
    """

    pg: dist.ProcessGroup
    ranks: tuple[int, ...]
    name: str


class ExchangeWork:
    """An exchange under way; ``wait`` before its output is read."""

    def __init__(self, work: dist.Work | None, subject: str, sent: Tensor | None = None) -> None:
        self._work, self._subject = work, subject
        # What is under way must not be freed.
        self._sent = sent

    def wait(self) -> None:
        """Makes the current stream (on CPU: this thread) wait. Raises RuntimeError naming the exchange if it failed."""
        if self._work is not None:
            try:
                self._work.wait()
            except RuntimeError as error:
                raise _failed(self._subject, error) from error
            self._work = self._sent = None


@dataclass(frozen=True)
class SubGroup:
    """Ranks that exchange with each other.

    Attributes:
        family: the partition of the context-parallel group that this is one part of; equal on all ranks.
        ranks: members as ranks of the context-parallel group, ascending.
        me: this rank's place among them.
        communicator: what carries the calls; None for one rank.
        log: where calls are noted.
    """

    family: str
    ranks: tuple[int, ...]
    me: int
    communicator: Communicator | None
    log: CallLog

    @property
    def size(self) -> int:
        """Members."""
        return len(self.ranks)

    def all_to_all(self, output: Tensor, input: Tensor, output_splits: Sequence[int], input_splits: Sequence[int],
                   what: str) -> ExchangeWork:
        """Sends rows of ``input`` to the members by place and receives theirs in ``output``; asynchronous.

        Args:
            output: [sum(output_splits), ...] contiguous, written.
            input: [sum(input_splits), ...] contiguous; must not change before the arrival.
            output_splits: rows from every member, by place.
            input_splits: rows for every member, by place.
            what: names the exchange in errors and logs; the same on all ranks.

        Raises:
            RuntimeError: the exchange failed or timed out; the message names plan, exchange and group.
        """
        assert len(output_splits) == len(input_splits) == self.size
        for x, splits in ((output, output_splits), (input, input_splits)):
            assert x.shape[0] == sum(splits)
            assert x.is_contiguous()
        self.log.add(self.family, what)
        if self.communicator is None:
            output.copy_(input)
            return ExchangeWork(None, what)
        subject = self._subject(what)
        try:
            work = dist.all_to_all_single(
                output, input, self._embedded(output_splits), self._embedded(input_splits),
                group=self.communicator.pg, async_op=True)
        except RuntimeError as error:
            raise _failed(subject, error) from error
        return ExchangeWork(work, subject, input)

    def exchange_evenly(self, parts: Tensor, what: str) -> Tensor:
        """``parts`` [size, ...], one for every member -> [size, ...], one from every member; waits."""
        parts = parts.contiguous()
        received = torch.empty_like(parts)
        ones = [1] * self.size
        self.all_to_all(received, parts, ones, ones, what).wait()
        return received

    def _embedded(self, splits: Sequence[int]) -> list[int]:
        """The splits of the whole communicator: zero for those outside this subgroup."""
        assert self.communicator is not None
        by_rank = dict(zip(self.ranks, splits, strict=True))
        return [by_rank.get(rank, 0) for rank in self.communicator.ranks]

    def _subject(self, what: str) -> str:
        assert self.communicator is not None
        plan = "no plan" if self.log.plan_version is None else f"plan {self.log.plan_version}"
        return (f"context parallelism, {plan}: {what} on {self.family}, ranks {list(self.ranks)}, over "
                f"{self.communicator.name}")


def _failed(subject: str, error: RuntimeError) -> RuntimeError:
    return RuntimeError(f"{subject}, failed: {error}")
