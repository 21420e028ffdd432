"""Time of attention and selection on one rank: from measured tables, or from straight lines fitted to a log.

Dims: q, k tokens of the queries and keys, h query heads (of all samples), d head dim.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from megatron_dsv.context_parallel.cluster import Cluster
from megatron_dsv.kernels import timings

MS = 1e6
"""Nanoseconds in a millisecond."""


# Splits and exchanges ask for the same shapes again and again.
_dense_ms = functools.lru_cache(maxsize=65536)(timings.dense_ms)
_sparse_ms = functools.lru_cache(maxsize=65536)(timings.sparse_ms)
_selection_ms = functools.lru_cache(maxsize=65536)(timings.selection_ms)


class KernelRates(Protocol):
    """What a cost model asks of kernels. Everything is in nanoseconds, and h may be a fraction."""

    def dense(self, q: int, k: int, h: float, d: int) -> tuple[float, float]:
        """Forward and backward of dense attention."""

    def sparse(self, q: int, k: int, h: float, d: int, density: float) -> tuple[float, float]:
        """Forward and backward of sparse attention at ``density``, kept keys over keys."""

    def select(self, q: int, k: int, h: float) -> float:
        """Scores, choice and lists of all query groups."""


@dataclass(frozen=True)
class MeasuredKernels:
    """The fastest measured kernels of a device; a rectangle of q x k costs as a square of equal area.

    Attributes:
        device: as torch names it.
        q_block, kv_block: granularity of the selection, in tokens.
        speed: of the GPU at hand in terms of that device.
        least_density: below it, time no longer falls; launches and lists are what is left.

    Raises:
        ValueError: the device was not measured.
    """

    device: str
    q_block: int
    kv_block: int
    speed: float = 1.0
    least_density: float = 0.01

    def __post_init__(self) -> None:
        if self.device not in timings.SPARSE:
            raise ValueError(f"gpu must be a device whose kernels were measured, {', '.join(sorted(timings.SPARSE))}, "
                             f"got {self.device!r}; name one, with its kernel-speed, or calibrate with `dsv bench "
                             "--calibrate`")

    def dense(self, q: int, k: int, h: float, d: int) -> tuple[float, float]:
        """See ``KernelRates``."""
        heads = math.ceil(h)
        forward, backward = _dense_ms(self.device, tokens=_square(q, k), heads=heads, head_dim=d)
        return self._ns(forward, h / heads), self._ns(backward, h / heads)

    def sparse(self, q: int, k: int, h: float, d: int, density: float) -> tuple[float, float]:
        """See ``KernelRates``."""
        heads = math.ceil(h)
        forward, backward = _sparse_ms(
            self.device, tokens=_square(q, k), heads=heads, head_dim=d,
            density=min(1.0, max(density, self.least_density)), q_block_size=self.q_block, kv_block_size=self.kv_block)
        return self._ns(forward, h / heads), self._ns(backward, h / heads)

    def select(self, q: int, k: int, h: float) -> float:
        """See ``KernelRates``."""
        heads = math.ceil(h)
        return self._ns(_selection_ms(self.device, tokens=_square(q, k), heads=heads,
                                      q_block_size=self.q_block, kv_block_size=self.kv_block), h / heads)

    def _ns(self, milliseconds: float, share: float) -> float:
        return milliseconds * share * MS / self.speed


def measured_kernels(cluster: Cluster, q_block: int, kv_block: int) -> MeasuredKernels:
    """Kernels of the device that a cluster names; raises ValueError that names the cluster if it was not measured."""
    try:
        return MeasuredKernels(cluster.gpu, q_block, kv_block, cluster.kernel_speed)
    except ValueError as error:
        raise ValueError(f"cluster {cluster.name}: {error}") from None


@dataclass(frozen=True)
class WithoutSelection:
    """``kernels`` of attention to lists that a step finds ready, as those of windows: selecting takes no time."""

    kernels: KernelRates

    def dense(self, q: int, k: int, h: float, d: int) -> tuple[float, float]:
        """See ``KernelRates``."""
        return self.kernels.dense(q, k, h, d)

    def sparse(self, q: int, k: int, h: float, d: int, density: float) -> tuple[float, float]:
        """See ``KernelRates``."""
        return self.kernels.sparse(q, k, h, d, density)

    def select(self, q: int, k: int, h: float) -> float:
        """Nothing."""
        return 0.0


@dataclass(frozen=True)
class FittedKernels:
    """Straight lines in density, fitted at one shape and scaled by q x k x heads x head dim.

    Attributes:
        tokens, heads, head_dim: the shape of the fit.
        dense_ms: forward and backward.
        sparse_forward_ms, sparse_backward_ms: (a, b) of a + b x density.
        select_ms: selection, forward only.
    """

    tokens: int
    heads: int
    head_dim: int
    dense_ms: tuple[float, float]
    sparse_forward_ms: tuple[float, float]
    sparse_backward_ms: tuple[float, float]
    select_ms: float

    def dense(self, q: int, k: int, h: float, d: int) -> tuple[float, float]:
        """See ``KernelRates``."""
        scale = self._scale(q, k, h, d)
        return self.dense_ms[0] * scale, self.dense_ms[1] * scale

    def sparse(self, q: int, k: int, h: float, d: int, density: float) -> tuple[float, float]:
        """See ``KernelRates``."""
        scale = self._scale(q, k, h, d)
        (a_f, b_f), (a_b, b_b) = self.sparse_forward_ms, self.sparse_backward_ms
        return (a_f + b_f * density) * scale, (a_b + b_b * density) * scale

    def select(self, q: int, k: int, h: float) -> float:
        """See ``KernelRates``."""
        return self.select_ms * self._scale(q, k, h, self.head_dim)

    def _scale(self, q: int, k: int, h: float, d: int) -> float:
        return MS * (q * k * h * d) / (self.tokens**2 * self.heads * self.head_dim)


class Line(NamedTuple):
    """``intercept + slope x``."""

    intercept: float
    slope: float

    def at(self, x: float) -> float:
        """The line's value."""
        return self.intercept + self.slope * x


