"""One iteration of sparse attention, from the hidden state to the gradients, and of its dense rivals.

Dims: S tokens, h heads, r rank, P proxies, Nq query groups; batch 1.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from attention.cases import DEFAULTS, RANK, Point, Shape
from attention.inputs import Hidden, Problem
from megatron_dsv.kernels.block_scores.api import block_scores, chunked_block_scores, pool_queries
from megatron_dsv.kernels.dense_attention import api as dense
from megatron_dsv.kernels.selection import KVSelection
from megatron_dsv.kernels.sparse_attention import api as sparse
from megatron_dsv.kernels.token_topk.api import token_topk
from megatron_dsv.sparsity.selection_rules import select

Mark = Callable[[], None]
"""Called between the stages of an iteration."""


@dataclass(frozen=True)
class SparseRun:
    """Calls of one point. ``budgets`` are the blocks that a row of each head keeps."""

    shape: Shape
    point: Point
    problem: Problem
    hidden: Hidden
    budgets: list[int]

    stages = ("selection", "forward", "backward")

    def low_rank(self) -> tuple[Tensor, Tensor]:
        """q_lr and k_lr [S, 1, h, r]: one product, and the exchange that tokens of other devices need."""
        shape = self.shape
        columns = F.linear(self.hidden.x, self.hidden.weight, self.hidden.bias)
        if shape.shards > 1:
            columns = columns.unflatten(1, (shape.shards, -1)).transpose(0, 1)
        both = columns.reshape(shape.tokens, 1, 2, shape.heads, RANK)
        return both[:, :, 0], both[:, :, 1]

    def pooled(self) -> tuple[Tensor, Tensor]:
        """Proxies [Nq * P, 1, h, r] of the query groups, and k_lr [S, 1, h, r]."""
        q_lr, k_lr = self.low_rank()
        return pool_queries(q_lr, q_block_size=self.point.blocks[0], proxies=self.point.proxies,
                            query_length=self.shape.tokens), k_lr

    def scores(self) -> Tensor:
        """Block scores as the selection ranks them, fp32 [1, h, Nq, Nk]; for checks, since it holds all of them."""
        return block_scores(*self.pooled(), kv_block_size=self.point.blocks[1], **self._scoring())

    def select(self) -> KVSelection:
        """Lists, with their key-major twin where the backend walks it."""
        pooled, k_lr = self.pooled()
        (q_block, kv_block), tokens = self.point.blocks, self.shape.tokens
        if kv_block == 1:
            selection = token_topk(pooled, k_lr, head_budgets=self.budgets, num_queries=tokens, q_block_size=q_block,
                                   query_length=tokens, **self._scoring())
        else:
            scores = chunked_block_scores(pooled, k_lr, kv_block_size=kv_block, **self._scoring())
            selection = select(
                scores, rule="topk", num_kv_heads=self.shape.heads, num_queries=tokens, num_keys=tokens,
                q_block_size=q_block, kv_block_size=kv_block, head_budgets=self.budgets,
                score_kind=DEFAULTS.dsv_score_reduction, kv_length=tokens, query_length=tokens)
        return selection.with_transposed() if self._walks_twin() else selection

    def forward(self, selection: KVSelection) -> tuple[Tensor, Tensor]:
        """out [S, 1, h, d] and lse [1, h, S]."""
        x = self.problem
        return sparse.forward(x.q, x.k, x.v, selection, backend=self.point.backend)

    def backward(self, selection: KVSelection, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv [S, 1, h, d]."""
        x = self.problem
        return sparse.backward(x.dout, x.q, x.k, x.v, out, lse, selection, backend=self.point.backend,
                               deterministic=self.point.deterministic)

    def iterate(self, mark: Mark) -> None:
        """The timed sequence; the lists attended are the ones just selected."""
        mark()
        selection = self.select()
        mark()
        out, lse = self.forward(selection)
        mark()
        self.backward(selection, out, lse)
        mark()

    def _scoring(self) -> dict[str, Any]:
        return {"proxies": self.point.proxies, "reduction": DEFAULTS.dsv_score_reduction,
                "kv_length": self.shape.tokens, "softmax_scale": RANK**-0.5}

    def _walks_twin(self) -> bool:
        # auto leaves it to the backward that it picks, as a training step does; token lists are never transposed.
        return self.point.backend in ("triton", "flash4") and self.point.blocks[1] > 1


@dataclass(frozen=True)
class DenseRun:
    """Calls of a dense baseline: ``flash4`` (FlashAttention-4), ``cudnn`` and ``sdpa`` (what torch takes)."""

    name: str
    problem: Problem

    stages = ("forward", "backward")

    def unserved(self) -> str | None:
        """Why this baseline has no number at this shape, or None."""
        few = Problem(*(x[:128].detach() for x in (self.problem.q, self.problem.k, self.problem.v, self.problem.dout)))
        if self.name == "cudnn":
            q = few.q.permute(1, 2, 0, 3).requires_grad_()
            params = torch.backends.cuda.SDPAParams(q, q, q, None, 0.0, False, False)
            served = torch.backends.cuda.can_use_cudnn_attention(params)
            return None if served else f"torch's cuDNN attention does not take head dim {q.shape[-1]}"
        try:
            replace(self, problem=few).iterate(lambda: None)
        except NotImplementedError as error:
            return str(error)
        return None

    def iterate(self, mark: Mark) -> None:
        """Forward and backward."""
        mark()
        out, lse = self.forward()
        mark()
        self.backward(out, lse)
        mark()

    def forward(self) -> tuple[Tensor, Tensor]:
        """out [S, 1, h, d] and lse [1, h, S]."""
        x = self.problem
        return dense.forward(x.q, x.k, x.v, backend=self._backend)

    def backward(self, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """dq, dk, dv [S, 1, h, d]."""
        x = self.problem
        return dense.backward(x.dout, x.q, x.k, x.v, out, lse, backend=self._backend)

    @property
    def _backend(self) -> str:
        return "flash4" if self.name == "flash4" else "sdpa"
