"""The attention scheme of a context-parallel group of one rank: everything is local.

Dims: s tokens, b batch, h query heads, G key/value heads, d head dim, r predictor rank, P proxies a group, Nq groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from megatron_dsv.context_parallel.partial_attention import Kernels
from megatron_dsv.context_parallel.plan import BlockPlan
from megatron_dsv.context_parallel.scheme import AttentionScheme, Pending, Select
from megatron_dsv.kernels.dense_attention.api import dense_attention
from megatron_dsv.kernels.sparse_attention.api import sparse_attention


@dataclass(frozen=True)
class LocalScheme(AttentionScheme):
    """AttentionScheme for context-parallel size 1.

    Args:
        query_heads: global numbers of this rank's query heads.
        proxies: P, proxy queries of a query group.
        kernels: what computes.
    """

    query_heads: range
    proxies: int
    kernels: Kernels = field(default_factory=Kernels)

    def begin(self, q_lr: Tensor, k_lr: Tensor, select: Select, plan: BlockPlan | None = None) -> Pending:
        """Selects key/value blocks from low-rank queries and keys (``Select`` gives the shapes); reads no plan."""
        return Pending(select(q_lr, k_lr, self.query_heads, range(q_lr.shape[0] // self.proxies)))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pending: Pending, *, softmax_scale: float) -> Tensor:
        """Attention of q [s, b, h, d] over k, v [s, b, G, d]; returns [s, b, h, d]."""
        kernels = self.kernels
        if pending.selection is None:
            return dense_attention(q, k, v, kv_length=pending.kv_length, softmax_scale=softmax_scale,
                                   backend=kernels.dense_backend, deterministic=kernels.deterministic)
        return sparse_attention(q, k, v, pending.selection, softmax_scale=softmax_scale,
                                backend=kernels.sparse_backend, deterministic=kernels.deterministic)

    def gather_rows(self, tensors: Sequence[Tensor], rows: Tensor) -> list[Tensor]:
        """Rows ``rows`` (int64 [n], global token numbers) of tensors [s, ...]."""
        return [x.index_select(0, rows) for x in tensors]

    def reduce_rows(self, sums: Tensor) -> Tensor:
        """Statistics of rows whose keys are spread over ranks; one rank holds whole rows, so this is the identity."""
        return sums

    def own_length(self, kv_length: Tensor, tokens: int) -> Tensor:
        """All of them."""
        return kv_length

    def by_heads(self, x: Tensor) -> tuple[Tensor, range]:
        """x [s, b, n, c] itself, and all of its heads."""
        return x.detach(), range(x.shape[2])
