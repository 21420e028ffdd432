"""The plan of a context-parallel run: frozen data that every rank holds alike and that no rank changes in a step.

For every block of the model and every range of sequence lengths it says how the ranks are split, which rank computes
which heads, and how keys and values travel. Heads move as units: a unit is one key/value head with its query heads, so
a group of grouped-query attention is never torn, and none crosses tensor-parallel ranks.

Symbols: g_h x g_s = cp (see ``geometry``), G key/value units of one tensor-parallel rank.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import json
import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from megatron_dsv.context_parallel.geometry import H_INNER, Split, check_split

SCHEMA = 1
NONE, SELECTIVE, GATHER = "none", "selective", "gather"
MAX_STAGES = 4
"""Of an exchange, where no memory asks for more: more calls hide little more, and each has its latency."""


class Topology(NamedTuple):
    """What a plan was made for.

    Attributes:
        cp, tp, pp: context-, tensor- and pipeline-parallel sizes.
        domain: GPUs that share the fast links of one node; context-parallel neighbours lie ``tp`` GPUs apart.
    """

    cp: int
    tp: int = 1
    pp: int = 1
    domain: int = 8

    @property
    def cp_per_node(self) -> int:
        """Neighbouring context-parallel ranks that share a node in every group of the job; divides ``cp``.

        Groups lie one behind the other, so of 12 ranks on nodes of 8 a group has 8 or 4 in a node: blocks of 4 always.
        """
        return math.gcd(self.cp, self.domain // self.tp) if self.domain % self.tp == 0 else 1

    @property
    def words(self) -> str:
        """For messages."""
        return f"cp {self.cp}, tp {self.tp}, pp {self.pp}, {self.domain} GPUs a node"


def exchanges(split: Split, sparse: bool) -> tuple[str, ...]:
    """Ways in which keys and values can travel under a split; the first is that of a plan without statistics."""
    return (NONE,) if split.g_s == 1 else (SELECTIVE, GATHER) if sparse else (GATHER,)


@dataclass(frozen=True, slots=True)
class BlockPlan:
    """One block's split, head assignment and key/value exchange.

    Attributes:
        layer: number of the block in the whole model, from 0.
        g_h, g_s, layout: the split of the context-parallel ranks.
        unit_order: [tp][G]; each tensor-parallel rank's units, sorted by the head rank that computes them.
        unit_splits: [tp][g_h]; how many units of that order each head rank takes; zero is allowed.
        kv_exchange: "none" (g_s is 1), "selective" (the selected rows of K|V travel) or "gather" (all of them do).
        stages: calls in which the exchanged rows arrive; their number depends on the plan alone, never on data.
        kv_block: keys per selected block; rows travel at this granularity, 1 for single tokens.
        sparse: whether the block attends sparsely; a dense block exchanges by "gather" or not at all.

    Raises:
        ValueError: in one line, naming the block and the field.
    """

    layer: int
    g_h: int
    g_s: int
    layout: str
    unit_order: tuple[tuple[int, ...], ...]
    unit_splits: tuple[tuple[int, ...], ...]
    kv_exchange: str
    stages: int
    kv_block: int
    sparse: bool

    def __post_init__(self) -> None:
        for name in ("layer", "g_h", "g_s", "stages", "kv_block"):
            least = 0 if name == "layer" else 1
            value = getattr(self, name)
            if type(value) is not int or value < least:
                raise self._error(f"{name} must be a whole number of at least {least}, got {value!r}")
        try:
            check_split(self.split, self.g_h * self.g_s)
        except ValueError as error:
            raise self._error(str(error)) from None
        if type(self.sparse) is not bool:
            raise self._error(f"sparse must be true or false, got {self.sparse!r}")
        self._check_units()
        allowed = exchanges(self.split, self.sparse)
        if self.kv_exchange not in allowed:
            kind = "sparse" if self.sparse else "dense"
            raise self._error(f"kv_exchange of a {kind} block with g_s {self.g_s} must be one of "
                              f"{', '.join(allowed)}, got {self.kv_exchange!r}")
        if self.stages > max(1, self.g_s - 1):
            raise self._error(f"stages must be at most the peers of a sequence group, {max(1, self.g_s - 1)}, "
                              f"got {self.stages}")

    def _check_units(self) -> None:
        if len(self.unit_order) != len(self.unit_splits) or not self.unit_order:
            raise self._error(f"unit_order and unit_splits must have one row per tensor-parallel rank, got "
                              f"{len(self.unit_order)} and {len(self.unit_splits)}")
        units = len(self.unit_order[0])
        for order, sizes in zip(self.unit_order, self.unit_splits):
            if sorted(order) != list(range(units)) or not units:
                raise self._error(f"unit_order must be a permutation of 0..{units - 1}, the same on every "
                                  f"tensor-parallel rank, got {list(order)}")
            if len(sizes) != self.g_h or min(sizes) < 0 or sum(sizes) != units:
                raise self._error(f"unit_splits must be g_h = {self.g_h} counts that sum to {units}, got {list(sizes)}")

    def _error(self, text: str) -> ValueError:
        return ValueError(f"plan of block {self.layer}: {text}")

    @property
    def split(self) -> Split:
        """The split of the ranks."""
        return Split(self.g_h, self.g_s, self.layout)

    @property
    def units(self) -> int:
        """G: key/value units of one tensor-parallel rank."""
        return len(self.unit_order[0])

    def units_of(self, tp_rank: int, i: int) -> tuple[int, ...]:
        """Units that head place ``i`` computes on ``tp_rank``, in the order held."""
        sizes = self.unit_splits[tp_rank]
        start = sum(sizes[:i])
        return self.unit_order[tp_rank][start:start + sizes[i]]

    def loads(self, tp_rank: int) -> tuple[tuple[int, ...], ...]:
        """[g_h] ``units_of`` every head place of ``tp_rank``."""
        return tuple(self.units_of(tp_rank, i) for i in range(self.g_h))


@dataclass(frozen=True, slots=True)
class CPPlan:
    """All blocks of all buckets.

    Attributes:
        version: counts the plans of a run.
        effective_step: the step whose forward is the first to use it.
        topo: what it was made for.
        buckets: ascending (shortest, longest) sequence lengths in tokens, both included, that share block plans.
        blocks: [bucket][layer].
        stats_digest: of the statistics that it was solved from; empty if none were.
        calibration_digest: of the measured costs that it was solved with; empty if none were.
        predicted_ns: [bucket] predicted nanoseconds of all blocks' attention with its exchanges, forward and backward;
            zero where nothing was predicted.

    Raises:
        ValueError: in one line, naming the field, or the block.
    """

    version: int
    effective_step: int
    topo: Topology
    buckets: tuple[tuple[int, int], ...]
    blocks: tuple[tuple[BlockPlan, ...], ...]
    stats_digest: str = ""
    calibration_digest: str = ""
    predicted_ns: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("version", "effective_step"):
            value = getattr(self, name)
            if type(value) is not int or value < 0:
                raise ValueError(f"plan: {name} must be a whole number of at least 0, got {value!r}")
        if any(type(size) is not int or size < 1 for size in self.topo):
            raise ValueError(f"plan: topo must be whole numbers of at least 1, got {tuple(self.topo)}")
        if not self.predicted_ns:
            object.__setattr__(self, "predicted_ns", (0,) * len(self.buckets))
        if not self.buckets or not len(self.buckets) == len(self.blocks) == len(self.predicted_ns):
            raise ValueError(f"plan: buckets, blocks and predicted_ns must have one entry per bucket, got "
                             f"{len(self.buckets)}, {len(self.blocks)} and {len(self.predicted_ns)}")
        last = 0
        for low, high in self.buckets:
            if not last < low <= high:
                raise ValueError(f"plan: buckets must be ascending ranges of tokens that do not overlap, "
                                 f"got {[list(bucket) for bucket in self.buckets]}")
            last = high
        layers = len(self.blocks[0])
        for row in self.blocks:
            if [block.layer for block in row] != list(range(layers)) or not layers:
                raise ValueError(f"plan: every bucket must hold blocks 0..{layers - 1} in order, "
                                 f"got {[block.layer for block in row]}")
            for block in row:
                self._check_block(block)

    def _check_block(self, block: BlockPlan) -> None:
        try:
            check_split(block.split, self.topo.cp)
        except ValueError as error:
            raise ValueError(f"plan of block {block.layer}: {error}") from None
        if len(block.unit_order) != self.topo.tp:
            raise ValueError(f"plan of block {block.layer}: unit_order must have one row per tensor-parallel rank, "
                             f"{self.topo.tp}, got {len(block.unit_order)}")
        if block.units != self.blocks[0][0].units:
            raise ValueError(f"plan of block {block.layer}: every block must have {self.blocks[0][0].units} units, "
                             f"got {block.units}")

    def check_job(self, *, topo: Topology, layers: int, units: int) -> None:
        """Raises ValueError unless the plan fits a job.

        Args:
            topo: the job's sizes.
            layers: blocks of the whole model.
            units: key/value heads of one tensor-parallel rank.
        """
        if self.topo != topo:
            raise ValueError(f"plan was made for {self.topo.words}, the job runs {topo.words}; solve it anew")
        if (len(self.blocks[0]), self.blocks[0][0].units) != (layers, units):
            raise ValueError(f"plan was made for {len(self.blocks[0])} blocks of {self.blocks[0][0].units} units a "
                             f"tensor-parallel rank, the model has {layers} of {units}; solve it anew")

    def bucket(self, tokens: int) -> int:
        """The bucket of a sequence length; raises ValueError where no bucket holds it."""
        for number, (low, high) in enumerate(self.buckets):
            if low <= tokens <= high:
                return number
        raise ValueError(f"plan {self.version} has no bucket for {tokens} tokens, only "
                         f"{', '.join(f'{low}..{high}' for low, high in self.buckets)}")

    def block(self, tokens: int, layer: int) -> BlockPlan:
        """The plan of block ``layer`` (from 0) at a sequence length in tokens."""
        return self.blocks[self.bucket(tokens)][layer]

    def splits(self) -> tuple[Split, ...]:
        """Distinct splits in use, sorted; the communicators that must exist before the plan is committed."""
        return tuple(sorted({block.split for row in self.blocks for block in row}))

    @property
    def kv_blocks(self) -> frozenset[int]:
        """Keys per selected block, of all blocks that attend sparsely."""
        return frozenset(block.kv_block for row in self.blocks for block in row if block.sparse)

    def to_json(self) -> str:
        """Canonical JSON: sorted keys, no spaces, whole numbers, booleans and strings only."""
        return json.dumps({"schema": SCHEMA, **dataclasses.asdict(self), "topo": self.topo._asdict()}, sort_keys=True,
                          separators=(",", ":"))

    @classmethod
    def from_json(cls, text: str | bytes) -> CPPlan:
        """The plan that ``to_json`` wrote; raises ValueError for anything else."""
        try:
            data = json.loads(text)
        except ValueError as error:
            raise ValueError(f"plan is not JSON: {error}") from None
        if not isinstance(data, dict) or data.pop("schema", None) != SCHEMA:
            raise ValueError(f"plan must be of schema {SCHEMA}; solve it anew")
        try:
            data["topo"] = Topology(**data["topo"])
            data["blocks"] = tuple(tuple(BlockPlan(**_tuples(block)) for block in row) for row in data["blocks"])
            data["buckets"] = _tuples(data["buckets"])
            data["predicted_ns"] = _tuples(data["predicted_ns"])
            return cls(**data)
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"plan has fields that schema {SCHEMA} does not: {error}") from None

    @property
    def digest(self) -> str:
        """sha256 of the canonical JSON, in hexadecimal."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()

    @property
    def digest_bits(self) -> int:
        """63 bits of the digest: fits an int64 with its sign, so that ranks can compare by reductions."""
        return int(self.digest[:16], 16) >> 1


