"""The plan of a running job from one profile to the next: all buckets, with hysteresis and predictions for the log."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from megatron_dsv.context_parallel.corrections import NO_CORRECTIONS, Corrections
from megatron_dsv.context_parallel.plan import CPPlan, attending
from megatron_dsv.context_parallel.planner import Hysteresis, Problem, evaluate, make_plan, replan
from megatron_dsv.context_parallel.statistics import BlockStats, digest

Bucket = tuple[int, int]


@dataclass(frozen=True)
class Profile:
    """What a re-plan starts from, for every bucket.

    Attributes:
        stats, sparse: [bucket][layer].
    """

    stats: tuple[tuple[BlockStats, ...], ...]
    sparse: tuple[tuple[bool, ...], ...]

    @property
    def digest(self) -> str:
        """Of the statistics of all blocks."""
        return digest([block for row in self.stats for block in row])


@dataclass(frozen=True)
class Proposal:
    """A plan that is not in force yet.

    Attributes:
        plan: the plan.
        changed: blocks, of all buckets, that differ from the plan in force.
        before_ns: predicted time of the plan in force under the new statistics, all blocks of all buckets; 0 if that
            plan was made without statistics or for other buckets.
        states: hysteresis of every bucket once the plan is in force.
    """

    plan: CPPlan
    changed: int
    before_ns: int
    states: tuple[Hysteresis, ...]

    @property
    def after_ns(self) -> int:
        """Predicted time of the proposal, all blocks of all buckets."""
        return sum(self.plan.predicted_ns)


@dataclass
class Replanner:
    """Solves plans; deterministic, and the same on every host.

    Attributes:
        problems: of every bucket, ascending.
        calibration_digest: of the costs in use.
        states: hysteresis of every bucket.
        corrections: of the costs, from block times that were measured.
        last_version: of an earlier plan of the run that is in force no more.
    """

    problems: tuple[tuple[Bucket, Problem], ...]
    calibration_digest: str
    states: tuple[Hysteresis, ...]
    corrections: Corrections = NO_CORRECTIONS
    last_version: int = 0

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """(shortest, longest) tokens."""
        return tuple(bucket for bucket, _ in self.problems)

    def solve(self, plan: CPPlan, profile: Profile, step: int) -> Proposal | None:
        """The plan for a new profile; None if every block keeps the plan in force.

        A plan of other buckets, or of no statistics, is replaced at once. A proposal counts only when it is in force:
        until ``states`` is set to its own, the next call decides as if there had been none.

        Args:
            plan: in force.
            profile: statistics.
            step: finished steps of the run.

        Raises:
            ValueError: a block that fits nowhere.
        """
        problems = [(bucket, self._corrected(problem)) for bucket, problem in self.problems]
        version = max(plan.version, self.last_version) + 1
        if plan.buckets != self.buckets or not plan.stats_digest:
            made = make_plan(problems, profile.stats, profile.sparse, version=version, effective_step=step,
                             calibration_digest=self.calibration_digest)
            fresh = tuple(replace(state, waited=()) for state in self.states)
            return Proposal(made, sum(map(len, made.blocks)), 0, fresh)
        rows, states, before, after, changed = [], [], 0, [], 0
        for number, (_, problem) in enumerate(problems):
            old, stats = plan.blocks[number], profile.stats[number]
            new, state = replan(problem, old, stats, profile.sparse[number], self.states[number])
            # A block that turned sparse or dense would run so under its old split, too.
            kept = [attending(block, sparse=sparse, kv_block=problem.shape.kv_block)
                    for block, sparse in zip(old, profile.sparse[number])]
            before += sum(evaluate(problem, block, of).total for block, of in zip(kept, stats))
            after.append(sum(evaluate(problem, block, of).total for block, of in zip(new, stats)))
            changed += sum(a != b for a, b in zip(old, new))
            rows.append(new)
            states.append(state)
        if not changed:
            # Waiting for a second profile is progress of its own.
            self.states = tuple(states)
            return None
        made = CPPlan(version, step, plan.topo, plan.buckets, tuple(rows), profile.digest, self.calibration_digest,
                      tuple(after))
        return Proposal(made, changed, before, tuple(states))

    def hurry(self, layers: Collection[int], *, of: int) -> None:
        """Lets some of ``of`` blocks change without a second profile: more is known now than when they were planned."""
        self.states = tuple(replace(state, waited=tuple(
            max(waited, state.patience - 1) if layer in layers else waited
            for layer, waited in enumerate(state.waited or (0,) * of))) for state in self.states)

    def predicted_ms(self, plan: CPPlan, profile: Profile, bucket: int, *, tokens: int) -> list[float]:
        """[layer] milliseconds of every block at a sequence length of the bucket, not corrected by measurements."""
        problem = self.problems[bucket][1]
        problem = replace(problem, shape=replace(problem.shape, tokens=tokens))
        return [evaluate(problem, block, stats).total / 1e6
                for block, stats in zip(plan.blocks[bucket], profile.stats[bucket])]

    def _corrected(self, problem: Problem) -> Problem:
        return replace(problem, model=replace(problem.model, corrections=self.corrections))


def shared_buckets(buckets: Sequence[Bucket], *, span: float = 1.5) -> tuple[Bucket, ...]:
    """Fewer buckets, for fewer plans: one reaches down to the shortest whose end is within ``span`` times its own."""
    merged: list[Bucket] = []
    for low, high in reversed(buckets):
        if merged and high * span >= merged[-1][1]:
            merged[-1] = (low, merged[-1][1])
        else:
            merged.append((low, high))
    return tuple(reversed(merged))


def histogram(plan: CPPlan) -> str:
    """How many blocks have which split, in words: ``2 x 4 h_inner in 30 blocks, 8 x 1 in 12``."""
    counts = Counter(block.split for row in plan.blocks for block in row)
    parts: list[str] = []
    for split, count in sorted(counts.items(), key=lambda item: (-item[1], item[0])):
        layout = f" {split.layout}" if min(split.g_h, split.g_s) > 1 else ""
        parts.append(f"{split.g_h} x {split.g_s}{layout} in {count}{'' if parts else ' blocks'}")
    return ", ".join(parts)
