"""What a rank starts ends with it, also when nobody can clean up."""

import contextlib
import functools
import multiprocessing
import os
import select
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from megatron_dsv.platform import child_processes, cpu
from megatron_dsv.testing.ranks import run_ranks

pytestmark = pytest.mark.skipif(not os.path.isdir("/proc/self/fd"), reason="the kernel's word for it is Linux's")


def _save_queue(mode: str) -> Callable[[], Any]:
    def start() -> Any:
        from megatron.core.dist_checkpointing.strategies import filesystem_async

        child_processes.install_save_queue(mode)
        return filesystem_async.get_write_results_queue()

    return start


class _Squares(torch.utils.data.Dataset):
    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> int:
        return index * index


def _data_loader() -> Any:
    build = child_processes.with_mortal_workers(
        lambda: torch.utils.data.DataLoader(_Squares(), num_workers=1, persistent_workers=True))
    items = iter(build())
    assert next(items).item() == 0
    return items


def _waits_for_ever(writer: Any) -> None:
    child_processes.end_with_parent()
    writer.send("lives")
    signal.pause()


def _helper(mode: str) -> Callable[[], Any]:
    def start() -> Any:
        reader, writer = multiprocessing.Pipe(duplex=False)
        process = multiprocessing.get_context(mode).Process(target=_waits_for_ever, args=(writer,))
        process.start()
        writer.close()
        assert reader.recv() == "lives"
        return process

    return start


def _descendants(process: int) -> list[int]:
    with open(f"/proc/{process}/task/{process}/children") as file:
        children = [int(number) for number in file.read().split()]
    return children + [one for child in children for one in _descendants(child)]


def _sockets(process: int) -> set[str]:
    folder = f"/proc/{process}/fd"
    links = set()
    for name in os.listdir(folder):
        with contextlib.suppress(FileNotFoundError):  # the one that lists the folder
            links.add(os.readlink(f"{folder}/{name}"))
    return {link for link in links if link.startswith("socket:")}


def _runs(process: int) -> bool:
    try:
        with open(f"/proc/{process}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _rank(start: Callable[[], Any], writer: Any) -> None:
    """Opens a socket, starts a helper, tells what both are, and waits to be killed."""
    listener = socket.create_server(("127.0.0.1", 0))
    kept = start()
    time.sleep(0.2)  # a forked helper lets go of what it inherited
    mine = os.readlink(f"/proc/self/fd/{listener.fileno()}")
    writer.send([(child, mine in _sockets(child)) for child in _descendants(os.getpid())])
    signal.pause()
    del kept


HELPERS = {"save-queue-forked": _save_queue("fork"), "save-queue-spawned": _save_queue("spawn"),
           "data-loader": _data_loader, "forked": _helper("fork"), "spawned": _helper("spawn"),
           "from-a-fork-server": _helper("forkserver")}


@pytest.mark.parametrize("helper", HELPERS)
def test_a_killed_rank_leaves_nothing(helper):
    cpu.preload()
    reader, writer = multiprocessing.Pipe(duplex=False)
    rank = multiprocessing.get_context("fork").Process(target=_rank, args=(HELPERS[helper], writer))
    rank.start()
    try:
        assert reader.poll(60)
        children = reader.recv()
        assert children
        assert all(_runs(child) for child, _ in children)
        assert not any(holds for _, holds in children), "a helper holds its rank's socket"
    finally:
        os.kill(rank.pid, signal.SIGKILL)
        rank.join()
    deadline = time.monotonic() + 2
    while left := [child for child, _ in children if _runs(child)]:
        assert time.monotonic() < deadline, f"{left} outlived the rank"
        time.sleep(0.02)


def test_a_process_that_nobody_started_is_left_alone():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        before = _sockets(os.getpid())
        child_processes.end_with_parent()
        assert os.readlink(f"/proc/self/fd/{listener.fileno()}") in before & _sockets(os.getpid())


RANK = "import signal; from megatron_dsv.platform.child_processes import end_with_launcher as end; end(); " \
       "import os; print(os.getpid(), flush=True); signal.pause()"
LAUNCHER = "import subprocess as s, sys; s.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True).wait()"


@pytest.mark.parametrize("by_torchrun", [True, False])
def test_a_rank_ends_with_a_launcher_that_is_killed(by_torchrun):
    """A rank in a session of its own, as torchrun starts it; without torchrun's mark it outlives its parent."""
    environment = {name: value for name, value in os.environ.items() if name != "TORCHELASTIC_RUN_ID"}
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, RANK], stdout=subprocess.PIPE, text=True,
                                env=environment | ({"TORCHELASTIC_RUN_ID": "x"} if by_torchrun else {}))
    rank = int(launcher.stdout.readline())
    launcher.kill()
    launcher.wait()
    # The rank holds the other end of the pipe until it ends.
    ended, _, _ = select.select([launcher.stdout], [], [], 20 if by_torchrun else 1)
    if not by_torchrun:
        os.kill(rank, signal.SIGKILL)
    launcher.stdout.close()
    assert bool(ended) is by_torchrun


def _saver(when: str) -> list[str]:
    """What a rank hears whose saver is killed: while it saves, between two saves, or while it takes its tensors."""
    from megatron.core.dist_checkpointing.strategies.async_utils import AsyncRequest, PersistentAsyncCaller

    cpu.enable()
    child_processes._LOOK_SECONDS = 0.1
    child_processes.notice_a_dead_saver(PersistentAsyncCaller)
    process = PersistentAsyncCaller._get_process(0, "fork")
    caller, heard = PersistentAsyncCaller(), []

    def hear(call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        try:
            call(*args, **kwargs)
        except child_processes.SaverEndedError as error:
            heard.append(str(error))

    first = AsyncRequest(time.sleep, (0.01,), [], call_idx=0)
    caller.schedule_async_call(first)
    assert caller.is_current_async_call_done(blocking=True)
    if when == "preload":
        dies = functools.partial(os._exit, 3)
        hear(caller.schedule_async_call, AsyncRequest(time.sleep, (60, None), [], preload_fn=dies, call_idx=1))
    elif when == "idle":
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        hear(caller.schedule_async_call, first)
    else:
        caller.schedule_async_call(AsyncRequest(time.sleep, (60,), [], call_idx=1))
        assert not caller.is_current_async_call_done(no_dist=True)
        os.kill(process.pid, signal.SIGKILL)
        process.join()
        hear(caller.is_current_async_call_done)
        hear(caller.is_current_async_call_done, blocking=True)
    caller.close()
    return heard


@pytest.mark.parametrize(("when", "status", "times"), [("saving", -9, 2), ("idle", -9, 1), ("preload", 3, 1)])
def test_a_rank_hears_of_a_dead_saver(when, status, times):
    cpu.preload()
    (heard,) = run_ranks(_saver, 1, when, timeout=20)
    assert len(heard) == times
    assert all(f"checkpoints ended with exit code {status} " in line and "without --async-save" in line
               for line in heard)
