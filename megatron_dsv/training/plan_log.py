"""What a run says of its context-parallel plans: a line each, ``plans.jsonl`` in its folder, and metrics."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from megatron_dsv.context_parallel import json_lines
from megatron_dsv.context_parallel.plan import CPPlan
from megatron_dsv.context_parallel.plan_commit import Decision
from megatron_dsv.context_parallel.replanner import Proposal, histogram
from megatron_dsv.metrics import Recorder

FILE = "plans.jsonl"


class PlanLog:
    """One rank's voice: the first rank speaks, and a rank that refuses a plan, which alone knows why.

    Args:
        rank: of this process in the job.
        folder: of the run; None for a run without one.
        recorder: takes metrics.
    """

    def __init__(self, rank: int, folder: Path | None, recorder: Recorder) -> None:
        self._rank, self._folder, self._recorder = rank, folder, recorder
        self._writes = True

    def source(self, phrase: str) -> None:
        """Where costs come from; once a launch."""
        if self._rank == 0:
            _say(f"context-parallel plans are solved with {phrase}")

    def decided(self, before: CPPlan, now: CPPlan, proposal: Proposal | None, decision: Decision, *, version: int,
                step: int, seconds: float) -> None:
        """A proposal was put in force, or refused by some rank.

        Args:
            before, now: plans in force.
            proposal: on the first rank.
            decision: the outcome.
            version: of the proposal.
            step: finished steps.
            seconds: that the whole re-plan took.
        """
        if decision.committed:
            self._record(now)
            if proposal is not None:
                blocks = sum(map(len, now.blocks))
                gain = f"{proposal.before_ns / 1e6:.4g} -> " if proposal.before_ns else ""
                _say(f"plan {now.version} at step {step}: {histogram(now)}; {proposal.changed} of {blocks} changed; "
                     f"predicted {gain}{proposal.after_ns / 1e6:.4g} ms; took {seconds:.2g} s")
                self._write("committed", now, step, changed=proposal.changed, seconds=round(seconds, 3),
                            predicted_ms=[proposal.before_ns / 1e6, proposal.after_ns / 1e6])
            return
        by = decision.refused_by
        if by == self._rank or (by < 0 and self._rank == 0):
            who = f"by rank {by}" if by >= 0 else "by all"
            _say(f"plan {version} at step {step} refused {who}, plan {before.version} stays in force: "
                 f"{decision.reason}")
        if self._rank == 0:
            self._write("refused", before, step, refused=version, by=by, reason=decision.reason)

    def failed(self, plan: CPPlan, reason: str, step: int) -> None:
        """No plan could be solved."""
        if self._rank == 0:
            _say(f"no new plan at step {step}, plan {plan.version} stays in force: {reason}")
            self._write("failed", plan, step, reason=reason)

    def resumed(self, plan: CPPlan, step: int) -> None:
        """The checkpoint's plan is in force as it was."""
        self._record(plan)
        if self._rank == 0:
            _say(f"plan {plan.version} of the checkpoint at step {step}: {histogram(plan)}")
            self._write("resumed", plan, step)

    def not_resumed(self, reason: str, step: int, *, by: int) -> None:
        """The checkpoint's plan does not serve this launch; ``by`` is the rank that refused it, -1 if all know why."""
        if self._rank == max(0, by):
            _say(f"the checkpoint's plan is not taken up at step {step}: {reason}; it is solved anew")

    def measured(self, by_kind: Mapping[str, tuple[float, float]], stale: tuple[str, ...], step: int) -> None:
        """Measured and predicted milliseconds of the blocks of one step, by kind of split."""
        self._recorder.record("dsv/cp_measured_ms", sum(measured for measured, _ in by_kind.values()))
        if self._rank == 0:
            parts = [f"{kind} {measured:.4g} measured, {expected:.4g} predicted"
                     for kind, (measured, expected) in sorted(by_kind.items())]
            _say(f"ms of attention at step {step}: {'; '.join(parts)}")
            if stale:
                _say(f"predictions of {', '.join(stale)} are off for good: run `dsv bench --calibrate` and give its "
                     "file by --dsv-cp-calibration")

    def _record(self, plan: CPPlan) -> None:
        self._recorder.record("dsv/cp_plan", plan.version)
        self._recorder.record("dsv/cp_predicted_ms", max(plan.predicted_ns) / 1e6)

    def _write(self, event: str, plan: CPPlan, step: int, **more: Any) -> None:
        if self._folder is None:
            return
        row = {"step": step, "event": event, "version": plan.version, "splits": histogram(plan), **more}
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            json_lines.append(self._folder / FILE, row)
        except OSError as error:
            # The other ranks would wait for this one.
            if self._writes:
                _say(f"{self._folder / FILE} cannot be written: {error.strerror}; the run goes on without its lines")
            self._writes = False


def _say(line: str) -> None:
    print(f" {line}", flush=True)
