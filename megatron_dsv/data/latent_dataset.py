"""A prepared latent data set as a map-style data set. The order of samples is ``sample_order``'s business.

Dims: C latent channels, T latent frames, H x W latent positions, L text tokens, D text width.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.utils.data import Dataset

from megatron_dsv.data import dataset_folder
from megatron_dsv.data.fingerprints import file_sha256
from megatron_dsv.data.holdout import Shape

_FLAG = "--latent-data"
_STAT_CHUNK, _STAT_THREADS = 1024, 16
_INDEX_KEYS = ("file", "bytes", "sha256", "shape", "caption", "source", "text_tokens")


class DamagedDataError(ValueError):
    """A file of a data set that is not as it was prepared, in one line that names --latent-data and the file."""

    def __init__(self, message: str) -> None:
        # A worker process of a DataLoader hands over its traceback, which ends with the message.
        super().__init__(message.rstrip().splitlines()[-1].removeprefix(f"{__name__}.{type(self).__name__}: "))


class LatentDataset(Dataset[dict[str, Any]]):
    """Records of a folder that ``dsv prepare`` wrote.

    Opening reads the two index files, and no sample; ``check_files`` looks whether the samples are there. Item
    ``record`` is a dictionary of

    * latents: fp32 [C, T, H, W]
    * text: fp32 [text_length, D], zeros after the text's own tokens
    * text_length: int, tokens that are the text's own
    * record: int

    Args:
        root: the folder.
        text_length: tokens that every text is padded or cut to; None is the longest that the text encoder gives.

    Attributes:
        root: the folder.
        text_length: as given.
        text_dim: D.
        buckets: record numbers by latent shape (C, T, H, W), both ascending.
        checksums: sha256 of each record's file.
        digest: sha256 of the index, which holds these.
        codec_description, text_description: what ``codec_from_description`` and ``text_encoder_from_description`` take.
        truncated_texts: records whose text is longer than ``text_length``.

    Raises:
        ValueError: the folder is missing, foreign, unfinished or damaged; the message names --latent-data.
    """

    def __init__(self, root: str | Path, text_length: int | None = None) -> None:
        self.root = Path(root)
        manifest = dataset_folder.read_dataset_json(self.root, _FLAG)
        self._records = _read_index(self.root, manifest)
        self.codec_description: dict[str, Any] = manifest["settings"]["codec"]
        self.text_description: dict[str, Any] = manifest["settings"]["text_encoder"]
        self.text_length = int(self.text_description["max_tokens"] if text_length is None else text_length)
        if self.text_length < 1:
            raise ValueError(f"text_length must be at least 1, got {text_length}")
        self.text_dim = int(self.text_description["dim"])
        self.digest: str = manifest["index_sha256"]
        self._null_text_sha256: str | None = manifest.get("null_text_sha256")
        self.checksums: list[str] = [record["sha256"] for record in self._records]
        self.truncated_texts = sum(record["text_tokens"] > self.text_length for record in self._records)
        if self.truncated_texts:
            warnings.warn(f"{self.truncated_texts} of {len(self._records)} captions in {self.root} are longer than "
                          f"{self.text_length} tokens and lose their end", stacklevel=2)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, record: int) -> dict[str, Any]:
        """Sample number ``record``.

        Raises:
            IndexError: no such record.
            DamagedDataError: its file is missing or damaged.
        """
        if not 0 <= record < len(self._records):
            raise IndexError(f"record must be in range({len(self._records)}), got {record}")
        entry = self._records[record]
        path = self.root / entry["file"]
        try:
            latents, text = dataset_folder.read_sample(path)
        except (OSError, SafetensorError, KeyError) as error:
            raise _damaged(path, "is missing" if isinstance(error, FileNotFoundError) else str(error)) from error
        if list(latents.shape) != entry["shape"] or text.shape[1] != self.text_dim:
            raise _damaged(path, f"holds latents {list(latents.shape)} and text {list(text.shape)} where the index "
                                 f"says {entry['shape']} and width {self.text_dim}")
        return {"latents": latents, "text": self.pad_text(text), "text_length": min(text.shape[0], self.text_length),
                "record": record}

    def check_files(self) -> None:
        """Looks at every sample file's existence and size, and reads none but the embedding of the empty caption.

        Raises:
            DamagedDataError: some are missing or of another size, or that embedding is not the one that was prepared;
                the message names the first and how many.
        """
        null_text = self.root / dataset_folder.NULL_TEXT_FILE
        if self.null_text.shape[1] != self.text_dim:
            raise _damaged(null_text,
                           f"has width {self.null_text.shape[1]} where the data set's text has {self.text_dim}")
        if self._null_text_sha256 is not None and file_sha256(null_text) != self._null_text_sha256:
            raise _damaged(null_text, "differs from its checksum")
        parts = [self._records[start:start + _STAT_CHUNK] for start in range(0, len(self._records), _STAT_CHUNK)]
        # Threads, because a file system over a network takes its time for each file.
        with ThreadPoolExecutor(_STAT_THREADS) as pool:
            bad = [found for part in pool.map(self._bad_files, parts) for found in part]
        if bad:
            count = f"{len(bad)} of {len(self)} sample files missing or of another size; the first, " if len(bad) > 1 \
                else ""
            raise _damaged(self.root / bad[0][0], bad[0][1], count)

    def _bad_files(self, records: list[dict[str, Any]]) -> list[tuple[str, str]]:
        """(file, what is wrong with it) of each record whose file is not as its index line says."""
        bad = []
        root = str(self.root)
        for record in records:
            try:
                size = os.stat(os.path.join(root, record["file"])).st_size
            except OSError as error:
                bad.append((record["file"], "is missing" if isinstance(error, FileNotFoundError) else
                            f"cannot be seen ({error.strerror})"))
                continue
            if size != record["bytes"]:
                bad.append((record["file"], f"has {size} bytes where the index says {record['bytes']}"))
        return bad

    @cached_property
    def buckets(self) -> dict[Shape, list[int]]:
        """Record numbers by latent shape (C, T, H, W), both ascending."""
        found: dict[Shape, list[int]] = {}
        for number, record in enumerate(self._records):
            channels, frames, height, width = record["shape"]
            found.setdefault((channels, frames, height, width), []).append(number)
        return {shape: found[shape] for shape in sorted(found)}

    @cached_property
    def null_text(self) -> Tensor:
        """Embedding fp32 [text_length, D] of the empty caption, padded; it replaces dropped captions.

        Raises:
            DamagedDataError: its file is missing or damaged.
        """
        path = self.root / dataset_folder.NULL_TEXT_FILE
        try:
            return self.pad_text(dataset_folder.read_null_text(self.root))
        except (OSError, SafetensorError, KeyError) as error:
            raise _damaged(path, "is missing" if isinstance(error, FileNotFoundError) else str(error)) from error

    def pad_text(self, text: Tensor) -> Tensor:
        """Embedding [L, D] padded with zeros, or cut, to [text_length, D]."""
        padded = torch.zeros(self.text_length, text.shape[1], dtype=text.dtype)
        kept = min(text.shape[0], self.text_length)
        padded[:kept] = text[:kept]
        return padded

    def facts(self, record: int) -> dict[str, Any]:
        """The index line of a record: file, bytes, sha256, shape, caption, source, start_seconds and so on."""
        return dict(self._records[record])


def _read_index(root: Path, manifest: dict[str, Any]) -> list[dict[str, Any]]:
    if not manifest.get("index_sha256"):
        raise ValueError(f"{_FLAG} must be a finished data set, got {root}, whose preparation has not finished; run "
                         "the same `dsv prepare` again")
    try:
        content = (root / dataset_folder.INDEX_FILE).read_bytes()
    except OSError as error:
        raise ValueError(f"{_FLAG} must be a folder written by `dsv prepare`, got {root}, which has no readable "
                         f"{dataset_folder.INDEX_FILE}; run the same `dsv prepare` again") from error
    if hashlib.sha256(content).hexdigest() != manifest["index_sha256"]:
        raise ValueError(f"{_FLAG} must be an intact data set, got {root}, whose {dataset_folder.INDEX_FILE} is "
                         "truncated or was changed; run the same `dsv prepare` again")
    records = [json.loads(line) for line in content.splitlines()]
    if not records or any(key not in record for record in records for key in _INDEX_KEYS):
        raise ValueError(f"{_FLAG} must hold at least one sample, all with {', '.join(_INDEX_KEYS)}, got {root}")
    return records


def _damaged(path: Path, reason: str, count: str = "") -> DamagedDataError:
    wrong = reason.splitlines()[0] if reason else "cannot be read"
    return DamagedDataError(f"{_FLAG} has {count or 'a damaged file: '}{path} {wrong}; list all with `dsv prepare "
                            "--verify`, delete them, and run the same `dsv prepare` again")
