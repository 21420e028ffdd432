"""Memory of one GPU, by what holds it: enough to say what cannot fit, and why.

Symbols: s tokens of a rank, h hidden size, F feed-forward width.
"""

from __future__ import annotations

from megatron_dsv.context_parallel.cluster import Cluster
from megatron_dsv.context_parallel.cost_model import BYTES
from megatron_dsv.context_parallel.job_layouts import Job, JobLayout

LAYER_TENSORS = 18
"""[s, h] tensors that one layer's forward and backward hold beside its attention and its feed-forward activations.

Fitted to the measured peak of wan2.1-1.3b at 32,760 tokens with full recomputation on one H200, 30.23 GiB.
"""
BASE_BYTES = 2**30
"""CUDA's context and libraries' workspaces."""
FIRST_COMMUNICATOR_BYTES = (474 + 446) * 2**20
"""What the first all-reduce and the first all-to-all take on a GPU."""
PREDICTOR_BYTES = 16
"""Of a predictor's parameter: fp32 weight, gradient and two moments, on every data-parallel rank."""
FRAGMENTATION = 0.05
"""Share of the memory that the allocator cannot use."""


def usable_bytes(cluster: Cluster) -> int:
    """Bytes of a GPU that tensors can have."""
    return round(cluster.memory_gib * 2**30 * (1 - FRAGMENTATION))


def memory_parts(job: Job, layout: JobLayout, cluster: Cluster, recompute: str) -> dict[str, int]:
    """Bytes of the fullest GPU by part, attention left out.

    Args:
        job: what is trained.
        layout: sizes.
        cluster: memory of a communicator.
        recompute: "full" or "none".
    """
    every = [_of_stage(job, layout, cluster, recompute, layers, min(layout.pp - stage, job.micro_batches(layout)))
             for stage, layers in enumerate(job.layers_of_stages(layout))]
    return max(every, key=lambda parts: sum(parts.values()))


def predictor_parameters(job: Job, tp: int) -> int:
    """Weights and biases of one layer's predictor on one tensor-parallel rank."""
    if not job.has_predictors:
        return 0
    channels = job.model.hidden if job.predictor_reads_hidden else job.model.head_dim
    return job.predictor_rank * (job.model.heads + job.model.groups) // tp * (channels + 1)


def _of_stage(job: Job, layout: JobLayout, cluster: Cluster, recompute: str, layers: int,
              in_flight: int) -> dict[str, int]:
    """The parts of a stage of so many layers with so many micro-batches in flight."""
    model, shards = job.model, layout.dp * layout.cp if job.sharded_optimizer else 1
    around = model.parameters - model.layers * model.layer_parameters
    weights = (layers * model.layer_parameters + around) // layout.tp
    tokens = job.padded_tokens(layout) * job.micro_batch // (layout.cp * layout.tp)
    one_layer = tokens * BYTES * (LAYER_TENSORS * model.hidden + model.matrices * model.ffn)
    # Queries, keys, values and outputs stay, too, but for the layer whose attention is counted apart.
    kept_layer = one_layer + 4 * tokens * BYTES * model.width
    inputs = tokens * BYTES * model.hidden
    if recompute != "full":
        activations = kept_layer * layers * in_flight
    elif job.recompute_method == "uniform":
        together = min(job.recompute_layers, layers)
        activations = inputs * -(-layers // together) * in_flight + kept_layer * (together - 1) + one_layer
    else:
        repeated = job.repeated_layers(layers)
        # A layer is repeated once the kept ones behind it are free again.
        activations = (inputs * repeated + kept_layer * (layers - repeated)) * in_flight \
            + (one_layer if repeated == layers else 0)
    groups = sum(size > 1 for size in (layout.tp, layout.pp, layout.cp, layout.dp)) + (layout.cp > 1)
    return {
        "weights": 2 * weights,
        "gradients": 4 * weights,
        "optimizer": 12 * weights // shards if job.optimizer else 0,
        "ema": 4 * weights // shards if job.ema else 0,
        "predictors": PREDICTOR_BYTES * predictor_parameters(job, layout.tp) * layers,
        "activations": activations,
        "communicators": groups * cluster.communicator_mib * 2**20 + (FIRST_COMMUNICATOR_BYTES if groups else 0),
        "base": BASE_BYTES,
    }


def words(parts: dict[str, int], limit: int) -> str:
    """The parts in GiB, largest first, against a limit."""
    total = sum(parts.values())
    listed = ", ".join(f"{name} {size / 2**30:.1f}" for name, size in
                       sorted(parts.items(), key=lambda row: (-row[1], row[0])) if size >= 2**30 / 20)
    return f"memory: {total / 2**30:.1f} GiB of {limit / 2**30:.1f} that a GPU can use ({listed})"
