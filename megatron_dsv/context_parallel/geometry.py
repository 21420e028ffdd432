"""Which context-parallel ranks form the head groups and the sequence groups of a split, in both layouts.

A split cuts a context-parallel group of C ranks into g_h x g_s. A head group holds the same query range and shares out
the heads; a sequence group holds the same heads and shares out the queries. Tokens never move: chunk c of the sequence,
S / C tokens, lives on rank c whatever the split.

Symbols: C ranks, c a rank, i = 0..g_h-1 its place in its head group, j = 0..g_s-1 its place in its sequence group.
h_inner puts a head group on neighbouring ranks (c = j g_h + i), s_inner a sequence group (c = i g_s + j).
"""

from __future__ import annotations

from typing import NamedTuple

H_INNER, S_INNER = "h_inner", "s_inner"
LAYOUTS = (H_INNER, S_INNER)


class Split(NamedTuple):
    """g_h head ranks x g_s sequence ranks in one layout. Hashable: the key of everything that depends on ranks alone.

    Attributes:
        g_h: ranks of a head group.
        g_s: ranks of a sequence group.
        layout: "h_inner" or "s_inner".
    """

    g_h: int
    g_s: int
    layout: str = H_INNER

    @property
    def size(self) -> int:
        """C, ranks of the whole context-parallel group."""
        return self.g_h * self.g_s

    def h_rank(self, rank: int) -> int:
        """i: the place of ``rank`` in its head group."""
        return rank % self.g_h if self.layout == H_INNER else rank // self.g_s

    def s_rank(self, rank: int) -> int:
        """j: the place of ``rank`` in its sequence group."""
        return rank // self.g_h if self.layout == H_INNER else rank % self.g_s

    def rank(self, i: int, j: int) -> int:
        """c: the rank at place i of head group j, which is place j of sequence group i."""
        return j * self.g_h + i if self.layout == H_INNER else i * self.g_s + j

    def h_group(self, rank: int) -> tuple[int, ...]:
        """Ranks of the head group of ``rank``, by place; also the chunks of the sequence that they query, in order."""
        return self.chunks(self.s_rank(rank))

    def s_group(self, rank: int) -> tuple[int, ...]:
        """Ranks of the sequence group of ``rank``, by place."""
        i = self.h_rank(rank)
        return tuple(self.rank(i, j) for j in range(self.g_s))

    def chunks(self, j: int) -> tuple[int, ...]:
        """Chunks of the sequence that make up the query (and key) range of sequence place j, in the order held."""
        return tuple(self.rank(i, j) for i in range(self.g_h))


def check_split(split: Split, size: int) -> None:
    """Raises ValueError unless ``split`` cuts a context-parallel group of ``size`` ranks."""
    if split.layout not in LAYOUTS:
        raise ValueError(f"layout must be one of {', '.join(LAYOUTS)}, got {split.layout!r}")
    if split.g_h < 1 or split.g_s < 1 or split.size != size:
        raise ValueError(f"g_h x g_s must be the context-parallel size, {size}, got {split.g_h} x {split.g_s}")


def splits(size: int, max_g_h: int) -> tuple[Split, ...]:
    """Every split of ``size`` ranks with at most ``max_g_h`` head ranks, in canonical order.

    Where one factor is 1 both layouts are the same ranks, and only h_inner is listed.
    """
    if size < 1 or max_g_h < 1:
        raise ValueError(f"size and max_g_h must be at least 1, got {size} and {max_g_h}")
    found = []
    for g_h in range(1, min(size, max_g_h) + 1):
        if size % g_h == 0:
            both = g_h > 1 and g_h < size
            found += [Split(g_h, size // g_h, layout) for layout in (LAYOUTS if both else (H_INNER,))]
    return tuple(found)
