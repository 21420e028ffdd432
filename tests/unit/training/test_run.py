"""A launch looks at its data set before it builds anything."""

from pathlib import Path

import pytest

from megatron_dsv.data.latent_dataset import LatentDataset
from megatron_dsv.testing.latents import write_latents
from megatron_dsv.training.arguments import HostError, dry_parse
from megatron_dsv.training.run import TrainingRun


@pytest.fixture
def data(tmp_path: Path) -> Path:
    """Videos of 3 x 4 x 6 = 72 and of 1 x 2 x 3 = 6 tokens."""
    return write_latents(tmp_path / "data", [(3, 8, 12)] * 3 + [(1, 4, 6)])


def run_of(data: Path, *flags: str) -> TrainingRun:
    argv = ["--config", "model/debug", "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1e-4",
            "--latent-valid-samples", "1", "--latent-data", str(data), *flags]
    ranks = 8 if "--context-parallel-size" in flags else 1
    return TrainingRun(dry_parse(argv, ranks), LatentDataset(data, text_length=16))


def test_long_query_groups_are_worth_a_line(data, capsys):
    run_of(data, "--dsv-q-block-size", "8").check_data()
    assert capsys.readouterr().err == ""
    # 3 x 128 + 64 slots for 3 x 72 + 6 tokens.
    run = run_of(data, "--dsv-q-block-size", "64")
    run.check_data()
    assert capsys.readouterr().err == ("warning: --dsv-q-block-size 64 pads the videos of --latent-data by 102% on "
                                       "average; smaller query groups pad less\n")
    run.args.rank = 1
    run.check_data()
    assert capsys.readouterr().err == ""


def test_windows_are_counted_as_the_data_set_has_them(data):
    assert run_of(data, "--dsv-q-block-size", "8").window_share_of_data(1, 128) is None
    windows = ("--dsv-attention", "window-1/3", "--dsv-sparse-stage", "dense", "--dsv-q-block-size", "8",
               "--dsv-kv-block-size", "1")
    run = run_of(data, *windows)
    # 1 x 1 x 2 of 72 tokens in three samples of 72 slots, 1 x 1 x 1 of 6 in one of 8.
    assert run.window_share_of_data(9, 72) == pytest.approx(2 / 72)
    assert run.window_share_of_data(8, 8) == pytest.approx(1 / 6)
    assert run.window_share_of_data(8, 72) == pytest.approx((3 * 2 / 72 + 1 / 6) / 4)


def test_query_groups_far_above_the_videos_are_refused(data):
    run_of(data, "--dsv-q-block-size", "512").check_data()
    with pytest.raises(ValueError, match="--dsv-q-block-size must be at most 8 times the 72 tokens of the longest "
                                         "video in --latent-data, got 1024, which pads it to 1024; use a smaller"):
        run_of(data, "--dsv-q-block-size", "1024").check_data()


def test_context_ranks_far_above_the_videos_are_refused(data, capsys):
    run_of(data, "--dsv-q-block-size", "64", "--context-parallel-size", "8").check_data()
    warning = "--dsv-q-block-size 64, --dsv-kv-block-size 64 and --context-parallel-size 8 pad the videos of "
    assert warning in capsys.readouterr().err
    with pytest.raises(ValueError, match="--context-parallel-size must deal out the 72 tokens of the longest video in "
                                         "--latent-data in whole query groups and key blocks, got 8, which pads it to "
                                         "1024; take fewer ranks"):
        run_of(data, "--dsv-q-block-size", "64", "--dsv-kv-block-size", "128", "--context-parallel-size",
               "8").check_data()


def test_missing_files_concern_the_host_and_its_first_rank_looks(data, monkeypatch):
    next(data.glob("samples/*/*.safetensors")).unlink()
    run = run_of(data, "--dsv-q-block-size", "8")
    with pytest.raises(HostError, match=r"--latent-data has a damaged file: .* is missing; "):
        run.check_data()
    monkeypatch.setenv("LOCAL_RANK", "1")
    run.check_data()


@pytest.mark.parametrize(("flags", "words"), [
    (["--dit-text-dim", "32"], "--dit-text-dim must be the data set's 64, got 32; prepare .* anew with a text "
     "encoder of 32, or set the flag, which makes it another model"),
    (["--dit-latent-channels", "4"], "--dit-latent-channels must be the data set's 16, got 4; prepare .* with a "
     "codec of 4, or set the flag"),
    (["--latent-valid-samples", "4"], "--latent-valid-samples must be below the 4 samples of --latent-data, got 4"),
])
def test_model_and_data_must_fit(data, flags, words):
    with pytest.raises(ValueError, match=words):
        run_of(data, *flags).check_data()
