"""Ways to cut a job into tensor, pipeline, context and data parallelism, and the limits that rule a way out."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from megatron_dsv.context_parallel.cluster import Cluster
from megatron_dsv.context_parallel.model_shape import ModelShape
from megatron_dsv.context_parallel.plan import Topology
from megatron_dsv.sparsity.token_layout import pad_multiple

MAX_PADDING = 0.05
"""Share of the tokens that padding to whole query groups and key blocks on every rank may add."""


class JobLayout(NamedTuple):
    """Sizes whose product is the number of GPUs."""

    tp: int
    pp: int
    cp: int
    dp: int

    def __str__(self) -> str:
        return f"TP {self.tp} x PP {self.pp} x CP {self.cp} x DP {self.dp}"


@dataclass(frozen=True)
class Job:
    """What is trained.

    Attributes:
        model: its sizes.
        tokens: S of one sample.
        global_batch: samples of a step.
        micro_batch: samples that one pass takes.
        q_block, kv_block: granularity of sparse attention.
        sparse: sparse attention; otherwise dense everywhere.
        dispatches: whether a block is dense where that is predicted to be faster; otherwise all are sparse, to windows
            that are found once and not selected in a step.
        predictors: whether layers have predictors, which cost memory and time of their loss in dense attention, too;
            None for those of sparse attention alone.
        predictor_rank, proxies: width of a low-rank query, and how many a query group sends.
        predictor_reads_hidden: whether predictors read the hidden state, or each head its own query or key.
        predictor_stride: one query row in so many trains the predictors; 0 leaves their loss out.
        stages: layers of every pipeline stage; empty deals them out evenly.
        recompute: "full", "none", or "auto" for none where it fits.
        recompute_method, recompute_layers: how "full" does it: "uniform" stores the input of every so many layers and
            repeats them together, "block" repeats so many first layers of a stage one by one and keeps the others.
        optimizer: whether a step ends with gradients reduced and weights updated.
        ema: whether an average of the weights is kept.
        sharded_optimizer: whether data- and context-parallel ranks share out the optimizer's state and the average.
        max_padding: share of the tokens that padding may add.
    """

    model: ModelShape
    tokens: int
    global_batch: int
    micro_batch: int = 1
    q_block: int = 64
    kv_block: int = 64
    sparse: bool = True
    dispatches: bool = True
    predictors: bool | None = None
    predictor_rank: int = 16
    proxies: int = 4
    predictor_reads_hidden: bool = True
    predictor_stride: int = 256
    stages: tuple[int, ...] = ()
    recompute: str = "auto"
    recompute_method: str = "uniform"
    recompute_layers: int = 1
    optimizer: bool = True
    ema: bool = True
    sharded_optimizer: bool = True
    max_padding: float = MAX_PADDING

    def __post_init__(self) -> None:
        for name, least in (("tokens", 1), ("global_batch", 1), ("micro_batch", 1), ("q_block", 1), ("kv_block", 1),
                            ("predictor_rank", 1), ("proxies", 1), ("predictor_stride", 0), ("recompute_layers", 1)):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name.replace('_', ' ')} must be at least {least}, got {value}")
        if self.recompute not in ("auto", "full", "none"):
            raise ValueError(f"recompute must be one of auto, full, none, got {self.recompute!r}")
        if self.recompute_method not in ("uniform", "block"):
            raise ValueError(f"recompute method must be uniform or block, got {self.recompute_method!r}")
        if self.stages and (sum(self.stages) != self.model.layers or min(self.stages) < 1):
            raise ValueError(f"stages must hold all {self.model.layers} layers, each at least 1, got "
                             f"{list(self.stages)}")

    def padded_tokens(self, layout: JobLayout) -> int:
        """S with the padding of a run."""
        multiple = pad_multiple(self.q_block, self.kv_block, layout.tp, layout.cp)
        return -(-self.tokens // multiple) * multiple

    def micro_batches(self, layout: JobLayout) -> int:
        """Passes of a step."""
        return self.global_batch // (layout.dp * self.micro_batch)

    @property
    def has_predictors(self) -> bool:
        """Whether layers have predictors."""
        return self.sparse if self.predictors is None else self.predictors

    def repeated_layers(self, layers: int) -> int:
        """Layers of a stage of so many whose forward "full" repeats in the backward."""
        return layers if self.recompute_method == "uniform" else min(self.recompute_layers, layers)

    def layers_of_stages(self, layout: JobLayout) -> tuple[int, ...]:
        """Layers of every pipeline stage, for a layout within the limits."""
        return self.stages or (self.model.layers // layout.pp,) * layout.pp


def topology(layout: JobLayout, cluster: Cluster) -> Topology:
    """What a plan is made for."""
    return Topology(layout.cp, layout.tp, layout.pp, cluster.gpus_per_node)


def layouts(gpus: int) -> Iterator[JobLayout]:
    """Every way to write ``gpus`` as a product of four sizes."""
    sizes = [size for size in range(1, gpus + 1) if gpus % size == 0]
    for tp in sizes:
        for pp in (size for size in sizes if gpus // tp % size == 0):
            rest = gpus // tp // pp
            for cp in (size for size in sizes if rest % size == 0):
                yield JobLayout(tp, pp, cp, rest // cp)


def limit(layout: JobLayout, job: Job, cluster: Cluster) -> str | None:
    """The first limit but memory that a layout breaks, in words; None where there is none."""
    model = job.model
    if layout.tp > cluster.gpus_per_node:
        return f"TP {layout.tp} must lie in one node of {cluster.gpus_per_node} GPUs"
    if model.groups % layout.tp or model.heads % layout.tp:
        return f"TP {layout.tp} must divide the {model.groups} key/value heads"
    if job.stages and len(job.stages) != layout.pp:
        return f"PP {layout.pp} must be the {len(job.stages)} stages that the layers are dealt out to"
    if not job.stages and model.layers % layout.pp:
        return f"PP {layout.pp} must divide the {model.layers} layers"
    if job.global_batch % (layout.dp * job.micro_batch):
        return f"DP {layout.dp} x micro batch {job.micro_batch} must divide the global batch {job.global_batch}"
    padding = job.padded_tokens(layout) - job.tokens
    if padding > job.max_padding * job.tokens:
        return (f"CP {layout.cp} x TP {layout.tp} must leave every rank whole query groups of {job.q_block} "
                f"and key blocks of {job.kv_block}: {padding} of padding for {job.tokens} tokens")
    return None
