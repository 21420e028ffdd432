"""The files of one iteration's torch_dist folder, read without a model: complete, undamaged, and what they say.

Only what damage leads to is called damage. What keeps this host from reading a whole file is told in its own words: an
earlier iteration would be no way out of it.
"""

from __future__ import annotations

import io
import warnings
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any, BinaryIO

from megatron.core import dist_checkpointing
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

WAY_OUT = "use an earlier iteration with --ckpt-step"


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded, in one line."""


def host_trouble(error: BaseException) -> str | None:
    """What keeps this host from reading a file that may be whole, and the way out; None for what damage leads to.

    A file that is not there is damage: it is a part of the checkpoint.
    """
    if isinstance(error, CheckpointException):
        error = next(iter(error.failures.values()), (error,))[0]
    reason = " ".join(f"{type(error).__name__}: {error}".split()).removesuffix(":")
    if isinstance(error, OSError) and not isinstance(error, FileNotFoundError):
        return f"cannot be read on this host ({reason}); launch again once it can be"
    if isinstance(error, MemoryError):
        return f"cannot be read for want of memory on this host ({reason}); launch again with more of it, or {WAY_OUT}"
    if isinstance(error, ImportError):
        return f"needs what is not installed on this host ({reason}); install it, or {WAY_OUT}"
    return None


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Tensor shapes by key.

    Raises:
        CheckpointError: tables that cannot be read, or a file that is shorter than they say or out of reach.
    """
    metadata = _metadata(folder)
    ends: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in ends.items():
        path = folder / name
        try:
            size = path.stat().st_size if path.is_file() else -1
        except OSError as error:
            raise CheckpointError(f"{path} {host_trouble(error)}") from error
        if size < end:
            state = "missing" if size < 0 else f"{size} bytes long, {end} are needed"
            raise CheckpointError(f"{folder} is truncated: {name} is {state}; {WAY_OUT}")
    return {key: tuple(value.size) for key, value in metadata.state_dict_metadata.items() if hasattr(value, "size")}


def common_state(folder: Path) -> dict[str, Any]:
    """What every rank saves alike: ``args`` of the run, ``content_metadata``, the iteration, the schedule.

    Raises:
        CheckpointError: it cannot be read.
    """
    try:
        with warnings.catch_warnings(action="ignore"):  # torch's, that no process group is there, and none is needed
            return dist_checkpointing.load_common_state_dict(str(folder))
    except (Exception, CheckpointException) as error:
        if (trouble := host_trouble(error)) is not None:
            raise CheckpointError(f"{folder}: its common state {trouble}") from error
        raise CheckpointError(f"{folder} is not a complete torch_dist checkpoint: its common state cannot be read "
                              f"({type(error).__name__}); {WAY_OUT}") from error


def verify_checksums(folder: Path, wanted: Callable[[str], bool], *, part: int = 0, parts: int = 1) -> None:
    """Reads what is stored under the wanted keys and compares it with the checksums that were written with it.

    Every entry is a zip archive, as torch.save writes it, with a CRC-32 of each member; torch.load does not look.

    Args:
        wanted: whether an entry, by its key, will be loaded.
        part, parts: look at every ``parts``-th of these entries, beginning with number ``part``.

    Raises:
        CheckpointError: an entry does not have its checksum.
    """
    stored = _metadata(folder).storage_data or {}
    entries = sorted((info.relative_path, info.offset, info.length, index.fqn)
                     for index, info in stored.items() if wanted(index.fqn))
    for name, offset, length, key in entries[part::parts]:
        try:
            with (folder / name).open("rb") as file:
                intact = _has_checksums(_Slice(file, offset, length))
        except (OSError, MemoryError) as error:
            raise CheckpointError(f"{folder / name} {host_trouble(error) or 'was removed'}") from error
        if not intact:
            raise CheckpointError(f"{folder} is damaged: {key} in {name} does not have the checksum that it was "
                                  f"written with; {WAY_OUT}")


def _has_checksums(entry: _Slice) -> bool:
    """Whether the zip archive in ``entry`` is whole. Raises OSError and MemoryError of the host, no others."""
    try:
        with zipfile.ZipFile(io.BufferedReader(entry, 1 << 20)) as archive:
            return archive.testzip() is None
    except MemoryError:
        raise
    except Exception:  # what damaged bytes lead a reader to has no type of its own
        # zipfile takes an error of the disk for the end of the archive.
        if entry.failure is not None:
            raise entry.failure from None
        return False


class _Slice(io.RawIOBase):
    """``length`` bytes of an open file, from ``start``; ``failure`` is the error that the file gave, if it did."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._position = file, start, length, 0
        self.failure: OSError | None = None

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        base = {io.SEEK_SET: 0, io.SEEK_CUR: self._position, io.SEEK_END: self._length}[whence]
        if base + offset < 0:
            raise OSError("a seek before the beginning")
        self._position = base + offset
        return self._position

    def readinto(self, buffer: Any) -> int:
        left = max(0, min(len(buffer), self._length - self._position))
        try:
            self._file.seek(self._start + self._position)
            data = self._file.read(left)
        except OSError as error:
            self.failure = error
            raise
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def _metadata(folder: Path) -> Any:
    incomplete = f"{folder} is not a complete torch_dist checkpoint"
    try:
        complete = dist_checkpointing.check_is_distributed_checkpoint(str(folder))
    except Exception as error:
        if (trouble := host_trouble(error)) is not None:
            raise CheckpointError(f"{folder}: its metadata.json {trouble}") from error
        complete = False
    if not complete:
        raise CheckpointError(f"{incomplete}: its metadata.json is missing or cannot be read; {WAY_OUT}")
    try:
        return FileSystemReader(folder).read_metadata()
    except Exception as error:
        if (trouble := host_trouble(error)) is not None:
            raise CheckpointError(f"{folder}: its .metadata {trouble}") from error
        raise CheckpointError(f"{incomplete}: its .metadata cannot be read ({type(error).__name__}); "
                              f"{WAY_OUT}") from error
