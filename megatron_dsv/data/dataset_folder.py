"""The files of a latent data set, and how they are written so that none is ever seen half-written.

    dataset.json             format, settings (codec, text encoder, buckets, ...), checksum of the index
    index.jsonl              one line a sample; the line number is the record number
    null_text.safetensors    embedding of the empty caption
    samples/ab/abcd...       one safetensors file a sample: latents, text, and its index line as metadata
    journal.jsonl            one line a finished video; what an interrupted preparation goes on from
    report.json              what was prepared, what was dropped and why

Dims: C latent channels, T latent frames, H x W latent positions, L text tokens, D text width.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save
from torch import Tensor

FORMAT = "megatron-dsv-latents"
FORMAT_VERSION = 1
DATASET_FILE = "dataset.json"
INDEX_FILE = "index.jsonl"
NULL_TEXT_FILE = "null_text.safetensors"
JOURNAL_FILE = "journal.jsonl"
REPORT_FILE = "report.json"
SAMPLES_FOLDER = "samples"
LATENT_DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def write_atomically(path: Path, content: bytes) -> None:
    """Writes a file whole or not at all, also if the process or the machine stops midway."""
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    with partial.open("wb") as stream:
        stream.write(content)
        stream.flush()
        os.fsync(stream.fileno())
    os.replace(partial, path)


def write_json(path: Path, value: Any) -> None:
    """Writes a JSON file whole or not at all."""
    write_atomically(path, (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode())


def printable(name: str) -> str:
    """A path's text with the bytes escaped that are not UTF-8: JSON and terminals cannot take them."""
    return name.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def sample_file(key: str) -> str:
    """Path of a sample's file relative to the data set, of a key in hexadecimal."""
    return f"{SAMPLES_FOLDER}/{key[:2]}/{key}.safetensors"


def write_sample(root: Path, key: str, latents: Tensor, text: Tensor, facts: dict[str, Any]) -> dict[str, Any]:
    """Writes one sample and gives its index line.

    Args:
        root: the data set.
        key: name of the sample.
        latents: [C, T, H, W] in the data type to store.
        text: [L, D]; stored in bf16 where the latents are.
        facts: JSON-ready facts of the sample; stored with it.
    """
    path = root / sample_file(key)
    path.parent.mkdir(parents=True, exist_ok=True)
    # One metadata entry: with several, their order in the file would differ from run to run.
    content = save({"latents": latents.contiguous(), "text": text.to(latents.dtype).contiguous()},
                   {"sample": json.dumps(facts, sort_keys=True, ensure_ascii=False)})
    write_atomically(path, content)
    return _index_line(key, content, facts)


def recover_sample(root: Path, key: str, checksum: str | None) -> dict[str, Any] | None:
    """Index line of a sample that is already there, from its file alone.

    Args:
        root: the data set.
        key: name of the sample.
        checksum: sha256 of the file as it was written; None if no line of an earlier run tells.

    Returns:
        the line; None if the file is not there, not readable, or not as it was written.
    """
    path = root / sample_file(key)
    try:
        content = path.read_bytes()
        with safe_open(path, "pt") as stream:
            facts = json.loads((stream.metadata() or {})["sample"])
            stream.get_slice("latents"), stream.get_slice("text")
    except (OSError, SafetensorError, KeyError, ValueError):
        return None
    line = _index_line(key, content, facts)
    return line if checksum in (None, line["sha256"]) else None


def _index_line(key: str, content: bytes, facts: dict[str, Any]) -> dict[str, Any]:
    return {"file": sample_file(key), "bytes": len(content), "sha256": hashlib.sha256(content).hexdigest(), **facts}


def read_sample(path: Path) -> tuple[Tensor, Tensor]:
    """Latents fp32 [C, T, H, W] and text fp32 [L, D] of a sample's file.

    Raises:
        OSError, SafetensorError, KeyError: the file is missing, damaged or foreign.
    """
    with safe_open(path, "pt") as stream:
        if not {"latents", "text"} <= set(stream.keys()):
            raise KeyError("no latents or no text in the file")
        return stream.get_tensor("latents").float(), stream.get_tensor("text").float()


def write_null_text(root: Path, text: Tensor) -> str:
    """Writes the embedding [L, D] of the empty caption and gives the file's checksum."""
    content = save({"text": text.contiguous()})
    write_atomically(root / NULL_TEXT_FILE, content)
    return hashlib.sha256(content).hexdigest()


def read_null_text(root: Path) -> Tensor:
    """Embedding fp32 [L, D] of the empty caption; errors as ``read_sample``."""
    with safe_open(root / NULL_TEXT_FILE, "pt") as stream:
        if "text" not in stream.keys():  # noqa: SIM118 - not a mapping, has no __contains__
            raise KeyError("no text in the file")
        return stream.get_tensor("text").float()


def read_dataset_json(root: Path, flag: str) -> dict[str, Any]:
    """Content of dataset.json.

    Args:
        root: the data set.
        flag: the flag that named it, for messages.

    Raises:
        ValueError: there is none, or it is of another format or version.
    """
    path = root / DATASET_FILE
    wanted = f"{flag} must be a folder written by `dsv prepare`"
    if not root.is_dir():
        raise ValueError(f"{wanted}, got {root}, which {'is not a folder' if root.exists() else 'does not exist'}")
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise ValueError(f"{wanted}, got {root}, which has no {DATASET_FILE}") from error
    except (OSError, ValueError) as error:
        raise ValueError(f"{wanted}, got {root}, whose {DATASET_FILE} is damaged ({type(error).__name__})") from error
    if not isinstance(content, dict) or content.get("format") != FORMAT or "settings" not in content:
        raise ValueError(f"{wanted}, got {root}, whose {DATASET_FILE} is of another program")
    if content.get("version") != FORMAT_VERSION:
        raise ValueError(f"{wanted} in format version {FORMAT_VERSION}, got {root} in version "
                         f"{content.get('version')}; prepare it again")
    return content


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Objects of a JSON-lines file, up to the first line that is not whole; an absent file has none."""
    if not path.exists():
        return []
    lines = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            value = json.loads(line)
        except ValueError:
            break
        if not line.endswith(b"\n") or not isinstance(value, dict):
            break
        lines.append(value)
    return lines


def lines_to_bytes(lines: list[dict[str, Any]]) -> bytes:
    """JSON-lines content; equal objects give equal bytes."""
    return b"".join(json.dumps(line, sort_keys=True, ensure_ascii=False).encode() + b"\n" for line in lines)


def listed_sample_files(root: Path) -> set[str]:
    """Paths, relative to the data set, of all sample files that are there."""
    return {path.relative_to(root).as_posix() for path in (root / SAMPLES_FOLDER).glob("*/*.safetensors")}
