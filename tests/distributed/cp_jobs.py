"""A job of planning ranks without a model: what planning reads of layers, and blocks that run as planned."""

from __future__ import annotations

import argparse
import itertools
import math
from types import SimpleNamespace

import torch.distributed as dist
from cp_cases import Whole, run_block, share
from cp_schemes import EXACT

from megatron_dsv.config import DSVConfig
from megatron_dsv.context_parallel.groups import CPGroupManager
from megatron_dsv.context_parallel.hybrid_cp import HybridScheme
from megatron_dsv.context_parallel.plan import CPPlan, Topology, even_plan
from megatron_dsv.context_parallel.plan_commit import PlanStore
from megatron_dsv.context_parallel.scheme import Pending
from megatron_dsv.metrics import Recorder
from megatron_dsv.training.cp_costs import costs_of, replanner_of
from megatron_dsv.training.cp_planning import CPPlanning, PlanningGroups
from megatron_dsv.training.cp_runtime import CPRuntime
from megatron_dsv.training.plan_log import PlanLog

LAYERS, HEADS, TOKENS = 2, 6, 65536


class Layer(SimpleNamespace):
    """What planning reads of an attention layer: budgets of its heads, and whether it is sparse."""

    def __init__(self, number: int, tp_rank: int, heads: int, dsv: DSVConfig) -> None:
        mine = range(tp_rank * heads, (tp_rank + 1) * heads)
        super().__init__(number=number, dsv=dsv, statistics=object(), sparse=False, seed=0)
        self.selector = SimpleNamespace(
            query_heads=mine, attends_sparsely=lambda tokens: self.sparse,
            budgets=lambda blocks: [math.ceil(blocks * kept_share(number, head, self.seed)) for head in mine])


def kept_share(layer: int, head: int, seed: int) -> float:
    return 0.01 + 0.6 * ((7 * layer + 5 * head * (seed + 1)) % 11 / 11) ** 3


class Job:
    """Planning on this rank: tp ranks are neighbours, then context-parallel ranks, then replicas."""

    def __init__(self, *, tp: int = 1, cp: int = 2, tokens: int = TOKENS, heads: int = HEADS, folder=None,
                 **flags) -> None:
        world, rank = dist.get_world_size(), dist.get_rank()
        topo = Topology(cp, tp, 1, 8)
        model, context, data = None, None, None
        for first in range(0, world, tp):
            group = dist.new_group(range(first, first + tp))
            model = group if rank in range(first, first + tp) else model
        for replica, place in itertools.product(range(world // (tp * cp)), range(tp)):
            ranks = [replica * tp * cp + c * tp + place for c in range(cp)]
            group = dist.new_group(ranks)
            context = group if rank in ranks else context
        for place in range(tp):
            ranks = list(range(place, world, tp))
            group = dist.new_group(ranks)
            data = group if rank in ranks else data
        self.dsv = DSVConfig(dsv_profile_momentum=0.5, **flags)
        self.layers = {number: Layer(number, rank % tp, heads // tp, self.dsv) for number in range(1, LAYERS + 1)}
        first = even_plan(topo, layers=LAYERS, units=heads // tp, longest=tokens, g_h=1)
        manager = CPGroupManager(context, node_ranks=cp)
        store = PlanStore(first, manager, lambda plan: plan.check_job(topo=topo, layers=LAYERS, units=heads // tp))
        self.runtime, self.args, self.recorder = CPRuntime(manager, store), argparse.Namespace(), Recorder()
        planner = replanner_of(costs_of(self.dsv, device=None, head_dim=64), self.dsv, topo=topo,
                               buckets=((1, tokens),), micro_batch=1, heads=heads, groups=heads, head_dim=64)
        self.planning = CPPlanning(
            self.runtime, planner, self.layers, self.dsv, self.args,
            PlanningGroups(dist.group.WORLD, model, data, context), PlanLog(rank, folder, self.recorder),
            layers=LAYERS, heads=heads, kv_heads=heads)

    @property
    def plan(self) -> CPPlan:
        return self.runtime.store.plan

    def step(self, step: int, work=lambda scheme: None, *, profiles: bool = True) -> None:
        """One step, finished as number ``step``."""
        self.planning.begin_micro_batch(profiles=profiles, tokens=self.plan.buckets[-1][1])
        work(self)
        self.planning.end_step(step)

    def turn(self, *sparse: bool, seed: int = 0) -> None:
        """The layers' gates and budgets change."""
        for layer, flag in zip(self.layers.values(), sparse):
            layer.sparse, layer.seed = flag, seed


def attend(whole: Whole, job: Job) -> None:
    """Every layer's block runs once, as the plan in force splits it."""
    problem, manager = whole.problem, job.runtime.manager
    scheme = HybridScheme(manager, range(problem.heads), tp_rank=0, proxies=2, kernels=EXACT)
    for block in job.plan.blocks[0]:
        if block.sparse:
            run_block(scheme, whole, block)
        else:
            q, k, v = (share(x, manager.rank, problem.ranks).clone().requires_grad_()
                       for x in (whole.q, whole.k, whole.v))
            scheme.attend(q, k, v, Pending(None, whole.kv_length, block), softmax_scale=1.0).sum().backward()
