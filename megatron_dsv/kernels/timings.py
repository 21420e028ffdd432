"""Measured costs of attention kernels and of selection, and their interpolation. Read by ``auto`` backends, dispatchers
and cost models.

A curve belongs to one backend, granularity and head dim. Between its measured points the rate, in products per
millisecond, is linear in log2 of the work (tokens^2 x heads x head dim x density); beyond both ends it is held. Times
are those of a backend's forward and backward with its list building; no projection, no communication.
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


class Cost(NamedTuple):
    """Milliseconds of a forward and of a backward."""

    forward: float
    backward: float


def dense_ms(device: str, *, tokens: int, heads: int, head_dim: int,
             backends: Collection[str] | None = None) -> Cost:
    """Dense attention over ``tokens`` queries and keys, each pass on the fastest backend (of ``backends``, if given).

    Takes the measured head dim nearest in log2. Raises ValueError for a device, or backends, that were not measured.
    """
    rows = _measured(DENSE, device, backends)
    nearest = min({row.head_dim for row in rows}, key=lambda d: abs(math.log2(d / head_dim)))
    costs = dense_costs(device, tokens=tokens, heads=heads, head_dim=nearest, backends=backends)
    return _fastest(costs.values(), head_dim / nearest)


def sparse_ms(device: str, *, tokens: int, heads: int, head_dim: int, density: float, q_block_size: int,
              kv_block_size: int, backends: Collection[str] | None = None) -> Cost:
    """Sparse attention at ``density`` (kept keys / keys), each pass on the fastest backend (of ``backends``, if given).

    Takes the measured granularity and then the head dim nearest in log2. Raises ValueError for a device, or backends,
    that were not measured, and for a density outside [0, 1].
    """
    def distance(row: SparseRow) -> tuple[float, float]:
        blocks = abs(math.log2(row.q_block_size / q_block_size)) + abs(math.log2(row.kv_block_size / kv_block_size))
        return blocks, abs(math.log2(row.head_dim / head_dim))

    near = min(_measured(SPARSE, device, backends), key=distance)
    costs = sparse_costs(device, tokens=tokens, heads=heads, head_dim=near.head_dim, density=density,
                         q_block_size=near.q_block_size, kv_block_size=near.kv_block_size, backends=backends)
    return _fastest(costs.values(), head_dim / near.head_dim)


def selection_ms(device: str, *, tokens: int, heads: int, q_block_size: int, kv_block_size: int) -> float:
    """Pooling, scores, choice and lists of one layer, the projection of the low-rank queries and keys included.

    Takes the measured granularity nearest in log2. Raises ValueError for an unmeasured device.
    """
    rows = _measured(SELECTION, device, None)

    def distance(row: SelectionRow) -> float:
        return abs(math.log2(row.q_block_size / q_block_size)) + abs(math.log2(row.kv_block_size / kv_block_size))

    least = min(map(distance, rows))
    points = [(row.tokens * row.tokens * row.heads, row.ms) for row in rows if distance(row) == least]
    return _time(points, tokens * tokens * heads)


def dense_costs(device: str, *, tokens: int, heads: int, head_dim: int,
                backends: Collection[str] | None = None) -> dict[str, Cost]:
    """Cost of every backend measured at exactly this head dim; empty where nothing was."""
    rows = [row for row in DENSE.get(device, ()) if row.head_dim == head_dim and _allowed(row, backends)]
    return _costs(rows, lambda row: _work(row.tokens, row.heads, row.head_dim, 1.0),
                  _work(tokens, heads, head_dim, 1.0))


def sparse_costs(device: str, *, tokens: int, heads: int, head_dim: int, density: float, q_block_size: int,
                 kv_block_size: int, backends: Collection[str] | None = None) -> dict[str, Cost]:
    """Cost of every backend measured at exactly this granularity and head dim; empty where nothing was."""
    if not 0 <= density <= 1:
        raise ValueError(f"density must lie in [0, 1], got {density}")
    wanted = (q_block_size, kv_block_size, head_dim)
    rows = [row for row in SPARSE.get(device, ())
            if (row.q_block_size, row.kv_block_size, row.head_dim) == wanted and _allowed(row, backends)]
    return _costs(rows, lambda row: _work(row.tokens, row.heads, row.head_dim, row.density),
                  _work(tokens, heads, head_dim, density))


def _work(tokens: int, heads: int, head_dim: int, density: float) -> float:
    return tokens * tokens * heads * head_dim * density


def _allowed(row: DenseRow | SparseRow, backends: Collection[str] | None) -> bool:
    return backends is None or row.backend in backends


def _costs(rows: list, work_of: Callable, work: float) -> dict[str, Cost]:
    costs = {}
    for backend in dict.fromkeys(row.backend for row in rows):
        mine = [row for row in rows if row.backend == backend]
        costs[backend] = Cost(_time([(work_of(row), row.forward_ms) for row in mine], work),
                              _time([(work_of(row), row.backward_ms) for row in mine], work))
    return costs


def _fastest(costs: Iterable[Cost], scale: float) -> Cost:
    forward, backward = zip(*costs)
    return Cost(min(forward) * scale, min(backward) * scale)


def _measured(table: dict, device: str, backends: Collection[str] | None) -> list:
    if device not in table:
        raise ValueError(f"device must be one that was measured, {', '.join(sorted(table))}, got {device!r}")
    rows = [row for row in table[device] if backends is None or row.backend in backends]
    if not rows:
        raise ValueError(f"backends must include one that was measured on {device}, "
                         f"{', '.join(sorted({row.backend for row in table[device]}))}, got {sorted(backends or ())}")
    return rows


def _time(points: list[tuple[float, float]], work: float) -> float:
    """Milliseconds at ``work`` on the curve through (work, milliseconds) points; points of equal work are averaged."""
    curve = []
    for amount, group in itertools.groupby(sorted(points), key=lambda point: point[0]):
        times = [milliseconds for _, milliseconds in group]
        curve.append((amount, amount * len(times) / sum(times)))
    if work <= curve[0][0]:
        return work / curve[0][1]
    for (low, low_rate), (high, high_rate) in itertools.pairwise(curve):
        if work <= high:
            weight = math.log2(work / low) / math.log2(high / low)
            return work / (low_rate + weight * (high_rate - low_rate))
    return work / curve[-1][1]
