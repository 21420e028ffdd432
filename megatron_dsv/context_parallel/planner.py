"""Plans from statistics: for every block the split, layout, head assignment and exchange with the least predicted time.

Blocks are independent, so each is solved alone. A running job re-plans with hysteresis: statistics are noisy, and a
plan that is a little better is not worth a change.

Symbols: g_h x g_s = cp, G units of a tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron_dsv.context_parallel.cost_model import (
    AttentionShape,
    BlockCost,
    CostModel,
    Terms,
    block_cost,
    sums,
)
from megatron_dsv.context_parallel.geometry import Split, splits
from megatron_dsv.context_parallel.head_assignment import GREEDY, SEARCH, THOROUGH, assign, lower_bound, searches_pairs
from megatron_dsv.context_parallel.plan import MAX_STAGES, BlockPlan, CPPlan, Topology, exchanges
from megatron_dsv.context_parallel.statistics import BlockStats, digest

PROMISING = 1.03
"""Splits whose greedy plan is within this factor of the best are searched further: what a search gains."""


class Candidate(NamedTuple):
    """A block's plan under one split, with its cost."""

    plan: BlockPlan
    cost: BlockCost


@dataclass(frozen=True)
class Problem:
    """What all blocks of one bucket share.

    Attributes:
        model: costs.
        shape: of a block's attention on one tensor-parallel rank, at the bucket's longest sequence.
        topo: sizes of the job.
        allowed: splits to choose from; empty for every one.
    """

    model: CostModel
    shape: AttentionShape
    topo: Topology
    allowed: tuple[Split, ...] = ()

    @property
    def splits(self) -> tuple[Split, ...]:
        """Splits to choose from."""
        return self.allowed or splits(self.topo.cp, self.shape.units)


def candidates(problem: Problem, layer: int, stats: BlockStats, sparse: bool, *, all_splits: bool = True
               ) -> list[Candidate]:
    """The best plan of one block under the splits that fit the memory, cheapest first.

    Args:
        problem: what the blocks share.
        layer: number of the block.
        stats: of its heads.
        sparse: whether it attends sparsely.
        all_splits: also of splits whose lower bound already exceeds the best plan.

    Raises:
        ValueError: no split fits; names the least memory that one would take.
    """
    ways = [_Way(problem, layer, stats, sparse, split, exchange)
            for split in problem.splits for exchange in exchanges(split, sparse)]
    ways.sort(key=lambda way: (way.bound, way.split, way.exchange))
    found: dict[Split, Candidate] = {}
    too_large: list[int] = []

    def keep(candidate: Candidate) -> None:
        if candidate.cost.memory > problem.model.memory_bytes:
            too_large.append(candidate.cost.memory)
        elif candidate.plan.split not in found or candidate.cost.total < found[candidate.plan.split].cost.total:
            found[candidate.plan.split] = candidate

    def least() -> int | None:
        return min((candidate.cost.total for candidate in found.values()), default=None)

    starts = []
    for way in ways:
        best = least()
        if all_splits or best is None or way.bound < best:
            starts.append((way, way.solve(GREEDY)))
            keep(starts[-1][1])
    for way, start in sorted(starts, key=lambda row: (row[1].cost.total, row[0].split, row[0].exchange)):
        best = least()
        if best is None or (start.cost.total <= best * PROMISING and way.bound < best):
            keep(way.solve(SEARCH))
    if found:
        winner = min(found.values(), key=_order).plan
        if searches_pairs(winner.units, winner.g_h):
            keep(next(way for way in ways if way.makes(winner)).solve(THOROUGH))
    if not found:
        raise ValueError(f"block {layer}: attention takes {min(too_large)} bytes on the fullest rank at least, of "
                         f"{problem.model.memory_bytes} that are left for it; take more context-parallel ranks")
    return sorted(found.values(), key=_order)


def plan_blocks(problem: Problem, stats: Sequence[BlockStats], sparse: Sequence[bool]) -> list[Candidate]:
    """The plan of every block with the least time.

    Raises:
        ValueError: a block that fits nowhere.
    """
    solved: dict[tuple[BlockStats, bool], Candidate] = {}
    for layer, key in enumerate(zip(stats, sparse)):
        if key not in solved:
            solved[key] = candidates(problem, layer, *key, all_splits=False)[0]
    return [Candidate(replace(solved[key].plan, layer=layer), solved[key].cost)
            for layer, key in enumerate(zip(stats, sparse))]


def make_plan(problems: Sequence[tuple[tuple[int, int], Problem]], stats: Sequence[Sequence[BlockStats]],
              sparse: Sequence[Sequence[bool]], *, version: int = 0, effective_step: int = 0,
              calibration_digest: str = "") -> CPPlan:
    """A plan of all buckets.

    Args:
        problems: ((shortest, longest) tokens, problem) of each bucket, ascending.
        stats, sparse: [bucket][layer].
        version, effective_step, calibration_digest: of the plan.
    """
    rows = [plan_blocks(problem, *of_bucket) for (_, problem), of_bucket in zip(problems, zip(stats, sparse))]
    return CPPlan(version, effective_step, problems[0][1].topo, tuple(bucket for bucket, _ in problems),
                  tuple(tuple(c.plan for c in row) for row in rows), digest([b for row in stats for b in row]),
                  calibration_digest, tuple(sum(c.cost.total for c in row) for row in rows))


