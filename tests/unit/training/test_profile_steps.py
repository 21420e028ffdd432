"""Which steps may be profiled, against the samples that the data set hands out."""

from pathlib import Path

import pytest

from megatron_dsv.data.latent_dataset import LatentDataset
from megatron_dsv.sparsity.schedule import profile_due
from megatron_dsv.testing.latents import write_latents
from megatron_dsv.training.arguments import dry_parse
from megatron_dsv.training.datasets import DatasetProvider
from megatron_dsv.training.run import TrainingRun

STEPS, BATCH = 40, 2


def run_of(data: Path, *flags: str) -> TrainingRun:
    argv = ["--config", "model/debug", "--micro-batch-size", "1", "--train-iters", str(STEPS), "--lr", "1e-4",
            "--eval-iters", "0", "--global-batch-size", str(BATCH), "--dsv-q-block-size", "8", "--dsv-sparse-stage",
            "auto", "--latent-valid-samples", "6", "--latent-data", str(data), *flags]
    return TrainingRun(dry_parse(argv, 1), LatentDataset(data, text_length=16))


def profiled(run: TrainingRun, steps: range, done: int = 0) -> list[int]:
    """Steps that a launch after ``done`` of them profiles."""
    run.args.consumed_train_samples, found = done * BATCH, []
    for run.args.curr_iteration in steps:
        if profile_due(run.args.curr_iteration, 10, run.profile_steps.may_profile):
            found.append(run.args.curr_iteration)
        run.args.consumed_train_samples += BATCH
    return found


def test_images_among_videos_are_never_profiled(tmp_path):
    data = write_latents(tmp_path, [(1, 8, 12)] * 14 + [(9, 8, 12)] * 5 + [(9, 12, 8)] * 7)
    run = run_of(data)
    assert run.profile_steps.lengths == {9 * 4 * 6}
    train, _, _ = DatasetProvider(run.args, run.latents)((STEPS * BATCH, 0, 0))
    long = [step for step in range(STEPS) if train[step * BATCH]["latents"].shape[1] == 9]
    assert 5 < len(long) < STEPS - 5
    steps = profiled(run, range(STEPS))
    assert set(steps) <= set(long)
    assert steps == [min(step for step in long if step >= due) for due in range(0, STEPS, 10)]
    for done in range(1, STEPS):
        assert profiled(run, range(done, STEPS), done) == [step for step in steps if step >= done]
    share = run.profile_steps.words.partition("tokens, ")
    assert share[0].endswith("are of videos of 216 ")
    assert 30 < float(share[2].partition("%")[0]) < 60


def test_a_batch_size_that_changes_looks_no_further_back_than_the_first_sample(tmp_path):
    data = write_latents(tmp_path, [(1, 8, 12)] * 14 + [(9, 8, 12)] * 6)
    run = run_of(data, "--global-batch-size", "16")
    run.args.curr_iteration, run.args.consumed_train_samples = 35, 48
    assert [run.profile_steps.may_profile(step) for step in range(25, 32)] == [False] * 7
    assert any(run.profile_steps.may_profile(step) for step in range(32, 36))


@pytest.mark.parametrize("shapes", [[(3, 8, 12)] * 8, [(3, 8, 12)] * 8 + [(3, 8, 10)] * 8])
def test_lengths_that_are_alike_are_all_profiled(tmp_path, shapes):
    run = run_of(write_latents(tmp_path, shapes))
    assert profiled(run, range(STEPS)) == [0, 10, 20, 30]
    assert run.profile_steps.words is None
    assert run.profile_steps.several == (len(set(shapes)) > 1)


def test_a_run_without_predictors_profiles_nothing(tmp_path):
    assert run_of(write_latents(tmp_path, [(3, 8, 12)] * 8), "--dsv-sparse-stage", "dense").profile_steps is None
