"""Plans that need no statistics: the same split everywhere, or, to find faults, another one for every block and step.

Symbols: cp ranks, G key/value units of one tensor-parallel rank, g_h x g_s a split.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import replace

from megatron_dsv.context_parallel.geometry import splits
from megatron_dsv.context_parallel.plan import MAX_STAGES, BlockPlan, CPPlan, Topology, even_plan, exchanges

SEQUENCE, HEADS, RANDOM = "sequence", "heads", "random"
MODES = (SEQUENCE, HEADS, RANDOM)


def buckets_of(lengths: Iterable[int]) -> tuple[tuple[int, int], ...]:
    """A bucket for each distinct sequence length in tokens, reaching down to the one before."""
    ends = sorted(set(lengths))
    return tuple((low + 1, high) for low, high in zip([0, *ends], ends))


def uniform_plan(mode: str, topo: Topology, *, layers: int, units: int, buckets: tuple[tuple[int, int], ...],
                 sparse: bool, kv_block: int) -> CPPlan:
    """The first plan of a run, version 0: every block split alike, its units dealt out evenly.

    Args:
        mode: ``sequence`` splits the sequence alone (g_s = cp); ``heads`` takes as many head ranks as divide cp and the
            units can fill; ``random`` begins as ``sequence``.
        topo: the job's sizes.
        layers: blocks of the whole model.
        units: G.
        buckets: ranges of sequence lengths.
        sparse: whether blocks may come to attend sparsely.
        kv_block: keys per selected block.

    Raises:
        ValueError: an unknown mode.
    """
    if mode not in MODES:
        raise ValueError(f"mode must be one of {', '.join(MODES)}, got {mode!r}")
    plan = even_plan(topo, layers=layers, units=units, longest=buckets[-1][1], g_h=None if mode == HEADS else 1,
                     sparse=sparse, kv_block=kv_block if sparse else 1, most_stages=MAX_STAGES)
    return replace(plan, buckets=buckets, blocks=plan.blocks * len(buckets), predicted_ns=())


def random_plan(plan: CPPlan, *, seed: int, step: int) -> CPPlan:
    """The successor of ``plan`` for ``step``: every block's split, layout, heads and exchange drawn anew.

    A pure function of its arguments. Head ranks may get no head at all. Whether blocks are sparse stays as it is.
    """
    drawn = random.Random(f"context-parallel plan/{seed}/{step}")
    blocks = tuple(tuple(_drawn_block(drawn, block, plan.topo.cp) for block in row) for row in plan.blocks)
    return replace(plan, version=plan.version + 1, effective_step=step, blocks=blocks, stats_digest="",
                   predicted_ns=())


def _drawn_block(drawn: random.Random, block: BlockPlan, cp: int) -> BlockPlan:
    split = drawn.choice(splits(cp, cp))
    tp, units = len(block.unit_order), block.units
    orders = tuple(tuple(drawn.sample(range(units), units)) for _ in range(tp))
    sizes = []
    for _ in range(tp):
        cuts = sorted(drawn.randint(0, units) for _ in range(split.g_h - 1))
        sizes.append(tuple(high - low for low, high in zip([0, *cuts], [*cuts, units])))
    ways = exchanges(split, block.sparse)
    exchange = drawn.choice(ways) if len(ways) > 1 else ways[0]
    return BlockPlan(block.layer, *split, orders, tuple(sizes), exchange, drawn.randint(1, max(1, split.g_s - 1)),
                     block.kv_block, block.sparse)
