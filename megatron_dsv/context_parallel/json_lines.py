"""Files of one JSON a line that a run adds to: a line that a kill or a full disk cut short spoils no other."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any


def append(path: Path, row: dict[str, Any]) -> None:
    """Adds a line; one that was left unfinished is ended first. OSError if it cannot be written."""
    line = json.dumps(row).encode() + b"\n"
    with path.open("a+b") as file:
        end = file.seek(0, os.SEEK_END)
        if end:
            file.seek(end - 1)
        torn = end > 0 and file.read(1) != b"\n"
        file.write(b"\n" + line if torn else line)


def parse(line: str) -> Any:
    """What a line holds; None for one that was cut short."""
    try:
        return json.loads(line)
    except ValueError:
        return None
