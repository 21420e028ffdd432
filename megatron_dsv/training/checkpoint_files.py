"""The files of one iteration's torch_dist folder, read without a model: complete, undamaged, and what they say."""

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


def stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Tensor shapes by key.

    Raises:
        CheckpointError: tables that cannot be read, or a file that is shorter than they say.
    """
    metadata = _metadata(folder)
    ends: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in ends.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else -1
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
        with (folder / name).open("rb") as file:
            try:
                with zipfile.ZipFile(io.BufferedReader(_Slice(file, offset, length), 1 << 20)) as archive:
                    intact = archive.testzip() is None
            except Exception:  # what damaged bytes lead a reader to has no type of its own
                intact = False
        if not intact:
            raise CheckpointError(f"{folder} is damaged: {key} in {name} does not have the checksum that it was "
                                  f"written with; {WAY_OUT}")


class _Slice(io.RawIOBase):
    """``length`` bytes of an open file, from ``start``."""

    def __init__(self, file: BinaryIO, start: int, length: int) -> None:
        self._file, self._start, self._length, self._position = file, start, length, 0

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
        self._file.seek(self._start + self._position)
        data = self._file.read(left)
        buffer[: len(data)] = data
        self._position += len(data)
        return len(data)


def _metadata(folder: Path) -> Any:
    incomplete = f"{folder} is not a complete torch_dist checkpoint"
    try:
        complete = dist_checkpointing.check_is_distributed_checkpoint(str(folder))
    except Exception:
        complete = False
    if not complete:
        raise CheckpointError(f"{incomplete}: its metadata.json is missing or cannot be read; {WAY_OUT}")
    try:
        return FileSystemReader(folder).read_metadata()
    except Exception as error:
        raise CheckpointError(f"{incomplete}: its .metadata cannot be read ({type(error).__name__}); "
                              f"{WAY_OUT}") from error
