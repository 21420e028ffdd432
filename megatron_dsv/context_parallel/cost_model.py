"""What a block's attention costs on every rank of a split: compute, all-to-all, key/value exchange, memory.

All times of units are whole nanoseconds, so that every host reaches the same plan. A block's time is

    max_i (select_i + forward_i + exposed_i) + max_i (backward_i + exposed_i) + all-to-alls + launches

over head places i; an exchange is exposed by what attention beside it does not hide.

Symbols: S tokens, B samples, s = S / cp, S_j = S / g_s, G units (key/value heads) of a tensor-parallel rank, r query
heads of a unit, d head dim, u coverage: the share of a peer's keys of one head that at least one query group of this
rank selects. Coverage, not density, is what travels: groups that select differently cover nearly everything.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from megatron_dsv.context_parallel.cluster import Cluster, Link
from megatron_dsv.context_parallel.corrections import NO_CORRECTIONS, Corrections
from megatron_dsv.context_parallel.geometry import Split
from megatron_dsv.context_parallel.kernel_rates import KernelRates
from megatron_dsv.context_parallel.plan import NONE, SELECTIVE, Topology
from megatron_dsv.context_parallel.statistics import BlockStats

BYTES = 2
"""Bytes of an activation (bf16)."""
PACK_GBPS = 2500.0
"""GB/s at which rows of K|V are gathered; slope of 20% to 60% of 65,536 rows of 512 bytes on one H200."""
ADD_ROWS_GBPS = 140.0
"""GB/s of bf16 rows at which returned gradients are added in fp32 to their owners; the same rows on one H200."""
LAUNCH_NS = 60_000
"""Host and launch time of one block's pass beyond its kernels, and of the one look at the row counts (43 us)."""


class Surcharge(NamedTuple):
    """Nanoseconds of a block's forward and backward: ``fixed + row x rows + pair x pairs``.

    Rows are query tokens x heads of a rank, pairs are rows x keys that each of them keeps.
    """

    fixed: float = 0.0
    row: float = 0.0
    pair: float = 0.0


_NOTHING = Surcharge()


@dataclass(frozen=True)
class Handling:
    """What a rank does to tensors that travel, beside attention and the links.

    Attributes:
        pack_gbps, add_rows_gbps: GB/s of rows of K|V gathered, and of returned gradients added to their owners.
        heads: where heads change ranks: columns sorted by rank, and back.
        rows: where rows that a sparse block selected travel: lists cut into stages, parts of the output merged.
        keys: where a dense block's keys travel: the same without lists.
    """

    pack_gbps: float = PACK_GBPS
    add_rows_gbps: float = ADD_ROWS_GBPS
    heads: Surcharge = _NOTHING
    rows: Surcharge = _NOTHING
    keys: Surcharge = _NOTHING

    def of(self, split: Split, sparse: bool, rows: float, pairs: float) -> float:
        """Nanoseconds of one block on one rank."""
        parts = [self.heads] if split.g_h > 1 else []
        parts += [self.rows if sparse else self.keys] if split.g_s > 1 else []
        return sum(part.fixed + part.row * rows + part.pair * pairs for part in parts)


@dataclass(frozen=True)
class AttentionShape:
    """The attention of one block on one tensor-parallel rank.

    Attributes:
        tokens, batch: S and B.
        units, group, head_dim: G, r and d.
        q_block, kv_block: granularity of the selection.
        predictor_rank, proxies: width of a low-rank query, and how many a query group sends.
    """

    tokens: int
    batch: int
    units: int
    group: int
    head_dim: int
    q_block: int = 64
    kv_block: int = 64
    predictor_rank: int = 16
    proxies: int = 4


