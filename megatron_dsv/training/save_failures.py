"""A folder that takes no more, as on a full disk, ends the run with one line; what was saved whole before stays.

A rank that cannot write leaves a collective that the others are in, or all of them learn of it from torch; either way
the launcher ends them.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import functools
from collections.abc import Iterator
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException

_TORCH_WRITER = "inline_container.cc"
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


class NotSavedError(RuntimeError):
    """What a run had to write and could not, in one line; all ranks know of it."""


class NotSavedHereError(NotSavedError):
    """The same, of one rank alone."""


@contextlib.contextmanager
def told(what: str, folder: str) -> Iterator[None]:
    """Turns what the block raises of ``what`` that it writes to ``folder`` into one line.

    Raises:
        NotSavedError: torch could not write a checkpoint, which all ranks learn.
        NotSavedHereError: this rank could not write.
    """
    try:
        yield
    except CheckpointException as error:
        # Only the rank that gathers results knows the reasons; it is the one that speaks.
        first = next(iter(error.failures.values()), (error,))[0]
        raise NotSavedError(_line(what, folder, first)) from error
    except (OSError, RuntimeError) as error:
        # torch.save has no other kind of error for a file that takes no more.
        if isinstance(error, RuntimeError) and _TORCH_WRITER not in str(error):
            raise
        raise NotSavedHereError(_line(what, folder, error)) from error


def install(args: argparse.Namespace) -> None:
    """Gives Megatron's saves, the asynchronous ones with them, this end."""
    from megatron.training import training

    save, finalize = training.save_checkpoint, training.maybe_finalize_async_save

    @functools.wraps(save)
    def save_or_tell(iteration: int, *positional: Any, **named: Any) -> Any:
        with told(f"iteration {iteration}", args.save):
            return save(iteration, *positional, **named)

    @functools.wraps(finalize)
    def finalize_or_tell(*positional: Any, **named: Any) -> Any:
        with told("an asynchronous save", args.save):
            return finalize(*positional, **named)

    training.save_checkpoint, training.maybe_finalize_async_save = save_or_tell, finalize_or_tell


def _line(what: str, folder: str, error: BaseException) -> str:
    reason = " ".join(f"{type(error).__name__}: {error}".split())
    full = not isinstance(error, OSError) or error.errno in (None, *_FULL)
    cure = "free space there (disk, quota)" if full else "mend that"
    return (f"{what} could not be written to {folder} ({reason}); {cure} and launch again; what was saved whole before "
            "stays")
