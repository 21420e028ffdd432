"""What may not change a bit: who computes which heads, which communicator carries the rows. And who calls what."""

from __future__ import annotations

import collections
from dataclasses import replace

import pytest
import torch
from cp_cases import Problem, Whole, make_plan, run_block
from cp_schemes import REPEATABLE, all_splits, prepared, scheme_of

from megatron_dsv.context_parallel.cost_model import calls
from megatron_dsv.context_parallel.geometry import Split
from megatron_dsv.context_parallel.groups import families
from megatron_dsv.context_parallel.plan import exchanges
from megatron_dsv.testing.ranks import run_ranks

FP32 = [Problem(4, units=4, dtype=torch.float32), Problem(4, units=4, ratio=2, dense=True, dtype=torch.float32)]


def assert_same_bits(got, expected, case) -> None:
    assert all(torch.equal(a, b) for a, b in zip(got, expected, strict=True)), case


def head_assignments(wholes: list[Whole]) -> int:
    """At a fixed g_s: four random assignments, ranks without heads among them."""
    manager, compared = prepared(4, node_ranks=2), 0
    for whole in wholes:
        scheme = scheme_of(manager, whole.problem, kernels=REPEATABLE)
        for split in [Split(2, 2, "h_inner"), Split(2, 2, "s_inner"), Split(4, 1)]:
            plans = [make_plan(split, whole.problem, seed=seed) for seed in range(4)]
            assert len({plan.unit_splits for plan in plans}) > 1
            first = run_block(scheme, whole, plans[0])
            for plan in [*plans[1:], plans[0]]:
                assert_same_bits(run_block(scheme, whole, plan), first, plan)
                compared += 1
    return compared


def backings(wholes: list[Whole]) -> int:
    """Every backing, and the first one twice."""
    schemes = [(name, prepared(4, node_ranks=2, backing=name)) for name in ("parents", "dedicated", "virtual")]
    compared = 0
    for whole in wholes:
        for number, split in enumerate(all_splits(4)):
            plan = make_plan(split, whole.problem, stages=1 + number % 3, seed=number)
            results = [run_block(scheme_of(manager, whole.problem), whole, plan)
                       for _, manager in [*schemes, schemes[0]]]
            for result in results[1:]:
                assert_same_bits(result, results[0], plan)
                compared += 1
    return compared


@pytest.fixture(scope="module")
def wholes() -> list[Whole]:
    return [Whole(problem) for problem in FP32]


def test_head_assignment_changes_no_bit(wholes):
    assert run_ranks(head_assignments, 4, wholes) == [24] * 4


def test_backing_changes_no_bit(wholes):
    assert run_ranks(backings, 4, wholes) == [24] * 4


def calls_of_rank(wholes: list[Whole]) -> list[list[tuple[str, str]]]:
    """Calls of forward and backward of every split, with recomputation: attend twice with one begin."""
    manager = prepared(6, node_ranks=3)
    manager.log.recording = True
    recorded = []
    for whole in wholes:
        for number, split in enumerate(all_splits(6)):
            manager.log.calls.clear()
            run_block(scheme_of(manager, whole.problem), whole, make_plan(split, whole.problem, stages=2, seed=number),
                      recompute=True)
            recorded.append(list(manager.log.calls))
    return recorded


def test_all_ranks_call_alike():
    # Two units on up to six head ranks: most have nothing to send, and call all the same.
    problem = Problem(6, units=2, batch=1)
    ranks = run_ranks(calls_of_rank, 6, [Whole(problem), Whole(replace(problem, dense=True))])
    assert all(calls == ranks[0] for calls in ranks)
    assert all(len(calls) >= 4 for calls in ranks[0])
    assert len({family for calls in ranks[0] for family, _ in calls}) == 5


def low_precision(wholes: list[Whole]) -> float:
    from cp_cases import worst_error

    manager = prepared(4, node_ranks=2)
    return max(worst_error(run_block(scheme_of(manager, whole.problem), whole, make_plan(split, whole.problem)), whole,
                           manager.rank) for whole in wholes for split in all_splits(4))


def test_fp32_is_as_good_as_fp32(wholes):
    assert 1e-9 < max(run_ranks(low_precision, 4, wholes)) < 2e-5


def calls_of_blocks(wholes: list[Whole]) -> list[tuple]:
    """(counted between head ranks and between sequence ranks, as the cost model counts them) of every split."""
    manager, counted = prepared(4, node_ranks=2), []
    manager.log.recording = True
    for whole in wholes:
        for split in all_splits(4):
            for exchange in exchanges(split, not whole.problem.dense):
                plan = make_plan(split, whole.problem, stages=2, exchange=exchange)
                manager.log.calls.clear()
                run_block(scheme_of(manager, whole.problem), whole, plan)
                made = collections.Counter(family for family, _ in manager.log.calls)
                found = tuple(made[str(family)] if family.size > 1 else 0 for family in families(split))
                counted.append((found, calls(split, plan.sparse, exchange, plan.stages), sum(made.values())))
    return counted


def test_the_cost_model_counts_the_calls_that_are_made(wholes):
    for found, predicted, total in run_ranks(calls_of_blocks, 4, wholes)[0]:
        assert found == predicted
        assert total == sum(predicted)
