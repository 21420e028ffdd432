"""Which head rank computes which units: longest first to the least loaded, under caps, then moves and swaps.

The problem is makespan on identical machines with a price on the largest count (the all-to-all): NP-hard, and small.
Everything is whole numbers and ties go to the lower number, so every host finds the same answer.

Symbols: G units, g_h head places.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Sequence
from operator import add, sub
from typing import NamedTuple

from megatron_dsv.context_parallel.cost_model import Load, Terms, a2a_ns, backward_ns, forward_ns, sums
from megatron_dsv.context_parallel.pair_search import MAX_UNITS, PairSearch

GREEDY, SEARCH, THOROUGH = 0, 1, 2
CLOSE_ENOUGH = 1000
"""A thousandth above the lower bound, the search ends."""
FEW_PLACES = 4
"""Up to so many places, pairs are searched from every greedy start: there are few, and ends differ most."""
LEAST_GAIN = 2000
"""A step gains at least one part in this many."""
_MAX_STEPS = 200
_NOTHING = Load()


class Assignment(NamedTuple):
    """Units of each head place, and what they cost.

    Attributes:
        loads: [g_h] units of each place, ascending.
        time: nanoseconds: slowest forward + slowest backward + slowest all-to-all; without launches.
        overflow: bytes by which the fullest place exceeds the memory limit.
    """

    loads: tuple[tuple[int, ...], ...]
    time: int
    overflow: int


def assign(terms: Terms, g_h: int, *, effort: int = THOROUGH) -> Assignment:
    """The best assignment found of the units of one tensor-parallel rank to ``g_h`` head places.

    Args:
        terms: of the rank.
        g_h: head places.
        effort: GREEDY, SEARCH (moves and swaps) or THOROUGH (then pairs of places, searched whole).
    """
    units = len(terms.forward)
    each = [sums(terms, (unit,)) for unit in range(units)]
    weight = [forward_ns(terms, load) + backward_ns(terms, load) for load in each]
    longest_first = sorted(range(units), key=lambda unit: (-weight[unit], unit))
    even = -(-units // g_h)
    starts = [_greedy(longest_first, weight, g_h, cap) for cap in sorted({even, even + 1, even + 2, units})]
    starts.sort(key=lambda start: _score(terms, [_held(each, load) for load in start]))
    best = starts[0]
    if effort >= SEARCH and g_h > 1:
        bound = lower_bound(terms, g_h)
        best = _improve(terms, each, [list(load) for load in best], bound)
        # Single moves and swaps do well where places hold many units.
        if effort >= THOROUGH and searches_pairs(units, g_h):
            pairs = PairSearch(terms, each, bound)
            _, _, best = min(pairs.run(start) for start in ([best] if g_h > FEW_PLACES else [best, *starts]))
    overflow, time = _score(terms, [_held(each, load) for load in best])
    return Assignment(tuple(tuple(sorted(load)) for load in best), time, overflow)


def searches_pairs(units: int, g_h: int) -> bool:
    """Whether THOROUGH does more than SEARCH: two places hold few enough units."""
    return g_h > 1 and 2 * -(-units // g_h) <= MAX_UNITS


def lower_bound(terms: Terms, g_h: int) -> int:
    """Nanoseconds that no assignment undercuts: of the heaviest unit, or of an even share, with even counts.

    An exchange counts by what a rank can hide of it at best, the whole of its attention.
    """
    units = len(terms.forward)
    selected = [select + forward for select, forward in zip(terms.select, terms.forward)]
    forward = max(max(selected), -(-sum(selected) // g_h))
    backward = max(max(terms.backward), -(-sum(terms.backward) // g_h))
    exposed = max(0, sum(terms.kv) - terms.hidden * sum(terms.forward) // 1000) // g_h
    exposed_back = max(0, sum(terms.kv_back) - terms.hidden * sum(terms.backward) // 1000) // g_h
    forward = max(forward, -(-sum(selected) // g_h) + exposed)
    backward = max(backward, -(-sum(terms.backward) // g_h) + exposed_back)
    return forward + backward + a2a_ns(terms, -(-units // g_h))


def _greedy(order: Sequence[int], weight: Sequence[int], g_h: int, cap: int) -> list[list[int]]:
    loads: list[list[int]] = [[] for _ in range(g_h)]
    heap = [(0, place) for place in range(g_h)]
    for unit in order:
        total, place = heapq.heappop(heap)
        loads[place].append(unit)
        if len(loads[place]) < cap:
            heapq.heappush(heap, (total + weight[unit], place))
    return loads


def _held(each: Sequence[Load], units: Sequence[int]) -> Load:
    """``sums`` of units whose own loads are known."""
    return Load(*map(sum, zip(*(each[unit] for unit in units)))) if units else _NOTHING


def _score(terms: Terms, loads: Sequence[Load]) -> tuple[int, int]:
    """(overflow, time) of an assignment; smaller is better."""
    parts = [_parts(terms, load) for load in loads]
    return _combine(terms, parts)


def _parts(terms: Terms, load: Load) -> tuple[int, int, int, int]:
    return forward_ns(terms, load), backward_ns(terms, load), a2a_ns(terms, load.units), load.memory


def _combine(terms: Terms, parts: Sequence[tuple[int, int, int, int]]) -> tuple[int, int]:
    forward, backward, a2a, memory = map(max, zip(*parts))
    return max(0, memory - terms.memory_limit), forward + backward + a2a


def _improve(terms: Terms, each: Sequence[Load], loads: list[list[int]], bound: int) -> list[list[int]]:
    """First improving move or swap that involves a place that sets the time, until there is none."""
    weight = [forward_ns(terms, load) + backward_ns(terms, load) for load in each]
    by_count = [a2a_ns(terms, count) for count in range(len(each) + 1)]
    hidden = terms.hidden

    def parts_of(load: Sequence[int]) -> tuple[int, int, int, int]:
        # _parts, without its calls: this is where a plan spends its time.
        select, forward, backward, kv, kv_back, memory, units = load
        exposed, exposed_back = kv - hidden * forward // 1000, kv_back - hidden * backward // 1000
        return (select + forward + (exposed if exposed > 0 else 0),
                backward + (exposed_back if exposed_back > 0 else 0), by_count[units], memory)

    held: list[tuple[int, ...]] = [_held(each, load) for load in loads]
    parts = [parts_of(load) for load in held]
    now = _combine(terms, parts)
    for _ in range(_MAX_STEPS):
        if not now[0] and (now[1] - bound) * CLOSE_ENOUGH <= bound:
            break
        enough = now[1] - max(1, now[1] // LEAST_GAIN)
        for a, b, given, taken in _exchanges_of(loads, parts, weight):
            gain = tuple(map(sub, each[given] if given is not None else _NOTHING,
                             each[taken] if taken is not None else _NOTHING))
            new_a, new_b = tuple(map(sub, held[a], gain)), tuple(map(add, held[b], gain))
            part_a, part_b = parts_of(new_a), parts_of(new_b)
            if not now[0] and sum(map(max, part_a[:3], part_b[:3])) > enough:
                continue
            tried = list(parts)
            tried[a], tried[b] = part_a, part_b
            then = _combine(terms, tried)
            if then < now and (now[0] or then[1] <= enough):
                held[a], held[b], parts, now = new_a, new_b, tried, then
                if given is not None:
                    loads[a].remove(given)
                    loads[b].append(given)
                if taken is not None:
                    loads[b].remove(taken)
                    loads[a].append(taken)
                break
        else:
            break
    return loads


def _exchanges_of(loads: Sequence[Sequence[int]], parts: Sequence[tuple[int, int, int, int]], weight: Sequence[int]
                  ) -> Iterator[tuple[int, int, int | None, int | None]]:
    """(a, b, unit that a gives b, unit that b gives a) for every place a that sets a maximum.

    What a gives is less than the difference between the two, or b would set it.
    """
    worst = [max(column) for column in zip(*parts)]
    places = range(len(loads))
    for a in (place for place in places if any(x == top for x, top in zip(parts[place], worst))):
        slack = [parts[a][0] + parts[a][1] - parts[b][0] - parts[b][1] for b in places]
        others = sorted((b for b in places if b != a), key=lambda b: -slack[b])
        counts = parts[a][2] == worst[2] or parts[a][3] == worst[3]
        for b in others:
            yield from ((a, b, unit, None) for unit in loads[a] if counts or weight[unit] < slack[b])
        for b in others:
            yield from ((a, b, mine, theirs) for mine in loads[a] for theirs in loads[b]
                        if 0 < weight[mine] - weight[theirs] < slack[b])
        if counts:
            # A place that sends too much takes a unit.
            for b in others:
                yield from ((a, b, None, unit) for unit in loads[b])
