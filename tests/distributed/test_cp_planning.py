"""Planning on ranks without a model: what is joined, who decides, and that nobody is left with another plan."""

from __future__ import annotations

import itertools

import pytest
import torch.distributed as dist
from cp_cases import Problem, Whole, run_block, share
from cp_jobs import Job, attend
from cp_schemes import EXACT
from test_cp_watch import naive_coverage

from megatron_dsv import presets
from megatron_dsv.context_parallel.block_watch import BlockWatch
from megatron_dsv.context_parallel.geometry import Split
from megatron_dsv.context_parallel.hybrid_cp import HybridScheme
from megatron_dsv.context_parallel.plan import CPPlan, attending
from megatron_dsv.context_parallel.scheme import Pending
from megatron_dsv.testing.ranks import run_ranks
from megatron_dsv.training.cp_record import PlanningRecord, stored_text

READ = CPPlan.from_json


@pytest.fixture(scope="session")
def slow_links(tmp_path_factory) -> str:
    """A cluster on which what travels decides: heads where most keys of a peer are needed, else the sequence."""
    text = presets.path("cluster/h200").read_text().replace("gbps: 292", "gbps: 2").replace("us: 38", "us: 1")
    path = tmp_path_factory.mktemp("cluster") / "slow.yaml"
    path.write_text(text)
    return str(path)


def dense_then_sparse(folder, cluster) -> tuple:
    job = Job(tp=2, cp=2, heads=16, folder=folder, dsv_cp_cluster=cluster)
    job.planning.begin_run(None, 0)
    dense = job.plan
    job.step(1, profiles=False)
    job.step(2)
    assert job.plan is dense, "nothing changed"
    job.turn(False, True)
    job.step(4)
    return dense, job.plan, stored_text(job.args)


def test_all_ranks_take_one_plan_made_from_all_heads(tmp_path, slow_links):
    ranks = run_ranks(dense_then_sparse, 8, tmp_path, slow_links, output=tmp_path / "logs")
    assert len({(dense.digest, sparse.digest, stored) for dense, sparse, stored in ranks}) == 1
    dense, sparse, _ = ranks[0]
    assert (dense.version, sparse.version, sparse.effective_step) == (1, 2, 4)
    assert [block.sparse for block in sparse.blocks[0]] == [False, True]
    # Layer 2 with the heads of both tensor-parallel ranks, not those of rank 0 twice.
    assert sparse.blocks[0][1].unit_order[0] != sparse.blocks[0][1].unit_order[1]
    lines = (tmp_path / "logs" / "rank0.txt").read_text().splitlines()
    assert lines[0].startswith(" plan 1 at step 0: ")
    assert "1 of 2 changed; predicted " in lines[1]
    assert " -> " in lines[1]
    events = [line for line in (tmp_path / "plans.jsonl").read_text().splitlines() if "committed" in line]
    assert len(events) == 2
    assert all(not (tmp_path / "logs" / f"rank{rank}.txt").read_text() for rank in range(1, 8))


def watched_coverage(whole: Whole, cluster: str) -> tuple:
    job = Job(cp=4, tokens=whole.problem.tokens, heads=whole.problem.units, dsv_q_block_size=4,
              dsv_kv_block_size=2, dsv_predictor_proxies=2, dsv_cp_cluster=cluster)
    job.turn(True, True)
    job.planning.begin_run(None, 0)
    seen = []
    for step in range(1, 4):
        job.step(step, lambda job: attend(whole, job))
        seen.append(({layer: dict(rows) for layer, rows in job.planning.record.coverage.items()},
                     job.planning._profile().stats[0][1].coverage))
    return seen


def test_coverage_is_measured_under_every_plan_and_read_by_the_next(slow_links):
    whole = Whole(Problem(4, units=4, padding=3))
    expected = naive_coverage(whole, 4)
    for seen in run_ranks(watched_coverage, 4, whole, slow_links):
        for table, used in seen:
            assert table.keys() == {0, 1}
            for rows in table.values():
                assert {ranks: pytest.approx(row, abs=1e-6) for ranks, row in expected.items()} == rows
            assert {ranks: list(row) for ranks, row in used} == table[1]


