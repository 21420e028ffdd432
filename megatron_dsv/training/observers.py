"""Builds what follows a run's profiles: the planning of context parallelism, and the trace of sparsity."""

from __future__ import annotations

import torch

from megatron_dsv.context_parallel.replanner import shared_buckets
from megatron_dsv.training.cp_costs import costs_of, replanner_of
from megatron_dsv.training.cp_planning import CPPlanning, PlanningGroups
from megatron_dsv.training.dsv_controller import DSVController
from megatron_dsv.training.plan_log import PlanLog
from megatron_dsv.training.run import TrainingRun
from megatron_dsv.training.sparsity_trace import SparsityTrace
from megatron_dsv.transformer.selector import device_name


def build_planning(run: TrainingRun, controller: DSVController) -> CPPlanning | None:
    """Planning under ``--dsv-cp-plan planned``; None otherwise, and without context parallelism."""
    if run.cp is None or run.dsv.dsv_cp_plan != "planned":
        return None
    args, plan, world = run.args, run.cp.store.plan, torch.distributed.group.WORLD
    assert world is not None
    memory = torch.cuda.get_device_properties(run.device).total_memory if run.device.type == "cuda" else None
    costs = costs_of(run.dsv, device=device_name(), head_dim=args.kv_channels, device_bytes=memory)
    # One key/value head per query head: grouped queries are refused when flags are checked.
    heads = kv_heads = args.num_attention_heads
    replanner = replanner_of(costs, run.dsv, topo=plan.topo, buckets=shared_buckets(plan.buckets),
                             micro_batch=args.micro_batch_size, heads=heads, groups=kv_heads,
                             head_dim=args.kv_channels)
    log = PlanLog(args.rank, run.folder, run.recorder)
    log.source(costs.source)
    everyone = run.cp.manager.everyone.communicator
    assert everyone is not None
    groups = PlanningGroups(world, controller.groups.model, controller.groups.data, everyone.pg)
    shares = [run.window_share_of_data(low, high) for low, high in replanner.buckets]
    return CPPlanning(run.cp, replanner, controller.attentions, run.dsv, args, groups, log, layers=args.num_layers,
                      heads=heads, kv_heads=kv_heads,
                      windows=None if None in shares else [share for share in shares if share is not None])


def build_trace(run: TrainingRun, controller: DSVController) -> SparsityTrace | None:
    """The trace of a run with predictors and a folder."""
    if run.folder is None or not run.dsv.has_predictor:
        return None
    return SparsityTrace(run.folder, controller.attentions, layers=run.args.num_layers,
                         heads=run.args.num_attention_heads, model_group=controller.groups.model, device=run.device)
