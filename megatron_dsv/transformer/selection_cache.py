"""Keeps what a recomputed layer attended, so that its second forward attends exactly the same."""

from __future__ import annotations

from collections import deque
from typing import Any


class SelectionCache:
    """First-in, first-out store of one attention module.

    Activation recomputation runs a layer's forward twice: first without a graph, then, in the backward pass, with one.
    Megatron's schedules (no pipelining, 1F1B) run a module's backwards in the order of its forwards, so the first entry
    stored is the first one asked for.
    """

    def __init__(self) -> None:
        self._entries: deque[Any] = deque()

    def store(self, entry: Any) -> None:
        """Keeps ``entry`` for the recomputation."""
        self._entries.append(entry)

    def pop(self) -> Any | None:
        """The oldest entry, or None if this forward recomputes nothing."""
        return self._entries.popleft() if self._entries else None

    def clear(self) -> int:
        """Drops everything at the end of a step; returns how many entries nobody had asked for."""
        left = len(self._entries)
        self._entries.clear()
        return left
