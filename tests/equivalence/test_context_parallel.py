"""Context parallelism computes what one rank computes, with predicted selections and another plan for every block at
every step, from one checkpoint with predictors.

Weights are large enough that attention shows: what a selection leaves out moves the loss fifty times further than
the tolerance of the comparison.
"""

import re

import pytest
import torch

from megatron_dsv.context_parallel.plan import CPPlan
from megatron_dsv.context_parallel.plan_commit import PlanStore
from megatron_dsv.testing.checkpoints import contents
from megatron_dsv.training.main import main

SMALL = ("--num-layers 2 --global-batch-size 2 --init-method-std 0.2 --lr 1e-2 --dsv-predictor-lr 1e-2 "
         "--dsv-kv-block-size 4")
SPARSE = f"{SMALL} --dsv-sparse-stage sparse --dsv-budget-mass 0.4"
TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
CP2, CP4 = "--context-parallel-size 2", "--context-parallel-size 4"
RANDOM, DISTRIBUTED = "--dsv-cp-plan random", "--use-distributed-optimizer"
RECOMPUTE = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"


def printing_plans(argv: list[str]) -> None:
    """The program, printing every plan that is put in force."""
    propose = PlanStore.propose

    def printing(self: PlanStore, *args: object, **named: object) -> object:
        decision = propose(self, *args, **named)
        print(f"PLAN {self.plan.to_json()}", flush=True)
        return decision

    PlanStore.propose = printing  # type: ignore[method-assign]
    main(argv)


def assert_same(log, expected):
    assert log.iterations == expected.iterations
    assert log.loss("loss") == pytest.approx(expected.loss("loss"), rel=2e-6)
    assert log.grad_norms == pytest.approx(expected.grad_norms, rel=2e-5)
    assert log.validation[-1][1] == pytest.approx(expected.validation[-1][1], rel=2e-6, nan_ok=True)


def reported(log, name):
    """A number of DSV, as printed each step by the rank that prints."""
    return [float(value) for output in log.output for value in re.findall(rf"{name}: (\S+)", output)]


@pytest.fixture(scope="module")
def start(train, tmp_path_factory):
    """A checkpoint with predictors, of two steps."""
    folder = tmp_path_factory.mktemp("start")
    train(f"{SMALL} {DISTRIBUTED} --dsv-sparse-stage predictor --save {folder} --save-interval 2 --eval-iters 0",
          steps=2)
    return f"{DISTRIBUTED} --load {folder}"


@pytest.fixture(scope="module")
def one_rank(train, start):
    return train(f"{SPARSE} {start}", steps=5)


def test_the_selection_shows(train, start, one_rank):
    dense = train(f"{SMALL} {start} --dsv-sparse-stage dense", steps=5)
    assert max(abs(got - other) / other for got, other in zip(one_rank.loss("loss"), dense.loss("loss"))) > 1e-4


@pytest.mark.parametrize(("ranks", "layout"), [
    (8, f"{TP2} {CP4} --dsv-cp-groups dedicated"), (4, f"{PP2} {CP2} {RECOMPUTE}"),
    (4, f"{TP2} {CP2} --sequence-parallel"), (4, f"{CP2} --overlap-grad-reduce --overlap-param-gather"),
], ids=["tp2-cp4", "pp2-cp2-recompute", "tp2-cp2-sp", "cp2-dp2-overlap"])
def test_predicted_selections_under_changing_plans(train, start, one_rank, ranks, layout):
    log = train(f"{SPARSE} {layout} {RANDOM} {start}", ranks, steps=5, main=printing_plans)
    assert_same(log, one_rank)
    for name in ("dsv/predictor_loss", "dsv/predictor_grad_norm", "dsv/recall", "dsv/keep_ratio", "dsv/sparsity"):
        assert reported(log, name) == pytest.approx(reported(one_rank, name), rel=2e-3), name
    plans = [CPPlan.from_json(text) for text in re.findall("PLAN (.*)", log.output[0])]
    assert [plan.effective_step for plan in plans] == [2, 3, 4, 5]
    blocks = [block for plan in plans for block in plan.blocks[0]]
    assert len({plan.blocks for plan in plans}) == len(plans)
    assert len({block.split for block in blocks}) > 1


