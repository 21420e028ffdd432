"""What a benchmark says, before it does anything, on a host without the GPUs that it needs."""

from __future__ import annotations

import argparse

import torch


def need_gpus(parser: argparse.ArgumentParser, gpus: int, what: str = "it", way_out: str = "") -> None:
    """Ends the program in one line with status 2 where this process sees fewer than ``gpus`` CUDA devices."""
    found = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if found < gpus:
        parser.exit(2, f"{parser.prog}: error: {what} needs {gpus} GPU{'s' * (gpus != 1)}, found {found}"
                       f"{way_out and f'; {way_out}'}\n")
