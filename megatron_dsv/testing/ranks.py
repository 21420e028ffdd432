"""Run a function on several gloo ranks, forked from this process: what is imported here is imported once for all.

Fork is safe under three conditions, which the harness keeps or checks: a child sets one intra-op thread before it
touches a tensor (OpenMP's pool does not survive a fork), CUDA is not initialised here (its context does not either),
and the parent runs no collective. Autograd may have run in the parent: without accelerators its engine has no threads.
"""

import faulthandler
import multiprocessing
import os
import pickle
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

# How long the other ranks may still report after the first failure, so that the cause comes with its consequences.
_GRACE_S = 1.0


class RankError(RuntimeError):
    """A rank raised, died or hung; the message carries each such rank's traceback and the end of its output."""


def run_ranks(
    fn: Callable[..., Any],
    world_size: int,
    *args: Any,
    timeout: float = 60.0,
    output: Path | None = None,
) -> list[Any]:
    """Call `fn(*args)` on `world_size` forked ranks of one gloo process group and return the results by rank.

    The default process group exists when `fn` starts (rendezvous through a file); RANK, WORLD_SIZE, LOCAL_RANK,
    LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT are set. `fn` may be a closure; only its result is pickled.

    Args:
        fn: runs on every rank.
        world_size: number of ranks.
        timeout: seconds for the whole call.
        output: folder for `rank<N>.txt`, each rank's stdout and stderr; None leaves them on this process's.

    Raises:
        RankError: a rank raised, died, or was not done in time. All ranks are dead when it is raised.
        RuntimeError: CUDA is initialised in this process.
    """
    if torch.cuda.is_initialized():
        raise RuntimeError("run_ranks() forks, and CUDA is initialised in this process: use run_ranks() before it is")
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory(prefix="ranks-") as folder:
        logs = Path(output) if output is not None else Path(folder)
        logs.mkdir(parents=True, exist_ok=True)
        processes, readers = [], []
        for rank in range(world_size):
            reader, writer = context.Pipe(duplex=False)
            rank_main = _RankMain(rank, world_size, Path(folder), logs if output is not None else None, writer)
            process = context.Process(target=rank_main, args=(fn, args), name=f"rank{rank}")
            with warnings.catch_warnings():
                # CPython warns of any fork beside threads; see the module's docstring.
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            writer.close()
            processes.append(process)
            readers.append(reader)
        try:
            results = _collect(readers, time.monotonic() + timeout)
            failures = {rank: text for rank, (ok, text) in results.items() if not ok}
            missing = [rank for rank in range(world_size) if rank not in results]
            if failures or missing:
                stacks = _stacks_of(processes, missing, Path(folder)) if not failures else {}
                raise RankError(_describe(failures, missing, stacks, logs, timeout))
            return [pickle.loads(results[rank][1]) for rank in range(world_size)]
        finally:
            for process in processes:
                _kill(process)


class _RankMain:
    """What a forked child executes."""

    def __init__(self, rank: int, world_size: int, folder: Path, logs: Path | None, writer: Connection) -> None:
        self.rank, self.world_size, self.folder, self.logs, self.writer = rank, world_size, folder, logs, writer
        self.parent = os.getpid()

    def __call__(self, fn: Callable[..., Any], args: tuple[Any, ...]) -> None:
        os.setsid()  # so that what a rank starts dies with it
        torch.set_num_threads(1)
        os.environ.update(
            RANK=str(self.rank), LOCAL_RANK=str(self.rank), WORLD_SIZE=str(self.world_size),
            LOCAL_WORLD_SIZE=str(self.world_size), MASTER_ADDR="127.0.0.1", MASTER_PORT="0", OMP_NUM_THREADS="1",
        )
        if self.logs is not None:
            log = os.open(self.logs / f"rank{self.rank}.txt", os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
            os.dup2(log, 1)
            os.dup2(log, 2)
            # A test runner may have put objects of its own in their place.
            sys.stdout = os.fdopen(1, "w", buffering=1, closefd=False)
            sys.stderr = os.fdopen(2, "w", buffering=1, closefd=False)
        with open(self.folder / f"stack{self.rank}", "w") as stack_file:
            faulthandler.register(signal.SIGUSR1, file=stack_file, all_threads=True)
            try:
                dist.init_process_group(
                    "gloo", init_method=f"file://{self.folder}/rendezvous", rank=self.rank, world_size=self.world_size
                )
                message: tuple[bool, bytes | str] = (True, pickle.dumps(fn(*args)))
            except BaseException:
                message = (False, traceback.format_exc())
            sys.stdout.flush()
            sys.stderr.flush()
            self.writer.send(message)
            self.writer.close()
            # A rank that leaves closes the connections of those still at work; the parent ends all of them together.
            while os.getppid() == self.parent:
                time.sleep(0.1)
        os._exit(0)


def _collect(readers: list[Connection], deadline: float) -> dict[int, tuple[bool, Any]]:
    """Messages by rank until all have come, the deadline passes, or the grace after the first failure is over."""
    results: dict[int, tuple[bool, Any]] = {}
    pending: dict[Any, int] = {reader: rank for rank, reader in enumerate(readers)}
    while pending and time.monotonic() < deadline:
        for reader in wait(list(pending), timeout=max(0.0, deadline - time.monotonic())):
            rank = pending.pop(reader)
            try:
                results[rank] = readers[rank].recv()
            except EOFError:
                results[rank] = (False, "the process died without a Python exception (killed, or os._exit)")
            if not results[rank][0]:
                deadline = min(deadline, time.monotonic() + _GRACE_S)
    return results


def _stacks_of(processes: list[Any], ranks: list[int], folder: Path) -> dict[int, str]:
    for rank in ranks:
        if processes[rank].is_alive():
            os.kill(processes[rank].pid, signal.SIGUSR1)
    time.sleep(0.3)
    return {rank: (folder / f"stack{rank}").read_text() for rank in ranks}


def _describe(
    failures: dict[int, str], missing: list[int], stacks: dict[int, str], logs: Path, timeout: float
) -> str:
    parts = [f"rank {rank} failed:\n{text}" for rank, text in failures.items()]
    parts += [f"rank {rank} was not done after {timeout:g} s; its stack:\n{stack}" for rank, stack in stacks.items()]
    if failures and missing:
        parts.append(f"ranks {missing} were still running and were killed")
    for rank in sorted(failures) + sorted(stacks):
        log = logs / f"rank{rank}.txt"
        if log.exists():
            parts.append(f"end of rank {rank}'s output:\n" + "\n".join(log.read_text().splitlines()[-15:]))
    return "\n".join(parts)


def _kill(process: Any) -> None:
    """End a rank and what it started, which may outlive it; its zombie keeps the group's number until the join."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        # It never got as far as leading a group.
        process.kill()
    process.join()