def refusals() -> list:
    """Rank 3 reads another plan than it was sent, then refuses one, then takes it."""
    job, seen = Job(cp=4), []
    job.planning.begin_run(None, 0)
    check = job.runtime.store._check

    def too_large(plan: CPPlan) -> None:
        raise ValueError("does not fit this rank")

    for step, fault in ((2, "reads"), (4, "refuses"), (6, "none")):
        job.turn(True, True, seed=1)
        if dist.get_rank() == 3 and fault == "reads":
            CPPlan.from_json = classmethod(lambda cls, text: READ(str(text, "utf-8").replace('"effective_step":2',
                                                                                           '"effective_step":3')))
        if dist.get_rank() == 3 and fault == "refuses":
            job.runtime.store._check = too_large
        job.step(step)
        CPPlan.from_json, job.runtime.store._check = READ, check
        seen.append((job.plan.version, job.plan.digest, [block.sparse for block in job.plan.blocks[0]]))
    return seen


def test_a_plan_that_one_rank_does_not_take_is_taken_by_none_and_proposed_again(tmp_path):
    ranks = run_ranks(refusals, 4, output=tmp_path)
    assert ranks[0] == ranks[1] == ranks[2] == ranks[3]
    assert [(version, sparse) for version, _, sparse in ranks[0]] == [
        (1, [False, False]), (1, [False, False]), (2, [True, True])]
    first, last = ((tmp_path / f"rank{rank}.txt").read_text() for rank in (0, 3))
    assert " plan 2 at step 2 refused by all, plan 1 stays in force: the ranks read different plans" in first
    assert " plan 2 at step 4 refused by rank 3, plan 1 stays in force: does not fit this rank" in last
    assert "step 4" not in first
    assert " plan 2 at step 6: " in first


def saved(whole: Whole) -> tuple[str, CPPlan]:
    job = Job(cp=4, tokens=whole.problem.tokens, heads=whole.problem.units, dsv_q_block_size=4,
              dsv_kv_block_size=2, dsv_predictor_proxies=2)
    job.turn(True, False)
    job.planning.begin_run(None, 0)
    job.step(2, lambda job: attend(whole, job))
    job.turn(True, True)
    job.step(4, lambda job: attend(whole, job))
    return stored_text(job.args), job.plan


def resumed(stored: str, cp: int, whole: Whole, kv_block: int = 2, otherwise: bool = False) -> tuple:
    job = Job(cp=cp, tokens=whole.problem.tokens, heads=whole.problem.units, dsv_q_block_size=4,
              dsv_kv_block_size=kv_block, dsv_predictor_proxies=2)
    job.turn(True, True)
    solved = []
    solve = job.planning.replanner.solve
    job.planning.replanner.solve = lambda *args: solved.append(1) or solve(*args)
    # What the first rank read counts.
    job.planning.begin_run(stored, 4, measured_otherwise=otherwise and dist.get_rank() == 0)
    return job.plan, bool(solved), job.planning.record.coverage, stored_text(job.args)


def test_a_resumed_run_has_the_plan_it_had_and_another_topology_keeps_what_was_learned(tmp_path):
    whole = Whole(Problem(4, units=4))
    stored, plan = run_ranks(saved, 4, whole)[0]
    assert plan.version == 2
    for again, solved, table, text in run_ranks(resumed, 4, stored, 4, whole):
        assert (again, solved, text) == (plan, False, stored)
        assert table.keys() == {0}, "the other layer selected nothing yet"
    for rank, (other, solved, halved, text) in enumerate(
            run_ranks(resumed, 2, stored, 2, whole, output=tmp_path / "two")):
        assert solved == (rank == 0)
        assert (other.topo.cp, other.version) == (2, 3), "versions count the plans of a run"
        assert halved == table, "coverage does not depend on the topology"
        assert text != stored
    line = (tmp_path / "two" / "rank0.txt").read_text().splitlines()[0]
    assert line == (" the checkpoint's plan is not taken up at step 4: it was made for cp 4, tp 1, pp 1, 8 GPUs a "
                    "node, the job runs cp 2, tp 1, pp 1, 8 GPUs a node; it is solved anew")
    for other, _, fresh, _ in run_ranks(resumed, 4, stored, 4, whole, 4, output=tmp_path / "blocks"):
        assert (other.kv_blocks, other.version, fresh) == ({4}, 3, {}), "needs of other blocks say nothing of these"
    line = (tmp_path / "blocks" / "rank0.txt").read_text().splitlines()[0]
    assert line == (" the checkpoint's plan is not taken up at step 4: it was made for key blocks of 2, the job "
                    "selects blocks of 4; it is solved anew")
    for other, _, fresh, _ in run_ranks(resumed, 4, stored, 4, whole, 2, True, output=tmp_path / "measures"):
        assert (other.version, fresh) == (3, {}), "needs of other groups or budgets say nothing of these"
    line = (tmp_path / "measures" / "rank0.txt").read_text().splitlines()[0]
    assert line == (" the checkpoint's plan is not taken up at step 4: the statistics that it was solved from are "
                    "measured anew; it is solved anew")


