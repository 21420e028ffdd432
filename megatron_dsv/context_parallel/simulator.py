"""A training step on a cluster, predicted: time and where it goes, memory, a plan per block, for any layout.

Symbols: S tokens of a sample, s = S / (cp tp) tokens of a rank, h hidden size.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from megatron_dsv.context_parallel.cluster import Cluster
from megatron_dsv.context_parallel.cost_model import BYTES, AttentionShape, BlockCost, CostModel, Handling
from megatron_dsv.context_parallel.geometry import Split
from megatron_dsv.context_parallel.job_layouts import Job, JobLayout, layouts, limit, topology
from megatron_dsv.context_parallel.job_memory import memory_parts, usable_bytes, words
from megatron_dsv.context_parallel.kernel_rates import KernelRates, WithoutSelection
from megatron_dsv.context_parallel.pipeline_schedule import pipeline_ns
from megatron_dsv.context_parallel.plan import BlockPlan
from megatron_dsv.context_parallel.planner import Candidate, Problem, plan_blocks
from megatron_dsv.context_parallel.statistics import BlockStats

ELEMENTWISE_TENSORS = 90
"""[s, h] bf16 tensors that one layer's forward reads and writes outside matrix products and attention.

Fitted to the measured dense step of wan2.1-1.3b, 32,760 tokens on one H200 with full recomputation: 2,489 ms.
"""
PREDICTOR_LOSS_NS = 5.1e-3
"""Nanoseconds of a sampled row x key x head of the predictors' loss and gradients.

