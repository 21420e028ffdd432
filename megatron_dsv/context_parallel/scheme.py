"""The attention scheme: what a transformer block asks of context parallelism, whatever the placement is.

Dims: s tokens of this rank, b batch, h query heads and G key/value heads of this tensor-parallel rank, d head dim,
r predictor rank, P proxies a group, Nq query groups of this rank.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor

from megatron_dsv.context_parallel.plan import BlockPlan
from megatron_dsv.kernels.selection import KVSelection

Select = Callable[[Tensor, Tensor, Sequence[int], Sequence[int]], KVSelection]
"""``select(q_lr [Nq*P, b, h', r], k_lr [S, b, G', r], head_ids, query_group_ids)``; the numbers are global: the h'
query heads passed are numbered in the model, the Nq groups passed in the whole sequence of S tokens."""


@dataclass(frozen=True)
class Pending:
    """What ``begin`` promises to ``attend``; a recomputed forward attends with the same one.

    Attributes:
        selection: what each query group attends to, or None for dense attention. Under context parallelism: of the
            heads and query groups that this rank computes, None also where it computes none.
        kv_length: int32 [b] on the CPU; keys of the whole sequence at or after it are padding. Read only where
            attention is dense.
        plan: of the block; None without context parallelism.
        exchange: what the sequence group agreed to exchange; the scheme's own.
    """

    selection: KVSelection | None
    kv_length: Tensor | None = None
    plan: BlockPlan | None = None
    exchange: Any = None


class AttentionScheme(Protocol):
    """Selection and attention over keys that may live on other ranks."""

    def begin(self, q_lr: Tensor, k_lr: Tensor, select: Select, plan: BlockPlan | None) -> Pending:
        """Selects from low-rank queries [Nq*P, b, h, r] and keys [s, b, G, r] of this rank's tokens."""

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pending: Pending, *, softmax_scale: float) -> Tensor:
        """Attention of q [s, b, h, d] over k, v [s, b, G, d] of all ranks; returns [s, b, h, d], differentiable."""

    def gather_rows(self, tensors: Sequence[Tensor], rows: Tensor) -> list[Tensor]:
        """Rows ``rows`` (int64 [n], token numbers of the whole sequence) of tensors [s, ...]: [n, ...] on every rank.

        No gradient. One call for all tensors of one dtype.
        """

    def reduce_rows(self, sums: Tensor) -> Tensor:
        """Sums over the ranks that the keys of a row are spread over."""

    def own_length(self, kv_length: Tensor, tokens: int) -> Tensor:
        """Real ones among this rank's ``tokens``, int32 [b] like ``kv_length``, which counts the whole sequence's."""

    def by_heads(self, x: Tensor) -> tuple[Tensor, range]:
        """x [s, b, n, c] of this rank's tokens -> [S, b, n', c] of all tokens, and which of the n heads the n' are.

        The heads are dealt out over the ranks that hold parts of the sequence; a rank may get none. No gradient.
        """
