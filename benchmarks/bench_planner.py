"""Distance of the planner's head assignments from the optimum, and the time that both take.

``python benchmarks/bench_planner.py [--seeds 10] [--time-limit 60]`` prints a table. The optimum is that of an integer
programme (scipy's HiGHS); where it is not proven in time, the distance is to the best assignment that it found.
Densities are log-normal with sigma 0.9 around 0.08.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
import time

from megatron_dsv.context_parallel import cluster
from megatron_dsv.context_parallel.cost_model import (
    AttentionShape,
    CostModel,
    Terms,
    a2a_ns,
    backward_ns,
    forward_ns,
    sums,
)
from megatron_dsv.context_parallel.geometry import Split
from megatron_dsv.context_parallel.head_assignment import GREEDY, assign
from megatron_dsv.context_parallel.kernel_rates import FittedKernels
from megatron_dsv.context_parallel.plan import Topology, exchanges
from megatron_dsv.context_parallel.statistics import BlockStats, modelled_coverage
from megatron_dsv.testing.assignment_oracle import least_time

CASES = ((12, Split(4, 1)), (16, Split(2, 1)), (16, Split(4, 1)), (16, Split(4, 2)), (24, Split(8, 1)))
KERNELS = FittedKernels(65536, 24, 128, (80.0, 220.0), (0.5, 100.0), (1.0, 300.0), 2.0)


def draw(units: int, split: Split, seed: int) -> Terms:
    """Costs of one block of ``units`` heads at 131,072 tokens on H200."""
    source = random.Random(seed)
    density = tuple(min(1.0, 0.08 * math.exp(source.gauss(0, 0.9))) for _ in range(units))
    stats = BlockStats(density, modelled_coverage(density, 1, tokens=131072, q_block=64, pattern="clustered",
                                                  sizes=(split.g_s,)))
    model = CostModel(cluster.load("h200"), KERNELS, 40 * 2**30)
    return model.terms(AttentionShape(131072, 1, units, 1, 128), Topology(split.size), split, stats, 0, sparse=True,
                       exchange=exchanges(split, True)[0])


def main() -> None:
    """Print a row per case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds for one integer programme")
    args = parser.parse_args()
    print("| heads | g_h x g_s | proven | even heads, mean / max | greedy | search | search ms | integer programme s |")
    print("|---|---|---|---|---|---|---|---|")
    for units, split in CASES:
        rows = []
        proven, ours, theirs = 0, 0.0, 0.0
        for seed in range(args.seeds):
            terms = draw(units, split, seed)
            start = time.process_time()
            found = assign(terms, split.g_h)
            ours += time.process_time() - start
            start = time.process_time()
            optimum = least_time(terms, split.g_h, time_limit=args.time_limit)
            theirs += time.process_time() - start
            proven += optimum.proven
            best = optimum.bound if optimum.proven else min(optimum.incumbent, found.time)
            rows.append((_even(terms, split.g_h) / best - 1, assign(terms, split.g_h, effort=GREEDY).time / best - 1,
                         found.time / best - 1))
        gaps = [f"{statistics.mean(column):.1%} / {max(column):.1%}" for column in zip(*rows)]
        print(f"| {units} | {split.g_h} x {split.g_s} | {proven} of {args.seeds} | {' | '.join(gaps)} | "
              f"{1e3 * ours / args.seeds:.1f} | {theirs / args.seeds:.1f} |", flush=True)


def _even(terms: Terms, g_h: int) -> int:
    """Time of heads dealt in their own order, the same number to every place."""
    each = len(terms.forward) // g_h
    loads = [sums(terms, range(place * each, (place + 1) * each)) for place in range(g_h)]
    return max(forward_ns(terms, x) for x in loads) + max(backward_ns(terms, x) for x in loads) + a2a_ns(terms, each)


if __name__ == "__main__":
    main()
