"""One attention block on synthetic inputs, under any scheme: what calibration and benchmarks time.

The block is projection to low rank, selection, attention and its backward. Query groups attend to neighbours in the
sequence and to places of their own, so ranks share some keys and not others.

Dims: S tokens of the sequence, s of this rank, h heads (as many key/value heads), d head dim, r low rank, P proxies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dsv.context_parallel.plan import BlockPlan
from megatron_dsv.context_parallel.scheme import AttentionScheme, Pending
from megatron_dsv.context_parallel.stopwatch import Mark
from megatron_dsv.kernels.block_scores.api import chunked_block_scores, pool_queries
from megatron_dsv.kernels.host_values import on_device
from megatron_dsv.kernels.selection import KVSelection
from megatron_dsv.kernels.token_topk.api import token_topk
from megatron_dsv.sparsity.selection_rules import select

_WAVES = 3
_LOCAL, _OWN = 1.5, 2.0
"""Amplitudes of the position's waves and of a block's own random direction."""


@dataclass(frozen=True)
class TrialShape:
    """A block.

    Attributes:
        tokens: S, a multiple of ranks x query group x key block.
        heads, head_dim: h and d.
        hidden: width of the hidden state that is projected, at least 2 h r.
        q_block, kv_block: granularity of the selection, in tokens.
        rank, proxies: r and P.
    """

    tokens: int
    heads: int
    head_dim: int
    hidden: int
    q_block: int = 64
    kv_block: int = 64
    rank: int = 16
    proxies: int = 4

    def __post_init__(self) -> None:
        if self.hidden < 2 * self.heads * self.rank:
            raise ValueError(f"hidden must be at least 2 x heads x rank, {2 * self.heads * self.rank}, "
                             f"got {self.hidden}")
        if self.rank < 2 * _WAVES + 2:
            raise ValueError(f"rank must be at least {2 * _WAVES + 2}, got {self.rank}")

    @property
    def blocks(self) -> int:
        """Key blocks of the sequence."""
        return self.tokens // self.kv_block

    def budgets(self, densities: Sequence[float]) -> tuple[int, ...]:
        """[h] blocks that a row of each head keeps, from its density."""
        return tuple(max(1, min(self.blocks, round(self.blocks * density))) for density in densities)


@dataclass(frozen=True)
class TrialInputs:
    """Tensors of one rank: x [s, 1, hidden], weight [2 h r, hidden], and q, k, v, dout [s, 1, h, d]."""

    x: Tensor
    weight: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    def share(self, rank: int, ranks: int) -> TrialInputs:
        """What rank ``rank`` of ``ranks`` holds, as copies: its chunk of the sequence."""
        def chunk(x: Tensor) -> Tensor:
            return x.detach().chunk(ranks)[rank].clone()

        return replace(self, x=chunk(self.x), q=chunk(self.q).requires_grad_(), k=chunk(self.k).requires_grad_(),
                       v=chunk(self.v).requires_grad_(), dout=chunk(self.dout))


def make_inputs(shape: TrialShape, device: torch.device, dtype: torch.dtype, seed: int = 0) -> TrialInputs:
    """Inputs of the whole sequence; the same on every device of one kind."""
    generator = torch.Generator(device).manual_seed(seed)
    low = torch.stack([_features(shape, block, device, generator) for block in (shape.q_block, shape.kv_block)], 1)
    weight = torch.randn((2 * shape.heads * shape.rank, shape.hidden), device=device, generator=generator)
    # Orthonormal rows: x weight^T is then exactly what x was made from.
    weight = torch.linalg.qr(weight.t())[0].t().contiguous()
    x = (low.flatten(1) @ weight)[:, None].to(dtype)
    size = (shape.tokens, 1, shape.heads, shape.head_dim)
    q, k, v, dout = (torch.randn(size, device=device, dtype=dtype, generator=generator) for _ in range(4))
    return TrialInputs(x, weight.to(dtype), q.requires_grad_(), k.requires_grad_(), v.requires_grad_(), dout)


def _features(shape: TrialShape, block: int, device: torch.device, generator: torch.Generator) -> Tensor:
    """[S, h, r]: waves of the position, and a random direction of each block of tokens."""
    count = -(-shape.tokens // block)
    place = (torch.arange(count, device=device) + 0.5) / count
    drawn = torch.randn((count, shape.heads, shape.rank), device=device, generator=generator)
    drawn = drawn / drawn.norm(dim=-1, keepdim=True) * _OWN
    drawn[..., :2 * _WAVES] = 0
    for wave in range(_WAVES):
        angle = 2 * math.pi * 4.0**wave * place
        drawn[..., 2 * wave] += _LOCAL * angle.cos()[:, None]
        drawn[..., 2 * wave + 1] += _LOCAL * angle.sin()[:, None]
    return drawn.repeat_interleave(block, 0)[:shape.tokens]


class TrialBlock:
    """The block on one rank.

    Args:
        shape: of the block.
        inputs: this rank's.
        scheme: who computes it.
        budgets: [h] blocks that a row of each head keeps; None attends densely.
        plan: of the block; None for the scheme of one rank.
    """

    stages = ("selection", "forward", "backward")

    def __init__(self, shape: TrialShape, inputs: TrialInputs, scheme: AttentionScheme,
                 budgets: Sequence[int] | None, plan: BlockPlan | None = None) -> None:
        self.shape, self.inputs, self.scheme, self.budgets, self.plan = shape, inputs, scheme, budgets, plan

    def begin(self) -> Pending:
        """Projection and selection; nothing of either where attention is dense."""
        if self.budgets is None:
            return Pending(None, plan=self.plan)
        shape = self.shape
        with torch.no_grad():
            low = F.linear(self.inputs.x, self.inputs.weight).unflatten(-1, (2, shape.heads, shape.rank))
            pooled = pool_queries(low[:, :, 0], q_block_size=shape.q_block, proxies=shape.proxies,
                                  query_length=low.shape[0])
            return self.scheme.begin(pooled, low[:, :, 1], self.select, self.plan)

    def select(self, q_lr: Tensor, k_lr: Tensor, head_ids: Sequence[int], group_ids: Sequence[int]) -> KVSelection:
        """``scheme.Select`` by the budgets."""
        assert self.budgets is not None
        shape = self.shape
        whole = group_ids == range(-(-shape.tokens // shape.q_block))
        rows: dict[str, Any] = {
            "head_budgets": [self.budgets[head] for head in head_ids], "num_queries": len(group_ids) * shape.q_block,
            "q_block_size": shape.q_block, "kv_length": shape.tokens, "query_length": shape.tokens,
            "query_group_ids": None if whole else on_device(tuple(group_ids), torch.int64, k_lr.device)}
        scale = shape.rank**-0.5
        if shape.kv_block == 1:
            # As a run selects: scores of single tokens are as many as dense attention's.
            return token_topk(q_lr, k_lr, **rows, proxies=shape.proxies, softmax_scale=scale)
        scores = chunked_block_scores(q_lr, k_lr, kv_block_size=shape.kv_block, proxies=shape.proxies,
                                      kv_length=shape.tokens, softmax_scale=scale)
        return select(scores, **rows, rule="topk", num_kv_heads=k_lr.shape[2], num_keys=shape.tokens,
                      kv_block_size=shape.kv_block, score_kind="mass")

    def attend(self, pending: Pending) -> Tensor:
        """out [s, 1, h, d]."""
        x = self.inputs
        return self.scheme.attend(x.q, x.k, x.v, pending, softmax_scale=self.shape.head_dim**-0.5)

    def gradients(self, out: Tensor) -> tuple[Tensor, ...]:
        """dq, dk and dv [s, 1, h, d]."""
        x = self.inputs
        return torch.autograd.grad(out, (x.q, x.k, x.v), x.dout)

    def iterate(self, mark: Mark) -> None:
        """One timed iteration in its ``stages``."""
        mark()
        pending = self.begin()
        mark()
        out = self.attend(pending)
        mark()
        self.gradients(out)
        mark()
