"""Training with predicted selections, another plan for every block at every step, equals one process.

Dims: S tokens, b batch, H query heads, G key/value heads, d head dim, r predictor rank.
"""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
import torch.distributed as dist
from cp_cases import GROUP, LOW_RANK, PROXIES, SCALE, Problem, make_plan, share
from cp_schemes import EXACT, all_splits, prepared, scheme_of
from torch import Tensor

from megatron_dsv.context_parallel.local import LocalScheme
from megatron_dsv.context_parallel.plan import BlockPlan
from megatron_dsv.context_parallel.scheme import AttentionScheme
from megatron_dsv.kernels.block_scores.api import chunked_block_scores, pool_queries
from megatron_dsv.kernels.selection import KVSelection
from megatron_dsv.sparsity.predictor_loss import predictor_loss_and_grads
from megatron_dsv.sparsity.selection_rules import select
from megatron_dsv.testing.ranks import run_ranks

BLOCKS, STEPS, RATE = 2, 3, 0.5


class Job:
    """Blocks of attention with predictors, on a target, in fp64; every random number is drawn here."""

    def __init__(self, problem: Problem, rule: str) -> None:
        self.problem, self.rule = problem, rule
        generator = torch.Generator().manual_seed(7)
        p, width = problem, problem.heads * problem.head_dim

        def draw(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, dtype=torch.float64)

        kv_width = p.units * p.head_dim
        self.weights = [draw(width, size) / width**0.5 for _ in range(BLOCKS) for size in (width, kv_width, kv_width)]
        self.predictors = [draw(width, size * LOW_RANK) for _ in range(BLOCKS) for size in (p.heads, p.units)]
        self.data = [draw(p.tokens, p.batch, width) for _ in range(STEPS)]
        self.target = draw(p.tokens, p.batch, width)
        self.kv_length = torch.full((p.batch,), p.tokens - p.padding, dtype=torch.int32)
        self.budgets = [1 + 2 * head for head in range(p.heads)]

    def select(self, q_lr: Tensor, k_lr: Tensor, head_ids: Sequence[int], groups: Sequence[int]) -> KVSelection:
        p = self.problem
        scores = chunked_block_scores(q_lr, k_lr, kv_length=self.kv_length, kv_block_size=p.kv_block, proxies=PROXIES,
                                      reduction="mass", softmax_scale=LOW_RANK**-0.5)
        return select(scores, rule=self.rule, num_kv_heads=k_lr.shape[2],
                      num_queries=q_lr.shape[0] // PROXIES * GROUP, num_keys=k_lr.shape[0], q_block_size=GROUP,
                      kv_block_size=p.kv_block, head_budgets=[self.budgets[head] for head in head_ids], theta=0.75,
                      kv_length=self.kv_length, query_length=self.kv_length, query_group_ids=torch.tensor([*groups]))

    def loss(self, scheme: AttentionScheme, x: Tensor, target: Tensor, weights: list[Tensor],
             plans: list[BlockPlan | None]) -> Tensor:
        """Mean squared error over the tokens passed."""
        p = self.problem
        for block in range(BLOCKS):
            wq, wk, wv = weights[3 * block:3 * block + 3]
            pq, pk = self.predictors[2 * block:2 * block + 2]
            with torch.no_grad():
                q_lr = pool_queries((x @ pq).unflatten(-1, (p.heads, LOW_RANK)), q_block_size=GROUP, proxies=PROXIES)
                k_lr = (x @ pk).unflatten(-1, (p.units, LOW_RANK))
            pending = scheme.begin(q_lr, k_lr, self.select, plans[block])
            q, k, v = ((x @ w).unflatten(-1, (-1, p.head_dim)) for w in (wq, wk, wv))
            x = x + scheme.attend(q, k, v, pending, softmax_scale=SCALE).flatten(2)
        return ((x - target) ** 2).mean()

    def train(self, scheme: AttentionScheme, rank: int, ranks: int) -> tuple[list[float], list[Tensor]]:
        """Losses and final weights."""
        weights, losses = [w.clone().requires_grad_() for w in self.weights], []
        for step, data in enumerate(self.data):
            plans = [make_plan(all_splits(ranks)[(BLOCKS * step + block) % len(all_splits(ranks))], self.problem,
                               stages=1 + step % 3, seed=step, layer=block) if ranks > 1 else None
                     for block in range(BLOCKS)]
            loss = self.loss(scheme, share(data, rank, ranks), share(self.target, rank, ranks), weights, plans)
            sums = [loss.detach().reshape(1), *torch.autograd.grad(loss, weights)]
            if ranks > 1:
                for value in sums:
                    dist.all_reduce(value)
                    value /= ranks
            losses.append(float(sums[0]))
            with torch.no_grad():
                for weight, grad in zip(weights, sums[1:]):
                    weight -= RATE * grad
        return losses, [weight.detach() for weight in weights]


