"""Megatron's own pretrain() on CPU ranks: every layout trains, and resumes as if it had not stopped.

The runs share checkpoints: each straight run saves at iteration 3 on its way to 5.
"""

import re
from pathlib import Path

import pytest
import tiny_model
import torch

from megatron_dsv.testing.pretrain import RunLog, run_pretrain
from megatron_dsv.testing.ranks import RankError, run_ranks

EMA = ["--ema-decay", "0.9"]
DISTOPT = ["--use-distributed-optimizer"]
TP2 = ["--tensor-model-parallel-size", "2"]
PP2 = ["--pipeline-model-parallel-size", "2"]
FROM_3 = ["--ckpt-step", "3"]


def train(world_size: int, *flags: str) -> RunLog:
    return run_pretrain([*tiny_model.BASE, *flags], world_size, main=tiny_model.main, keep_state=True)


def save_at_3(folder: Path) -> list[str]:
    return ["--save", str(folder), "--save-interval", "3"]


@pytest.fixture(scope="module")
def single(tmp_path_factory) -> tuple[RunLog, Path]:
    """The reference: one rank, five iterations, with EMA, saved at 3 and 5."""
    folder = tmp_path_factory.mktemp("single")
    return train(1, *EMA, *save_at_3(folder)), folder


@pytest.fixture(scope="module")
def distopt(tmp_path_factory) -> tuple[RunLog, Path]:
    """DP 2 with the distributed optimizer, otherwise as `single`."""
    folder = tmp_path_factory.mktemp("distopt")
    return train(2, *EMA, *DISTOPT, *save_at_3(folder)), folder


def assert_same_run(log: RunLog, straight: RunLog) -> None:
    """`log` is bitwise the end of `straight`."""
    start = straight.iterations.index(log.iterations[0])
    assert log.losses == straight.losses[start:]
    assert log.grad_norms == straight.grad_norms[start:]
    assert log.validation == [entry for entry in straight.validation if entry[0] > log.iterations[0]]
    for left, right in zip([*log.states, *log.ema], [*straight.states, *straight.ema], strict=True):
        assert left.keys() == right.keys()
        assert all(torch.equal(left[name], right[name]) for name in left)


def assert_close_run(log: RunLog, straight: RunLog) -> None:
    """`log` follows the end of `straight`, but for the order of summation (the precision that Megatron prints)."""
    start = straight.iterations.index(log.iterations[0])
    assert log.loss("mse") == pytest.approx(straight.loss("mse")[start:], rel=2e-6)
    assert log.grad_norms == pytest.approx(straight.grad_norms[start:], rel=2e-6)
    expected = [loss["mse"] for done, loss in straight.validation if done > log.iterations[0]]
    assert [loss["mse"] for _, loss in log.validation] == pytest.approx(expected, rel=2e-6)


def whole(parts: list[dict[str, torch.Tensor]], layout: str) -> dict[str, torch.Tensor]:
    """Assemble ranks' tensors to those of one rank."""
    if layout == "pp2":
        second = {name.replace("layers.0", "layers.1"): value for name, value in parts[1].items()}
        return parts[0] | second
    if layout == "dp2":
        names = dict.fromkeys([*parts[0], *parts[1]])
        return {name: torch.cat([part[name].flatten() for part in parts if name in part]) for name in names}
    axis = {"linear_qkv": 0, "linear_fc1": 0, "linear_proj.weight": 1, "linear_fc2.weight": 1}
    result = {}
    for name, value in parts[0].items():
        cut = next((dim for key, dim in axis.items() if key in name), None)
        result[name] = value if cut is None else torch.cat([part[name] for part in parts], dim=cut)
    return result


def assert_close_tensors(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor], atol: float = 2e-6) -> None:
    assert left.keys() == right.keys()
    for name in left:
        torch.testing.assert_close(left[name].flatten(), right[name].flatten(), rtol=0, atol=atol, msg=lambda m: m)


def test_data_parallel_equals_one_rank(single, distopt):
    reference, _ = single
    plain = train(2, *EMA)
    assert_close_run(plain, reference)
    assert_close_run(distopt[0], reference)
    assert_close_tensors(plain.states[1], reference.states[0])
    assert_close_tensors(distopt[0].states[1], reference.states[0])
    # The shards of the distributed optimizer's EMA are two halves of the whole.
    sizes = [sum(shard.numel() for shard in rank.values()) for rank in distopt[0].ema]
    assert max(sizes) < 0.6 * sum(sizes)
    assert_close_tensors(whole(distopt[0].ema, "dp2"), reference.ema[0])


def test_loss_falls(single):
    losses = single[0].loss("mse")
    assert losses[-1] < 0.6 * losses[0]


@pytest.mark.parametrize(
    ("flags", "layout"), [(TP2, "tp2"), ([*TP2, "--sequence-parallel"], "tp2"), (PP2, "pp2")], ids=["tp", "tp-sp", "pp"]
)
@pytest.mark.parametrize("optimizer", [[], DISTOPT], ids=["adam", "distopt"])
def test_resume_in_another_layout(single, distopt, flags, layout, optimizer):
    straight, folder = distopt if optimizer else single
    log = train(2, *EMA, *flags, *optimizer, *FROM_3, "--load", str(folder))
    assert log.iterations == [4, 5]
    assert_close_run(log, straight)
    assert_close_tensors(whole(log.states, layout), straight.states[0])
    reference = whole(straight.ema, "dp2") if optimizer else straight.ema[0]
    # One data-parallel rank owns all of its tensors; the distributed optimizer keeps them flat.
    ema = [
        {name: shard.view_as(state[name]) for name, shard in part.items()} for part, state in zip(log.ema, log.states)
    ]
    assert_close_tensors(whole(ema, layout), reference)


