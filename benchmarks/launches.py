"""Why a launch of the training program by a benchmark failed."""

from __future__ import annotations

import re

_REASONS = (
    # Of this project, of the system by way of torchrun's report, and of any other exception but torchrun's own.
    re.compile(r"^\S+\.py: error: .+$", re.MULTILINE),
    re.compile(r"Signal \d+ \(SIG\w+\).*$", re.MULTILINE),
    re.compile(r"^(?:\[\w+\]: ?)?(?!\S*ChildFailedError)\S*(?:Error|Exception): .+$", re.MULTILINE),
)


def reason(output: str) -> str:
    """Why the launch that printed ``output`` failed, in one line: its last error, else the last words there are."""
    for pattern in _REASONS:
        found = pattern.findall(output)
        if found:
            return found[-1].strip()
    said = [line.strip() for line in output.splitlines() if line.strip(" =-")]
    return said[-1] if said else "no output"
