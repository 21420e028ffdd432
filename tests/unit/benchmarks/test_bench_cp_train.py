"""The training part of the context-parallel benchmark: arms before their steps, and rows read off a log."""

import pytest
from cp.block import ALONE, PLANNED
from cp.scheduled_pretrain import run_scheduled
from cp.train import TrainBench, cases
from cp.train_cases import Case, densities, plan_of, predicted_ms

from megatron_dsv.cli.plan import load_model
from megatron_dsv.context_parallel import cluster
from megatron_dsv.context_parallel.calibration import Calibration
from megatron_dsv.context_parallel.cost_model import Handling, Surcharge
from megatron_dsv.context_parallel.kernel_rates import CalibratedKernels, Line
from megatron_dsv.context_parallel.plan import Topology
from megatron_dsv.testing.latents import write_latents
from megatron_dsv.testing.pretrain import run_pretrain

KERNELS = CalibratedKernels(Line(0, 6e-6), Line(0, 16e-6), Line(0, 7.5e-6), Line(0, 23e-6), Line(0, 3e-5))


@pytest.fixture
def calibration(tmp_path):
    path = tmp_path / "calibration.json"
    Calibration(cluster.load("h200x2"), KERNELS, Handling(heads=Surcharge(7e5), rows=Surcharge(4e6)), 64, 64,
                128).save(path)
    return str(path)


def case(calibration, **changes):
    return Case(**{"name": "sparse, two GPUs", "ranks": 2, "tokens": 512, "sparsity": 0.5, "steps": 5, "heads": 4,
                   "head_dim": 32, "arms": ((0, "(1, 2)"), (2, "(2, 1)"), (3, PLANNED)),
                   "calibration": calibration, **changes})


def test_arms_and_the_steps_that_count(calibration):
    one = case(calibration)
    assert [one.arm_at(step) for step in range(5)] == ["(1, 2)", "(1, 2)", "(2, 1)", PLANNED, PLANNED]
    assert [list(one.timed_steps(arm)) for arm in ("(1, 2)", "(2, 1)", PLANNED)] == [[1], [2], [4]]
    assert Case.from_json(one.to_json()) == one


def test_every_layer_deals_the_same_shares_to_other_heads():
    first, second = densities(0.9, 16, 0), densities(0.9, 16, 1)
    assert first != second
    assert sorted(first) == sorted(second)
    assert sum(first) / 16 == pytest.approx(0.1)


def test_plans_are_those_asked_for(calibration):
    one = case(calibration, tokens=65536, heads=16, head_dim=128, sparsity=0.9)
    for arm in ("(1, 2)", "(2, 1)"):
        blocks = plan_of(arm, one, Topology(2, domain=2), layers=3, tokens=65536)
        assert {f"({block.g_h}, {block.g_s})" for block in blocks} == {arm}
        assert [block.layer for block in blocks] == [0, 1, 2]
    planned = plan_of(PLANNED, one, Topology(2, domain=2), layers=3, tokens=65536)
    # The surcharge on rows makes heads the better split; which heads go together follows the layer's shares.
    assert {block.g_h for block in planned} == {2}
    assert len({block.unit_order for block in planned}) > 1
    for block in planned:
        shares = densities(0.9, 16, block.layer)
        loads = [sum(shares[unit] for unit in units) for units in block.loads(0)]
        assert max(loads) < 1.02 * sum(loads) / 2


def test_predictions_are_of_whole_steps(calibration):
    model = load_model("model/dsv-2.7b")
    one, two = (predicted_ms(ALONE if ranks == 1 else PLANNED, case(
        calibration, ranks=ranks, tokens=65536, heads=16, head_dim=128, sparsity=0.9), model) for ranks in (1, 2))
    assert 1.7 * two < one < 2.2 * two
    with pytest.raises(ValueError, match=r"sparse, two GPUs, .*: memory: "):
        predicted_ms(ALONE, case(calibration, ranks=1, tokens=2**20, heads=56, head_dim=128, sparsity=0.9),
                     load_model("model/dsv-30b"))