def waiting(whole: Whole) -> list:
    """What the next checkpoint would hold after each profile, beside the hysteresis in force on this rank."""
    job = Job(cp=4, tokens=whole.problem.tokens, heads=whole.problem.units, dsv_q_block_size=4, dsv_kv_block_size=2,
              dsv_predictor_proxies=2, dsv_cp_replan_interval=3)
    job.turn(True, True)
    job.planning.begin_run(None, 0)
    seen = []
    for step in range(1, 7):
        if step == 5:
            job.turn(True, True, seed=3)
        fault, job.runtime.store._check = job.runtime.store._check, job.runtime.store._check
        if step == 6 and dist.get_rank() == 1:
            job.runtime.store._check = refuse
        if step == 6:
            job.turn(False, True, seed=3)
        job.step(step, lambda job: attend(whole, job))
        job.runtime.store._check = fault
        kept = PlanningRecord.read(stored_text(job.args))
        seen.append((kept.states(job.planning._fresh, 1), job.planning.replanner.states, job.plan.version))
    return seen


def refuse(plan: CPPlan) -> None:
    raise ValueError("not this one")


def test_a_checkpoint_holds_the_hysteresis_in_force_whatever_became_of_the_profile():
    """Profiles that hurry blocks and do not solve, that solve in vain, and whose plan is refused."""
    ranks = run_ranks(waiting, 4, Whole(Problem(4, units=4)))
    assert all(seen == ranks[0] for seen in ranks)
    for kept, in_force, _ in ranks[0]:
        assert kept == in_force
    assert ranks[0][0][0][0].waited == (1, 1), "coverage was measured for the first time: no second profile is due"
    assert ranks[0][5][2] == ranks[0][4][2], "the last plan was refused"


def test_a_damaged_record_costs_a_line_and_a_new_plan(tmp_path):
    whole = Whole(Problem(2, units=4))

    def once() -> tuple:
        job = Job(cp=2, tokens=whole.problem.tokens, heads=4, dsv_q_block_size=4, dsv_kv_block_size=2,
                  dsv_predictor_proxies=2)
        job.planning.begin_run(None, 0)
        return resumed(stored_text(job.args)[:100], 2, whole)

    for plan, _, _, _ in run_ranks(once, 2, output=tmp_path):
        assert plan.version == 1
    lines = (tmp_path / "rank0.txt").read_text().splitlines()
    assert lines[1].startswith(" the checkpoint's plan is not taken up at step 4: the record of planning cannot be "
                               "read: ")
    assert lines[2].startswith(" plan 1 at step 4: ")


def timed(whole: Whole, **flags) -> tuple:
    """Rank 1 waits: its clock runs ten times as fast, as if it came early to everything."""
    job = Job(cp=2, tokens=whole.problem.tokens, heads=whole.problem.units, dsv_q_block_size=4, dsv_kv_block_size=2,
              dsv_predictor_proxies=2, **flags)
    ticks = itertools.count()
    pace = 10 if dist.get_rank() == 1 else 1
    job.runtime.manager.watch = BlockWatch(clock=lambda: next(ticks) * pace / 1000)
    job.turn(True, False)
    job.planning.begin_run(None, 0)
    job.step(1, lambda job: attend(whole, job))
    assert not job.planning.replanner.corrections.by_kind, "the first profiled step of a launch compiles"
    job.step(2, lambda job: attend(whole, job))
    predicted = job.planning.replanner.predicted_ms(job.plan, job.planning._profile(), 0, tokens=whole.problem.tokens)
    return job.planning.replanner.corrections.to_data(), predicted, job.recorder.report()


