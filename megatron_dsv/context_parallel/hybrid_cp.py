"""hybrid_cp: the attention scheme of a context-parallel group, every block split its own way.

A block's plan cuts the C ranks into g_h x g_s: heads are shared out inside a head group (``head_cp``), then keys are
exchanged inside a sequence group (``sequence_cp``). head_cp alone is g_s = 1 and sequence_cp alone is g_h = 1. The
residual stream keeps one layout, chunk c of the sequence on rank c, so blocks may differ and nothing is re-sharded.

Dims: s tokens of this rank, b batch, H query heads and G key/value heads of this tensor-parallel rank, n units (key/
value heads with their query heads) of this rank in a block, d head dim, r predictor rank, P proxies a group, Nq query
groups of this rank, S = C s tokens of the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from megatron_dsv.context_parallel.block_watch import BACKWARD, FORWARD, SELECT, BlockWatch
from megatron_dsv.context_parallel.comm import SubGroup
from megatron_dsv.context_parallel.dense_exchange import DenseExchange
from megatron_dsv.context_parallel.groups import CPGroupManager
from megatron_dsv.context_parallel.head_cp import HeadExchange
from megatron_dsv.context_parallel.key_stages import KeyStages
from megatron_dsv.context_parallel.partial_attention import Kernels, Keys
from megatron_dsv.context_parallel.plan import GATHER, BlockPlan
from megatron_dsv.context_parallel.scheme import AttentionScheme, Pending, Select
from megatron_dsv.context_parallel.selective_exchange import SelectiveExchange
from megatron_dsv.context_parallel.sequence_cp import Exchange, SequenceAttention
from megatron_dsv.kernels.selection import KVSelection

_KEPT_PLANS = 256


class HybridScheme(AttentionScheme):
    """AttentionScheme for context-parallel sizes above 1.

    Args:
        manager: the process groups; the splits of a plan must be prepared before it is used.
        query_heads: global numbers of this tensor-parallel rank's query heads.
        tp_rank: this rank's row of the plans' ``unit_order``.
        proxies: P.
        kernels: what computes.
    """

    def __init__(self, manager: CPGroupManager, query_heads: range, *, tp_rank: int, proxies: int,
                 kernels: Kernels | None = None) -> None:
        self.manager, self.query_heads, self.tp_rank, self.proxies = manager, query_heads, tp_rank, proxies
        self.kernels = Kernels() if kernels is None else kernels
        self._heads: dict[BlockPlan, HeadExchange] = {}
        self._stages: dict[tuple[BlockPlan, int, int], KeyStages] = {}

    @torch.no_grad()
    def begin(self, q_lr: Tensor, k_lr: Tensor, select: Select, plan: BlockPlan | None) -> Pending:
        """Selects from low-rank queries [Nq*P, b, H, r] and keys [s, b, G, r] of this rank's tokens.

        Low-rank keys are gathered, full ones never. The sequence group then agrees on the rows to exchange; how many
        there are is copied to the host without waiting for it.

        Raises:
            ValueError: no plan, or tokens or a selection that do not fit it.
        """
        plan = _given(plan)
        with self.manager.watch.span(plan.layer, SELECT, k_lr.device):
            pending = self._begin(q_lr, k_lr, select, plan)
        self.manager.watch.see(plan, pending.selection, k_lr.shape[0] * plan.split.size // plan.kv_block)
        return pending

    def _begin(self, q_lr: Tensor, k_lr: Tensor, select: Select, plan: BlockPlan) -> Pending:
        heads, s, b = self._head_exchange(plan), k_lr.shape[0], k_lr.shape[1]
        what = _name(plan)
        if q_lr.shape[2] != len(self.query_heads) or k_lr.shape[2] != plan.units or s % plan.kv_block:
            raise ValueError(f"{what}: low-rank queries and keys must have {len(self.query_heads)} and {plan.units} "
                             f"heads, and a rank a multiple of {plan.kv_block} tokens, got {tuple(q_lr.shape)} and "
                             f"{tuple(k_lr.shape)}")
        queries, = heads.to_heads([q_lr], f"{what}, low-rank queries")
        keys, = heads.to_heads([k_lr], f"{what}, low-rank keys")
        keys = self._gather_sequence(keys, plan, f"{what}, low-rank keys of all ranks")
        selection = None
        if heads.mine:
            selection = select(queries, keys, self._head_ids(plan, heads.mine), self._group_ids(plan, q_lr.shape[0]))
            _check_selection(selection, plan, s * plan.g_h, s * plan.split.size, what)
        exchange = None
        if plan.g_s > 1:
            exchange = SelectiveExchange(
                selection, self._key_stages(plan, s, plan.kv_block), self.manager.sequence_group(plan.split),
                lanes=(b, len(heads.mine)), device=k_lr.device, everything=plan.kv_exchange == GATHER,
                fixed_width=self.kernels.deterministic, what=what)
        return Pending(selection, plan=plan, exchange=exchange)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, pending: Pending, *, softmax_scale: float) -> Tensor:
        """Attention of q [s, b, H, d] over the keys of all ranks, k, v [s, b, G, d]; returns [s, b, H, d].

        Dense where nothing was selected: over the first ``pending.kv_length`` keys of the sequence, or all of them.
        All ranks must call alike; the backward is one autograd node, so its calls have one order, too.

        Raises:
            ValueError: no plan, or heads that do not fit it.
            RuntimeError: an exchange failed or timed out.
        """
        plan = _given(pending.plan)
        if q.shape[2] != len(self.query_heads) or k.shape[2] != plan.units or q.shape[0] != k.shape[0]:
            raise ValueError(f"{_name(plan)}: q and k must have the tokens of this rank and {len(self.query_heads)} "
                             f"and {plan.units} heads, got {tuple(q.shape)} and {tuple(k.shape)}")
        exchange = pending.exchange
        if exchange is None:
            exchange = self._exchange_without_rows(plan, q, pending)
        attention = SequenceAttention(exchange, self.kernels, softmax_scale, _name(plan))
        return _PlannedAttention.apply(q, k, v, self._head_exchange(plan), attention, self.manager.watch, plan.layer)

    @torch.no_grad()
    def gather_rows(self, tensors: Sequence[Tensor], rows: Tensor) -> list[Tensor]:
        """Rows ``rows`` (int64 [n], token numbers of the whole sequence) of tensors [s, ...]: [n, ...] on every rank.

        One call for all tensors of one dtype.
        """
        if len({x.dtype for x in tensors}) > 1:
            return [self.gather_rows([x], rows)[0] for x in tensors]
        s = tensors[0].shape[0]
        local = rows - self.manager.rank * s
        mine = (local >= 0) & (local < s)
        found = torch.cat([x.index_select(0, local.clamp(0, s - 1)).flatten(1) for x in tensors], 1)
        found = self.manager.all_reduce(found.masked_fill(~mine[:, None], 0), "sampled rows")
        parts = found.split([x[0].numel() for x in tensors], 1)
        return [part.contiguous().view(len(rows), *x.shape[1:]) for part, x in zip(parts, tensors)]

    @torch.no_grad()
    def reduce_rows(self, sums: Tensor) -> Tensor:
        """Sum over the context-parallel ranks."""
        return self.manager.all_reduce(sums, "sums of sampled rows")

    def own_length(self, kv_length: Tensor, tokens: int) -> Tensor:
        """Real ones among this rank's ``tokens``, int32 [b] like ``kv_length``, which counts the whole sequence's."""
        return (kv_length - self.manager.rank * tokens).clamp(0, tokens)

    @torch.no_grad()
    def by_heads(self, x: Tensor) -> tuple[Tensor, range]:
        """x [s, b, n, c] of this rank's tokens -> [S, b, n', c] of all tokens, and which of the n heads the n' are."""
        ranks = self.manager.size
        shares = [range(x.shape[2] * rank // ranks, x.shape[2] * (rank + 1) // ranks) for rank in range(ranks)]
        exchange = HeadExchange(self.manager.everyone, tuple(tuple(heads) for heads in shares))
        traded, = exchange.to_heads([x], "tokens for whole heads")
        return traded, shares[self.manager.rank]

    def _exchange_without_rows(self, plan: BlockPlan, q: Tensor, pending: Pending) -> Exchange:
        s, b = q.shape[:2]
        stages, group = self._key_stages(plan, s, s), self.manager.sequence_group(plan.split)
        lengths = pending.kv_length
        if lengths is None:
            lengths = torch.full((b,), s * plan.split.size, dtype=torch.int32, device="cpu")
        if plan.g_s == 1:
            return LocalKeys(lengths if pending.selection is None else pending.selection, stages, group)
        if pending.selection is not None:
            raise ValueError(f"{_name(plan)}: a selection of keys that other ranks hold must come from begin")
        return DenseExchange(lengths, stages, group)

    def _head_exchange(self, plan: BlockPlan) -> HeadExchange:
        if plan not in self._heads:
            if len(self._heads) >= _KEPT_PLANS:
                self._heads.clear()
                self._stages.clear()
            units = tuple(tuple(sorted(units)) for units in plan.loads(self.tp_rank))
            self._heads[plan] = HeadExchange(self.manager.head_group(plan.split), units)
        return self._heads[plan]

    def _key_stages(self, plan: BlockPlan, s: int, block: int) -> KeyStages:
        key = (plan, s, block)
        if key not in self._stages:
            self._stages[key] = KeyStages(plan.split, plan.split.s_rank(self.manager.rank), plan.stages, s // block,
                                          block)
        return self._stages[key]

    def _head_ids(self, plan: BlockPlan, units: tuple[int, ...]) -> tuple[int, ...]:
        ratio = len(self.query_heads) // plan.units
        return tuple(self.query_heads[unit * ratio + head] for unit in units for head in range(ratio))

    def _group_ids(self, plan: BlockPlan, rows: int) -> range | tuple[int, ...]:
        """Global numbers of the query groups of this rank's head group."""
        count = rows // self.proxies
        chunks = plan.split.h_group(self.manager.rank)
        if chunks == tuple(range(chunks[0], chunks[0] + len(chunks))):
            return range(chunks[0] * count, (chunks[-1] + 1) * count)
        return tuple(chunk * count + number for chunk in chunks for number in range(count))

    def _gather_sequence(self, x: Tensor, plan: BlockPlan, what: str) -> Tensor:
        """[g_h * s, b, n, r] -> [S, b, n, r] of the whole sequence, in its order."""
        if plan.g_s == 1:
            return x
        group = self.manager.sequence_group(plan.split)
        parts = group.exchange_evenly(x.expand(plan.g_s, *x.shape), what).unflatten(1, (plan.g_h, -1))
        order = [chunk for j in range(plan.g_s) for chunk in plan.split.chunks(j)]
        if order == sorted(order):
            return parts.flatten(0, 2)
        # s_inner: chunk c lies at sequence place c % g_s and head place c // g_s.
        return parts.transpose(0, 1).flatten(0, 2)


class LocalKeys:
    """The exchange of a sequence group of one rank: nothing travels."""

    def __init__(self, keys: Keys, stages: KeyStages, group: SubGroup) -> None:
        self.stages, self.group, self._keys = stages, group, keys

    def keys(self, stage: int) -> Keys:
        """All keys of the sequence, in stage 0."""
        return self._keys

    def _nothing_travels(self, *args: object) -> NoReturn:
        raise AssertionError("there is no stage after 0")

    send = receive = send_gradients = add_gradients = _nothing_travels


class _PlannedAttention(torch.autograd.Function):
    """One node for q, k and v: heads in, attention by stages, heads out; the backward mirrors it."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, k: Tensor, v: Tensor, heads: HeadExchange, attention: SequenceAttention,
                watch: BlockWatch, layer: int) -> Tensor:
        ctx.heads, ctx.attention, ctx.watch, ctx.layer = heads, attention, watch, layer
        ctx.ratio = q.shape[2] // k.shape[2]
        with watch.span(layer, FORWARD, q.device):
            q, k, v = heads.to_heads([q, k, v], f"{attention.what}, q, k and v to their heads")
            out, lse = attention.forward(q, k, v)
            ctx.save_for_backward(q, k, v, out, lse)
            return heads.to_tokens([out], [ctx.ratio], f"{attention.what}, out to its tokens")[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        heads, attention = ctx.heads, ctx.attention
        q, k, v, out, lse = ctx.saved_tensors
        with ctx.watch.span(ctx.layer, BACKWARD, dout.device):
            # Autograd may hand over an expanded gradient, whose last stride is 0.
            dout = dout if dout.stride(-1) == 1 else dout.contiguous()
            dout, = heads.to_heads([dout], f"{attention.what}, gradient of out to its heads")
            grads = attention.backward(dout, q, k, v, out, lse)
            dq, dk, dv = heads.to_tokens(grads, [ctx.ratio, 1, 1], f"{attention.what}, gradients to their tokens")
        return dq, dk, dv, None, None, None, None


def _given(plan: BlockPlan | None) -> BlockPlan:
    if plan is None:
        raise ValueError("context parallelism needs the block's plan: pass plan= to begin, or in Pending")
    return plan


def _name(plan: BlockPlan) -> str:
    return f"block {plan.layer} as ({plan.g_h}, {plan.g_s}) {plan.layout}"


def _check_selection(selection: KVSelection, plan: BlockPlan, queries: int, keys: int, what: str) -> None:
    got = (selection.num_queries, selection.num_keys, selection.kv_block_size)
    if got != (queries, keys, plan.kv_block):
        raise ValueError(f"{what}: select must return a selection of {queries} queries over {keys} keys in blocks of "
                         f"{plan.kv_block}, got {got[0]}, {got[1]} and {got[2]}")
