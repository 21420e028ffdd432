"""The process groups of context parallelism: made at the start or when a plan is committed, never in a step.

Both layouts of all splits use two kinds of partitions of the C ranks only: ``contiguous(g)`` = {k g, ..., k g + g - 1}
and ``strided(g)`` = {k, k + C/g, k + 2 C/g, ...}. Which communicator carries a partition is decided for the partition,
never for a rank: the members of one subgroup would otherwise enter different ones and wait for each other for good.

Each communicator costs hundreds of MiB of device memory, hence the choice of ``BACKINGS``.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dsv.context_parallel.block_watch import BlockWatch
from megatron_dsv.context_parallel.comm import CallLog, Communicator, SubGroup
from megatron_dsv.context_parallel.geometry import H_INNER, Split, check_split

BACKINGS = ("parents", "dedicated", "virtual")
"""``parents``: the whole group's communicator and one of the ranks of a node; ``dedicated``: one for every distinct
subgroup; ``virtual``: the whole group's alone."""


class Family(NamedTuple):
    """A partition of the ranks into subgroups of ``size``.

    Attributes:
        strided: members lie C / size apart; otherwise they are neighbours.
        size: members of a subgroup.
    """

    strided: bool
    size: int

    def __str__(self) -> str:
        return f"{'strided' if self.strided else 'contiguous'}({self.size})"

    def members(self, rank: int, total: int) -> tuple[int, ...]:
        """The subgroup of ``rank`` among ``total`` ranks, ascending."""
        step = total // self.size if self.strided else 1
        first = rank % step if self.strided else rank - rank % self.size
        return tuple(range(first, first + step * self.size, step))


def families(split: Split) -> tuple[Family, Family]:
    """The partitions into head groups and into sequence groups; a group of all ranks counts as contiguous."""
    h_strided, s_strided = split.layout != H_INNER, split.layout == H_INNER
    return (Family(h_strided and 1 < split.g_h < split.size, split.g_h),
            Family(s_strided and 1 < split.g_s < split.size, split.g_s))


