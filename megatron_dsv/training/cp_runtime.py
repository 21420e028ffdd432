"""What a run under context parallelism owns: its process groups and the plan in force; made once, with the model."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch

from megatron_dsv.config import DSVConfig
from megatron_dsv.context_parallel.groups import CPGroupManager
from megatron_dsv.context_parallel.plan import CPPlan, Topology
from megatron_dsv.context_parallel.plan_commit import PlanStore
from megatron_dsv.context_parallel.plan_modes import MODES, RANDOM, SEQUENCE, buckets_of, random_plan, uniform_plan
from megatron_dsv.models.config import VideoDiTConfig
from megatron_dsv.models.layouts import latent_layout
from megatron_dsv.platform import cpu


@dataclass(frozen=True)
class CPRuntime:
    """Context parallelism of one rank.

    Attributes:
        manager: the process groups.
        store: the plan in force; the model's layers read it at every forward.
    """

    manager: CPGroupManager
    store: PlanStore


def build_cp_runtime(args: argparse.Namespace, dsv: DSVConfig, dit: VideoDiTConfig, groups: Any) -> CPRuntime | None:
    """Groups and the first plan, which needs no statistics; None at context-parallel size 1. Every rank must call it.

    Args:
        args: parsed arguments, with ``latent_shapes`` of the data set.
        dsv, dit: configurations.
        groups: Megatron's ProcessGroupCollection (``cp`` is used).
    """
    if args.context_parallel_size == 1:
        return None
    topo = topology_of(args)
    device = cpu.current_device()
    manager = CPGroupManager(
        groups.cp, node_ranks=topo.cp_per_node, backing=dsv.dsv_cp_groups, device=device,
        timeout=timedelta(minutes=args.distributed_timeout_minutes))
    layers, units = args.num_layers, args.num_attention_heads // topo.tp
    lengths = [latent_layout(tuple(shape[1:]), dit, dsv, topo.tp, topo.cp).padded_length
               for shape in args.latent_shapes]
    first = uniform_plan(
        dsv.dsv_cp_plan if dsv.dsv_cp_plan in MODES else SEQUENCE, topo, layers=layers, units=units,
        buckets=buckets_of(lengths), sparse=dsv.may_be_sparse, kv_block=dsv.dsv_kv_block_size)

    def check(plan: CPPlan) -> None:
        plan.check_job(topo=topo, layers=layers, units=units)

    return CPRuntime(manager, PlanStore(first, manager, check))


def topology_of(args: argparse.Namespace) -> Topology:
    """The sizes that a plan is made for; GPUs of a node are the ranks that the launcher started on this one."""
    return Topology(cp=args.context_parallel_size, tp=args.tensor_model_parallel_size,
                    pp=args.pipeline_model_parallel_size,
                    domain=int(os.environ.get("LOCAL_WORLD_SIZE", args.world_size)))


def redraw_plan(runtime: CPRuntime, dsv: DSVConfig, *, seed: int, step: int) -> None:
    """Under ``--dsv-cp-plan random``, puts another plan in force; between two steps only, by every rank of the job.

    Args:
        seed: of the run.
        step: finished steps; the plan serves the next one.

    Raises:
        RuntimeError: a rank refused the plan.
    """
    if dsv.dsv_cp_plan != RANDOM:
        return
    world = torch.distributed.group.WORLD
    assert world is not None
    proposal = random_plan(runtime.store.plan, seed=seed, step=step) if world.rank() == 0 else None
    decision = runtime.store.propose(proposal, world)
    if not decision.committed:
        raise RuntimeError(f"--dsv-cp-plan random: the plan for step {step} was refused by rank {decision.refused_by}: "
                           f"{decision.reason or 'its own message says why'}")
