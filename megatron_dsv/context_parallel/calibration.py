"""Constants of the cost model from measurements: straight lines by least squares.

A fitted line is ``a + b x`` with a and b of at least 0. Errors are relative, so that short times count as much as long
ones.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Sequence
from typing import NamedTuple

from megatron_dsv.context_parallel.cluster import Cluster, Link
from megatron_dsv.context_parallel.kernel_rates import FittedKernels


class Line(NamedTuple):
    """``intercept + slope x``."""

    intercept: float
    slope: float

    def at(self, x: float) -> float:
        """The line's value."""
        return self.intercept + self.slope * x


class AllToAllRow(NamedTuple):
    """One measured all-to-all.

    Attributes:
        link: "node" or "network", the slowest that it crosses.
        ranks: of the group.
        remote_bytes: that each rank sends to others.
        us: microseconds.
    """

    link: str
    ranks: int
    remote_bytes: int
    us: float


class SparseRow(NamedTuple):
    """Sparse attention at one shape: density, milliseconds of a forward and of a backward."""

    density: float
    forward_ms: float
    backward_ms: float


def fit_line(points: Sequence[tuple[float, float]]) -> Line:
    """The line with the least sum of squared relative errors through (x, y) points, neither part below 0.

    Raises:
        ValueError: fewer than two different x, or a y that is not above 0.
    """
    if len({x for x, _ in points}) < 2:
        raise ValueError(f"a line needs measurements at two sizes at least, got {len({x for x, _ in points})}")
    if not all(y > 0 and math.isfinite(y) for _, y in points):
        raise ValueError(f"measured times must be above 0, got {[y for _, y in points]}")
    weights = [1 / (y * y) for _, y in points]
    total = sum(weights)
    x_mean = sum(w * x for w, (x, _) in zip(weights, points)) / total
    y_mean = sum(w * y for w, (_, y) in zip(weights, points)) / total
    slope = sum(w * (x - x_mean) * (y - y_mean) for w, (x, y) in zip(weights, points)) / \
        sum(w * (x - x_mean) ** 2 for w, (x, _) in zip(weights, points))
    intercept = y_mean - slope * x_mean
    if slope < 0:
        return Line(y_mean, 0.0)
    if intercept < 0:
        # Through the origin: the relative error's least squares has this closed form.
        return Line(0.0, sum(x / y for x, y in points) / sum((x / y) ** 2 for x, y in points))
    return Line(intercept, slope)


def fit_links(cluster: Cluster, rows: Sequence[AllToAllRow]) -> Cluster:
    """The cluster with the links that were measured in place of what its file says.

    Raises:
        ValueError: an unknown link, or a link measured at one size only.
    """
    links = {"node": cluster.node_link, "network": cluster.network}
    for row in rows:
        if row.link not in links:
            raise ValueError(f"link must be one of {', '.join(links)}, got {row.link!r}")
    for name, old in links.items():
        mine = [row for row in rows if row.link == name]
        if mine:
            line = fit_line([(row.remote_bytes, row.us - old.peer_us * (row.ranks - 1)) for row in mine])
            if not line.slope:
                raise ValueError(f"link {name} must be measured at sizes that take longer the larger they are")
            links[name] = Link(1e-3 / line.slope, line.intercept, old.peer_us)
    return dataclasses.replace(cluster, node_link=links["node"], network=links["network"])


def fit_kernels(*, tokens: int, heads: int, head_dim: int, dense_ms: tuple[float, float], sparse: Sequence[SparseRow],
                select_ms: float) -> FittedKernels:
    """Lines in density through sparse rows of one shape, beside dense attention and selection at the same shape."""
    forward = fit_line([(row.density, row.forward_ms) for row in sparse])
    backward = fit_line([(row.density, row.backward_ms) for row in sparse])
    return FittedKernels(tokens, heads, head_dim, dense_ms, (forward.intercept, forward.slope),
                         (backward.intercept, backward.slope), select_ms)


def digest(cluster: Cluster, kernels: object) -> str:
    """sha256 of the constants in use, in hexadecimal, first 16 digits; ``kernels`` is a dataclass."""
    data = [dataclasses.asdict(cluster), dataclasses.asdict(kernels)]  # type: ignore[call-overload]
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]