def test_rows_are_read_off_a_log(calibration, tmp_path):
    bench = TrainBench("model/dsv-2.7b", [], tmp_path / "logs", False)
    one = case(calibration, arms=((0, "(1, 2)"), (2, PLANNED)), steps=4)
    text = "".join(f" iteration  {number}/ 4 | elapsed time per iteration (ms): {ms} | loss: 1.{number}E+00 |\n"
                   for number, ms in ((1, 900.0), (2, 50.0), (3, 70.0), (4, 40.0)))
    said = []
    text += 'ARM {"arm": "(1, 2)", "peak_gib": 3.5}\n'
    rows = bench._rows(one, text, 0, {(one.name, arm): 45.0 for _, arm in one.arms}, said.append)
    assert [(row["plan"], row["measured_ms"], row["peak_gib"], row["losses"]) for row in rows] == [
        ("(1, 2)", 50.0, 3.5, [1.2]), (PLANNED, 40.0, None, [1.4])]
    assert bench.failures == []
    bench._rows(one, text, 1, {(one.name, arm): 45.0 for _, arm in one.arms}, said.append)
    assert bench.failures[0].startswith("sparse, two GPUs: status 1, 4 of 4 steps; ARM")
    bench.losses = {"sparse, one GPU": [1.0, 2.0], "sparse, two GPUs": [1.0, 2.02, 3.0]}
    bench.compare(said.append)
    assert "losses of 2 steps differ by 1.00e-02 at most" in said[-1]


def test_launches_of_both_lengths(calibration):
    long = cases(262144, "model/dsv-2.7b", 0.9, calibration, short=True)
    assert [[one.ranks for one in group] for group in long] == [[2], [2]]
    assert [len(long[0][0].timed_steps(arm)) for arm in ("(2, 1)", "(1, 2)", PLANNED)] == [3, 3, 3]
    assert list(long[1][0].timed_steps("(2, 1)")) == [0]
    short = cases(65536, "model/dsv-2.7b", 0.9, calibration, short=False)
    assert [[one.ranks for one in group] for group in short] == [[2], [2], [1, 1]]
    assert short[0][0].steps - short[0][0].arms[-1][0] == 20


def test_a_schedule_changes_plans_in_training(calibration, tmp_path):
    data = write_latents(tmp_path / "data", [(8, 16, 16)] * 2)
    model = tmp_path / "model.yaml"
    model.write_text("num-layers: 2\nhidden-size: 128\nnum-attention-heads: 4\nffn-hidden-size: 128\n"
                     "dit-text-dim: 64\ndit-text-length: 16\ndit-position: sincos\ndit-mlp: geglu\n")
    flags = ["--config", str(model), "--latent-data", str(data), "--latent-valid-samples", "0", "--eval-iters", "0",
             "--micro-batch-size", "1", "--global-batch-size", "1", "--train-iters", "5", "--lr", "1e-4",
             "--log-interval", "1", "--dsv-sparse-stage", "sparse"]

    def losses(one, *more):
        schedule = tmp_path / "schedule.json"
        schedule.write_text(one.to_json())
        return run_pretrain([str(schedule), *flags, *more], one.ranks, main=run_scheduled).loss("loss")

    alone = losses(case(calibration, ranks=1, arms=((0, ALONE),)))
    two = losses(case(calibration), "--context-parallel-size", "2", "--dsv-cp-plan", "sequence")
    assert two == pytest.approx(alone, rel=2e-3)
    assert two[:2] == pytest.approx(alone[:2], rel=1e-5)
    # What is kept reaches the layers: the gates of a fresh model let little of it through, but not nothing.
    assert losses(case(calibration, ranks=1, arms=((0, ALONE),), sparsity=0.8)) != alone
    alone = cases(65536, "model/dsv-2.7b", 0.9, calibration, short=False, launches="sparse")
    assert [[one.name for one in group] for group in alone] == [
        ["sparse, two GPUs, 65536 tokens"], ["sparse, one GPU, 65536 tokens"]]
