"""A file that a command is to write, checked before the work that fills it."""

from __future__ import annotations

import os
from pathlib import Path


def check_output_file(flag: str, file: str) -> None:
    """Raises ValueError, naming ``flag``, unless ``file`` can be written: its folder is there, itself no folder."""
    path = Path(file)
    if path.is_dir():
        raise ValueError(f"{flag} must be a file, got {file}, which is a folder")
    folder = path.resolve().parent
    if not folder.is_dir():
        raise ValueError(f"{flag} must lie in a folder that exists, got {file}; make {folder} first")
    if not os.access(path if path.exists() else folder, os.W_OK):
        raise ValueError(f"{flag} must be a file that can be written, got {file}")
