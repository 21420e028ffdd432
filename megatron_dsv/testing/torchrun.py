"""Launching a program on the ranks of this host, for tests of whole launches."""

from __future__ import annotations

import sys


def torchrun(ranks: int) -> list[str]:
    """The words before a script: torchrun on this interpreter, on a port that the launcher takes while it is free.

    A port that a test looks for beforehand may be gone when its launch begins.
    """
    return [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost",
            "--nproc-per-node", str(ranks)]
