"""Opening and reading a data set: texts fitted, and one clear error for each way in which the folder can be wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_dsv.data import dataset_folder
from megatron_dsv.data.clip_plan import PixelBucket
from megatron_dsv.data.codecs import HaarCodec
from megatron_dsv.data.latent_dataset import LatentDataset
from megatron_dsv.data.preparation import PrepareOptions, prepare
from megatron_dsv.data.text import HashTextEncoder


@pytest.fixture
def prepared(tmp_path: Path, make_video: Callable[..., Path]) -> Path:
    videos = tmp_path / "videos"
    videos.mkdir()
    make_video(videos / "one two three.mp4", 5)
    make_video(videos / "one.mp4", 9)
    root = tmp_path / "set"
    prepare(PrepareOptions(videos, root, (PixelBucket(16, 16, 5), PixelBucket(16, 16, 9))), HaarCodec(4),
            HashTextEncoder(dim=8))
    return root


def test_texts_are_padded_and_cut_with_a_counted_warning(prepared: Path) -> None:
    encoder = HashTextEncoder(dim=8)
    with pytest.warns(UserWarning, match="1 of 2 captions in .* are longer than 3 tokens and lose their end"):
        data = LatentDataset(prepared, text_length=3)
    assert data.truncated_texts == 1
    assert list(data.buckets) == [(4, 2, 2, 2), (4, 3, 2, 2)]
    long, short = (data[data.buckets[shape][0]] for shape in data.buckets)
    assert (long["text_length"], short["text_length"]) == (3, 2)
    stored = encoder.encode(["one two three"])[0].bfloat16().float()
    assert torch.equal(long["text"], stored[:3])
    assert torch.equal(short["text"][2:], torch.zeros(1, 8))
    assert (data.text_dim, data.null_text.shape, data.null_text.dtype) == (8, (3, 8), torch.float32)
    assert len(set(data.checksums)) == len(data) == 2


def test_an_unlisted_record_is_an_index_error(prepared: Path) -> None:
    data = LatentDataset(prepared)
    for record in (-1, 2):
        with pytest.raises(IndexError, match=rf"record must be in range\(2\), got {record}"):
            data[record]


def edit_manifest(root: Path, **changes: object) -> None:
    path = root / "dataset.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


@pytest.mark.parametrize(("damage", "message"), [
    (lambda root: root.rename(root.with_name("moved")), "which does not exist"),
    (lambda root: (root / "dataset.json").unlink(), r"which has no dataset\.json"),
    (lambda root: (root / "dataset.json").write_text("{"), r"whose dataset\.json is damaged \(JSONDecodeError\)"),
    (lambda root: (root / "dataset.json").write_text('{"a": 1}'), r"whose dataset\.json is of another program"),
    (lambda root: edit_manifest(root, version=99), "in format version 1, got .* in version 99; prepare it again"),
    (lambda root: edit_manifest(root, index_sha256=None), "whose preparation has not finished; run the same"),
    (lambda root: (root / "index.jsonl").unlink(), r"which has no readable index\.jsonl"),
    (lambda root: (root / "index.jsonl").write_bytes((root / "index.jsonl").read_bytes()[:-20]),
     r"whose index\.jsonl is truncated or was changed"),
])
def test_a_wrong_folder_is_one_clear_error(prepared: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(prepared)
    with pytest.raises(ValueError, match=f"^--latent-data must .*{message}") as caught:
        LatentDataset(prepared)
    assert "\n" not in str(caught.value)


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ValueError, match=r"--latent-data must be .*which is not a folder"):
        LatentDataset(tmp_path / "file")


@pytest.mark.parametrize(("damage", "message"), [
    (lambda path: path.unlink(), "is missing"),
    (lambda path: path.write_bytes(path.read_bytes()[:-8]), "damaged file"),
    (lambda path: path.write_bytes(b"foreign"), "damaged file"),
    (lambda path: dataset_folder.write_atomically(path, dataset_folder.save({"x": torch.zeros(1)})), "no latents"),
    (lambda path: dataset_folder.write_atomically(path, dataset_folder.save(
        {"latents": torch.zeros(4, 1, 2, 2), "text": torch.zeros(1, 8)})), r"holds latents \[4, 1, 2, 2\]"),
])
def test_a_damaged_sample_is_named(prepared: Path, damage: Callable[[Path], object], message: str) -> None:
    data = LatentDataset(prepared)
    path = prepared / data.facts(1)["file"]
    damage(path)
    with pytest.raises(ValueError, match=f"--latent-data has a damaged file: .*{path.name}.*dsv prepare") as caught:
        data[1]
    assert re.search(message, str(caught.value))
    data[0]


def test_a_missing_null_text_is_named(prepared: Path) -> None:
    (prepared / "null_text.safetensors").unlink()
    with pytest.raises(ValueError, match=r"--latent-data has a damaged file: .*null_text\.safetensors is missing"):
        _ = LatentDataset(prepared).null_text


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-1])


@pytest.mark.parametrize("threads", [1, 16])
def test_files_are_looked_at_without_reading_them(prepared: Path, threads: int,
                                                  monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatron_dsv.data.latent_dataset._STAT_CHUNK", 1)
    monkeypatch.setattr("megatron_dsv.data.latent_dataset._STAT_THREADS", threads)
    data = LatentDataset(prepared)
    with monkeypatch.context() as patch:
        patch.setattr(dataset_folder, "read_sample", lambda path: pytest.fail("read a sample"))
        data.check_files()
    first, second = (prepared / data.facts(record)["file"] for record in range(2))
    cut(second)
    with pytest.raises(ValueError, match=f"^--latent-data has a damaged file: {second} has .* bytes where the index "
                                         "says .*; list all with `dsv prepare --verify`"):
        data.check_files()
    first.unlink()
    with pytest.raises(ValueError, match="^--latent-data has 2 of 2 sample files missing or of another size; the "
                                         f"first, {first} is missing; list all") as caught:
        data.check_files()
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("damage", "message"), [
    (Path.unlink, "null_text.safetensors is missing"),
    (cut, "null_text.safetensors Error while deserializing header"),
    (lambda path: dataset_folder.write_null_text(path.parent, torch.zeros(1, 7)), "has width 7 where .* text has 8"),
    (lambda path: dataset_folder.write_null_text(path.parent, torch.full((1, 8), torch.nan)),
     "null_text.safetensors differs from its checksum; list all"),
])
def test_the_empty_caption_is_looked_at_too(prepared: Path, damage: Callable[[Path], object], message: str) -> None:
    damage(prepared / "null_text.safetensors")
    with pytest.raises(ValueError, match=f"^--latent-data has a damaged file: .*{message}"):
        LatentDataset(prepared).check_files()