def turned_since_the_plan(whole: Whole) -> tuple:
    """Both blocks are planned sparse; one attends densely, as the dispatcher may decide between two plans."""
    job = Job(cp=2, tokens=whole.problem.tokens, heads=whole.problem.units, dsv_q_block_size=4, dsv_kv_block_size=2,
              dsv_predictor_proxies=2)
    job.turn(True, True)
    job.planning.begin_run(None, 0)
    plan = job.plan.blocks[0]
    assert all(block.sparse for block in plan)
    seen = []
    job.planning.log.measured = lambda sums, stale, step: seen.append(sums)

    def work(job: Job) -> None:
        scheme = HybridScheme(job.runtime.manager, range(4), tp_rank=0, proxies=2, kernels=EXACT)
        run_block(scheme, whole, plan[0])
        q, k, v = (share(x, job.runtime.manager.rank, 2).clone().requires_grad_() for x in (whole.q, whole.k, whole.v))
        dense = attending(plan[1], sparse=False, kv_block=2)
        scheme.attend(q, k, v, Pending(None, whole.kv_length, dense), softmax_scale=1.0).sum().backward()

    ticks = itertools.count()
    job.runtime.manager.watch = BlockWatch(clock=lambda: next(ticks) / 1000)
    for step in (1, 2):
        job.step(step, work)
    return seen


def test_a_block_that_ran_otherwise_than_planned_is_no_measurement_of_its_plan():
    for seen in run_ranks(turned_since_the_plan, 2, Whole(Problem(2, units=4))):
        (sums,) = seen
        (pair,) = sums.values()
        # A selection, a forward and a backward of one block, a millisecond each.
        assert pair[0] == pytest.approx(3.0)


def test_a_rank_that_waits_measures_nothing_and_all_learn_the_same():
    whole = Whole(Problem(2, units=4))
    first, second = run_ranks(timed, 2, whole)
    assert first == second
    corrections, predicted, metrics = first
    # A selection, a forward and a backward, a millisecond each; a dense block selects nothing.
    for kind, expected, took in zip(("sparse", "dense"), predicted, (3.0, 2.0)):
        (factor,) = [entry[0] for name, entry in corrections.items() if name.startswith(kind)]
        assert factor == pytest.approx(took / expected, rel=1e-5)
    assert metrics["dsv/cp_measured_ms"] == pytest.approx(5.0)
    assert metrics["dsv/cp_plan"] == 1


@pytest.mark.parametrize("flags", [{"dsv_cp_correction": False}, {"dsv_deterministic": True}], ids=["off", "repeat"])
def test_times_act_on_nothing_when_plans_must_repeat(flags):
    for corrections, _, metrics in run_ranks(lambda: timed(Whole(Problem(2, units=4)), **flags), 2):
        assert corrections == {}
        assert metrics["dsv/cp_measured_ms"] == pytest.approx(5.0), "they are said all the same"


@pytest.mark.parametrize("flags", [{}, {"dsv_cp_correction": False}], ids=["on", "off"])
def test_a_checkpoints_corrections_are_kept_and_act_where_they_are_wanted(flags):
    def run() -> tuple:
        job = Job(cp=2, **flags)
        record = PlanningRecord(job.plan, calibration=job.planning.replanner.calibration_digest)
        record.corrections = record.corrections.observe("dense heads", 2.0, 1.0)
        record.keep(job.args)
        job.planning.begin_run(stored_text(job.args), 2)
        return (job.planning.replanner.corrections == record.corrections,
                PlanningRecord.read(stored_text(job.args)).corrections == record.corrections)

    assert run_ranks(run, 2) == [(not flags, True)] * 2


def nothing_fits() -> tuple:
    job = Job(cp=2)
    job.planning.begin_run(None, 0)
    planner = job.planning.replanner
    bucket, problem = planner.problems[0]
    from dataclasses import replace
    planner.problems = ((bucket, replace(problem, model=replace(problem.model, memory_bytes=10))),)
    job.turn(True, True)
    job.step(2)
    return job.plan.version, job.plan.blocks[0][0].split


def test_a_job_for_which_no_plan_fits_keeps_its_plan(tmp_path):
    for version, split in run_ranks(nothing_fits, 2, output=tmp_path):
        assert (version, split.size) == (1, 2)
        assert isinstance(split, Split)
    assert " no new plan at step 2, plan 1 stays in force: block 0: attention takes" in (
        tmp_path / "rank0.txt").read_text()


def test_a_longer_interval_skips_profiles_but_not_a_layer_that_turns():
    def run() -> list[int]:
        job, looks = Job(cp=2, dsv_cp_replan_interval=10), []
        solve = job.planning.replanner.solve
        job.planning.replanner.solve = lambda plan, profile, step: looks.append(step) or solve(plan, profile, step)
        job.planning.begin_run(None, 0)
        for step in range(2, 28, 2):
            job.turn(step >= 6, False)
            job.step(step)
        return looks

    first, second = run_ranks(run, 2)
    assert first == [0, 6, 16, 26]
    assert second == [], "one rank solves"
