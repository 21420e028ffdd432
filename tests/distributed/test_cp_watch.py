"""What a profiled step sees of its blocks: what all splits would exchange, and how long each pass took."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch.distributed as dist
from cp_cases import Problem, Whole, make_plan, run_block
from cp_schemes import all_splits, prepared, scheme_of

from megatron_dsv.context_parallel.block_watch import BACKWARD, FORWARD, SELECT, BlockWatch
from megatron_dsv.context_parallel.coverage import coverage
from megatron_dsv.context_parallel.geometry import splits
from megatron_dsv.testing.ranks import run_ranks


def naive_coverage(whole: Whole, ranks: int) -> dict[int, list[float]]:
    """g_s -> [G], by asking of every pair of chunks what the mask of the first sample says."""
    p = whole.problem
    valid = torch.arange(p.tokens // p.kv_block) * p.kv_block < whole.kv_length[0]
    mask = (whole.mask[0] & valid).unflatten(0, (p.units, p.ratio)).any(1)
    groups, blocks = p.chunk // p.group, p.chunk // p.kv_block
    found: dict[int, list[float]] = {}
    for split in splits(ranks, ranks):
        if split.g_s == 1:
            continue
        worst = [0.0] * p.units
        for unit, j in itertools.product(range(p.units), range(split.g_s)):
            queries = [c * groups + g for c in split.chunks(j) for g in range(groups)]
            keys = [c * blocks + x for c in range(ranks) if c not in split.chunks(j) for x in range(blocks)]
            needed = sum(bool(mask[unit, queries, key].any()) for key in keys)
            worst[unit] = max(worst[unit], needed / len(keys))
        known = found.get(split.g_s, [0.0] * p.units)
        found[split.g_s] = [max(a, b) for a, b in zip(known, worst)]
    return found


def watched(whole: Whole, seed: int) -> tuple[list[dict], list[list[float]]]:
    """Coverage joined over the ranks, for every split that a block may have while it is watched."""
    problem = whole.problem
    manager = prepared(problem.ranks, node_ranks=2)
    scheme, results, counts = scheme_of(manager, problem), [], []
    for number, split in enumerate(all_splits(problem.ranks)):
        plan = make_plan(split, problem, seed=seed, layer=number)
        run_block(scheme, whole, plan)
        assert number not in manager.watch.seen, "off until it is started"
        manager.watch.start()
        run_block(scheme, whole, plan)
        manager.watch.stop()
        run_block(scheme, whole, plan)
        joined = torch.zeros(problem.units, problem.ranks, problem.tokens // problem.kv_block, dtype=torch.uint8)
        seen, blocks, needs = manager.watch.seen[number]
        assert (seen, blocks) == (plan, joined.shape[2])
        units = sorted(plan.units_of(0, split.h_rank(manager.rank)))
        if needs is not None:
            for row, unit in enumerate(units):
                joined[unit, list(split.h_group(manager.rank))] = needs[row]
        dist.all_reduce(joined, op=dist.ReduceOp.MAX)
        results.append({g_s: shares.tolist() for g_s, shares in coverage(joined).items()})
        counts.append([len(passes) for passes in manager.watch.milliseconds().values()])
    return results, counts


@pytest.mark.parametrize(("ranks", "units", "ratio"), [(4, 3, 1), (6, 2, 2)])
def test_every_split_tells_what_all_splits_would_exchange(ranks, units, ratio):
    whole = Whole(Problem(ranks, units=units, ratio=ratio, padding=5))
    expected = naive_coverage(whole, ranks)
    for results, counts in run_ranks(watched, ranks, whole, 3):
        for found in results:
            assert found.keys() == expected.keys()
            for g_s, shares in expected.items():
                assert found[g_s] == pytest.approx(shares, abs=1e-6)
        assert counts == [[3]] * len(results), "selection, forward and backward of one block"


def timed(whole: Whole) -> list[dict]:
    """Two micro-batches and a recomputed one, under a clock that ticks."""
    ticks = itertools.count()
    manager = prepared(2, node_ranks=2)
    manager.watch = BlockWatch(clock=lambda: next(ticks) / 1000)
    scheme, plan = scheme_of(manager, whole.problem), make_plan(all_splits(2)[0], whole.problem)
    manager.watch.start()
    run_block(scheme, whole, plan)
    run_block(scheme, whole, plan, recompute=True)
    manager.watch.stop()
    return [manager.watch.milliseconds(), len(manager.watch._spans)]


def test_times_are_means_of_a_pass():
    for times, spans in run_ranks(timed, 2, Whole(Problem(2))):
        assert spans == 7, "two selections, three forwards, two backwards"
        assert times == {0: {SELECT: pytest.approx(1.0), FORWARD: pytest.approx(1.0), BACKWARD: pytest.approx(1.0)}}