@functools.lru_cache(maxsize=4096)
def attending(block: BlockPlan, *, sparse: bool, kv_block: int) -> BlockPlan:
    """``block`` for a layer that attends sparsely, or densely, whatever the plan foresaw: the split and heads stay.

    Plans change between steps alone, but a layer that passes or leaves its gate attends otherwise at once.
    """
    if block.sparse == sparse:
        return block
    return dataclasses.replace(block, sparse=sparse, kv_exchange=exchanges(block.split, sparse)[0],
                               kv_block=kv_block if sparse else 1)


def even_block(layer: int, split: Split, *, tp: int, units: int, sparse: bool, kv_block: int = 1,
               kv_exchange: str | None = None, stages: int = 1) -> BlockPlan:
    """A block whose units are dealt in their own order, as evenly as they divide: the plan of a run without statistics.

    ``kv_exchange`` left out is the first of ``exchanges``.
    """
    base, more = divmod(units, split.g_h)
    sizes = tuple(base + (i < more) for i in range(split.g_h))
    exchange = kv_exchange or exchanges(split, sparse)[0]
    return BlockPlan(layer, split.g_h, split.g_s, split.layout, (tuple(range(units)),) * tp, (sizes,) * tp, exchange,
                     stages, kv_block, sparse)


def even_plan(topo: Topology, *, layers: int, units: int, longest: int, g_h: int | None = None, sparse: bool = False,
              kv_block: int = 1, most_stages: int = 1) -> CPPlan:
    """The same even split in every block, one bucket up to ``longest`` tokens; version 0, effective at once.

    ``g_h`` left out is the largest divisor of cp that ``units`` can fill. Keys arrive in ``most_stages`` calls, or in
    one a peer where there are fewer.
    """
    if g_h is None:
        g_h = max(size for size in range(1, min(topo.cp, units) + 1) if topo.cp % size == 0)
    split = Split(g_h, topo.cp // g_h, H_INNER)
    blocks = tuple(even_block(layer, split, tp=topo.tp, units=units, sparse=sparse, kv_block=kv_block,
                              stages=min(most_stages, max(1, split.g_s - 1))) for layer in range(layers))
    return CPPlan(0, 0, topo, ((1, longest),), (blocks,))


def _tuples(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_tuples(item) for item in value)
    if isinstance(value, dict):
        return {key: _tuples(item) for key, item in value.items()}
    return value
