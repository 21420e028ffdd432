"""Bytes that changed on the disk are found, whichever they are."""

import json
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

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


def test_no_common_state(folder):
    with warnings.catch_warnings(action="error"), \
            pytest.raises(CheckpointError, match="its common state cannot be read"):
        checkpoint_files.common_state(folder)
