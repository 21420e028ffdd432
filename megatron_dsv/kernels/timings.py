"""Measured costs of attention kernels, as data, and their interpolation. Read by dispatchers and cost models.

Kernel times only: no projection, no selection, no communication.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass


@dataclass(frozen=True)
class DenseRow:
    """Dense attention over ``tokens`` queries and keys, ``heads`` query heads; milliseconds."""

    tokens: int
    heads: int
    head_dim: int
    forward_ms: float
    backward_ms: float


@dataclass(frozen=True)
class SparseRow:
    """Sparse attention at ``density`` (kept keys / keys); milliseconds."""

    q_block_size: int
    kv_block_size: int
    tokens: int
    heads: int
    head_dim: int
    density: float
    forward_ms: float
    backward_ms: float


# cuDNN 9.19 SDPA through torch 2.11.0+cu130, bf16, batch 1, not causal, one H200 (driver 580.159).
_H200_DENSE = (
    DenseRow(16384, 24, 128, 4.80, 14.04),
    DenseRow(32768, 24, 128, 21.2, 60.2),
    DenseRow(65536, 24, 128, 85.2, 244.1),
    DenseRow(131072, 6, 128, 85.3, 245.1),
    DenseRow(262144, 2, 128, 115.2, 326.3),
    DenseRow(16384, 16, 64, 2.28, 5.95),
    DenseRow(32768, 16, 64, 8.87, 24.3),
    DenseRow(65536, 16, 64, 37.6, 96.0),
    DenseRow(131072, 8, 64, 75.5, 194.4),
)

# Two-pass Triton 3.6.0 prototypes of the same design on the same card, random lists. 64x64 and 128x128 are sustained
# (power-capped) times; the others come from short runs, up to 15% optimistic. Token rows (kv block 1) use fp32 atomics.
_H200_SPARSE = (
    SparseRow(64, 64, 65536, 24, 128, 0.0996, 12.37, 33.07),
    SparseRow(128, 128, 65536, 24, 128, 0.0996, 11.28, 36.85),
    SparseRow(128, 64, 65536, 24, 128, 0.0996, 12.9, 33.9),
    SparseRow(128, 32, 65536, 24, 128, 0.0996, 12.7, 43.3),
    SparseRow(64, 32, 65536, 24, 128, 0.0996, 11.9, 42.5),
    SparseRow(128, 16, 65536, 24, 128, 0.0996, 20.7, 61.4),
    SparseRow(32, 64, 65536, 24, 128, 0.0996, 33.1, 43.5),
    SparseRow(16, 64, 65536, 24, 128, 0.0996, 41.1, 67.0),
    SparseRow(128, 1, 65536, 24, 128, 0.0996, 14.3, 55.0),
    SparseRow(64, 1, 65536, 24, 128, 0.0996, 14.2, 104.4),
)

DENSE = {"NVIDIA H200": _H200_DENSE}
SPARSE = {"NVIDIA H200": _H200_SPARSE}


def dense_ms(device: str, *, tokens: int, heads: int, head_dim: int) -> tuple[float, float]:
    """(forward, backward) milliseconds of dense attention over ``tokens`` queries and keys.

    The rate is interpolated linearly in log2(tokens) between measured sizes of the nearest head dim and held beyond
    them. ``device`` is the name that torch.cuda.get_device_name returns. Raises ValueError for an unmeasured device.
    """
    measured = _of_device(DENSE, device)
    nearest = min({row.head_dim for row in measured}, key=lambda d: abs(math.log2(d / head_dim)))
    rows = sorted((row for row in measured if row.head_dim == nearest), key=lambda row: row.tokens)
    work = tokens * tokens * head_dim * heads
    forward = _interpolate([(row.tokens, _rate(row, row.forward_ms)) for row in rows], tokens)
    backward = _interpolate([(row.tokens, _rate(row, row.backward_ms)) for row in rows], tokens)
    return work / forward, work / backward


def sparse_ms(device: str, *, tokens: int, heads: int, head_dim: int, density: float, q_block_size: int,
              kv_block_size: int) -> tuple[float, float]:
    """(forward, backward) milliseconds of the Triton sparse attention, proportional to the kept work.

    Takes the measured granularity nearest to the asked one in log2 of both block sizes. Raises ValueError for an
    unmeasured device or a density outside [0, 1].
    """
    if not 0 <= density <= 1:
        raise ValueError(f"density must lie in [0, 1], got {density}")

    def distance(row: SparseRow) -> float:
        return abs(math.log2(row.q_block_size / q_block_size)) + abs(math.log2(row.kv_block_size / kv_block_size))

    row = min(_of_device(SPARSE, device), key=distance)
    work = tokens * tokens * head_dim * heads * density
    measured = row.tokens * row.tokens * row.head_dim * row.heads * row.density
    return work / measured * row.forward_ms, work / measured * row.backward_ms


def _of_device(table: dict, device: str) -> tuple:
    if device not in table:
        raise ValueError(f"device must be one that was measured, {', '.join(sorted(table))}, got {device!r}")
    return table[device]


def _rate(row: DenseRow, milliseconds: float) -> float:
    """Query-key-channel products per millisecond."""
    return row.tokens * row.tokens * row.head_dim * row.heads / milliseconds


def _interpolate(points: list[tuple[int, float]], tokens: int) -> float:
    for (low, low_rate), (high, high_rate) in itertools.pairwise(points):
        if low <= tokens <= high:
            weight = math.log2(tokens / low) / math.log2(high / low)
            return low_rate + weight * (high_rate - low_rate)
    return points[0][1] if tokens < points[0][0] else points[-1][1]