def train_on_rank(job: Job) -> tuple[list[float], list[Tensor]]:
    scheme = scheme_of(prepared(job.problem.ranks, node_ranks=2), job.problem)
    return job.train(scheme, dist.get_rank(), job.problem.ranks)


@pytest.mark.parametrize(("ranks", "rule", "problem"), [
    (4, "topk", Problem(4, units=3, ratio=2, batch=2, padding=6)),
    (4, "topk-mass", Problem(4, units=4, kv_block=1, batch=1, padding=3)),
    (6, "topk", Problem(6, units=2, kv_block=4, batch=1)),
], ids=lambda value: value if isinstance(value, str) else None)
def test_training_with_a_plan_for_every_block_and_step(ranks, rule, problem):
    job = Job(problem, rule)
    local = LocalScheme(range(problem.heads), PROXIES, EXACT)
    losses, weights = job.train(local, 0, 1)
    assert losses[-1] != losses[0]
    for got_losses, got_weights in run_ranks(train_on_rank, ranks, job):
        assert got_losses == pytest.approx(losses, rel=1e-12)
        for got, expected in zip(got_weights, weights, strict=True):
            assert (got - expected).abs().max() < 1e-12 * max(1.0, expected.abs().max().item())


def loss_of_rank(rows: Tensor, tensors: tuple[Tensor, ...], problem: Problem) -> tuple[Tensor, Tensor, Tensor]:
    """Predictor loss from this rank's tokens alone: sampled queries are gathered, keys stay."""
    scheme = scheme_of(prepared(4, node_ranks=2), problem)
    q_lr, k_lr, q, k = (share(x, dist.get_rank(), 4) for x in tensors)
    length = torch.tensor([problem.tokens - problem.padding - dist.get_rank() * problem.chunk])
    q_lr, q = scheme.gather_rows([q_lr, q], rows)
    loss, dq, dk = predictor_loss_and_grads(
        q_lr, k_lr, q, k, softmax_scale=SCALE,
        kv_length=length.clamp(0, problem.chunk), reduce_rows=scheme.reduce_rows)
    return loss, scheme.reduce_rows(dq), dk


def test_predictor_loss_where_no_rank_sees_a_whole_row():
    problem = Problem(4, units=2, ratio=2, batch=1, padding=3)
    generator = torch.Generator().manual_seed(3)
    tensors = tuple(torch.randn(problem.tokens, 1, heads, width, generator=generator, dtype=torch.float64)
                    for heads, width in ((4, LOW_RANK), (2, LOW_RANK), (4, 4), (2, 4)))
    rows = torch.tensor([2, 9, 10, 17, 26])
    q_lr, k_lr, q, k = tensors
    exact = predictor_loss_and_grads(q_lr[rows], k_lr, q[rows], k, softmax_scale=SCALE,
                                     kv_length=problem.tokens - problem.padding)
    results = run_ranks(loss_of_rank, 4, rows, tensors, problem)
    for loss, dq, _ in results:
        assert torch.allclose(loss, exact[0], rtol=1e-12, atol=0)
        assert torch.allclose(dq, exact[1], rtol=1e-9, atol=1e-14)
    assert torch.allclose(torch.cat([dk for *_, dk in results]), exact[2], rtol=1e-9, atol=1e-14)