class CPGroupManager:
    """Owns the communicators of one context-parallel group; every rank of it makes one and prepares alike.

    Args:
        cp_group: the context-parallel process group; its communicator is borrowed, not owned.
        node_ranks: neighbouring ranks of ``cp_group`` that share one node's fast links; only ``parents`` reads it.
        backing: one of ``BACKINGS``.
        device: where warm-up tensors live: the device of the group's backend.
        timeout: of the communicators made here; those of ``cp_group`` were set where it was made.

    Raises:
        ValueError: an unknown backing, or node blocks that do not divide the group.
    """

    def __init__(self, cp_group: dist.ProcessGroup, *, node_ranks: int, backing: str = "parents",
                 device: torch.device | str = "cpu", timeout: timedelta = timedelta(minutes=10)) -> None:
        if backing not in BACKINGS:
            raise ValueError(f"backing of context-parallel groups must be one of {', '.join(BACKINGS)}, "
                             f"got {backing!r}")
        self.size, self.rank = cp_group.size(), cp_group.rank()
        if backing == "parents" and (node_ranks < 1 or self.size % node_ranks):
            raise ValueError(f"node_ranks must divide the {self.size} context-parallel ranks, got {node_ranks}; "
                             "choose a divisor, or backing='virtual'")
        self.node_ranks, self.backing, self.device, self.timeout = node_ranks, backing, torch.device(device), timeout
        self.log = CallLog()
        self.watch = BlockWatch()
        self._global_ranks = dist.get_process_group_ranks(cp_group)
        self._whole = Communicator(cp_group, tuple(range(self.size)), "the context-parallel communicator")
        self._made: dict[Family, Communicator] = {}
        self._groups: dict[Family, SubGroup] = {}
        self._warmed = False

    def __deepcopy__(self, memo: dict) -> CPGroupManager:
        # Process groups cannot be copied; a copied model shares them.
        return self

    def check(self, splits: Iterable[Split]) -> None:
        """Raises ValueError unless ``prepare`` could serve these splits. Calls no collective."""
        for split in splits:
            check_split(split, self.size)

    def prepare(self, splits: Iterable[Split]) -> int:
        """Makes and warms up what these splits need; all ranks together, outside any step.

        Every rank must pass the same splits. What exists already is kept and costs nothing.

        Returns:
            Communicators made.

        Raises:
            ValueError: as ``check``.
        """
        splits = sorted(set(splits))
        self.check(splits)
        if not self._warmed:
            self._warm_up(self._whole)
            self._warmed = True
        before = len(self._made)
        for family in sorted({family for split in splits for family in families(split)}):
            if family in self._groups:
                continue
            home = self._home(family)
            if home is not None and home not in self._made:
                self._made[home] = self._make(home)
            ranks = family.members(self.rank, self.size)
            communicator = None
            if family.size > 1:
                communicator = self._whole if home is None else self._made[home]
            self._groups[family] = SubGroup(str(family), ranks, ranks.index(self.rank), communicator, self.log)
        return len(self._made) - before

    @property
    def everyone(self) -> SubGroup:
        """All ranks as one subgroup, whatever was prepared."""
        return SubGroup(f"contiguous({self.size})", self._whole.ranks, self.rank, self._whole, self.log)

    def head_group(self, split: Split) -> SubGroup:
        """This rank's head group. Raises ValueError unless the split was prepared."""
        return self._prepared(families(split)[0], split)

    def sequence_group(self, split: Split) -> SubGroup:
        """This rank's sequence group. Raises ValueError unless the split was prepared."""
        return self._prepared(families(split)[1], split)

    def all_reduce(self, x: Tensor, what: str) -> Tensor:
        """Sum of ``x`` over all context-parallel ranks, a new tensor, the same bits on every rank."""
        self.log.add(f"contiguous({self.size})", what)
        x = x.clone()
        if self.size > 1:
            try:
                dist.all_reduce(x, group=self._whole.pg)
            except RuntimeError as error:
                raise RuntimeError(f"context parallelism, plan {self.log.plan_version}: {what} on all ranks failed: "
                                   f"{error}") from error
        return x

    def _home(self, family: Family) -> Family | None:
        """The partition whose own communicators carry ``family``; None where the whole group's does."""
        if family.size in (1, self.size) or self.backing == "virtual":
            return None
        if self.backing == "dedicated":
            return family
        node = Family(False, self.node_ranks)
        inside = not family.strided and self.node_ranks % family.size == 0
        return node if inside and self.node_ranks < self.size else None

    def _make(self, family: Family) -> Communicator:
        ranks = family.members(self.rank, self.size)
        name = f"dsv/{family}/{ranks[0]}"
        # Only members take part, in the order in which every rank makes its groups.
        pg = dist.new_group([self._global_ranks[rank] for rank in ranks], timeout=self.timeout, group_desc=name,
                            use_local_synchronization=True)
        communicator = Communicator(pg, ranks, name)
        self._warm_up(communicator)
        return communicator

    def _warm_up(self, communicator: Communicator) -> None:
        """The first collective of each kind connects the ranks; that must not happen in a step."""
        if len(communicator.ranks) == 1:
            return
        x = torch.zeros(len(communicator.ranks), device=self.device)
        try:
            dist.all_reduce(x, group=communicator.pg)
            dist.all_to_all_single(torch.empty_like(x), x, group=communicator.pg)
        except RuntimeError as error:
            raise RuntimeError(f"context parallelism: warming up {communicator.name} failed: {error}") from error

    def _prepared(self, family: Family, split: Split) -> SubGroup:
        if family not in self._groups:
            raise ValueError(f"split {tuple(split)} was not prepared; commit a plan that holds it first, groups are "
                             "never made in a step")
        return self._groups[family]
