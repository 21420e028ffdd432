"""The costs that a run plans with: a calibration of its machines, a cluster file, or what was measured on H200."""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_dsv.config import DSVConfig
from megatron_dsv.context_parallel import cluster as clusters
from megatron_dsv.context_parallel.calibration import Calibration, digest
from megatron_dsv.context_parallel.cost_model import AttentionShape, CostModel
from megatron_dsv.context_parallel.kernel_rates import WithoutSelection, measured_kernels
from megatron_dsv.context_parallel.plan import Topology
from megatron_dsv.context_parallel.planner import Hysteresis, Problem
from megatron_dsv.context_parallel.replanner import Bucket, Replanner

DEFAULT_CLUSTER = "h200"
"""The one kind of machine whose kernels were measured."""
ATTENTION_SHARE = 0.25
"""Share of a GPU's memory that one block's attention may take: weights, optimizer and activations have the rest."""


@dataclass(frozen=True)
class Costs:
    """What is known of the machines.

    Attributes:
        model: costs.
        digest: of its constants.
        source: one phrase for the log.
    """

    model: CostModel
    digest: str
    source: str


def costs_of(dsv: DSVConfig, *, device: str | None, head_dim: int, device_bytes: int | None = None) -> Costs:
    """The costs that the flags ask for, else those of ``DEFAULT_CLUSTER``.

    Args:
        device: as torch.cuda.get_device_name gives it; None for a CPU.
        head_dim: size of a head.
        device_bytes: memory of the device; bounds what the cluster says of it. None where there is none.

    Raises:
        ValueError: one line that names the flag and the file.
    """
    if dsv.dsv_cp_calibration is not None:
        return _calibrated(dsv, dsv.dsv_cp_calibration, head_dim, device_bytes)
    flag = "" if dsv.dsv_cp_cluster is None else "--dsv-cp-cluster: "
    try:
        cluster = clusters.load(dsv.dsv_cp_cluster or DEFAULT_CLUSTER)
        kernels = measured_kernels(cluster, dsv.dsv_q_block_size, dsv.dsv_kv_block_size)
    except ValueError as error:
        raise ValueError(f"{flag}{error}") from None
    foreign = not flag and device != cluster.gpu
    source = f"the constants of {cluster.name}" + (
        f", which this {device or 'CPU'} is not; give --dsv-cp-cluster or --dsv-cp-calibration" if foreign else "")
    return Costs(CostModel(cluster, kernels, _attention_bytes(cluster, device_bytes)), digest(cluster, kernels), source)


def _calibrated(dsv: DSVConfig, path: str, head_dim: int, device_bytes: int | None) -> Costs:
    try:
        found = Calibration.load(path)
        found.check(q_block=dsv.dsv_q_block_size, kv_block=dsv.dsv_kv_block_size, head_dim=head_dim)
    except ValueError as error:
        raise ValueError(f"--dsv-cp-calibration: {error}") from None
    instead = "" if dsv.dsv_cp_cluster is None else f", not --dsv-cp-cluster {dsv.dsv_cp_cluster}"
    return Costs(found.cost_model(_attention_bytes(found.cluster, device_bytes)), found.digest,
                 f"the calibration {path}{instead}")


def _attention_bytes(cluster: clusters.Cluster, device_bytes: int | None) -> int:
    described = int(cluster.memory_gib * 2**30)
    return int(ATTENTION_SHARE * (described if device_bytes is None else min(described, device_bytes)))


def low_rank_width(dsv: DSVConfig) -> int:
    """Channels that a token sends before attention: of the predictor; a window sends the shape alone, in one."""
    return dsv.dsv_predictor_rank if dsv.window_fraction is None else 1


def replanner_of(costs: Costs, dsv: DSVConfig, *, topo: Topology, buckets: tuple[Bucket, ...], micro_batch: int,
                 heads: int, groups: int, head_dim: int) -> Replanner:
    """The planner of a run.

    Args:
        costs: of the machines.
        dsv: granularity of selections.
        topo: sizes of the job.
        buckets: ranges of sequence lengths.
        micro_batch: samples of one pass.
        heads, groups: query heads and key/value heads of the whole model.
        head_dim: size of a head.
    """
    units = groups // topo.tp
    model = costs.model if dsv.window_fraction is None else replace(
        costs.model, kernels=WithoutSelection(costs.model.kernels))
    problems = tuple((bucket, Problem(model, AttentionShape(
        bucket[1], micro_batch, units, heads // groups, head_dim, dsv.dsv_q_block_size, dsv.dsv_kv_block_size,
        low_rank_width(dsv), dsv.dsv_predictor_proxies), topo)) for bucket in buckets)
    return Replanner(problems, costs.digest, (Hysteresis(),) * len(buckets))
