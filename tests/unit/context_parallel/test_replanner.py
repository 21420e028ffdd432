import dataclasses

import pytest
from test_planner import MODEL, shape, stats

from megatron_dsv.context_parallel.corrections import Corrections, kind_of
from megatron_dsv.context_parallel.geometry import Split
from megatron_dsv.context_parallel.plan import Topology, even_block, even_plan
from megatron_dsv.context_parallel.planner import Hysteresis, Problem, evaluate, plan_blocks
from megatron_dsv.context_parallel.replanner import Profile, Replanner, histogram, shared_buckets

TOPO = Topology(4, domain=8)
BUCKETS = ((1, 32768), (32769, 131072))
LAYERS, UNITS = 3, 8
FIRST = even_plan(TOPO, layers=LAYERS, units=UNITS, longest=131072)


def replanner(**hysteresis):
    problems = tuple((bucket, Problem(MODEL, shape(UNITS, tokens=bucket[1]), TOPO)) for bucket in BUCKETS)
    return Replanner(problems, "calibration", (Hysteresis(**hysteresis),) * 2)


def profile(seed, *, sparse=(True,) * LAYERS, sigma=0.9):
    rows = tuple(tuple(stats(UNITS, 10 * seed + layer, sigma=sigma, tokens=high) for layer in range(LAYERS))
                 for _, high in BUCKETS)
    return Profile(rows, (tuple(sparse),) * 2)


def test_the_first_plan_is_what_the_planner_finds_for_every_bucket():
    planner, of = replanner(), profile(1, sparse=(False, True, True))
    made = planner.solve(FIRST, of, 7)
    assert (made.plan.version, made.plan.effective_step, made.plan.buckets) == (1, 7, BUCKETS)
    assert made.before_ns == 0
    for number, (_, problem) in enumerate(planner.problems):
        best = plan_blocks(problem, of.stats[number], of.sparse[number])
        assert made.plan.blocks[number] == tuple(candidate.plan for candidate in best)
        assert made.plan.predicted_ns[number] == sum(candidate.cost.total for candidate in best)
    assert [block.sparse for block in made.plan.blocks[0]] == [False, True, True]
    assert made.plan.stats_digest == of.digest


def test_a_better_plan_waits_for_a_second_profile_and_says_what_it_gains():
    planner, old, new = replanner(), profile(1), profile(2)
    plan = planner.solve(FIRST, old, 0).plan
    assert planner.solve(plan, old, 50) is None, "nothing changed"
    assert planner.solve(plan, new, 100) is None, "one profile is noise"
    made = planner.solve(plan, new, 150)
    costs = [[sum(evaluate(problem, block, of).total for block, of in zip(p.blocks[n], new.stats[n]))
              for n, (_, problem) in enumerate(planner.problems)] for p in (plan, made.plan)]
    assert made.before_ns == sum(costs[0]) > made.after_ns == sum(costs[1])
    assert made.plan.predicted_ns == tuple(costs[1])
    assert made.changed == sum(a != b for old_row, new_row in zip(plan.blocks, made.plan.blocks)
                               for a, b in zip(old_row, new_row)) > 0
    assert (made.plan.version, made.plan.effective_step) == (2, 150)


def test_a_block_of_which_more_is_known_needs_no_second_profile():
    def changed(before, after):
        return {a.layer for old_row, new_row in zip(before.blocks, after.blocks)
                for a, b in zip(old_row, new_row) if a != b}

    planner, old, new = replanner(), profile(1), profile(2)
    plan = planner.solve(FIRST, old, 0).plan
    planner.hurry({1}, of=LAYERS)
    made = planner.solve(plan, new, 50)
    assert changed(plan, made.plan) == {1}
    planner.states = made.states
    others = planner.solve(made.plan, new, 100).plan
    assert changed(made.plan, others) == {0, 2}, "they wait for their second profile"


def test_a_refused_proposal_is_made_again_at_once():
    planner, old, new = replanner(patience=1), profile(1), profile(2)
    plan = planner.solve(FIRST, old, 0).plan
    refused = planner.solve(plan, new, 100)
    assert planner.solve(plan, new, 150).plan.blocks == refused.plan.blocks
    planner.states = refused.states
    assert planner.solve(refused.plan, new, 200) is None


def test_a_block_that_changes_its_stage_is_planned_at_once():
    planner = replanner(patience=9)
    plan = planner.solve(FIRST, profile(1, sparse=(False, False, False)), 0).plan
    made = planner.solve(plan, profile(1, sparse=(False, True, False)), 50)
    assert made.changed == 2, "one block in either bucket"
    assert [[block.sparse for block in row] for row in made.plan.blocks] == [[False, True, False]] * 2


def test_what_was_measured_turns_a_choice():
    planner, of = replanner(patience=1), profile(1, sigma=0.0)
    plan = planner.solve(FIRST, of, 0).plan
    raw = [evaluate(planner.problems[1][1], block, row).total / 1e6 for block, row in zip(plan.blocks[1], of.stats[1])]
    assert {kind_of(block.split, True) for block in plan.blocks[1]} == {"sparse hybrid"}
    planner.corrections = Corrections().observe("sparse hybrid", 40.0, 10.0).observe("sparse heads", 10.0, 10.0)
    made = planner.solve(plan, of, 50)
    assert {kind_of(block.split, True) for block in made.plan.blocks[1]} == {"sparse heads"}
    again = planner.predicted_ms(plan, of, 1, tokens=131072)
    assert again == raw, "a ratio is taken of what the model says, not of itself"


def test_a_plan_that_fits_nowhere_is_an_error_that_names_the_block():
    planner = replanner()
    tight = dataclasses.replace(MODEL, memory_bytes=1000)
    planner.problems = tuple((bucket, dataclasses.replace(problem, model=tight))
                             for bucket, problem in planner.problems)
    with pytest.raises(ValueError, match=r"block 0: attention takes \d+ bytes on the fullest rank at least, of 1000"):
        planner.solve(FIRST, profile(1), 0)


def test_buckets_of_like_lengths_share_a_plan():
    def ends(*lengths):
        return tuple((low + 1, high) for low, high in zip((0, *lengths), lengths))

    assert shared_buckets(ends(4096)) == ((1, 4096),)
    assert shared_buckets(ends(64, 1024, 30000, 40000, 60000)) == ((1, 64), (65, 1024), (1025, 30000), (30001, 60000))
    assert shared_buckets(ends(100, 140, 190, 250)) == ((1, 140), (141, 250))


def test_the_histogram_counts_blocks_of_all_buckets():
    blocks = [even_block(layer, split, tp=1, units=4, sparse=True)
              for layer, split in enumerate((Split(4, 1), Split(2, 2), Split(2, 2)))]
    plan = dataclasses.replace(FIRST, blocks=(tuple(blocks),))
    assert histogram(plan) == "2 x 2 h_inner in 2 blocks, 4 x 1 in 1"
