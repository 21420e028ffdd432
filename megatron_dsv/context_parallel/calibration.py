"""Constants of the cost model from measurements: straight lines by least squares.

``dsv bench --calibrate`` measures (``microbenchmarks``) and writes a ``Calibration``; ``Calibration.load`` reads it.

A fitted line is ``a + b x`` with a and b of at least 0. Errors are relative, so that short times count as much as long
ones.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from megatron_dsv.context_parallel.cluster import Cluster, Link
from megatron_dsv.context_parallel.cost_model import CostModel, Handling, Surcharge
from megatron_dsv.context_parallel.kernel_rates import CalibratedKernels, Line

SCHEMA = 1


class AllToAllRow(NamedTuple):
    """One measured all-to-all.

    Attributes:
        link: "node" or "network", the slowest that it crosses.
        ranks: of the group.
        remote_bytes: that each rank sends over that link.
        us: microseconds.
    """

    link: str
    ranks: int
    remote_bytes: int
    us: float


def all_to_all_row(ranks: int, node_ranks: int, payload: int, us: float) -> AllToAllRow:
    """The row of an all-to-all in which each of ``ranks`` ranks sends ``payload`` bytes, as much to every other.

    Between nodes of ``node_ranks`` ranks only what leaves the node is of the network: the cost model charges it so.
    """
    if node_ranks >= ranks:
        return AllToAllRow("node", ranks, payload, us)
    return AllToAllRow("network", ranks, payload * (ranks - node_ranks) // (ranks - 1), us)


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


class Remainder(NamedTuple):
    """What a measured block took beyond the model: ``rows`` and ``pairs`` as ``Surcharge`` counts them, nanoseconds,
    and the whole time, which the error is relative to."""

    rows: float
    pairs: float
    ns: float
    total_ns: float


def fit_surcharge(remainders: Sequence[Remainder], *, of_pairs: bool) -> Surcharge:
    """The surcharge, no part below 0, with the least sum of squared errors relative to the blocks' whole times.

    Args:
        of_pairs: whether there is a part that grows with the pairs.
    """
    if not remainders:
        return Surcharge()
    total = torch.tensor([row.total_ns for row in remainders], dtype=torch.float64)
    columns = torch.tensor([(1.0, row.rows, row.pairs) for row in remainders], dtype=torch.float64)
    target = torch.tensor([row.ns for row in remainders], dtype=torch.float64) / total
    # Scaled columns: rows and pairs differ by many orders of magnitude.
    size = columns.abs().amax(0).clamp_min(1.0)
    columns = columns / size / total[:, None]
    best, least = torch.zeros(3, dtype=torch.float64), float(target.square().sum())
    # Of the least-squares solutions without some columns, the best that is not negative is the constrained optimum.
    for count in range(1, (3 if of_pairs else 2) + 1):
        for chosen in itertools.combinations(range(3 if of_pairs else 2), count):
            part = columns[:, chosen]
            found = torch.linalg.pinv(part) @ target
            error = float((part @ found - target).square().sum())
            if bool((found >= 0).all()) and error < least - 1e-15:
                best = torch.zeros(3, dtype=torch.float64)
                best[list(chosen)] = found
                least = error
    return Surcharge(*(best / size).tolist())


def digest(cluster: Cluster, kernels: object, handling: Handling | None = None) -> str:
    """sha256 of the constants in use, in hexadecimal, first 16 digits; ``kernels`` is a dataclass."""
    data = [dataclasses.asdict(cluster), dataclasses.asdict(kernels)]  # type: ignore[call-overload]
    if handling is not None:
        data.append(dataclasses.asdict(handling))
    return hashlib.sha256(json.dumps(data, sort_keys=True).encode()).hexdigest()[:16]


@dataclass(frozen=True)
class Calibration:
    """Measured constants of the machines at hand.

    Attributes:
        cluster: links, overlap and communicators as measured; the rest is of the cluster file it was measured beside.
        kernels: attention and selection of one GPU.
        handling: rearranging tensors.
        q_block, kv_block, head_dim: what the kernels were measured at.
        measured: the rows behind the constants, which also tell what was measured at all.
    """

    cluster: Cluster
    kernels: CalibratedKernels
    handling: Handling
    q_block: int
    kv_block: int
    head_dim: int
    measured: dict[str, Any] = field(default_factory=dict, compare=False)

    @property
    def digest(self) -> str:
        """Of the constants, not of the rows behind them."""
        return digest(self.cluster, self.kernels, self.handling)

    def cost_model(self, memory_bytes: int) -> CostModel:
        """The model with these constants; ``memory_bytes`` as there."""
        return CostModel(self.cluster, self.kernels, memory_bytes, handling=self.handling)

    def applied_to(self, cluster: Cluster) -> Cluster:
        """Another cluster, such as a larger one of the same machines, with what was measured here and nothing else.

        One rank measures no link; ranks of one node do not measure the network, nor ranks of several the node's own.
        """
        found: dict[str, Any] = {}
        if "node" in self.links:
            found["node_link"] = self.cluster.node_link
        if "network" in self.links:
            found["network"] = self.cluster.network
        if self.links:
            found["overlap"] = self.cluster.overlap
        if self.measured.get("first_communicator_mib") is not None:
            found["communicator_mib"] = self.cluster.communicator_mib
        return dataclasses.replace(cluster, **found)

    @property
    def links(self) -> frozenset[str]:
        """Of "node" and "network", those that were measured."""
        return frozenset(row["link"] for row in self.measured.get("all_to_all", ()))

    def check(self, *, q_block: int, kv_block: int, head_dim: int) -> None:
        """Raises ValueError unless the kernels were measured at this granularity and head dim."""
        wanted, got = (q_block, kv_block, head_dim), (self.q_block, self.kv_block, self.head_dim)
        if wanted != got:
            raise ValueError(f"the calibration was measured with query groups of {got[0]}, key blocks of {got[1]} and "
                             f"heads of {got[2]}, the job has {wanted[0]}, {wanted[1]} and {wanted[2]}; "
                             "run `dsv bench --calibrate` with the job's")

    def save(self, path: str | Path) -> None:
        """Writes JSON that ``load`` reads."""
        text = json.dumps({"schema": SCHEMA, "digest": self.digest, **dataclasses.asdict(self)}, indent=1)
        Path(path).write_text(text + "\n", encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> Calibration:
        """What ``save`` wrote.

        Raises:
            ValueError: one line that names the file.
        """
        try:
            data = json.loads(Path(path).read_text(encoding="utf-8"))
        except OSError as error:
            raise ValueError(f"calibration {path}: cannot be read: {error.strerror}") from None
        except ValueError as error:
            raise ValueError(f"calibration {path}: is not JSON: {error}") from None
        if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
            raise ValueError(f"calibration {path}: must be of schema {SCHEMA}; run `dsv bench --calibrate` again")
        try:
            known = data.pop("digest")
            data["cluster"] |= {name: Link(**data["cluster"][name]) for name in ("node_link", "network")}
            data["cluster"] = Cluster(**data["cluster"])
            data["kernels"] = CalibratedKernels(**{name: Line(*row) for name, row in data["kernels"].items()})
            data["handling"] |= {name: Surcharge(*data["handling"][name]) for name in ("heads", "rows", "keys")}
            data["handling"] = Handling(**data["handling"])
            made = cls(**data)
            made.applied_to(made.cluster)
        except (AttributeError, KeyError, TypeError) as error:
            raise ValueError(f"calibration {path}: has fields that schema {SCHEMA} does not: {error}") from None
        constants = [*itertools.chain(*vars(made.kernels).values()), made.handling.pack_gbps,
                     made.handling.add_rows_gbps, *made.handling.heads, *made.handling.rows, *made.handling.keys]
        if not all(isinstance(value, int | float) and math.isfinite(value) and value >= 0 for value in constants):
            raise ValueError(f"calibration {path}: its constants must be numbers of at least 0, got {constants}; run "
                             "`dsv bench --calibrate` again")
        if made.digest != known:
            raise ValueError(f"calibration {path}: was changed by hand, its digest is {known} but its constants have "
                             f"{made.digest}; run `dsv bench --calibrate` again")
        return made
