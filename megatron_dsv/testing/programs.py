"""The training program as one rank of a test runs it."""

from __future__ import annotations

import contextlib
import os
import warnings
from pathlib import Path
from typing import Any

from megatron_dsv.training.main import main


def run_program(arguments: list[str], folder: str | Path) -> tuple[Any, str]:
    """Exit status (None if it ran to its end) and stderr of the program on this rank, of ``run_ranks``.

    Args:
        arguments: command line.
        folder: exists; takes the file that stderr goes through.
    """
    path, status = Path(folder) / f"stderr{os.environ['RANK']}", None
    with path.open("w") as sink, contextlib.redirect_stderr(sink), warnings.catch_warnings(action="ignore"):
        try:
            main(arguments)
        except SystemExit as stop:
            status = stop.code
    return status, path.read_text()
