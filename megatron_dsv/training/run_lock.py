"""One launch at a time saves to a folder: rank 0 holds a lock on a file in it.

The lock is POSIX's (fcntl), which shared file systems pass on between hosts and the kernel drops when the process
ends, however it ends. So a file that a killed run left behind locks nothing.
"""

from __future__ import annotations

import contextlib
import datetime
import errno
import fcntl
import os
import socket
from collections.abc import Iterator
from pathlib import Path

LOCK_FILE = "running.lock"
_TAKEN = (errno.EACCES, errno.EAGAIN)
_UNSUPPORTED = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


class FolderInUseError(ValueError):
    """`--save` belongs to another launch, or cannot be written, in one line."""


@contextlib.contextmanager
def hold(folder: str | Path | None) -> Iterator[None]:
    """Keeps other launches out of ``folder``, which is made, until the block ends; None does nothing.

    Only one process of a launch may hold it, and it must not open the file elsewhere: closing that would drop the lock.

    Raises:
        FolderInUseError: another launch holds the folder (the message says which), or it cannot be written.
    """
    if folder is None:
        yield
        return
    path = Path(folder) / LOCK_FILE
    is_new = not path.parent.exists()
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        lock = _acquire(path)
    except OSError as error:
        raise FolderInUseError(f"--save must be a folder that can be written, got {path.parent.absolute()}: "
                               f"{error.strerror or error}; give another name") from error
    try:
        yield
    finally:
        # Removed while it is locked: who has it open finds that the name is another file's, and opens that.
        with contextlib.suppress(OSError):
            path.unlink()
        os.close(lock)
        if is_new:
            with contextlib.suppress(OSError):
                path.parent.rmdir()  # where the run came to nothing


def _acquire(path: Path) -> int:
    """An open, locked descriptor of the file that has the name ``path``."""
    while True:
        lock = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.read(lock, 500).decode(errors="replace").strip() or "another process"
            os.close(lock)
            if error.errno in _TAKEN:
                raise FolderInUseError(f"--save {path.parent} is in use by {holder}; end that run, or give another "
                                       "folder") from None
            if error.errno not in _UNSUPPORTED:
                raise
            print(f" {path.parent} lies on a file system without locks ({error.strerror}): a second launch into it "
                  "would go unseen", flush=True)
            return os.open(os.devnull, os.O_RDONLY)
        if _is_named(lock, path):
            break
        os.close(lock)
    since = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    os.ftruncate(lock, 0)
    os.write(lock, f"process {os.getpid()} on {socket.gethostname()} since {since}\n".encode())
    return lock


def _is_named(lock: int, path: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(lock), os.stat(path))
    except FileNotFoundError:
        return False
