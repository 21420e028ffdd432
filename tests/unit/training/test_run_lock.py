"""A second launch into one folder is refused while the first one lives, and not a moment longer."""

import errno
import fcntl
import multiprocessing
import os
import re
import signal
import socket
from pathlib import Path
from typing import Any

import pytest

from megatron_dsv.training import run_lock

FORK = multiprocessing.get_context("fork")


def _hold_until_told(folder: Path, pipe: Any) -> None:
    with run_lock.hold(folder):
        pipe.send(os.getpid())
        pipe.recv()
    pipe.send("released")


def _with_a_helper(folder: Path, pipe: Any) -> None:
    with run_lock.hold(folder):
        helper = FORK.Process(target=signal.pause)
        helper.start()
        pipe.send(helper.pid)
        pipe.recv()


def _start(target: Any, folder: Path) -> tuple[Any, Any, int]:
    here, there = FORK.Pipe()
    process = FORK.Process(target=target, args=(folder, there))
    process.start()
    assert here.poll(20)
    return process, here, here.recv()


def test_a_second_launch_is_told_who_holds_the_folder(tmp_path):
    folder = tmp_path / "runs" / "new"
    process, pipe, holder = _start(_hold_until_told, folder)
    host = re.escape(socket.gethostname())
    with pytest.raises(ValueError, match=rf"--save .*/new is in use by process {holder} on {host} since 20\d\d-"), \
            run_lock.hold(folder):
        pass
    assert process.is_alive()
    pipe.send("go")
    assert pipe.poll(20)
    process.join()
    assert not folder.exists(), "a launch that wrote nothing leaves nothing"
    with run_lock.hold(folder):
        (folder / "saved").write_text("")
    assert [path.name for path in folder.iterdir()] == ["saved"]


def test_a_killed_launch_blocks_nobody(tmp_path):
    process, _, holder = _start(_hold_until_told, tmp_path)
    os.kill(holder, signal.SIGKILL)
    process.join()
    assert (tmp_path / run_lock.LOCK_FILE).exists()
    with run_lock.hold(tmp_path):
        assert f"process {os.getpid()} on" in (tmp_path / run_lock.LOCK_FILE).read_text()
    assert list(tmp_path.iterdir()) == []


def test_a_helper_that_outlives_the_launch_does_not_keep_the_lock(tmp_path):
    process, _, helper = _start(_with_a_helper, tmp_path)
    process.kill()
    process.join()
    try:
        with run_lock.hold(tmp_path):
            os.kill(helper, 0)
    finally:
        os.kill(helper, signal.SIGKILL)


def test_a_name_that_was_given_away_while_waiting(tmp_path, monkeypatch):
    """Who opened the file just before its owner removed it must not share the folder with who makes it anew."""
    lock, removed = fcntl.lockf, []

    def remove_first(file: int, flags: int) -> None:
        if not removed:
            removed.append((tmp_path / run_lock.LOCK_FILE).unlink())
        lock(file, flags)

    monkeypatch.setattr(fcntl, "lockf", remove_first)
    with run_lock.hold(tmp_path):
        assert str(os.getpid()) in (tmp_path / run_lock.LOCK_FILE).read_text()


def test_a_folder_that_cannot_be_made(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(ValueError, match=r"--save must be a folder that can be written, got /.*/file/run: "), \
            run_lock.hold(tmp_path / "file" / "run"):
        pass


def test_a_file_system_without_locks_is_said(tmp_path, monkeypatch, capsys):
    def refuse(file: int, flags: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr(fcntl, "lockf", refuse)
    with run_lock.hold(tmp_path):
        assert "a file system without locks (No locks available)" in capsys.readouterr().out


def test_no_folder_no_lock():
    with run_lock.hold(None):
        pass
