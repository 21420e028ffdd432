"""Schemes and groups for the tests of context parallelism; runs on ranks."""

from __future__ import annotations

import torch.distributed as dist
from cp_cases import PROXIES, Problem

from megatron_dsv.context_parallel.geometry import Split, splits
from megatron_dsv.context_parallel.groups import CPGroupManager
from megatron_dsv.context_parallel.hybrid_cp import HybridScheme
from megatron_dsv.context_parallel.partial_attention import Kernels

EXACT = Kernels(dense_backend="reference", sparse_backend="reference")
REPEATABLE = Kernels(dense_backend="reference", sparse_backend="reference", deterministic=True)


def all_splits(ranks: int) -> list[Split]:
    """Every factorisation, in both layouts where they differ."""
    return list(splits(ranks, ranks))


def prepared(ranks: int, *, node_ranks: int, backing: str = "parents") -> CPGroupManager:
    """A manager of all ranks that can serve every split."""
    manager = CPGroupManager(dist.group.WORLD, node_ranks=node_ranks, backing=backing)
    manager.prepare(all_splits(ranks))
    return manager


def scheme_of(manager: CPGroupManager, problem: Problem, *, kernels: Kernels = EXACT) -> HybridScheme:
    """The scheme of a model with this problem's heads."""
    return HybridScheme(manager, range(problem.heads), tp_rank=0, proxies=PROXIES, kernels=kernels)
