"""Content checksums: of files, of model folders and of settings. All are sha256 in hexadecimal."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any

_CHUNK_BYTES = 1 << 20
_WEIGHT_SUFFIXES = (".safetensors", ".bin", ".json", ".model")


def file_sha256(path: Path) -> str:
    """Checksum of a file's bytes."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def folder_fingerprint(folder: Path) -> str:
    """Checksum of the configuration, tokenizer and weight files directly in a model folder, names included."""
    digest = hashlib.sha256()
    for path in sorted(folder.iterdir()):
        if path.is_file() and path.suffix in _WEIGHT_SUFFIXES:
            digest.update(os.fsencode(path.name) + f"\n{file_sha256(path)}\n".encode())
    return digest.hexdigest()


def json_sha256(value: Any) -> str:
    """Checksum of a JSON-ready value, whatever the order of its keys."""
    return hashlib.sha256(json.dumps(value, sort_keys=True, ensure_ascii=False).encode()).hexdigest()
