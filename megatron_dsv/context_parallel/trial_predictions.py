"""What the cost model says of a trial block, from its measured statistics."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from megatron_dsv.context_parallel.cost_model import AttentionShape, CostModel
from megatron_dsv.context_parallel.coverage import chunk_needs, coverage
from megatron_dsv.context_parallel.groups import CPGroupManager
from megatron_dsv.context_parallel.kernel_rates import KernelRates
from megatron_dsv.context_parallel.plan import BlockPlan, Topology
from megatron_dsv.context_parallel.planner import Problem, evaluate
from megatron_dsv.context_parallel.statistics import BlockStats
from megatron_dsv.context_parallel.trial_block import TrialBlock, TrialShape


def stats_of(densities: Sequence[float], block: TrialBlock | None, manager: CPGroupManager) -> BlockStats:
    """Statistics as a run would have recorded them: of heads that keep ``densities`` [h], with the coverage of all
    splits from one selection of ``block``, whose plan splits the sequence over all ranks; None is dense."""
    if block is None:
        return BlockStats(tuple(densities))
    selection = block.begin().selection
    assert selection is not None
    needs = torch.zeros((len(densities), manager.size, selection.num_kv_blocks), dtype=torch.uint8,
                        device=selection.kv_indices.device)
    needs[:, manager.rank] = chunk_needs(selection, 1)[:, 0]
    found = coverage(manager.all_reduce(needs, "needed blocks"))
    return BlockStats(tuple(densities), tuple((ranks, tuple(units.tolist())) for ranks, units in found.items()))


def mean_coverage(stats: BlockStats, ranks: int) -> float:
    """Mean over units of the coverage that a split of the sequence over ``ranks`` has."""
    return sum(stats.unit_coverage(unit, ranks) for unit in range(len(stats.density))) / len(stats.density)


def predicted_ns(model: CostModel, shape: TrialShape, topo: Topology, plan: BlockPlan, stats: BlockStats) -> int:
    """Nanoseconds of a block under a plan."""
    return evaluate(problem(model, shape, topo), plan, stats).total


def problem(model: CostModel, shape: TrialShape, topo: Topology) -> Problem:
    """The planner's problem of a block over the ranks and nodes of ``topo``."""
    attention = AttentionShape(shape.tokens, 1, shape.heads, 1, shape.head_dim, shape.q_block, shape.kv_block,
                               shape.rank, shape.proxies)
    return Problem(model, attention, topo)


def alone_ns(kernels: KernelRates, shape: TrialShape, densities: Sequence[float] | None) -> float:
    """Nanoseconds of a block on one rank; ``densities`` [h], None for dense attention."""
    tokens, heads = shape.tokens, shape.heads
    if densities is None:
        return sum(kernels.dense(tokens, tokens, heads, shape.head_dim))
    mean = sum(densities) / heads
    return sum(kernels.sparse(tokens, tokens, heads, shape.head_dim, mean)) + kernels.select(tokens, tokens, heads)