@dataclass(frozen=True)
class CalibratedKernels:
    """Straight lines through times measured on the GPU at hand (``dsv bench --calibrate``).

    Attributes:
        dense_forward, dense_backward: nanoseconds by products, q x k x h x d.
        sparse_forward, sparse_backward: nanoseconds by products that are kept, q x k x h x d x density.
        selection: nanoseconds by q x k x h.
    """

    dense_forward: Line
    dense_backward: Line
    sparse_forward: Line
    sparse_backward: Line
    selection: Line

    def dense(self, q: int, k: int, h: float, d: int) -> tuple[float, float]:
        """See ``KernelRates``."""
        work = q * k * h * d
        return self.dense_forward.at(work), self.dense_backward.at(work)

    def sparse(self, q: int, k: int, h: float, d: int, density: float) -> tuple[float, float]:
        """See ``KernelRates``."""
        work = q * k * h * d * density
        return self.sparse_forward.at(work), self.sparse_backward.at(work)

    def select(self, q: int, k: int, h: float) -> float:
        """See ``KernelRates``."""
        return self.selection.at(q * k * h)


ARTIFACT = FittedKernels(32768, 16, 128, dense_ms=(18.8, 250.0), sparse_forward_ms=(0.43, 44.6),
                         sparse_backward_ms=(8.82, 935.6), select_ms=5.2)
"""The DSV artifact's kernels on an H100, fitted to its log of five sparsities at 32,768 tokens and 16 heads of 128.

Its selection, a matrix product and torch.topk for query groups of 32, took 5.2 ms at 65,536 tokens and 4 heads, which
is the same number of pairs. Its dense backward is a tutorial kernel at 88 TFLOP/s: no baseline of this project.
"""


def _square(q: int, k: int) -> int:
    """Side of the square of equal area: attention's time is linear in q x k."""
    return max(1, round(math.sqrt(q * k)))
