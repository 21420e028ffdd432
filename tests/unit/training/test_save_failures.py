"""A folder that takes no more ends a run with one line, printed by a rank that knows why."""

import argparse
import errno
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint.api import CheckpointException

from megatron_dsv.training import arguments, main, save_failures
from megatron_dsv.training.run_config import write_run_config
from megatron_dsv.training.save_failures import NotSavedError, NotSavedHereError, told

FULL = OSError(errno.ENOSPC, "No space left on device")


def test_the_configuration_of_a_run_on_a_full_disk(tmp_path, monkeypatch):
    write = Path.write_text

    def fill(self, text, **named):
        write(self, text[:5], **named)
        raise FULL

    monkeypatch.setattr(Path, "write_text", fill)
    args = argparse.Namespace(save=str(tmp_path), tensorboard_dir=None, rank=0, world_size=1, launch_argv=[],
                              launch_settings={})
    with pytest.raises(NotSavedHereError, match=r"the run's configuration could not be written to .*No space left on "
                                                r"device\); free space there"):
        write_run_config(args)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("error", "kind"), [
    (FULL, NotSavedHereError),
    (CheckpointException("write", {3: (FULL, None)}), NotSavedError),
    (CheckpointException("write", {}), NotSavedError),
])
def test_a_save_that_fails_is_one_line(monkeypatch, error, kind):
    from megatron.training import training

    def fail(*_, **__):
        raise error

    for name in ("save_checkpoint", "maybe_finalize_async_save"):
        monkeypatch.setattr(training, name, fail)
    save_failures.install(argparse.Namespace(save="runs/x"))
    with pytest.raises(NotSavedError, match=r"^iteration 7 could not be written to runs/x") as caught:
        training.save_checkpoint(7, [], None)
    assert type(caught.value) is kind
    assert "\n" not in str(caught.value)
    with pytest.raises(NotSavedError, match=r"^an asynchronous save could not be written to runs/x"):
        training.maybe_finalize_async_save(blocking=True)


def test_space_is_asked_for_only_where_it_is_missing():
    for number, cure in ((errno.EDQUOT, "free space there"), (errno.ENOMEM, "mend that"), (errno.EACCES, "mend that"),
                         (errno.ESTALE, "mend that")):
        with pytest.raises(NotSavedHereError, match=rf"\); {cure}.* and launch again"), told("it", "runs/x"):
            raise OSError(number, "why")


def test_a_file_of_torch_that_takes_no_more():
    with pytest.raises(NotSavedHereError, match=r"RuntimeError: .*inline_container"), told("it", "runs/x"):
        torch.save(torch.ones(100000), "/dev/full")
    with pytest.raises(RuntimeError, match=r"^size mismatch$"), told("it", "runs/x"):
        raise RuntimeError("size mismatch")


@pytest.mark.parametrize(("error", "rank", "lines"), [
    (NotSavedHereError("full"), "3", 1), (NotSavedError("full"), "3", 0), (NotSavedError("full"), "0", 1)])
def test_who_knows_why_speaks(monkeypatch, capsys, error, rank, lines):
    def fail(args):
        raise error

    monkeypatch.setattr(arguments.time, "sleep", lambda _: None)
    monkeypatch.setattr(arguments, "parse", lambda argv: argparse.Namespace(world_size=4, save=None, rank=int(rank),
                                                                            expanded_argv=[]))
    monkeypatch.setattr(main, "_train", fail)
    monkeypatch.setattr(main.sys, "argv", ["pretrain_video_dit.py"])
    monkeypatch.setenv("RANK", rank)
    with pytest.raises(SystemExit) as stop:
        main.main([])
    assert stop.value.code == 1
    assert capsys.readouterr().err == "pretrain_video_dit.py: error: full\n" * lines