def test_shapes_of_several_lengths(train, start, mixed_latents):
    """A bucket for each length, micro-batches of two, and pipeline stages that learn the length from each other."""
    flags = f"{SPARSE} --micro-batch-size 2 {start}"
    log = train(f"{flags} {PP2} {CP2} {RANDOM}", 4, steps=5, data=mixed_latents, main=printing_plans)
    assert_same(log, train(flags, steps=5, data=mixed_latents))
    plan = CPPlan.from_json(re.findall("PLAN (.*)", log.output[0])[-1])
    assert plan.buckets == ((1, 32), (33, 96))
    assert plan.blocks[0] != plan.blocks[1]


@pytest.mark.parametrize("flags", [
    f"{SMALL} --dsv-sparse-stage dense --dsv-attention window-1/3",
    f"{SPARSE} --dsv-predictor-input qk",
    f"{SMALL} --dsv-sparse-stage auto --dsv-gate-recall 0.05 --dsv-budget-mass 0.5 --dit-position sincos",
], ids=["window", "qk", "auto"])
def test_stages(train, flags):
    """The gate of auto opens in the fifth step; before it, attention is dense and predictors learn."""
    expected = train(flags, steps=5)
    log = train(f"{flags} {CP2} {RANDOM}", 2, steps=5)
    assert_same(log, expected)
    for name in ("dsv/recall", "dsv/predictor_loss"):
        assert reported(log, name) == pytest.approx(reported(expected, name), rel=2e-3)
    assert reported(log, "dsv/sparse_layers") == reported(expected, "dsv/sparse_layers")
    if "auto" in flags:
        assert reported(log, "dsv/sparse_layers") == [0, 0, 0, 0, 2]


def test_resume_is_bitwise(train, tmp_path):
    flags = f"{SPARSE} {CP2} {RANDOM} {DISTRIBUTED} --ema-decay 0.9"
    straight = train(f"{flags} --save {tmp_path} --save-interval 2", 2, steps=4)
    resumed = train(f"{flags} --load {tmp_path} --ckpt-step 2 --save {tmp_path / 'resumed'} --save-interval 2", 2,
                    steps=4)
    assert resumed.iterations == [3, 4]
    assert (resumed.losses, resumed.grad_norms) == (straight.losses[2:], straight.grad_norms[2:])
    (tensors, _), (expected, _) = contents(tmp_path / "resumed", 4), contents(tmp_path, 4)
    assert tensors.keys() == expected.keys()
    for key, value in expected.items():
        torch.testing.assert_close(tensors[key], value, rtol=0, atol=0, equal_nan=True, msg=key)


def test_a_run_that_changes_its_context_parallel_size(train, tmp_path):
    """Weights, predictors, profiles and all their moments, EMA and the optimizer's, against a run that never does."""
    flags = f"{SPARSE} {DISTRIBUTED} --ema-decay 0.9"
    expected = train(f"{flags} --save {tmp_path / '0'} --save-interval 1", steps=4)
    for done, ranks, layout in ((1, 2, f"{CP2} --dsv-cp-plan heads"), (2, 1, ""), (3, 4, CP4)):
        log = train(f"{flags} {layout} --load {tmp_path / str(done - 1)} --ckpt-step {done} --save "
                    f"{tmp_path / str(done)} --save-interval 1", ranks, steps=done + 1)
        assert log.loss("loss") == pytest.approx(expected.loss("loss")[done:done + 1], rel=2e-6)
        assert log.grad_norms == pytest.approx(expected.grad_norms[done:done + 1], rel=2e-5)
    (tensors, _), (expected_tensors, _) = contents(tmp_path / "3", 4), contents(tmp_path / "0", 4)
    assert tensors.keys() == expected_tensors.keys()
    for key, value in expected_tensors.items():
        # Adam turns the rounding noise of a gradient that is zero by symmetry, a key's bias, into a step.
        torch.testing.assert_close(tensors[key], value, rtol=1e-3, atol=2e-5, equal_nan=True, msg=key)
