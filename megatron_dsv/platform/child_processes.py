"""Ranks end with their launcher, and helper processes of a rank with it, also when the parent is killed.

No orphan trains on, or holds sockets or a log open.

A spawned helper imports this file, so it stays light.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import multiprocessing
import os
import queue
import signal
import sys
import threading
import time
from collections.abc import Callable
from multiprocessing import connection
from multiprocessing.managers import SyncManager
from typing import Any

_PR_SET_PDEATHSIG = 1  # of prctl(2)
_LOOK_SECONDS = 1.0


def end_with_parent() -> None:
    """To be called first in a child of `multiprocessing`: it is killed when its parent ends, however that ends.

    Linux watches the thread that started the child, which must live as long as the parent. A fork server, which is
    then the one that started it, lives as long as its children do, so that a thread of the child watches the parent.
    Sockets that a fork copied are let go of: they belong to the parent's process groups. Elsewhere than in such a child
    it does nothing.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    starter = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != starter or not parent.is_alive():  # it ended before the kernel was told
        os._exit(1)
    if starter != parent.pid:
        threading.Thread(target=_end_after, args=(parent.sentinel,), daemon=True).start()
    _release_sockets()


def _end_after(sentinel: int) -> None:
    connection.wait([sentinel])
    os._exit(1)


def end_with_launcher() -> None:
    """To be called first in a rank: one that torchrun started is killed when torchrun ends, however that ends.

    torchrun puts every rank into a session of its own, so that nothing else would tell it. Its workers are started by
    its main thread, which Linux watches here. A rank without torchrun is left alone.
    """
    if "TORCHELASTIC_RUN_ID" not in os.environ or sys.platform != "linux":
        return
    launcher = os.getppid()
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != launcher:  # it ended before the kernel was told
        os._exit(1)


def _release_sockets() -> None:
    """Put /dev/null in the place of every open socket: closed numbers would be given away, and closed once more."""
    null = os.open(os.devnull, os.O_RDWR)
    for name in os.listdir("/proc/self/fd"):
        try:
            if os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                os.dup2(null, int(name), inheritable=False)
        except OSError:
            continue  # the folder's own descriptor
    os.close(null)


def install_save_queue(mp_mode: str | None) -> None:
    """Let Megatron's ``get_write_results_queue`` start a process that ends with this one.

    Args:
        mp_mode: how it is started, ``fork`` or ``spawn``; None takes what Megatron asks for.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async

    wanted = mp_mode

    def get_write_results_queue(mp_mode: str = "spawn") -> Any:
        if filesystem_async._results_queue is None:
            manager = SyncManager(ctx=multiprocessing.get_context(wanted or mp_mode))
            manager.start(initializer=end_with_parent)
            filesystem_async._results_queue = manager.Queue()
        return filesystem_async._results_queue

    filesystem_async.get_write_results_queue = get_write_results_queue


def async_save_loop(*args: Any, **kwargs: Any) -> Any:
    """Megatron's loop of the asynchronous saver, in a process that ends with the rank."""
    end_with_parent()
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller

    loop = PersistentAsyncCaller.async_loop
    # A forked process has this function in its place, a spawned one has Megatron's.
    return getattr(loop, "megatrons", loop)(*args, **kwargs)


class SaverEndedError(RuntimeError):
    """The process that writes a rank's checkpoints is gone, in one line."""


def notice_a_dead_saver(caller: Any) -> None:
    """Lets ``PersistentAsyncCaller`` raise :class:`SaverEndedError` where it would wait for a saver that was killed.

    Args:
        caller: the class, whose methods are replaced.
    """
    start, schedule, is_done, close = (caller._get_process, caller.schedule_async_call,
                                       caller.is_current_async_call_done, caller.close)

    def check(process: Any) -> None:
        if process is not None and not process.is_alive():
            # What is still in the pipe has no reader, for which the rank's end would wait.
            caller._persistent_queue.cancel_join_thread()
            raise SaverEndedError(
                f"the process that writes this rank's checkpoints ended with exit code {process.exitcode} (-9: killed, "
                "as for want of host memory), so that none can be saved; resume from the last one, with more memory or "
                "without --async-save")

    def start_watched(rank: int, *args: Any, **kwargs: Any) -> Any:
        process = start(rank, *args, **kwargs)
        preloads = caller._persistent_preload_q

        def join() -> None:
            with preloads._cond:
                while not preloads._unfinished_tasks._semlock._is_zero():
                    preloads._cond.wait(_LOOK_SECONDS)
                    check(process)

        preloads.join = join
        return process

    @functools.wraps(schedule)
    def schedule_if_alive(self: Any, request: Any) -> None:
        check(caller._persistent_process)
        schedule(self, request)

    @functools.wraps(is_done)
    def is_done_or_dead(self: Any, blocking: bool = False, no_dist: bool = False) -> bool:
        while self.process is not None and self.cur_item is None:
            was_alive = self.process.is_alive()
            with contextlib.suppress(queue.Empty):
                # A saver that has answered may end; one that had ended before this look has not.
                self.cur_item = caller._persistent_comp_q.get(block=not was_alive, timeout=_LOOK_SECONDS)
            if self.cur_item is None:
                check(None if was_alive else self.process)
                if not blocking:
                    break
                time.sleep(_LOOK_SECONDS / 10)
        return is_done(self, blocking, no_dist)

    @functools.wraps(close)
    def close_what_lives(self: Any, abort: bool = False) -> None:
        close(self, abort or (self.process is not None and not self.process.is_alive()))

    caller._get_process = staticmethod(start_watched)
    caller.schedule_async_call = schedule_if_alive
    caller.is_current_async_call_done = is_done_or_dead
    caller.close = close_what_lives


def with_mortal_workers(build: Callable[..., Any]) -> Callable[..., Any]:
    """A builder of data loaders whose workers end with this process at once; torch's own look every five seconds."""

    @functools.wraps(build)
    def build_with_mortal_workers(*args: Any, **kwargs: Any) -> Any:
        loader = build(*args, **kwargs)
        if loader is not None and loader.num_workers > 0:
            loader.worker_init_fn = functools.partial(_begin_worker, loader.worker_init_fn)
        return loader

    return build_with_mortal_workers


def _begin_worker(begin: Callable[[int], None] | None, worker: int) -> None:
    end_with_parent()
    if begin is not None:
        begin(worker)
