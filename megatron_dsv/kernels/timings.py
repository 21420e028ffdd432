"""Measured costs of attention kernels and of selection, and their interpolation. Read by ``auto`` backends, dispatchers
and cost models.

A curve belongs to one backend, granularity and head dim. Between its measured points the rate, in products per
millisecond, is linear in log2 of the work (tokens^2 x heads x head dim x density); beyond both ends it is held. No
sparse pass and no selection takes less than the least that was measured of its backend: what its launches take.
Where a head dim was not measured, a curve of the nearest one is scaled as dense attention is between the two. Times
are those of a backend's forward and backward with its list building; no communication.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Collection, Iterable
from typing import NamedTuple

from megatron_dsv.kernels import timings_h200
from megatron_dsv.kernels.timing_rows import DenseRow, SelectionRow, SparseRow

DENSE: dict[str, tuple[DenseRow, ...]] = {"NVIDIA H200": timings_h200.DENSE}
SPARSE: dict[str, tuple[SparseRow, ...]] = {"NVIDIA H200": timings_h200.SPARSE}
SELECTION: dict[str, tuple[SelectionRow, ...]] = {"NVIDIA H200": timings_h200.SELECTION}
"""Rows by the name that torch.cuda.get_device_name returns."""
LAUNCH_ALLOWANCE_MS: dict[str, float] = {"NVIDIA H200": timings_h200.LAUNCH_ALLOWANCE_MS}
"""What launching selection, forward and backward of a sparse layer is taken to cost, however short their kernels are:
measured at one shape, more than some layers take."""


class Cost(NamedTuple):
    """Milliseconds of a forward and of a backward."""

    forward: float
    backward: float


def dense_ms(device: str, *, tokens: int, heads: int, head_dim: int,
             backends: Collection[str] | None = None) -> Cost:
    """Dense attention over ``tokens`` queries and keys, each pass on the fastest backend (of ``backends``, if given).

    Raises ValueError for a device, or backends, that were not measured.
    """
    _measured(DENSE, device, backends)
    return _fastest(dense_costs(device, tokens=tokens, heads=heads, head_dim=head_dim, backends=backends))


def sparse_ms(device: str, *, tokens: int, heads: int, head_dim: int, density: float, q_block_size: int,
              kv_block_size: int, backends: Collection[str] | None = None) -> Cost:
    """Sparse attention at ``density`` (kept keys / keys), each pass on the fastest backend (of ``backends``, if given).

    Takes the measured granularity nearest in log2. Raises ValueError for a device, or backends, that were not measured,
    and for a density outside [0, 1].
    """
    def distance(row: SparseRow) -> float:
        return abs(math.log2(row.q_block_size / q_block_size)) + abs(math.log2(row.kv_block_size / kv_block_size))

    near = min(_measured(SPARSE, device, backends), key=distance)
    return _fastest(sparse_costs(
        device, tokens=tokens, heads=heads, head_dim=head_dim, density=density, q_block_size=near.q_block_size,
        kv_block_size=near.kv_block_size, backends=backends))


def selection_ms(device: str, *, tokens: int, heads: int, q_block_size: int, kv_block_size: int) -> float:
    """Pooling, scores, choice and lists of one layer, the projection of the low-rank queries and keys included.

    Takes the measured granularity nearest in log2. Raises ValueError for an unmeasured device.
    """
    rows = _measured(SELECTION, device, None)

    def distance(row: SelectionRow) -> float:
        return abs(math.log2(row.q_block_size / q_block_size)) + abs(math.log2(row.kv_block_size / kv_block_size))

    least = min(map(distance, rows))
    points = [(row.tokens * row.tokens * row.heads, row.ms) for row in rows if distance(row) == least]
    return max(_time(points, tokens * tokens * heads), min(row.ms for row in rows))


def dense_costs(device: str, *, tokens: int, heads: int, head_dim: int,
                backends: Collection[str] | None = None) -> dict[str, Cost]:
    """Cost of every measured backend (of ``backends``, if given); empty where nothing was measured."""
    costs = {}
    for backend, rows in _by_backend(DENSE.get(device, ()), backends).items():
        nearest = _nearest_head_dim(rows, head_dim)
        rows = [row for row in rows if row.head_dim == nearest]
        cost = _cost(rows, lambda row: _work(row.tokens, row.heads, row.head_dim, 1.0),
                     _work(tokens, heads, nearest, 1.0))
        costs[backend] = Cost(*(head_dim / nearest * milliseconds for milliseconds in cost))
    return costs


def sparse_costs(device: str, *, tokens: int, heads: int, head_dim: int, density: float, q_block_size: int,
                 kv_block_size: int, backends: Collection[str] | None = None,
                 most_below: bool = False) -> dict[str, Cost]:
    """Cost of every backend (of ``backends``, if given) measured at exactly this granularity; empty where none was.

    With ``most_below``, the most that any density up to this one takes: it never falls as density grows, as measured
    times of short kernels do.
    """
    if not 0 <= density <= 1:
        raise ValueError(f"density must lie in [0, 1], got {density}")
    costs = {}
    for backend, measured in _by_backend(SPARSE.get(device, ()), backends).items():
        rows = [row for row in measured if (row.q_block_size, row.kv_block_size) == (q_block_size, kv_block_size)]
        if not rows:
            continue
        nearest = _nearest_head_dim(rows, head_dim)
        rows = [row for row in rows if row.head_dim == nearest]
        cost = _cost(rows, lambda row: _work(row.tokens, row.heads, row.head_dim, row.density),
                     _work(tokens, heads, nearest, density), most_below)
        if nearest != head_dim:
            forward, backward = _dense_ratio(device, tokens, heads, head_dim, nearest)
            cost = Cost(forward * cost.forward, backward * cost.backward)
        costs[backend] = Cost(max(cost.forward, min(row.forward_ms for row in measured)),
                              max(cost.backward, min(row.backward_ms for row in measured)))
    return costs


def _dense_ratio(device: str, tokens: int, heads: int, head_dim: int, other: int) -> tuple[float, float]:
    """Forward and backward of dense attention at ``head_dim`` over those at another; their ratio if unmeasured."""
    mine, others = (dense_costs(device, tokens=tokens, heads=heads, head_dim=d) for d in (head_dim, other))
    if not mine:
        return head_dim / other, head_dim / other
    one, two = _fastest(mine), _fastest(others)
    return one.forward / two.forward, one.backward / two.backward


def _by_backend(rows: Iterable, backends: Collection[str] | None) -> dict[str, list]:
    groups: dict[str, list] = {}
    for row in rows:
        if backends is None or row.backend in backends:
            groups.setdefault(row.backend, []).append(row)
    return groups


def _nearest_head_dim(rows: list, head_dim: int) -> int:
    return min({row.head_dim for row in rows}, key=lambda d: abs(math.log2(d / head_dim)))


def _work(tokens: int, heads: int, head_dim: int, density: float) -> float:
    return tokens * tokens * heads * head_dim * density


def _cost(rows: list, work_of: Callable, work: float, most_below: bool = False) -> Cost:
    return Cost(_time([(work_of(row), row.forward_ms) for row in rows], work, most_below),
                _time([(work_of(row), row.backward_ms) for row in rows], work, most_below))


def _fastest(costs: dict[str, Cost]) -> Cost:
    return Cost(min(cost.forward for cost in costs.values()), min(cost.backward for cost in costs.values()))


def _measured(table: dict, device: str, backends: Collection[str] | None) -> list:
    if device not in table:
        raise ValueError(f"device must be one that was measured, {', '.join(sorted(table))}, got {device!r}")
    rows = [row for row in table[device] if backends is None or row.backend in backends]
    if not rows:
        raise ValueError(f"backends must include one that was measured on {device}, "
                         f"{', '.join(sorted({row.backend for row in table[device]}))}, got {sorted(backends or ())}")
    return rows


def _time(points: list[tuple[float, float]], work: float, most_below: bool = False) -> float:
    """Milliseconds at ``work`` on the curve through (work, milliseconds) points; points of equal work are averaged.

    With ``most_below``, the most on the curve up to there.
    """
    curve = _curve(points)
    time = _interpolate(curve, work)
    if most_below:
        # Between two points time has no maximum of its own, since rate is linear in the logarithm of the work.
        time = max([time, *(amount / rate for amount, rate in curve if amount <= work)])
    return time


def _curve(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """(work, rate), ascending in work."""
    curve = []
    for amount, group in itertools.groupby(sorted(points), key=lambda point: point[0]):
        times = [milliseconds for _, milliseconds in group]
        curve.append((amount, amount * len(times) / sum(times)))
    return curve


def _interpolate(curve: list[tuple[float, float]], work: float) -> float:
    if work <= curve[0][0]:
        return work / curve[0][1]
    for (low, low_rate), (high, high_rate) in itertools.pairwise(curve):
        if work <= high:
            weight = math.log2(work / low) / math.log2(high / low)
            return work / (low_rate + weight * (high_rate - low_rate))
    return work / curve[-1][1]
