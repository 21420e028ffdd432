"""What was probably meant by a name that nobody knows."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


def did_you_mean(got: str, known: Iterable[str]) -> str:
    """The end of a message about ``got``: the name that is nearest to it, or nothing where none is near."""
    close = difflib.get_close_matches(got, list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""
