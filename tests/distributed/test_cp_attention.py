"""Attention over context-parallel ranks equals one process, for every split, layout, assignment and exchange."""

from __future__ import annotations

import pytest
from cp_cases import Problem, Whole, make_plan, run_block, worst_error
from cp_schemes import all_splits, prepared, scheme_of

from megatron_dsv.testing.ranks import run_ranks


def problems(ranks: int) -> list[Whole]:
    """MHA and GQA, blocks and tokens, padding that ends inside a block, and the dense block."""
    return [Whole(problem, seed) for seed, problem in enumerate((
        Problem(ranks),
        Problem(ranks, units=2, ratio=3, kv_block=1, batch=1, padding=5),
        Problem(ranks, units=5, kv_block=4, padding=11),
        Problem(ranks, units=3, ratio=2, dense=True, padding=11),
    ))]


def errors_of_rank(wholes: list[Whole], variants: list[tuple], node_ranks: int) -> list[tuple[str, float]]:
    """(case, error) of every problem under every variant: (split, stages, exchange)."""
    found = []
    manager = prepared(wholes[0].problem.ranks, node_ranks=node_ranks)
    for whole in wholes:
        scheme = scheme_of(manager, whole.problem)
        for number, (split, stages, exchange) in enumerate(variants):
            if whole.problem.dense and exchange == "selective":
                continue
            plan = make_plan(split, whole.problem, stages=stages, exchange=exchange, seed=number)
            error = worst_error(run_block(scheme, whole, plan), whole, scheme.manager.rank)
            found.append((f"{whole.problem} {plan}", error))
    return found


def check(ranks: int, variants: list[tuple], tolerance: float, wholes: list[Whole], node_ranks: int = 2) -> None:
    results = run_ranks(errors_of_rank, ranks, wholes, variants, node_ranks, timeout=280)
    assert all(result for result in results)
    worst = max((error, case) for result in results for case, error in result)
    assert worst[0] < tolerance, worst


@pytest.mark.parametrize("ranks", [2, 4, 6])
def test_equals_one_process(ranks):
    variants = [(split, 1 + number % 3, ("selective", "gather")[number % 4 == 3])
                for number, split in enumerate(all_splits(ranks))]
    check(ranks, variants, 1e-12, problems(ranks), node_ranks=3 if ranks == 6 else 2)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 4, 6, 8])
def test_equals_one_process_in_every_combination(ranks):
    variants = [(split, stages, exchange) for split in all_splits(ranks) for stages in range(1, min(4, ranks))
                for exchange in ("selective", "gather")]
    check(ranks, variants, 1e-12, problems(ranks), node_ranks=3 if ranks == 6 else 2)
