"""A folder that holds nothing to load is refused with a line, unless the run is going to save there."""

from argparse import Namespace
from pathlib import Path

import pytest

from megatron_dsv.training import run_folders


def _args(**changes) -> Namespace:
    return Namespace(**{"save": None, "load": None, "pretrained_checkpoint": None, "tensorboard_dir": None,
                        "ckpt_step": None, "rank": 0} | changes)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A folder with one saved iteration."""
    folder = tmp_path / "run"
    (folder / "iter_0000020").mkdir(parents=True)
    (folder / "iter_0000020" / "metadata.json").write_text("{}")
    (folder / run_folders.TRACKER).write_text("20")
    return folder


def test_an_iteration_of_no_checkpoint():
    with pytest.raises(ValueError, match=r"--ckpt-step needs --load, .* got --ckpt-step 3 alone"):
        run_folders.check_flags(_args(ckpt_step=3))


def test_a_saved_run_can_be_loaded(run):
    for changes in ({"load": str(run)}, {"load": str(run), "ckpt_step": 20}, {"pretrained_checkpoint": str(run)}):
        run_folders.check_flags(_args(**changes))
        run_folders.check(_args(**changes))


@pytest.mark.parametrize("name", ["save", "load", "pretrained_checkpoint"])
def test_a_folder_that_the_host_cannot_look_into(run, monkeypatch, name):
    def denied(path: Path) -> bool:
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_file", denied)
    with pytest.raises(ValueError, match=f"--{name.replace('_', '-')} must be a folder that this host can read, got "
                                         rf"{run}/.*: Permission denied; mend that, or give another folder$"):
        run_folders.check(_args(**{name: str(run)}))


def test_nothing_to_load(run, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "file").write_text("")
    for name, message in {
            "missing": "--load must be the folder that a run saved to, got .*missing, which does not exist",
            "empty": f"got .*empty, which has no {run_folders.TRACKER}",
            "file": "got .*file, which is not a folder",
            "run/iter_0000020": r"one iteration of it; use .*/run with --ckpt-step 20",
            "run/iter_0000030": r"one iteration of it; use .*/run with --ckpt-step 30"}.items():
        with pytest.raises(ValueError, match=message):
            run_folders.check(_args(load=str(tmp_path / name)))
        with pytest.raises(ValueError, match=message.replace("--load", "--pretrained-checkpoint")):
            run_folders.check(_args(pretrained_checkpoint=str(tmp_path / name)))
    with pytest.raises(ValueError, match="does not exist"):
        run_folders.check(_args(load=str(tmp_path / "missing"), ckpt_step=3))


def test_another_save_is_no_excuse(tmp_path):
    with pytest.raises(ValueError, match=r"does not exist.* leave it out to start from scratch"):
        run_folders.check(_args(load=str(tmp_path / "missing"), save=str(tmp_path / "other")))


def test_the_first_launch_of_a_job_that_resumes_itself(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run_folders.check(_args(load="job/checkpoints", save=str(tmp_path / "job" / "checkpoints")))
    assert capsys.readouterr().out == " --load job/checkpoints holds no checkpoint yet: the run starts from scratch\n"
    run_folders.check(_args(load="job/checkpoints", save="job/checkpoints", rank=1))
    assert capsys.readouterr().out == ""
    assert list(tmp_path.iterdir()) == []


def test_a_job_that_begins_from_pretrained_weights(run, tmp_path, capsys):
    job = str(tmp_path / "job")
    run_folders.check(_args(load=job, save=job, pretrained_checkpoint=str(run)))
    assert f"the run starts from {run}" in capsys.readouterr().out


def test_a_save_that_was_killed_half_way_is_started_over(tmp_path, capsys):
    (tmp_path / "iter_0000010").mkdir()
    (tmp_path / "iter_0000010" / "__0_0.distcp").write_text("half")
    run_folders.check(_args(load=str(tmp_path), save=str(tmp_path)))
    assert "starts from scratch" in capsys.readouterr().out


def test_a_complete_iteration_is_not_overwritten(run):
    (run / run_folders.TRACKER).unlink()
    with pytest.raises(ValueError, match=r"holds iter_0000020 but no latest.*; use --ckpt-step 20, or move"):
        run_folders.check(_args(load=str(run), save=str(run)))


def test_a_second_run_does_not_begin_inside_another(run, tmp_path):
    save = str(run)
    for changes, words in (({}, "is not given"), ({"pretrained_checkpoint": save}, "is not given"),
                           ({"load": str(tmp_path / "other")}, "is .*/other")):
        message = f"--save .*/run holds iteration 20 and --load {words}, .*; add --load {save} to go on"
        with pytest.raises(ValueError, match=message):
            run_folders.check(_args(save=save, **changes))
    run_folders.check(_args(save=save, load=save))
    run_folders.check(_args(save=save, load=save, ckpt_step=20))
    run_folders.check(_args(save=str(tmp_path / "new"), load=save))
