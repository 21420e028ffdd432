"""Attention problems for context parallelism: the whole problem, each rank's share of it, and the one-process answer.

Dims: S tokens, b batch, h query heads, G key/value heads, d head dim, Nq query groups, Nk key blocks.
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_dsv.context_parallel.geometry import Split
from megatron_dsv.context_parallel.hybrid_cp import HybridScheme
from megatron_dsv.context_parallel.plan import BlockPlan
from megatron_dsv.context_parallel.scheme import Pending
from megatron_dsv.kernels.selection import DENSE_ROW, KVSelection, from_block_mask
from megatron_dsv.kernels.sparse_attention import api as sparse
from megatron_dsv.testing.attention_oracle import oracle

GROUP, PROXIES, LOW_RANK, SCALE = 4, 2, 3, 0.4


@dataclass(frozen=True)
class Problem:
    """A sequence of S tokens on C ranks; ``padding`` tokens at its end are not real."""

    ranks: int
    chunk: int = 8
    batch: int = 2
    units: int = 3
    ratio: int = 1
    head_dim: int = 4
    kv_block: int = 2
    padding: int = 0
    dense: bool = False
    group: int = GROUP
    dtype: torch.dtype = torch.float64

    @property
    def tokens(self) -> int:
        return self.ranks * self.chunk

    @property
    def heads(self) -> int:
        return self.units * self.ratio


class Whole:
    """All tensors of a problem, its selection as a mask, and out with all gradients from a textbook oracle."""

    def __init__(self, problem: Problem, seed: int = 0) -> None:
        self.problem = p = problem
        self.checks_low_rank = True
        generator = torch.Generator().manual_seed(seed)

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        self.q, self.dout = (draw(p.tokens, p.batch, p.heads, p.head_dim) for _ in range(2))
        self.k, self.v = (draw(p.tokens, p.batch, p.units, p.head_dim) for _ in range(2))
        self.q_lr = draw(p.tokens // p.group * PROXIES, p.batch, p.heads, LOW_RANK)
        self.k_lr = draw(p.tokens, p.batch, p.units, LOW_RANK)
        self.kv_length = torch.full((p.batch,), p.tokens - p.padding, dtype=torch.int32)
        if p.batch > 1:
            self.kv_length[1] -= p.padding // 2
        shape = (p.batch, p.heads, p.tokens // p.group)
        keep = torch.rand((*shape, 1), generator=generator) * 0.6
        mask = torch.rand((*shape, p.tokens // p.kv_block), generator=generator) < keep
        kind = torch.rand(shape, generator=generator)
        kind[:, 0] = 0.0  # the first head attends to nothing, the last one to everything
        kind[:, -1] = 1.0
        mask[kind < 0.1] = False
        self.dense_rows = kind > 0.9
        mask[self.dense_rows] = True
        self.mask = torch.ones_like(mask) if p.dense else mask
        self.answer = self._solve()
        self._load_kernels()

    def _load_kernels(self) -> None:
        """The first call of the ops imports much of torch: better here, once, than on every forked rank."""
        lengths = torch.ones((1, 1), dtype=torch.int32)
        one = torch.ones(1, 1, 1, 1)
        selection = from_block_mask(torch.ones(1, 1, 1, 1, dtype=torch.bool), lengths, num_queries=1, num_keys=1,
                                    q_block_size=1, kv_block_size=1)
        out, lse = sparse.forward(one, one, one, selection, backend="reference")
        sparse.backward(one, one, one, one, out, lse, selection, backend="reference")

    def token_mask(self) -> Tensor:
        """bool [b, h, S, S]."""
        p = self.problem
        tokens = self.mask.repeat_interleave(p.group, 2).repeat_interleave(p.kv_block, 3)
        return tokens & (torch.arange(p.tokens) < self.kv_length[:, None, None, None])

    def _solve(self) -> tuple[Tensor, ...]:
        q, k, v = (x.clone().requires_grad_() for x in (self.q, self.k, self.v))
        # A row without keys has no maximum; its weights are all zero whatever stands there.
        out, _ = oracle(q, k, v, self.token_mask(), SCALE)
        return (out.detach(), *torch.autograd.grad(out, (q, k, v), self.dout))

    def select(self, q_lr: Tensor, k_lr: Tensor, head_ids: Sequence[int], groups: Sequence[int]) -> KVSelection:
        """The part of the mask that was asked for; the low-rank tensors must be exactly those heads and tokens."""
        p, heads, groups = self.problem, list(head_ids), list(groups)
        rows = [group * PROXIES + proxy for group in groups for proxy in range(PROXIES)]
        units = [head // p.ratio for head in heads[::p.ratio]]
        if self.checks_low_rank:
            assert torch.equal(q_lr.cpu(), self.q_lr[rows][:, :, heads].to(p.dtype))
            assert torch.equal(k_lr.cpu(), self.k_lr[:, :, units].to(p.dtype))
        lengths = self.kv_length[:, None].expand(p.batch, len(heads) // p.ratio).contiguous()
        selection = from_block_mask(
            self.mask[:, heads][:, :, groups].to(k_lr.device), lengths.to(k_lr.device),
            num_queries=len(groups) * p.group, num_keys=p.tokens, q_block_size=p.group, kv_block_size=p.kv_block)
        dense = self.dense_rows[:, heads][:, :, groups].to(k_lr.device)
        return replace(selection, row_start=torch.where(dense, DENSE_ROW, selection.row_start))


def share(x: Tensor, rank: int, ranks: int) -> Tensor:
    """This rank's chunk of the sequence."""
    return x.chunk(ranks)[rank]


