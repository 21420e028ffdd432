"""Bytes that changed on the disk are found, whichever they are."""

import json
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

from megatron_dsv.training import checkpoint_files
from megatron_dsv.training.checkpoint_files import CheckpointError, verify_checksums


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    generator = torch.Generator().manual_seed(0)
    state = {"model.weight": torch.randn(40, 50, generator=generator),
             "optimizer.exp_avg": torch.randn(40, 50, generator=generator), "steps": {"done": 3}}
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state, checkpoint_id=tmp_path, no_dist=True)
    (tmp_path / "metadata.json").write_text(json.dumps({
        "sharded_backend": "torch_dist", "sharded_backend_version": 1, "common_backend": "torch",
        "common_backend_version": 1}))
    return tmp_path


def _everything(key: str) -> bool:
    return True


def _entries(folder: Path) -> dict[str, tuple[Path, int, int]]:
    stored = dcp.FileSystemReader(folder).read_metadata().storage_data
    return {index.fqn: (folder / info.relative_path, info.offset, info.length) for index, info in stored.items()}


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1
    path.write_bytes(bytes(data))


def test_what_was_saved_is_intact(folder):
    verify_checksums(folder, _everything)
    assert checkpoint_files.stored_shapes(folder) == {"model.weight": (40, 50), "optimizer.exp_avg": (40, 50)}


@pytest.mark.parametrize("share", [0.1, 0.5, 0.9])
@pytest.mark.parametrize("key", ["model.weight", "optimizer.exp_avg"])
def test_one_bit_of_a_tensor(folder, key, share):
    path, offset, length = _entries(folder)[key]
    _flip(path, offset + int(length * share))
    with pytest.raises(CheckpointError, match=rf"is damaged: {key} in {path.name} does not have the checksum.*--ckpt"):
        verify_checksums(folder, _everything)
    verify_checksums(folder, lambda other: other != key)


def test_no_archive_at_all(folder):
    path, offset, length = _entries(folder)["model.weight"]
    data = bytearray(path.read_bytes())
    data[offset : offset + length] = b"x" * length
    path.write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match=r"is damaged: model\.weight"):
        verify_checksums(folder, _everything)


def _complaint(folder: Path, part: int) -> str:
    try:
        verify_checksums(folder, _everything, part=part, parts=2)
    except CheckpointError as error:
        return str(error)
    return ""


def test_parts_cover_every_entry_once(folder):
    entries = _entries(folder)
    for key, (path, offset, length) in entries.items():
        original = path.read_bytes()
        _flip(path, offset + length // 2)
        complaints = [_complaint(folder, part) for part in range(2)]
        assert sorted(map(bool, complaints)) == [False, True]
        assert key in "".join(complaints)
        path.write_bytes(original)


def test_tables_that_cannot_be_read(folder):
    (folder / ".metadata").write_bytes(b"no pickle")
    with pytest.raises(CheckpointError, match=r"its \.metadata cannot be read"):
        checkpoint_files.stored_shapes(folder)
    (folder / "metadata.json").unlink()
    with pytest.raises(CheckpointError, match=r"its metadata\.json is missing"):
        checkpoint_files.stored_shapes(folder)


def _fails(error, *, after: int = 0):
    """A function that fails after so many calls, which give 200 bytes each."""
    calls = []

    def fail(*args, **kwargs):
        calls.append(args)
        if len(calls) > after:
            raise error
        return b"x" * 200
    return fail


@pytest.mark.parametrize(("error", "words"), [
    (OSError(5, "Input/output error"), r"cannot be read on this host \(OSError: \[Errno 5\] Input/output error\); "),
    (PermissionError(13, "Permission denied"), r"cannot be read on this host \(PermissionError: .*denied\); launch "),
    (MemoryError(), r"cannot be read for want of memory on this host \(MemoryError\); launch again with more"),
    (ModuleNotFoundError("No module named 'x'"), r"needs what is not installed on this host \(.*'x'\); install it, "),
])
def test_what_the_host_lacks_is_no_damage(folder, monkeypatch, error, words):
    def refused(look, *rest):
        with pytest.raises(CheckpointError, match=words) as caught:
            look(folder, *rest)
        assert "damaged" not in str(caught.value)
        assert "complete" not in str(caught.value)
        assert "\n" not in str(caught.value)

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files.dist_checkpointing, "load_common_state_dict", _fails(error))
        refused(checkpoint_files.common_state)
        failures = CheckpointException("load", {0: (error, None)})
        patch.setattr(checkpoint_files.dist_checkpointing, "load_common_state_dict", _fails(failures))
        refused(checkpoint_files.common_state)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files.dist_checkpointing, "check_is_distributed_checkpoint", _fails(error))
        refused(checkpoint_files.stored_shapes)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint_files.FileSystemReader, "read_metadata", _fails(error))
        refused(checkpoint_files.stored_shapes)
    if isinstance(error, OSError):
        with monkeypatch.context() as patch:
            patch.setattr(Path, "is_file", _fails(error))
            refused(checkpoint_files.stored_shapes)


class _Disk:
    """An open file whose reads fail after the first few."""

    def __init__(self, good: int) -> None:
        self.read = _fails(OSError(5, "Input/output error"), after=good)

    def seek(self, position: int) -> int:
        return position

    def __enter__(self):
        return self

    def __exit__(self, *_):
        return None


@pytest.mark.parametrize("good", [0, 1, 2])
def test_an_error_of_the_disk_is_no_damage(folder, monkeypatch, good):
    """Also where zipfile takes it for an archive without an end."""
    opened = Path.open
    monkeypatch.setattr(Path, "open", lambda path, *rest, **named: _Disk(good) if path.suffix == ".distcp" else opened(
        path, *rest, **named))
    with pytest.raises(CheckpointError, match=r"distcp cannot be read on this host \(OSError: \[Errno 5\] Input/"):
        verify_checksums(folder, _everything)


def test_no_common_state(folder):
    with warnings.catch_warnings(action="error"), \
            pytest.raises(CheckpointError, match="its common state cannot be read"):
        checkpoint_files.common_state(folder)
