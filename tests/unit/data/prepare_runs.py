"""Runs of `dsv prepare`: their flags, and what they left."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SHAPE = ["--frames", "5", "--height", "32", "--width", "48"]


def flags(source: Path, output: Path, *more: str) -> list[str]:
    return ["prepare", "--input", str(source), "--output", str(output), *SHAPE, "--text-dim", "16", *more]


def tree(root: Path) -> dict[str, bytes]:
    """Content of a data set, without the journal's time stamps and the report's account of reuse."""
    return {path.relative_to(root).as_posix(): path.read_bytes() for path in sorted(root.rglob("*"))
            if path.is_file() and path.name not in (".lock", "journal.jsonl", "report.json")}


def report(root: Path) -> dict[str, Any]:
    return json.loads((root / "report.json").read_text())
