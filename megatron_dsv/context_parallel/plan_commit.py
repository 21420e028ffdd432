"""Changing the plan of a run: one rank proposes, all ranks take it, or none does.

Between two steps rank 0 sends the plan's bytes; every rank reads, checks and digests what it got; a vote compares all
digests and all checks; only after it are new communicators made and the plan put in force. Ranks with different plans
would send each other rows that nobody expects, so a plan that one rank refuses or reads differently is refused by all.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from megatron_dsv.context_parallel.groups import CPGroupManager
from megatron_dsv.context_parallel.plan import BlockPlan, CPPlan

_POLL_S = 0.002
_NOBODY = 2**31 - 1


@dataclass(frozen=True)
class Decision:
    """The outcome of a proposal, the same on all ranks but for ``reason``.

    Attributes:
        committed: whether the proposal is in force.
        refused_by: lowest rank of the group that refused it, -1 if none did.
        reason: why this rank refused it, or that digests differ; empty otherwise.
    """

    committed: bool
    refused_by: int = -1
    reason: str = ""


class PlanStore:
    """The plan in force, one object per rank.

    Args:
        plan: the first plan; its splits are prepared by ``commit`` or by the caller.
        manager: the process groups of this rank's context-parallel group.
        check: raises ValueError if a plan does not fit the job (``CPPlan.check_job``), its memory or its layout.
    """

    def __init__(self, plan: CPPlan, manager: CPGroupManager, check: Callable[[CPPlan], None]) -> None:
        self.manager, self._check = manager, check
        check(plan)
        manager.prepare(plan.splits())
        self.plan = plan
        manager.log.plan_version = plan.version

    def __deepcopy__(self, memo: dict) -> PlanStore:
        # A copied model follows the same plan.
        return self

    def block(self, tokens: int, layer: int) -> BlockPlan:
        """The plan of block ``layer`` (from 0) for a sequence of ``tokens``, as ``CPPlan.block``."""
        return self.plan.block(tokens, layer)

    def propose(self, proposal: CPPlan | None, group: dist.ProcessGroup, *,
                timeout: timedelta = timedelta(minutes=5)) -> Decision:
        """Puts rank 0's proposal in force on all ranks of ``group``, or on none; between two steps only.

        Args:
            proposal: read on rank 0 of ``group``; the others pass None.
            group: all ranks that follow one plan: every context-parallel group of the job.
            timeout: how long the other ranks may take for one message.

        Raises:
            TimeoutError: a rank did not answer; the message names plan, message and group.
            RuntimeError: a rank's connection is gone; the same.
        """
        vote = _Vote(group, self.manager.device, timeout, f"plan {self.plan.version} in force")
        payload = vote.broadcast(None if proposal is None else proposal.to_json().encode())
        plan, reason = None, ""
        try:
            plan = CPPlan.from_json(payload)
            self._check(plan)
            self.manager.check(plan.splits())
            if plan.version <= self.plan.version:
                raise ValueError(f"plan {plan.version} is not newer than plan {self.plan.version}")
        except ValueError as error:
            plan, reason = None, str(error)
        same, refused_by = vote.count(None if plan is None else plan.digest_bits)
        if plan is None or refused_by >= 0:
            return Decision(False, refused_by, reason)
        if not same:
            return Decision(False, -1, "the ranks read different plans")
        self.manager.prepare(plan.splits())
        self.plan = plan
        self.manager.log.plan_version = plan.version
        return Decision(True)


def broadcast_bytes(payload: bytes | None, group: dist.ProcessGroup, device: torch.device, *, what: str,
                  timeout: timedelta = timedelta(minutes=5)) -> bytes:
    """Rank 0's bytes, on every rank of ``group``; the others pass None.

    Args:
        device: where messages live: the device of the group's backend.
        what: the subject, for messages.

    Raises:
        TimeoutError, RuntimeError: as ``PlanStore.propose``.
    """
    return _Vote(group, device, timeout, what).broadcast(payload)


class _Vote:
    """Three collectives that give up by name when a rank does not come."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device, timeout: timedelta, subject: str) -> None:
        self._group, self._device, self._timeout, self._subject = group, device, timeout, subject
        self._source = dist.get_process_group_ranks(group)[0]

    def broadcast(self, payload: bytes | None) -> bytes:
        """Rank 0's bytes."""
        size = self._tensor([0 if payload is None else len(payload)])
        self._finish(dist.broadcast(size, self._source, group=self._group, async_op=True), "the size of a new plan")
        data = torch.zeros(int(size), dtype=torch.uint8, device=self._device)
        if payload is not None and self._group.rank() == 0:
            data.copy_(torch.frombuffer(bytearray(payload), dtype=torch.uint8))
        self._finish(dist.broadcast(data, self._source, group=self._group, async_op=True), "a new plan")
        return data.cpu().numpy().tobytes()

    def count(self, digest: int | None) -> tuple[bool, int]:
        """(whether all digests are equal, lowest rank that has none or -1)."""
        refuser = self._group.rank() if digest is None else _NOBODY
        ballot = self._tensor([refuser, digest or 0, -(digest or 0)])
        work = dist.all_reduce(ballot, dist.ReduceOp.MIN, group=self._group, async_op=True)
        self._finish(work, "the vote on a new plan")
        first, least, greatest = ballot.tolist()
        return least == -greatest, -1 if first == _NOBODY else first

    def _tensor(self, numbers: list[int]) -> Tensor:
        return torch.tensor(numbers, dtype=torch.int64, device=self._device)

    def _finish(self, work: dist.Work, what: str) -> None:
        name = f"context parallelism, {self._subject}: {what} among {self._group.size()} ranks"
        deadline = time.monotonic() + self._timeout.total_seconds()
        while not work.is_completed():
            if time.monotonic() > deadline:
                raise TimeoutError(f"{name} did not arrive within {self._timeout.total_seconds():g} s: a rank is gone "
                                   "or stuck; end the job and resume from its last checkpoint")
            time.sleep(_POLL_S)
        try:
            work.wait()
        except RuntimeError as error:
            raise RuntimeError(f"{name} failed: {error}; end the job and resume from its last checkpoint") from error
