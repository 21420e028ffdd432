"""A step that is not finite ends the run on all ranks with one line, and leaves the last checkpoint as it was."""

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron_dsv.testing.programs import run_program
from megatron_dsv.testing.ranks import run_ranks
from megatron_dsv.training.finite_steps import FiniteSteps, NotFiniteError, _check_weights

SMALL = ("--config model/debug --latent-valid-samples 4 --eval-iters 0 --micro-batch-size 1 --global-batch-size 2 "
         "--lr 2e-3 --lr-decay-style constant --log-interval 1 --num-workers 0 --num-layers 2 --hidden-size 48 "
         "--ffn-hidden-size 96 --train-iters 4 --dsv-q-block-size 8")


def _poison(rank: int, where: str, step: int) -> None:
    """Makes one number of ``where`` on one rank infinite or NaN, in one step."""
    from megatron_dsv.training import forward_step

    original = forward_step.loss_function

    def poisoned(output: torch.Tensor, *, run: Any, training: bool, **named: Any) -> Any:
        if training and int(os.environ["RANK"]) == rank and run.args.curr_iteration == step - 1:
            if where == "loss":
                output = output * float("inf")
            else:
                output.register_hook(lambda gradient: gradient * float("nan"))
        return original(output, run=run, training=training, **named)

    forward_step.loss_function = poisoned


def _outcome(argv: list[str], folder: Path, poison: tuple[int, str, int]) -> tuple[Any, str, list[str]]:
    """Exit status, stderr and the names in the folder that the run saves to, of this rank."""
    _poison(*poison)
    return *run_program(argv, folder), sorted(os.listdir(folder / "run"))


@pytest.fixture
def outcome(latents, tmp_path) -> Callable[..., list[tuple[Any, str, list[str]]]]:
    def run(flags: str, ranks: int, poison: tuple[int, str, int]) -> list[tuple[Any, str, list[str]]]:
        (tmp_path / "run").mkdir()
        argv = [*SMALL.split(), "--latent-data", str(latents), "--save", str(tmp_path / "run"), "--save-interval", "2",
                *flags.split()]
        return run_ranks(_outcome, ranks, argv, tmp_path, poison)

    return run


CASES = {
    # flags, ranks, (rank, what, step), what is said of it
    "loss": ("--use-distributed-optimizer", 2, (1, "loss", 3), "iteration 3: the loss is not finite on rank 1;"),
    "context-parallel": ("--context-parallel-size 2 --dsv-cp-plan random --dsv-kv-block-size 8", 2, (1, "loss", 3),
                         "iteration 3: the loss is not finite on rank 1;"),
    "gradient": ("--bf16", 1, (0, "gradient", 3), "iteration 3: the losses are finite, but a gradient is not;"),
    "first-step": ("--dsv-sparse-stage predictor --dsv-q-block-size 16 --dsv-kv-block-size 16", 1, (0, "loss", 1),
                   "iteration 1: the loss is not finite on rank 0;"),
    "fp16-loss": ("--fp16", 1, (0, "loss", 3), "iteration 3: the loss is not finite on rank 0;"),
}


@pytest.mark.parametrize("case", CASES)
def test_one_line_and_nothing_saved(outcome, tmp_path, case):
    flags, ranks, poison, message = CASES[case]
    results = outcome(flags, ranks, poison)
    assert [code for code, _, _ in results] == [1] * ranks
    lines = [line for _, text, _ in results for line in text.splitlines()]
    assert len(lines) == 1, lines
    assert message in lines[0]
    assert f"--iterations-to-skip {poison[2]}" in lines[0]
    assert ("dsv prepare --verify" in lines[0]) == (poison[1] == "loss")
    saved = [name for name in os.listdir(tmp_path / "run") if name.startswith("iter_")]
    assert saved == (["iter_0000002"] if poison[2] > 2 else [])
    tracker = tmp_path / "run" / "latest_checkpointed_iteration.txt"
    assert not saved or tracker.read_text() == "2"
    assert not (tmp_path / "run" / "running.lock").exists()


def test_the_step_can_be_skipped(outcome):
    ((code, errors, names),) = outcome("--iterations-to-skip 3", 1, (0, "loss", 3))
    assert (code, errors) == (None, "")
    assert "iter_0000004" in names


@pytest.mark.parametrize("layout", ["--tensor-model-parallel-size 2",
                                    pytest.param("--context-parallel-size 2", marks=pytest.mark.slow)])
def test_a_skipped_step_takes_its_samples_with_it(train, layout):
    """Every rank passes over the same samples; weights that stay as they are make losses comparable."""
    flags = "--num-layers 1 --global-batch-size 2 --eval-iters 0 --lr 1e-30 --min-lr 0"
    straight = train(flags, steps=3)
    skipping = train(f"{flags} --iterations-to-skip 2 {layout}", 2, steps=3)
    assert skipping.iterations == [1, 3]
    first, second, third = straight.loss("loss")
    assert skipping.loss("loss") == pytest.approx([first, third], rel=2e-6)
    assert second != pytest.approx(third, rel=1e-3)


def test_weights_that_overflowed_are_not_saved():
    def check(bad: float) -> str:
        weights = [torch.ones(3), torch.ones(2, 2)]
        if int(os.environ["RANK"]) == 1:
            weights[1][0, 1] = bad
        try:
            _check_weights(7, weights)
        except NotFiniteError as error:
            return str(error)
        return ""

    for bad in (float("nan"), float("-inf")):
        assert all("iteration 7: weights are not finite" in text for text in run_ranks(check, 2, bad))
    assert run_ranks(check, 2, 3e38) == ["", ""]


def test_a_dynamic_loss_scale_may_overflow_gradients():
    class Chunk:
        expert_parallel_buffers: tuple[Any, ...] = ()

        def __init__(self, value: float) -> None:
            self.buffers = (type("Buffer", (), {"grad_data": torch.tensor([1.0, value])}),)

    def check() -> None:
        FiniteSteps(losses=True, gradients=False).check([Chunk(float("inf"))], 1)
        FiniteSteps(losses=True, gradients=True).check([Chunk(3e38)], 1)
        with pytest.raises(NotFiniteError, match="iteration 1: the losses are finite, but a gradient is not"):
            FiniteSteps(losses=True, gradients=True).check([Chunk(float("inf"))], 1)
        watched = FiniteSteps(losses=True, gradients=False)
        watched.see(torch.tensor(float("nan")))
        watched.see(torch.tensor(1.0))
        with pytest.raises(NotFiniteError, match="iteration 2: the loss is not finite on rank 0"):
            watched.check([Chunk(1.0)], 2)

    run_ranks(check, 1)
