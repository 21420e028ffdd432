"""Heads in chunks, for library kernels: one head that keeps everything makes a rectangle of lists wide for all."""

from __future__ import annotations

from collections.abc import Iterator

RECTANGLE_ENTRIES = 1 << 25
"""Entries of a rectangle of lists, int32; more are split by heads."""


def head_chunks(heads: int, kv_heads: int, *, row_entries: int,
                most_heads: int | None = None) -> Iterator[tuple[slice, slice]]:
    """(query heads, key/value heads) of every chunk: whole key/value heads, as even as they come, at least one.

    Args:
        heads, kv_heads: of all; ``heads`` is a multiple of ``kv_heads``.
        row_entries: entries of the rectangle of one query head; a chunk's stay within ``RECTANGLE_ENTRIES``.
        most_heads: query heads of a chunk that something else allows, if anything does.
    """
    ratio = heads // kv_heads
    most = RECTANGLE_ENTRIES // max(1, row_entries)
    most = max(1, (most if most_heads is None else min(most, most_heads)) // ratio)
    step = -(-kv_heads // -(-kv_heads // most))
    for first in range(0, kv_heads, step):
        last = min(kv_heads, first + step)
        yield slice(first * ratio, last * ratio), slice(first, last)