def evaluate(problem: Problem, plan: BlockPlan, stats: BlockStats) -> BlockCost:
    """Cost of a given plan of one block under given statistics."""
    terms = [problem.model.terms(problem.shape, problem.topo, plan.split, stats, rank, sparse=plan.sparse,
                                 exchange=plan.kv_exchange, stages=plan.stages) for rank in range(problem.topo.tp)]
    return block_cost(terms, [[sums(t, load) for load in plan.loads(rank)] for rank, t in enumerate(terms)])


@dataclass(frozen=True)
class Hysteresis:
    """When a block's plan changes: its time exceeds the new plan's by ``threshold`` in ``patience`` profiles running.

    Attributes:
        threshold: share of the new plan's time.
        patience: profiles running.
        waited: [layer] profiles running in which the block was over the threshold.
    """

    threshold: float = 0.05
    patience: int = 2
    waited: tuple[int, ...] = ()


def replan(problem: Problem, plans: Sequence[BlockPlan], stats: Sequence[BlockStats], sparse: Sequence[bool],
           state: Hysteresis) -> tuple[tuple[BlockPlan, ...], Hysteresis]:
    """Plans after a profile: a block keeps its plan unless another has promised more for long enough.

    A block that turned sparse or dense, or whose plan no longer fits the memory, changes at once.

    Args:
        problem: of the bucket.
        plans: in force, [layer].
        stats, sparse: of the new profile, [layer].
        state: from the last call.

    Returns:
        The plans to put in force (the same objects where nothing changed), and the state for the next call.
    """
    waited = list(state.waited or (0,) * len(plans))
    result = []
    for layer, (old, new) in enumerate(zip(plans, plan_blocks(problem, stats, sparse))):
        now = evaluate(problem, old, stats[layer])
        forced = old.sparse != sparse[layer] or now.memory > problem.model.memory_bytes
        over = now.total > new.cost.total * (1 + state.threshold)
        waited[layer] = waited[layer] + 1 if over else 0
        if forced or waited[layer] >= max(1, state.patience):
            result.append(new.plan)
            waited[layer] = 0
        else:
            result.append(old)
    return tuple(result), replace(state, waited=tuple(waited))


def _order(candidate: Candidate) -> tuple[int, Split]:
    return candidate.cost.total, candidate.plan.split


class _Way:
    """A block under one split and one way to exchange keys and values."""

    def __init__(self, problem: Problem, layer: int, stats: BlockStats, sparse: bool, split: Split, exchange: str):
        self.problem, self.layer, self.stats, self.sparse = problem, layer, stats, sparse
        self.split, self.exchange = split, exchange
        self.least_stages = problem.model.stages_for(problem.shape, split)
        self.terms = self._terms(self.least_stages)
        # Most hidden, fewest calls: what no number of stages undercuts.
        most = [problem.model.restaged(t, problem.topo, split, sparse, max(self.stages)) for t in self.terms]
        self.bound = max(lower_bound(t, split.g_h) for t in most) + max(t.fixed for t in self.terms)

    @property
    def stages(self) -> range:
        """Numbers of stages worth a try."""
        return range(self.least_stages, max(self.least_stages, min(MAX_STAGES, self.split.g_s - 1)) + 1)

    def makes(self, plan: BlockPlan) -> bool:
        """Whether a plan is of this split and exchange."""
        return (plan.split, plan.kv_exchange) == (self.split, self.exchange)

    def solve(self, effort: int) -> Candidate:
        """The best assignment at the fewest stages, then the best number of stages for it."""
        assigned = [assign(terms, self.split.g_h, effort=effort) for terms in self.terms]
        orders = tuple(tuple(unit for load in a.loads for unit in load) for a in assigned)
        sizes = tuple(tuple(map(len, a.loads)) for a in assigned)
        loads = [[sums(t, load) for load in a.loads] for t, a in zip(self.terms, assigned)]
        _, stages = min((block_cost([self._restaged(t, count) for t in self.terms], loads).total, count)
                        for count in self.stages)
        cost = block_cost([self._restaged(t, stages) for t in self.terms], loads)
        if stages != self.least_stages:
            final = self._terms(stages)
            cost = block_cost(final, [[sums(t, load) for load in a.loads] for t, a in zip(final, assigned)])
        return Candidate(BlockPlan(self.layer, *self.split, orders, sizes, self.exchange, stages,
                                   self.problem.shape.kv_block if self.sparse else 1, self.sparse), cost)

    def _restaged(self, terms: Terms, stages: int) -> Terms:
        return self.problem.model.restaged(terms, self.problem.topo, self.split, self.sparse, stages)

    def _terms(self, stages: int) -> list[Terms]:
        return [self.problem.model.terms(self.problem.shape, self.problem.topo, self.split, self.stats, rank,
                                         sparse=self.sparse, exchange=self.exchange, stages=stages)
                for rank in range(self.problem.topo.tp)]
