"""What Megatron's data set provider hands out, and how a run ends that meets a damaged sample."""

from pathlib import Path
from typing import Any

import pytest

from megatron_dsv.data.latent_dataset import LatentDataset
from megatron_dsv.testing.latents import write_latents
from megatron_dsv.testing.programs import run_program
from megatron_dsv.testing.ranks import run_ranks
from megatron_dsv.training.arguments import dry_parse
from megatron_dsv.training.datasets import DatasetProvider, SampleOrderError


def provided(data: Path, *flags: str, consumed: int = 0, trained: int = 0) -> tuple[Any, Any]:
    """(arguments, validation set) of a launch that has trained and evaluated before."""
    args = dry_parse(["--config", "model/debug", "--micro-batch-size", "1", "--train-iters", "8", "--lr", "1e-4",
                      "--eval-iters", "2", "--latent-valid-samples", "6", "--latent-data", str(data), *flags], 1)
    args.consumed_valid_samples, args.consumed_train_samples = consumed, trained
    _, validation, _ = DatasetProvider(args, LatentDataset(data, text_length=16))((8, 16, 0))
    return args, validation


@pytest.mark.parametrize(("batch", "consumed"), [(4, 0), (4, 6)])
def test_an_evaluation_begins_at_the_start_of_a_pass(tmp_path, batch, consumed):
    """Also where the samples evaluated so far are no multiple of the batch, as after a change of its size."""
    data = write_latents(tmp_path, [(3, 8, 12)] * 6 + [(1, 4, 6)] * 6)
    args, validation = provided(data, "--global-batch-size", str(batch), consumed=consumed)
    # Megatron's sampler starts there.
    begin = args.consumed_valid_samples
    for start in range(begin, begin + 16, batch):
        shapes = {tuple(validation[index]["latents"].shape) for index in range(start, start + batch)}
        assert len(shapes) == 1, "the samples of a global batch share a shape"
    assert [validation[begin + index]["index"] for index in range(8)] == list(range(8))
    assert len(validation) >= begin + 16


def test_a_batch_size_that_tears_a_group_is_refused_unless_nothing_is_trained(tmp_path):
    data = write_latents(tmp_path, [(3, 8, 12)] * 6 + [(1, 4, 6)] * 6)
    with pytest.raises(SampleOrderError, match="--global-batch-size must divide the 6 samples consumed so far, got 4"):
        provided(data, "--global-batch-size", "4", trained=6)
    provided(data, "--global-batch-size", "4", "--skip-train", trained=6)


@pytest.mark.parametrize("workers", [0, 1])
def test_a_sample_damaged_in_place_ends_the_run_in_one_line(tmp_path, workers):
    data = write_latents(tmp_path / "data", [(3, 8, 12)])
    sample, = data.glob("samples/*/*")
    sample.write_bytes(b"\xff" * sample.stat().st_size)
    flags = ("--config model/debug --latent-valid-samples 0 --eval-iters 0 --micro-batch-size 1 --train-iters 2 "
             f"--lr 1e-4 --lr-decay-style constant --num-layers 2 --hidden-size 48 --ffn-hidden-size 96 "
             f"--num-workers {workers}")
    (code, text), = run_ranks(run_program, 1, [*flags.split(), "--latent-data", str(data)], tmp_path)
    lines = [line for line in text.splitlines() if "error" in line.lower() or "Traceback" in line]
    assert (code, len(lines)) == (1, 1), text
    assert f": error: --latent-data has a damaged file: {sample} Error while deserializing" in lines[0]
    assert lines[0].endswith("; list all with `dsv prepare --verify`, delete them, and run the same `dsv prepare` "
                             "again")
