"""A resumed run continues the straight one: bitwise in the same layout, to printed precision in another.

Straight runs save halfway and at the end, so that a resumed run is compared with the straight one's whole checkpoint:
weights, predictors and both their Adam moments, profiles, gate states, EMA and the optimizer's own moments.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dsv.testing.checkpoints import contents
from megatron_dsv.testing.ranks import RankError
from megatron_dsv.training.main import main

SMALL = "--num-layers 2 --global-batch-size 2 --eval-iters 0 --dsv-kv-block-size 4"
TP2, PP2, DISTRIBUTED = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2", \
    "--use-distributed-optimizer"
STAGES = {
    # The budget leaves blocks out, and the gate opens at the second profile, in step 3 of 6: it is in the checkpoint.
    "auto": "--dsv-sparse-stage auto --dsv-gate-recall 0.05 --dsv-budget-mass 0.5",
    "sparse": "--dsv-sparse-stage sparse --dsv-budget-mass 0.5",
    "predictor": "--dsv-sparse-stage predictor",
}
LAYOUTS = {"one": (1, ""), "dp2-distributed-optimizer": (2, DISTRIBUTED),
           "pp2-distributed-optimizer": (2, f"{PP2} {DISTRIBUTED}")}


def printing_draws(argv: list[str]) -> None:
    """The program, printing each training sample that it asks for."""
    from megatron_dsv.training.datasets import DiffusionDataset

    original = DiffusionDataset.__getitem__

    def printing(self: DiffusionDataset, index: int) -> dict[str, Any]:
        item = original(self, index)
        sums = [item[name].double().sum().item() for name in ("latents", "text", "noise", "timestep")]
        print(f"DRAWN {index} {sums}", flush=True)
        return item

    DiffusionDataset.__getitem__ = printing  # type: ignore[method-assign]
    main(argv)


def drawn(log: Any) -> list[str]:
    """Every sample that some rank drew, in the order of the sample counter."""
    lines = {line for output in log.output for line in re.findall(r"DRAWN .*", output)}
    return sorted(lines, key=lambda line: int(line.split()[1]))


@pytest.fixture(scope="module")
def straight(train, tmp_path_factory):
    """straight(stage, layout): (folder, log) of six steps, saved after three and at the end; each runs once."""
    done = {}

    def run(stage: str, layout: str) -> tuple[Path, Any]:
        if (stage, layout) not in done:
            folder = tmp_path_factory.mktemp("straight")
            ranks, flags = LAYOUTS[layout]
            log = train(f"{SMALL} {STAGES[stage]} {flags} --ema-decay 0.9 --save {folder} --save-interval 3", ranks,
                        steps=6, main=printing_draws)
            done[stage, layout] = folder, log
        return done[stage, layout]

    return run


@pytest.mark.parametrize(("stage", "layout"), [
    pytest.param(stage, layout, marks=[pytest.mark.slow] if stage != "auto" and "distributed" in layout else [])
    for stage in STAGES for layout in LAYOUTS if stage == "auto" or not layout.startswith("pp2")])
def test_same_layout_is_bitwise(train, straight, tmp_path, stage, layout):
    folder, expected = straight(stage, layout)
    ranks, flags = LAYOUTS[layout]
    log = train(f"{SMALL} {STAGES[stage]} {flags} --ema-decay 0.9 --load {folder} --ckpt-step 3 --save {tmp_path} "
                "--save-interval 6", ranks, steps=6, main=printing_draws)
    assert log.iterations == [4, 5, 6]
    assert log.losses == expected.losses[3:]
    assert log.grad_norms == expected.grad_norms[3:]
    assert drawn(log) == drawn(expected)[6:], "samples, noise, timesteps and dropped captions"
    (tensors, common), (expected_tensors, expected_common) = contents(tmp_path, 6), contents(folder, 6)
    assert tensors.keys() == expected_tensors.keys()
    for key, value in expected_tensors.items():
        torch.testing.assert_close(tensors[key], value, rtol=0, atol=0, equal_nan=True, msg=key)
    assert common["optimizer"] == expected_common["optimizer"]
    assert common["opt_param_scheduler"] == expected_common["opt_param_scheduler"]
    assert common["args"].consumed_train_samples == expected_common["args"].consumed_train_samples == 12
    halfway, _ = contents(folder, 3)
    moved = [key for key, value in expected_tensors.items() if not torch.equal(value, halfway[key])]
    for part in ("decoder.layers.mlp.linear_fc1.weight", "decoder.layers.self_attention.predictor.query_weight",
                 "decoder.layers.self_attention.predictor.key_bias_exp_avg_sq", "optimizer.state.ema.head.weight",
                 "decoder.layers.self_attention.statistics.head_recall"):
        assert any(key.endswith(part) for key in moved), f"{part} must change between the two checkpoints"
    if stage == "auto":
        assert tensors["decoder.layers.self_attention.statistics.schedule_state"][:, 0, 0].tolist() == [1, 1]


def test_the_gate_moves_where_the_straight_run_moves_it(straight):
    """Six steps of `auto` above hold dense steps and sparse ones, or resuming them would show little."""
    _, log = straight("auto", "one")
    counts = [int(count) for output in log.output for count in re.findall(r"dsv/sparse_layers: (\d)", output)]
    assert counts[0] == 0
    assert counts[-1] == 2


def test_evaluation_alone_needs_no_length(train, tmp_path):
    flags = "--num-layers 1 --global-batch-size 2 --eval-iters 2 --ema-decay 0.9"
    expected = train(f"{flags} --save {tmp_path} --save-interval 3", steps=3)
    before = (tmp_path / "config.yaml").read_text()
    log = train(f"{flags} --load {tmp_path} --save {tmp_path} --save-interval 3 --skip-train", steps=None)
    assert (tmp_path / "config.yaml").read_text() == before
    assert log.iterations == []
    assert [values for _, values in log.validation] == [values for _, values in expected.validation]


def test_selections_of_another_size_are_measured_anew(train, straight):
    """The gate of the checkpoint is open, for budgets of blocks of 4: of blocks of 8 nothing is known."""
    folder, _ = straight("auto", "one")
    log = train(f"{SMALL} {STAGES['auto']} --ema-decay 0.9 --load {folder} --ckpt-step 3 --dsv-kv-block-size 8",
                steps=6)
    (text,) = log.output
    assert (" block fraction and recall of the checkpoint's layers were measured with --dsv-kv-block-size 4, this run "
            "has --dsv-kv-block-size 8: they are measured anew, and every layer passes the gate anew") in text
    assert re.findall(r"profile at step (\d)", text) == ["4", "5"]
    # The first profile gives the budgets, the second the first recall.
    assert re.findall(r"dsv/sparse_layers: (\d)", text) == ["0"] * 3
    first, second = re.findall(r"profile at step \d:((?:\n   layer .*)+)", text)
    assert "recall not measured" in first
    assert "not measured" not in second


def test_a_longer_run_starts_like_the_shorter(train, straight):
    folder, expected = straight("auto", "one")
    log = train(f"{SMALL} {STAGES['auto']} --ema-decay 0.9 --load {folder} --ckpt-step 3", steps=8)
    assert log.iterations == [4, 5, 6, 7, 8]
    assert log.losses[:3] == expected.losses[3:]
    assert log.grad_norms[:3] == expected.grad_norms[3:]


def test_other_batches_per_rank_keep_the_order_of_samples(train, straight):
    """One rank with micro-batches of one, then two ranks, then one rank with a micro-batch of two."""
    folder, expected = straight("predictor", "one")
    for ranks, flags in ((2, ""), (1, "--micro-batch-size 2")):
        log = train(f"{SMALL} {STAGES['predictor']} --ema-decay 0.9 --load {folder} --ckpt-step 3 {flags}", ranks,
                    steps=6, main=printing_draws)
        assert drawn(log) == drawn(expected)[6:]
        assert log.loss("loss") == pytest.approx(expected.loss("loss")[3:], rel=2e-6)
        assert log.grad_norms == pytest.approx(expected.grad_norms[3:], rel=1e-4)


def learning_rates(log: Any) -> list[float]:
    return [float(rate) for output in log.output for rate in re.findall(r"learning rate: ([\d.E+-]+)", output)]


def test_another_batch_size_goes_on_with_the_schedule_and_ends_with_the_samples(train, tmp_path):
    flags = "--num-layers 1 --eval-iters 0 --dsv-sparse-stage dense --lr-decay-style cosine --lr-warmup-fraction 0.3"
    expected = learning_rates(train(f"{flags} --save {tmp_path} --save-interval 2", steps=4))
    assert len(set(expected)) == 4
    halved = train(f"{flags} --load {tmp_path} --ckpt-step 2 --global-batch-size 2", steps=4)
    assert halved.iterations == [3, 4]
    assert learning_rates(halved) == expected[2:]
    doubled = train(f"{flags} --load {tmp_path} --ckpt-step 2 --global-batch-size 8 --train-samples 24", steps=None)
    assert doubled.iterations == [3, 4]
    assert re.findall(r"consumed samples: +(\d+)", doubled.output[0]) == ["16", "24"]
    assert learning_rates(doubled)[-1] == 0, "the end of the schedule"
    again = train(f"{flags} --load {tmp_path}", steps=4)
    assert again.iterations == []
    assert "nothing is left to train: the checkpoint holds iteration 4, and the last one is 4;" in again.output[0]


def test_a_trial_refuses_the_resumes_that_a_launch_refuses(train, straight, mixed_latents):
    folder, _ = straight("auto", "one")
    flags = f"{SMALL} {STAGES['auto']} --ema-decay 0.9 --load {folder} --dry-run"
    for more, data, message in (
        ("--lr 1e-3", {}, "--lr is 0.001, but the checkpoint was saved with 0.002"),
        ("--lr-warmup-iters 2", {}, "gives lr_warmup_steps = 4, but the checkpoint was saved with 0"),
        ("--global-batch-size 5", {"data": mixed_latents}, "--global-batch-size must divide the 12 samples consumed"),
    ):
        with pytest.raises(RankError, match=message):
            train(f"{flags} {more}", steps=8, **data)
    for more in ("--global-batch-size 4", "--lr 1e-3 --no-load-optim"):
        assert "the launch can run\n" in train(f"{flags} {more}", steps=8).output[0]
    for more, words in (("--hidden-size 96", "trained with --hidden-size 48, this run has --hidden-size 96"),
                        ("--num-layers 3 --finetune", "trained with --num-layers 2, this run has --num-layers 3")):
        with pytest.raises(RankError, match=words):
            train(f"{flags} {more}", steps=8)
    assert "the launch can run, but nothing is left to train: " in train(flags, steps=4).output[0]


HOPS = [(2, f"{TP2} --sequence-parallel"), (2, PP2), (2, ""), (2, TP2)]


@pytest.mark.parametrize(("stage", "optimizer", "hops"), [
    pytest.param("auto", DISTRIBUTED, HOPS, id="auto-distributed-optimizer"),
    pytest.param("sparse", "", HOPS[:2], id="sparse", marks=pytest.mark.slow)])
def test_other_layouts_to_printed_precision(train, tmp_path, stage, optimizer, hops):
    """A run that changes its layout every two steps against one that never does."""
    flags = f"{SMALL} {STAGES[stage]} {optimizer} --ema-decay 0.9 --dsv-freeze-selection"
    steps = 2 + 2 * len(hops)
    expected = train(f"{flags} --save {tmp_path / 'straight'} --save-interval 2", steps=steps)
    folder = tmp_path / "straight"
    for number, (ranks, layout) in enumerate(hops, start=1):
        done, target = 2 * number, tmp_path / f"hop{number}"
        log = train(f"{flags} {layout} --load {folder} --ckpt-step {done} --save {target} --save-interval 2", ranks,
                    steps=done + 2)
        assert log.iterations == [done + 1, done + 2]
        assert log.loss("loss") == pytest.approx(expected.loss("loss")[done:done + 2], rel=1e-6)
        assert log.grad_norms == pytest.approx(expected.grad_norms[done:done + 2], rel=1e-4)
        folder = target
    (tensors, _), (expected_tensors, _) = contents(folder, steps), contents(tmp_path / "straight", steps)
    for key, value in expected_tensors.items():
        # Adam turns the rounding noise of a gradient that is zero by symmetry, a key's bias, into a step.
        torch.testing.assert_close(tensors[key], value, rtol=1e-3, atol=2e-5, equal_nan=True, msg=key)