Measured: 2.06 ms for 256 rows, 65,536 keys and 24 heads on one H200.
"""
OPTIMIZER_BYTES = 40
"""Bytes that an update reads and writes per parameter that a rank owns."""
Stats = Callable[[int], Sequence[BlockStats]]


class StepTime(NamedTuple):
    """Milliseconds of one step on the slowest pipeline stage, and the rest of the step.

    Attributes:
        linear: matrix products and cross-attention. elementwise: norms, activations, residuals.
        attention, selection, all_to_all, exchange: self-attention, and what its context parallelism exposes.
        predictors: their loss. tensor_parallel: collectives of TP. bubble: waiting for other stages.
        data_parallel: exposed reduction and gathering. optimizer: the update.
    """

    linear: float
    elementwise: float
    attention: float
    selection: float
    all_to_all: float
    exchange: float
    predictors: float
    tensor_parallel: float
    bubble: float
    data_parallel: float
    optimizer: float


@dataclass(frozen=True)
class Simulation:
    """One layout's step.

    Attributes:
        layout, recompute: what was simulated.
        step_ms: milliseconds; times: where they go.
        memory: bytes of the fullest GPU by part.
        blocks: plan of every block; costs: of one micro-batch.
        mfu: operations done, three forwards of what is kept, over the peak; dense_mfu counts all pairs.
        tokens_per_s: of the whole cluster.
    """

    layout: JobLayout
    recompute: str
    step_ms: float
    times: StepTime
    memory: dict[str, int]
    blocks: tuple[BlockPlan, ...]
    costs: tuple[BlockCost, ...]
    mfu: float
    dense_mfu: float
    tokens_per_s: float


class Refusal(NamedTuple):
    """Why a layout cannot run; ``short`` is how many bytes it lacks, None for another limit."""

    layout: JobLayout
    reason: str
    short: int | None


@dataclass
class Simulator:
    """Simulates layouts of one job on one cluster, and remembers the plans that layouts share.

    Args:
        cluster: machines and links.
        kernels: times of attention and selection.
        job: what is trained.
        stats: padded tokens -> statistics of every block.
        allowed: splits that plans may use; empty for every one.
        handling: what rearranging tensors takes.
    """

    cluster: Cluster
    kernels: KernelRates
    job: Job
    stats: Stats
    allowed: tuple[Split, ...] = ()
    handling: Handling = field(default_factory=Handling)
    _plans: dict[tuple[int, int, int], list[Candidate]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.job.dispatches:
            self.kernels = WithoutSelection(self.kernels)

    def simulate(self, layout: JobLayout) -> Simulation | Refusal:
        """One layout: its step, or the limit that it breaks."""
        if layout.tp * layout.pp * layout.cp * layout.dp != self.cluster.gpus:
            raise ValueError(f"layout must take all {self.cluster.gpus} GPUs, got {layout}")
        reason = limit(layout, self.job, self.cluster)
        if reason:
            return Refusal(layout, reason, None)
        refusal = None
        for recompute in ("none", "full") if self.job.recompute == "auto" else (self.job.recompute,):
            parts = memory_parts(self.job, layout, self.cluster, recompute)
            left = usable_bytes(self.cluster) - sum(parts.values())
            if left > 0:
                blocks = self._blocks(layout, left)
                if blocks is not None:
                    return self._step(layout, recompute, parts, blocks)
                parts = {**parts, "attention": max(c.cost.memory for c in self._blocks(layout, 2**62) or ())}
            limit_bytes = usable_bytes(self.cluster)
            refusal = Refusal(layout, words(parts, limit_bytes), sum(parts.values()) - limit_bytes)
        assert refusal is not None
        return refusal

    def rank(self, keep: int = 10) -> tuple[list[Simulation], list[Refusal]]:
        """The ``keep`` fastest layouts of all, fastest first, and those that cannot run.

        Layouts are tried in the order of a bound that no plan undercuts, until it exceeds what was found.

        Raises:
            ValueError: no layout fits; says which comes nearest, and what it lacks.
        """
        refused, open_ = [], []
        for layout in layouts(self.cluster.gpus):
            reason = limit(layout, self.job, self.cluster)
            if reason:
                refused.append(Refusal(layout, reason, None))
            else:
                open_.append((self._bound_ms(layout), layout))
        found: list[Simulation] = []
        for bound, layout in sorted(open_):
            if len(found) >= keep and bound >= found[-1].step_ms:
                break
            result = self.simulate(layout)
            if isinstance(result, Refusal):
                refused.append(result)
            else:
                found = sorted([*found, result], key=lambda s: (s.step_ms, s.layout))[:keep]
        if not found:
            short = [row for row in refused if row.short is not None]
            nearest = min(short, key=lambda row: (row.short or 0, row.layout)) if short else refused[0]
            raise ValueError(f"no layout of {self.cluster.gpus} GPUs fits; the nearest is {nearest.layout}: "
                             f"{nearest.reason}")
        return found, refused

    def _shape(self, layout: JobLayout) -> AttentionShape:
        job, model = self.job, self.job.model
        return AttentionShape(job.padded_tokens(layout), job.micro_batch, model.groups // layout.tp,
                              model.heads // model.groups, model.head_dim, job.q_block, job.kv_block,
                              job.predictor_rank, job.proxies)

    def _blocks(self, layout: JobLayout, memory: int) -> list[Candidate] | None:
        """Every block's plan under a memory limit, sparse where that is faster; None where one does not fit."""
        key = (layout.tp, layout.cp, 0)
        known = self._plans.get(key)
        if known is None:
            known = self._plans[key] = self._plan(layout, 2**62)
        if max(c.cost.memory for c in known) <= memory:
            return known
        # In steps of a fortieth, so that layouts with much the same room share a plan.
        step = usable_bytes(self.cluster) // 40
        key = (layout.tp, layout.cp, max(1, memory // step))
        if key not in self._plans:
            try:
                self._plans[key] = self._plan(layout, min(memory, key[2] * step))
            except ValueError:
                self._plans[key] = []
        return self._plans[key] or None

    def problem(self, layout: JobLayout, memory: int) -> Problem:
        """What the planner solves for a layout, with ``memory`` bytes for a block's attention."""
        return Problem(CostModel(self.cluster, self.kernels, memory, handling=self.handling), self._shape(layout),
                       topology(layout, self.cluster), allowed=self.allowed)

    def _plan(self, layout: JobLayout, memory: int) -> list[Candidate]:
        problem = self.problem(layout, memory)
        stats = self.stats(problem.shape.tokens)
        if self.job.sparse and not self.job.dispatches:
            return plan_blocks(problem, stats, [True] * len(stats))
        dense = plan_blocks(problem, [BlockStats((1.0,) * self.job.model.heads)] * len(stats), [False] * len(stats))
        if not self.job.sparse:
            return dense
        sparse = plan_blocks(problem, stats, [True] * len(stats))
        extra = self._predictor_ns(layout)
        return [s if s.cost.total + extra < d.cost.total else d for s, d in zip(sparse, dense)]

    def _step(self, layout: JobLayout, recompute: str, parts: dict[str, int], blocks: list[Candidate]) -> Simulation:
        micro, ends = self.job.micro_batches(layout), list(itertools.accumulate(self.job.layers_of_stages(layout)))
        linear, elementwise, tensor = self._layer_ns(layout)
        predictors = self._predictor_ns(layout)
        forward, backward, rows = [], [], []
        for first, end in zip([0, *ends], ends):
            per_stage = end - first
            costs = [c.cost for c in blocks[first:end]]
            shared = sum((c.exposed + c.a2a) // 2 for c in costs)
            attend, select = sum(c.forward - c.select for c in costs), sum(c.select for c in costs)
            back = sum(c.backward for c in costs)
            again = self.job.repeated_layers(per_stage) / per_stage if recompute == "full" else 0
            passes = 3 + again
            row = {"linear": per_stage * linear * passes, "elementwise": per_stage * elementwise * passes,
                   "tensor_parallel": per_stage * tensor * passes, "attention": attend * (1 + again) + back,
                   "selection": select, "exchange": sum(c.exposed for c in costs) * (2 + again) / 2,
                   "all_to_all": sum(c.a2a for c in costs) * (2 + again) / 2, "predictors": per_stage * predictors}
            layer = per_stage * (linear + elementwise + tensor)
            forward.append(round(layer + attend + select + shared + per_stage * predictors))
            backward.append(round(layer * (2 + again) + back + shared + again * (attend + shared)))
            rows.append(row)
        total = pipeline_ns(forward, backward, micro, round(self._send_ns(layout)))
        slowest = max(range(layout.pp), key=lambda stage: (forward[stage] + backward[stage], -stage))
        data, update = self._update_ns(layout, forward[slowest], backward[slowest])
        bubble = total - micro * (forward[slowest] + backward[slowest])
        step = total + data + update
        times = StepTime(**{name: micro * ns / 1e6 for name, ns in rows[slowest].items()}, bubble=bubble / 1e6,
                         data_parallel=data / 1e6, optimizer=update / 1e6)
        memory = {**parts, "attention": max(c.cost.memory for c in blocks)}
        done, dense = self._flops([c.plan for c in blocks], layout)
        peak = self.cluster.gpus * self.cluster.peak_tflops * 1e12 * step / 1e9
        samples = self.job.global_batch
        return Simulation(layout, recompute, step / 1e6, times, memory, tuple(c.plan for c in blocks),
                          tuple(c.cost for c in blocks), 3 * samples * done / peak, 3 * samples * dense / peak,
                          samples * self.job.tokens / (step / 1e9))

    def _layer_ns(self, layout: JobLayout) -> tuple[float, float, float]:
        """One layer's forward: matrix products, elementwise passes, tensor-parallel collectives."""
        job, model, cluster = self.job, self.job.model, self.cluster
        ranks = layout.cp * layout.tp
        flops = model.linear_flops(job.padded_tokens(layout)) * job.micro_batch / ranks
        bytes_ = job.padded_tokens(layout) * job.micro_batch * model.hidden * BYTES
        tensor = 0.0
        if layout.tp > 1:
            # Gathered before and scattered after self-attention, cross-attention and feed-forward.
            one = cluster.node_link.latency_us * 1e3 + \
                bytes_ / layout.cp * (layout.tp - 1) / layout.tp / cluster.node_link.gbps
            tensor = 6 * one
        return (flops / (cluster.peak_tflops * cluster.gemm_efficiency) / 1e3,
                ELEMENTWISE_TENSORS * bytes_ / ranks / cluster.hbm_gbps, tensor)

    def _predictor_ns(self, layout: JobLayout) -> float:
        """One layer's predictor loss."""
        job = self.job
        if not job.has_predictors or not job.predictor_stride:
            return 0.0
        rows = job.tokens / job.predictor_stride
        return PREDICTOR_LOSS_NS * rows * job.tokens * job.model.heads * job.micro_batch / (layout.cp * layout.tp)

    def _send_ns(self, layout: JobLayout) -> float:
        """One stage's output to the next."""
        tokens = self.job.padded_tokens(layout) * self.job.micro_batch / (layout.cp * layout.tp)
        link = self.cluster.network
        return link.latency_us * 1e3 + tokens * self.job.model.hidden * BYTES / link.gbps

    def _update_ns(self, layout: JobLayout, forward: int, backward: int) -> tuple[float, float]:
        """(what the last backward and the first forward do not hide of the data-parallel collectives, the update)."""
        if not self.job.optimizer:
            return 0.0, 0.0
        share = max(self.job.layers_of_stages(layout)) / self.job.model.layers
        weights = self.job.model.parameters / layout.tp * share
        shards = layout.dp * layout.cp
        update = OPTIMIZER_BYTES * weights / shards / self.cluster.hbm_gbps
        if shards == 1:
            return 0.0, update
        inside = max(1, min(shards, self.cluster.gpus_per_node // layout.tp))
        gbps = self.cluster.node_link.gbps if inside == shards else self.cluster.network.gbps * inside
        moved = weights * (shards - 1) / shards / gbps
        return max(0.0, 4 * moved - backward) + max(0.0, 2 * moved - forward), update

    def _flops(self, plans: Sequence[BlockPlan], layout: JobLayout) -> tuple[float, float]:
        """Forward operations of one sample: (what is done, with all pairs)."""
        model, tokens = self.job.model, self.job.tokens
        stats = self.stats(self.job.padded_tokens(layout))
        kept = sum(sum(stats[p.layer].density) / len(stats[p.layer].density) if p.sparse else 1.0 for p in plans)
        linear = model.layers * model.linear_flops(tokens)
        return linear + kept * model.attention_flops(tokens), linear + model.layers * model.attention_flops(tokens)

    def _bound_ms(self, layout: JobLayout) -> float:
        """Milliseconds that no plan of this layout undercuts: perfect balance, nothing exposed."""
        linear, elementwise, tensor = self._layer_ns(layout)
        shape = self._shape(layout)
        heads = shape.units * shape.group * shape.batch / layout.cp
        stats = self.stats(shape.tokens)
        attention = 0.0
        for block in dict.fromkeys(stats):
            dense = sum(self.kernels.dense(shape.tokens, shape.tokens, heads, shape.head_dim))
            best = dense
            if self.job.sparse:
                density = sum(block.density) / len(block.density)
                sparse = sum(self.kernels.sparse(shape.tokens, shape.tokens, heads, shape.head_dim, density)) \
                    + self.kernels.select(shape.tokens, shape.tokens, heads) + self._predictor_ns(layout)
                best = min(dense, sparse) if self.job.dispatches else sparse
            attention += best * stats.count(block) if isinstance(stats, list) else best
        model, micro = self.job.model, self.job.micro_batches(layout)
        stage = (model.layers * 3 * (linear + elementwise + tensor) + attention) / layout.pp
        return 0.999 * stage * (micro + layout.pp - 1) / 1e6


def dense_twin(simulator: Simulator) -> Simulator:
    """The same job with dense attention everywhere, for comparison."""
    return Simulator(simulator.cluster, simulator.kernels, replace(simulator.job, sparse=False, predictors=False),
                     simulator.stats,
                     simulator.allowed, simulator.handling)