def test_resume_in_the_same_layout_is_bitwise(single, distopt):
    assert_same_run(train(1, *EMA, *FROM_3, "--load", str(single[1])), single[0])
    assert_same_run(train(2, *EMA, *DISTOPT, *FROM_3, "--load", str(distopt[1])), distopt[0])


@pytest.mark.parametrize("flags", [[], DISTOPT], ids=["adam", "distopt"])
def test_bf16_trains_and_resumes_bitwise(single, tmp_path, flags):
    straight = train(2, *EMA, *flags, "--bf16", *save_at_3(tmp_path))
    # bf16 has 8 bits: a relative rounding of 2^-9 a value.
    assert straight.loss("mse") == pytest.approx(single[0].loss("mse"), rel=0.03)
    assert straight.states[0]["project_in.weight"].dtype == torch.bfloat16
    assert all(shard.dtype == torch.float32 for shard in straight.ema[0].values())
    assert_same_run(train(2, *EMA, *flags, "--bf16", *FROM_3, "--load", str(tmp_path)), straight)


def test_bucket_format_keeps_the_ema(tmp_path):
    # bf16, because in fp32 Megatron cannot load this format: it writes into views of leaf parameters with grad on.
    flags = [*EMA, *DISTOPT, "--bf16"]
    base = [flag for flag in tiny_model.BASE if flag != "--dist-ckpt-optim-fully-reshardable"]
    straight = run_pretrain([*base, *flags, *save_at_3(tmp_path)], 2, main=tiny_model.main, keep_state=True)
    resumed = run_pretrain(
        [*base, *flags, *FROM_3, "--load", str(tmp_path)], 2, main=tiny_model.main, keep_state=True
    )
    assert_same_run(resumed, straight)


def test_full_recompute_changes_nothing(single):
    flags = "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1".split()
    assert_same_run(train(1, *EMA, *flags), single[0])


def test_longer_run_from_a_checkpoint_without_ema(single, tmp_path):
    """One resume with another --train-iters, and an EMA that starts at the loaded weights."""
    short = train(1, "--train-iters", "3", *save_at_3(tmp_path))
    longer = train(1, *EMA, "--train-iters", "4", "--load", str(tmp_path))
    assert longer.iterations == [4]
    assert "the checkpoint has no EMA of the weights" in longer.output[0]
    assert "lr_decay_steps 24 -> 32" in longer.output[0]
    # The learning rate of iteration 4 is that of the current flags: 24 of 32 samples into the cosine.
    current = float(re.search(r"iteration +4/.*?learning rate: ([0-9.E+-]+)", longer.output[0]).group(1))
    expected = train(1, "--train-iters", "4").output[0]
    assert current == float(re.search(r"iteration +4/.*?learning rate: ([0-9.E+-]+)", expected).group(1))
    for name, average in longer.ema[0].items():
        before, after = short.states[0][name], longer.states[0][name]
        # First update: d = min(0.9, 1/10).
        torch.testing.assert_close(average, 0.1 * before + 0.9 * after, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lr", "2e-2"], "ScheduleError: --lr is 0.02, but the checkpoint was saved with 0.01"),
        (["--lr-decay-style", "linear"], "ScheduleError: --lr-decay-style gives lr_decay_style = 'linear', but"),
    ],
)
def test_another_schedule_names_the_flag(single, flags, message):
    with pytest.raises(RankError, match=message):
        train(1, *flags, *FROM_3, "--load", str(single[1]))


def test_validation_is_reported_without_perplexity(single, tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = train(1, "--tensorboard-dir", str(tmp_path))
    assert "PPL" not in log.output[0]
    assert log.output[0].count("validation loss at iteration") == 3
    events = EventAccumulator(str(tmp_path))
    events.Reload()
    written = [(event.step, event.value) for event in events.Scalars("mse validation")]
    assert written == [(done, pytest.approx(loss["mse"])) for done, loss in log.validation]
    assert not [tag for tag in events.Tags()["scalars"] if "ppl" in tag.lower()]


def test_asynchronous_save_is_refused_without_cuda(tmp_path):
    with pytest.raises(RankError, match="NotImplementedError: --async-save needs CUDA"):
        train(1, "--async-save", *save_at_3(tmp_path))


@pytest.mark.parametrize(("flags", "layout"), [([], "dp1"), (TP2, "tp2"), (PP2, "pp2")], ids=["one", "tp", "pp"])
def test_ema_weights_for_sampling(distopt, flags, layout):
    straight, folder = distopt
    world_size = 2 if flags else 1
    weights = run_ranks(
        tiny_model.load_ema, world_size, [*tiny_model.BASE, *flags], str(folder / "iter_0000005"), timeout=60
    )
    assert_close_tensors(weights[0] if not flags else whole(weights, layout), whole(straight.ema, "dp2"), atol=0)


def test_checkpoint_without_ema_cannot_be_sampled_with_it(tmp_path):
    train(1, "--train-iters", "1", *save_at_3(tmp_path))
    with pytest.raises(RankError, match="holds no EMA of the weights: train with --ema-decay"):
        run_ranks(tiny_model.load_ema, 1, tiny_model.BASE, str(tmp_path / "iter_0000001"))
    with pytest.raises(RankError, match="is not a torch_dist checkpoint of one iteration"):
        run_ranks(tiny_model.load_ema, 1, tiny_model.BASE, str(tmp_path))