def make_plan(split: Split, problem: Problem, *, stages: int = 1, exchange: str | None = None, seed: int = 0,
              layer: int = 0) -> BlockPlan:
    """A plan with random heads and uneven counts; some ranks often get none."""
    chance = random.Random(f"{split}/{problem.units}/{seed}")
    order = chance.sample(range(problem.units), problem.units)
    cuts = sorted(chance.randint(0, problem.units) for _ in range(split.g_h - 1))
    sizes = tuple(high - low for low, high in zip([0, *cuts], [*cuts, problem.units]))
    kind = "none" if split.g_s == 1 else exchange or ("gather" if problem.dense else "selective")
    return BlockPlan(layer, split.g_h, split.g_s, split.layout, (tuple(order),), (sizes,), kind,
                     min(stages, max(1, split.g_s - 1)), problem.kv_block, not problem.dense)


def run_block(scheme: HybridScheme, whole: Whole, plan: BlockPlan, *, recompute: bool = False) -> tuple[Tensor, ...]:
    """This rank's out, dq, dk and dv; with ``recompute`` attention runs once before, without a graph."""
    p, rank, device = whole.problem, scheme.manager.rank, scheme.manager.device
    mine = [share(x, rank, p.ranks).to(device, p.dtype) for x in (whole.q, whole.k, whole.v, whole.q_lr, whole.k_lr)]
    q, k, v = (x.requires_grad_() for x in mine[:3])
    if p.dense:
        pending = Pending(None, kv_length=whole.kv_length, plan=plan)
    else:
        pending = scheme.begin(mine[3], mine[4], whole.select, plan)
    if recompute:
        with torch.no_grad():
            scheme.attend(q, k, v, pending, softmax_scale=SCALE)
    out = scheme.attend(q, k, v, pending, softmax_scale=SCALE)
    grads = torch.autograd.grad(out, (q, k, v), share(whole.dout, rank, p.ranks).to(device, p.dtype))
    return (out.detach(), *grads)


def worst_error(got: tuple[Tensor, ...], whole: Whole, rank: int) -> float:
    """Largest difference from the one-process answer, relative to its largest element but at least 1."""
    worst = 0.0
    for ours, exact in zip(got, whole.answer, strict=True):
        difference = (ours.double() - share(exact, rank, whole.problem.ranks)).abs().max().item()
        # NaN must not pass for small.
        relative = float("inf") if math.isnan(difference) else difference / max(1.0, exact.abs().max().item())
        worst = max(worst, relative)
    return worst
