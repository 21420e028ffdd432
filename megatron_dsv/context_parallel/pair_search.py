"""Every way to share out the units of two head places, for pairs that hold few enough.

Symbols: G units, g_h head places, n units of a pair.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from megatron_dsv.context_parallel.cost_model import Load, Terms

MAX_UNITS = 9
"""2^9 ways are looked at; pairs with more units are left as they are."""
_MAX_ROUNDS = 50

Ints = NDArray[np.int64]


class PairSearch:
    """Shares out pairs of places anew, one of which sets the time, until no pair gains.

    Args:
        terms: of one tensor-parallel rank.
        each: [G] loads of single units.
        bound: nanoseconds that nothing undercuts.
    """

    def __init__(self, terms: Terms, each: Sequence[Load], bound: int):
        self.hidden, self.limit, self.bound = terms.hidden, terms.memory_limit, bound
        self.columns = np.array(each, dtype=np.int64).T.copy()
        units = np.arange(len(each) + 1)
        self.a2a = terms.a2a * np.maximum(terms.peers * units, len(each) - units) if terms.peers else units * 0

    def run(self, start: Sequence[Sequence[int]]) -> tuple[int, int, list[list[int]]]:
        """(bytes over the limit, nanoseconds, [g_h] units of each place), from such units to start with."""
        held = [list(load) for load in start]
        parts = [tuple(int(x) for x in self._parts(self.columns[:, load].sum(axis=1))) for load in held]
        now = self._value(*map(max, zip(*parts)))
        for _ in range(_MAX_ROUNDS):
            if not now[0] and now[1] * 1000 <= self.bound * 1001:
                break
            better = self._one_pair(held, parts, now)
            if better is None:
                break
            now = better
        return (*now, held)

    def _one_pair(self, held: list[list[int]], parts: list[tuple[int, ...]], now: tuple[int, int]
                  ) -> tuple[int, int] | None:
        """Change the first pair that gains; the new value, or None where no pair does."""
        worst = tuple(map(max, zip(*parts)))
        places = range(len(held))
        for a in (p for p in places if any(x == top for x, top in zip(parts[p][:3], worst))):
            for b in (p for p in places if p != a):
                units = sorted(held[a] + held[b])
                if len(units) > MAX_UNITS:
                    continue
                others = [parts[p] for p in places if p not in (a, b)]
                floor = tuple(map(max, zip(*others))) if others else (0, 0, 0, 0)
                ways = _ways(len(units))
                columns = self.columns[:, units]
                first = columns @ ways
                part_a, part_b = self._parts(first), self._parts(columns.sum(axis=1)[:, None] - first)
                overflow, time = self._value(*(np.maximum(np.maximum(x, y), z)
                                               for x, y, z in zip(part_a, part_b, floor)))
                if overflow.any():
                    time = time + overflow * (2 * int(time.max()) + 1)
                least = int(time.argmin())
                found = (int(overflow[least]), int(time[least]) if not overflow[least] else now[1])
                if found < now:
                    held[a] = [unit for unit, mine in zip(units, ways[:, least]) if mine]
                    held[b] = [unit for unit, mine in zip(units, ways[:, least]) if not mine]
                    parts[a] = tuple(int(x[least]) for x in part_a)
                    parts[b] = tuple(int(x[least]) for x in part_b)
                    return self._value(*map(max, zip(*parts)))
        return None

    def _parts(self, loads: Ints) -> tuple[Ints, Ints, Ints, Ints]:
        """[7, ...] loads -> forward, backward, all-to-all, memory; the formulas of ``cost_model``."""
        select, forward, backward, kv, kv_back, memory, units = loads
        exposed = np.maximum(0, kv - self.hidden * forward // 1000)
        exposed_back = np.maximum(0, kv_back - self.hidden * backward // 1000)
        return select + forward + exposed, backward + exposed_back, self.a2a[units], memory

    def _value(self, forward, backward, a2a, memory):
        """(bytes over the limit, nanoseconds) of the slowest places."""
        over = memory - self.limit
        return (max(0, over) if isinstance(over, int) else np.maximum(0, over)), forward + backward + a2a


@functools.lru_cache(maxsize=MAX_UNITS + 1)
def _ways(units: int) -> Ints:
    """[n, 2^n] every subset, as zeros and ones."""
    return (np.arange(2**units) >> np.arange(units)[:, None]) & 1
