"""Rows of the cost table: what was measured, at which shape, in milliseconds."""

from __future__ import annotations

from typing import NamedTuple


class DenseRow(NamedTuple):
    """Dense attention over ``tokens`` queries and keys, ``heads`` query heads."""

    backend: str
    tokens: int
    heads: int
    head_dim: int
    forward_ms: float
    backward_ms: float


class SparseRow(NamedTuple):
    """Sparse attention at ``density`` (kept keys / keys), with the building of its lists from a KVSelection."""

    backend: str
    q_block_size: int
    kv_block_size: int
    tokens: int
    heads: int
    head_dim: int
    density: float
    forward_ms: float
    backward_ms: float


class SelectionRow(NamedTuple):
    """Projection, pooling, scores, choice and key-major twin of one layer."""

    q_block_size: int
    kv_block_size: int
    tokens: int
    heads: int
    ms: float
