"""What `dsv sample` refuses before it builds anything."""

import argparse
from pathlib import Path

import pytest

from megatron_dsv.cli import sample
from megatron_dsv.cli.main import main
from megatron_dsv.training.sampling import checkpoint_folders


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run's folder, as far as its names go."""
    (tmp_path / "run" / "iter_0000004").mkdir(parents=True)
    (tmp_path / "run" / "iter_0000004" / ".metadata").write_text("")
    (tmp_path / "run" / "config.yaml").write_text("")
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("4\n")
    return tmp_path / "run"


@pytest.mark.parametrize(("flags", "words"), [
    ("--frames 0 --height 48 --width 32", "--frames must be an integer of at least 1, got 0"),
    ("--frames 5 --height -8 --width 32", "--height must be an integer of at least 1, got -8"),
    ("--frames 5 --height 48 --width 0", "--width must be an integer of at least 1, got 0"),
    ("--frames 5", "--frames, --height and --width must be given together"),
    ("--steps 0", "--steps must be an integer of at least 1, got 0"),
    ("--seed -1", "--seed must be an integer of at least 0 and below 2**63, got -1"),
    ("--seed 9223372036854775808", "--seed must be an integer of at least 0 and below 2**63, got 9223372036854775808"),
    ("--guidance nan", "--guidance must be a number of at least 0, got nan"),
    ("--guidance inf", "--guidance must be a number of at least 0, got inf"),
    ("--guidance -1", "--guidance must be a number of at least 0, got -1.0"),
    ("--shift nan", "--shift must be a number above 0, got nan"),
    ("--fps nan", "--fps must be a number of at least 0.01 and at most 1000, got nan"),
    ("--fps 1e-9", "--fps must be a number of at least 0.01 and at most 1000, got 1e-09"),
    ("--attention sparse --keep-ratio nan", "--keep-ratio must be a number above 0 and at most 1, got nan"),
    ("--keep-ratio 0.5", "--keep-ratio needs --attention sparse, got --attention dense"),
    ("--text-folder /none", "--text-folder must be a folder, got /none, which is none"),
    ("--output {run}", "--output must end in .mp4"),
    ("--output {run}/folder.mp4", "--output must be a file, got "),
    ("--output {run}/none/x.mp4", "--output must lie in a folder that exists, got "),
])
def test_flags_are_named_before_anything_is_built(run, flags, words, capsys, monkeypatch):
    (run / "folder.mp4").mkdir()
    monkeypatch.setattr("megatron_dsv.training.sampling.sample_video", lambda args: pytest.fail("built something"))
    assert main(["sample", str(run), "--prompt", "x", *flags.format(run=run).split()]) == 2
    error = capsys.readouterr().err
    assert error.startswith("dsv sample: error: ")
    assert error.count("\n") == 1
    assert words in error


def test_defaults_pass(run, monkeypatch):
    monkeypatch.chdir(run)
    parser = argparse.ArgumentParser()
    sample.add_arguments(parser)
    sample.check(parser.parse_args([str(run), "--prompt", "x"]))


@pytest.mark.parametrize("content", ["", "four", "-1", "release", "\u0664", "\x00"])
def test_a_tracker_must_hold_a_step(run, content):
    assert checkpoint_folders(run) == (run, run / "iter_0000004")
    (run / "latest_checkpointed_iteration.txt").write_text(content)
    with pytest.raises(ValueError, match=r"latest_checkpointed_iteration\.txt must hold a step, got .*name one of its"):
        checkpoint_folders(run)