class Terms(NamedTuple):
    """Costs of one tensor-parallel rank's units under one split and one way to exchange keys and values.

    Attributes:
        select, forward, backward: [G] nanoseconds of a unit's selection (with its low-rank exchange) and attention.
        kv, kv_back: [G] nanoseconds of a unit's exchange in the forward and in the backward.
        hidden: thousandths of a pass's attention that can hide its exchange.
        a2a: nanoseconds of all four all-to-alls for one unit that a rank receives or sends.
        peers: g_h - 1; rank i receives n_i from each, and sends the G - n_i that it does not compute.
        fixed: nanoseconds of launches and latencies.
        memory: [G] bytes of a unit; memory_limit bounds their sum on a rank.
        memory_limit: bytes.
        exchange, stages: of the plan.
    """

    select: tuple[int, ...]
    forward: tuple[int, ...]
    backward: tuple[int, ...]
    kv: tuple[int, ...]
    kv_back: tuple[int, ...]
    hidden: int
    a2a: int
    peers: int
    fixed: int
    memory: tuple[int, ...]
    memory_limit: int
    exchange: str
    stages: int


class BlockCost(NamedTuple):
    """Nanoseconds of one block's attention, forward and backward, on its slowest ranks.

    Attributes:
        total: of everything below but ``select`` and ``memory``.
        forward, backward: attention, in the forward with its selection.
        exposed: exchange that nothing hides, and launches.
        a2a: all-to-alls between head ranks.
        memory: bytes on the fullest rank.
        select: the part of ``forward`` that is selection, on the rank with most of it.
    """

    total: int
    forward: int
    backward: int
    exposed: int
    a2a: int
    memory: int
    select: int


class Load(NamedTuple):
    """Sums of ``Terms`` over the units of one head place, and their number."""

    select: int = 0
    forward: int = 0
    backward: int = 0
    kv: int = 0
    kv_back: int = 0
    memory: int = 0
    units: int = 0


