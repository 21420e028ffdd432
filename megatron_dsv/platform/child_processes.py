"""Ranks end with their launcher, and helper processes of a rank with it, also when the parent is killed.

No orphan trains on, or holds sockets or a log open.

A spawned helper imports this file, so it stays light.
"""

from __future__ import annotations

import ctypes
import functools
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable
from multiprocessing import connection
from multiprocessing.managers import SyncManager
from typing import Any

_PR_SET_PDEATHSIG = 1  # of prctl(2)


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