@dataclass(frozen=True)
class CostModel:
    """Costs on a cluster with given kernels.

    Attributes:
        cluster: links, overlap.
        kernels: of one GPU.
        memory_bytes: what one block's attention may use on a GPU; one is computed at a time.
        corrections: factors on the times of a kind of split, from block times that were measured while training.
        handling: what rearranging tensors takes.
    """

    cluster: Cluster
    kernels: KernelRates
    memory_bytes: int
    corrections: Corrections = NO_CORRECTIONS
    handling: Handling = Handling()

    def terms(self, shape: AttentionShape, topo: Topology, split: Split, stats: BlockStats, tp_rank: int, *,
              sparse: bool, exchange: str, stages: int = 1) -> Terms:
        """Costs of the units of ``tp_rank`` (``Terms``).

        Args:
            shape: of the block on one tensor-parallel rank.
            topo: sizes and nodes.
            split: of the context-parallel ranks.
            stats: densities and coverage of all heads of the model.
            tp_rank: whose heads.
            sparse: whether the block attends sparsely.
            exchange: "none", "selective" or "gather".
            stages: calls of the exchange.
        """
        units = range(tp_rank * shape.units, (tp_rank + 1) * shape.units)
        density = [stats.unit_density(unit, shape.group) if sparse else float(shape.group) for unit in units]
        rows = shape.tokens // split.g_s
        heads = shape.units * shape.group * shape.batch / split.g_h
        mean = sum(density) / (shape.units * shape.group)
        forward, backward = self.kernels.sparse(rows, shape.tokens, heads, shape.head_dim, mean) if sparse \
            else self.kernels.dense(rows, shape.tokens, heads, shape.head_dim)
        # The rate is that of a mean rank; a unit's share of it is its share of the kept pairs.
        share = split.g_h / sum(density)
        select = self._select(shape, topo, split, rows, heads, masks=exchange == SELECTIVE) if sparse else 0.0
        covered = [stats.unit_coverage(unit, split.g_s) if exchange == SELECTIVE else 1.0 for unit in units]
        payload = 2 * shape.head_dim * BYTES * shape.batch * (split.g_s - 1) * rows
        link_ns = self._ns_per_byte(topo, split, of_heads=False)
        # A sparse block's rows are packed and added back one by one, even if all of them travel.
        pack = 2 / self.handling.pack_gbps if sparse else 0.0
        add = 1 / self.handling.add_rows_gbps if sparse else 3 / self.cluster.hbm_gbps
        a2a_bytes = shape.tokens // topo.cp * shape.batch * BYTES * (4 * shape.group + 4) * shape.head_dim
        low_rank = shape.tokens // topo.cp * shape.batch * BYTES * shape.predictor_rank * (
            1 + shape.group * shape.proxies / shape.q_block) if sparse else 0.0
        mine = rows * heads
        handled = round(self.handling.of(split, sparse, mine, mine * shape.tokens * mean))
        terms = Terms(
            select=(round(select),) * shape.units,
            forward=tuple(round(forward * share * kept) for kept in density),
            backward=tuple(round(backward * share * kept) for kept in density),
            kv=tuple(round(payload * u * (link_ns + pack)) for u in covered),
            # Keys and values again, and their gradients back to the owners.
            kv_back=tuple(round(payload * u * (2 * link_ns + pack + add)) for u in covered),
            hidden=self._hidden(split, exchange, stages),
            a2a=round((a2a_bytes + low_rank) * self._ns_per_byte(topo, split, of_heads=True)),
            peers=split.g_h - 1,
            fixed=self._fixed(topo, split, sparse, exchange, stages) + handled,
            memory=self._memory(shape, split, rows, density, stages, sparse),
            memory_limit=self.memory_bytes, exchange=exchange, stages=stages)
        return _scaled(terms, self.corrections.thousandths(split, sparse))

    def restaged(self, terms: Terms, topo: Topology, split: Split, sparse: bool, stages: int) -> Terms:
        """The same costs with another number of stages; memory stays what it was."""
        more = self._fixed(topo, split, sparse, terms.exchange, stages) - \
            self._fixed(topo, split, sparse, terms.exchange, terms.stages)
        return terms._replace(hidden=self._hidden(split, terms.exchange, stages), stages=stages,
                              fixed=terms.fixed + more * self.corrections.thousandths(split, sparse) // 1000)

    def stages_for(self, shape: AttentionShape, split: Split) -> int:
        """The fewest calls of an exchange whose two buffers, at full coverage, take an eighth of the memory at most."""
        if split.g_s == 1:
            return 1
        per_peer = 2 * 2 * shape.head_dim * BYTES * shape.batch * shape.tokens // split.g_s
        per_peer *= -(-shape.units // split.g_h)
        allowed = max(1, self.memory_bytes // 8 // per_peer)
        return min(split.g_s - 1, -(-(split.g_s - 1) // allowed))

    def _select(self, shape: AttentionShape, topo: Topology, split: Split, rows: int, heads: float, *,
                masks: bool) -> float:
        """Nanoseconds of one unit's selection, its low-rank keys and its masks."""
        compute = self.kernels.select(rows, shape.tokens, heads) * split.g_h / shape.units
        missing = shape.batch * (shape.tokens - rows)
        received = missing * (shape.predictor_rank * BYTES + (1 / (8 * shape.kv_block) if masks else 0.0))
        return compute + received * self._ns_per_byte(topo, split, of_heads=False)

    def _hidden(self, split: Split, exchange: str, stages: int) -> int:
        """Thousandths of a pass's attention beside which rows travel: its own keys', then those of earlier stages."""
        share = 0.0 if exchange == NONE else 1 / split.g_s if stages == 1 else 1 - 1 / (stages + 1)
        return round(1000 * self.cluster.overlap * share)

    def _fixed(self, topo: Topology, split: Split, sparse: bool, exchange: str, stages: int) -> int:
        calls_h, calls_s = calls(split, sparse, exchange, stages)
        latency = calls_h * self._latency_us(topo, split, True) + calls_s * self._latency_us(topo, split, False)
        return 2 * LAUNCH_NS + round(1000 * latency)

    def _memory(self, shape: AttentionShape, split: Split, rows: int, density: Sequence[float], stages: int,
                sparse: bool) -> tuple[int, ...]:
        """Bytes of each unit: q, k, v and their gradients, output and its gradient, lse, rows received, lists."""
        tensors = BYTES * shape.batch * rows * shape.head_dim * (2 * (shape.group + 2) + 2 * shape.group)
        lse = 4 * shape.batch * rows * shape.group
        received = 2 * 2 * BYTES * shape.batch * shape.head_dim * rows * (split.g_s - 1) / stages
        low_rank = shape.batch * shape.tokens * shape.predictor_rank * BYTES if sparse else 0
        entries = 8 * shape.batch * (rows / shape.q_block) * shape.tokens / shape.kv_block if sparse else 0.0
        fixed = tensors + lse + received + low_rank
        return tuple(round(fixed + entries * kept) for kept in density)

    def _ns_per_byte(self, topo: Topology, split: Split, *, of_heads: bool) -> float:
        """Nanoseconds of one byte of remote payload in an exchange with all peers of a group, the slower link's."""
        size, inside = _members(topo, split, of_heads)
        if size == 1:
            return 0.0
        return max((inside - 1) / (size - 1) / self.cluster.node_link.gbps,
                   (size - inside) / (size - 1) / self.cluster.network.gbps)

    def _latency_us(self, topo: Topology, split: Split, of_heads: bool) -> float:
        size, inside = _members(topo, split, of_heads)
        link: Link = self.cluster.node_link if inside == size else self.cluster.network
        return link.latency_us + link.peer_us * (size - 1) if size > 1 else 0.0


def calls(split: Split, sparse: bool, exchange: str, stages: int) -> tuple[int, int]:
    """Collectives of a block, forward and backward: (between head ranks, between sequence ranks)."""
    # q, k and v together, out, its gradient, theirs; low-rank queries and keys before, which differ in length.
    heads = (6 if sparse else 4) if split.g_h > 1 else 0
    # Keys and values, again, and their gradients; low-rank keys and the bits of needed blocks before.
    return heads, sparse + (exchange == SELECTIVE) + 3 * stages if exchange != NONE else 0


def _scaled(terms: Terms, thousandths: int) -> Terms:
    """All times of a split by one factor; what is hidden is a share, and memory no time."""
    if thousandths == 1000:
        return terms
    def scaled(column: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(ns * thousandths // 1000 for ns in column)

    return terms._replace(
        select=scaled(terms.select), forward=scaled(terms.forward), backward=scaled(terms.backward),
        kv=scaled(terms.kv), kv_back=scaled(terms.kv_back), a2a=terms.a2a * thousandths // 1000,
        fixed=terms.fixed * thousandths // 1000)


@functools.lru_cache(maxsize=4096)
def _members(topo: Topology, split: Split, of_heads: bool) -> tuple[int, int]:
    """(size of the groups, how many of a group's ranks lie in one node at least)."""
    size = split.g_h if of_heads else split.g_s
    stride = 1 if (split.layout == "h_inner") == of_heads else split.size // size
    return size, math.gcd(size, topo.cp_per_node) if stride == 1 else max(1, min(size, topo.cp_per_node // stride))


def sums(terms: Terms, units: Sequence[int]) -> Load:
    """The load of a head place that computes ``units``."""
    columns = (terms.select, terms.forward, terms.backward, terms.kv, terms.kv_back, terms.memory)
    return Load._make([*(sum(column[unit] for unit in units) for column in columns), len(units)])


def forward_ns(terms: Terms, load: Load) -> int:
    """Selection, attention and exposed exchange of a forward on one rank."""
    return load.select + load.forward + max(0, load.kv - terms.hidden * load.forward // 1000)


def backward_ns(terms: Terms, load: Load) -> int:
    """Attention and exposed exchange of a backward on one rank."""
    return load.backward + max(0, load.kv_back - terms.hidden * load.backward // 1000)


def a2a_ns(terms: Terms, count: int) -> int:
    """All-to-alls of a rank that computes ``count`` units: the larger of what it receives and sends."""
    return terms.a2a * max(terms.peers * count, len(terms.forward) - count) if terms.peers else 0


def block_cost(terms: Sequence[Terms], loads: Sequence[Sequence[Load]]) -> BlockCost:
    """Cost of a block from the terms and the loads [g_h] of every tensor-parallel rank; the slowest rank counts."""
    every = [(t, load) for t, row in zip(terms, loads) for load in row]
    forward = max(forward_ns(t, load) for t, load in every)
    backward = max(backward_ns(t, load) for t, load in every)
    a2a = max(a2a_ns(t, load.units) for t, load in every)
    compute_f = max(load.select + load.forward for _, load in every)
    compute_b = max(load.backward for _, load in every)
    fixed = max(t.fixed for t in terms)
    return BlockCost(forward + backward + a2a + fixed, compute_f, compute_b,
                     forward - compute_f + backward - compute_b + fixed, a2a, max(load.memory for _, load in every),
                     max(load.select for _, load in every))
