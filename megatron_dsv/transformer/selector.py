"""Turns low-rank queries and keys of one layer into a KVSelection, within the layer's measured budgets.

Dims: S tokens, b batch, h local query heads, G local key/value heads, r predictor rank, P proxies a group, Nq query
groups, Nk key/value blocks.
"""

from __future__ import annotations

import functools
import hashlib
import math
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from megatron_dsv.config import DSVConfig
from megatron_dsv.kernels.block_scores.api import ChunkedScores, chunked_block_scores
from megatron_dsv.kernels.host_values import on_device
from megatron_dsv.kernels.selection import KVSelection
from megatron_dsv.kernels.token_topk.api import token_topk
from megatron_dsv.sparsity.budget import head_budgets
from megatron_dsv.sparsity.dispatcher import Decision, use_sparse
from megatron_dsv.sparsity.schedule import Stage, attends_sparsely
from megatron_dsv.sparsity.selection_rules import select
from megatron_dsv.sparsity.token_layout import TokenLayout
from megatron_dsv.sparsity.windows import window_selection
from megatron_dsv.transformer.layer_statistics import LayerStatistics


@functools.cache
def device_name() -> str | None:
    """Name of the CUDA device, for the table of measured times; None without one."""
    return torch.cuda.get_device_name() if torch.cuda.is_available() else None


class Selector:
    """The selection policy of one layer.

    Args:
        dsv: the sparse-attention configuration.
        layer_number: global, from 1.
        query_heads: global numbers of the local query heads.
        num_kv_heads: G.
        head_dim, dtype: of the queries, for the dispatcher's cost table.
        statistics: the layer's measured statistics and schedule state.
    """

    def __init__(self, dsv: DSVConfig, *, layer_number: int, query_heads: range, num_kv_heads: int, head_dim: int,
                 dtype: torch.dtype, statistics: LayerStatistics | None) -> None:
        self.dsv = dsv
        self.layer_number = layer_number
        self.query_heads = query_heads
        self.num_kv_heads = num_kv_heads
        self.head_dim = head_dim
        self.dtype = dtype
        self.statistics = statistics

    def keep_ratio(self) -> float:
        """Share of blocks that this layer keeps on average over all heads; NaN before the first profile."""
        if self.dsv.dsv_keep_ratio is not None:
            return self.dsv.dsv_keep_ratio
        if self.statistics is None:
            return math.nan
        return max(self.statistics.layer_block_fraction(), self.dsv.dsv_min_keep_ratio)

    @property
    def may_be_sparse(self) -> bool:
        """Whether stage and gate let this layer attend to predicted keys only, if that pays."""
        return self.statistics is not None and attends_sparsely(Stage(self.dsv.dsv_sparse_stage),
                                                                self.statistics.state())

    def attends_sparsely(self, num_tokens: int) -> bool:
        """Whether this layer attends to predicted keys only, at its current budget and place in the schedule."""
        return self.decision(num_tokens).sparse

    def decision(self, num_tokens: int) -> Decision:
        """``attends_sparsely``, and why."""
        dsv = self.dsv
        if not self.may_be_sparse:
            return Decision(False, "dense: it has not passed the gate" if dsv.dsv_sparse_stage == Stage.AUTO else
                            f"dense: --dsv-sparse-stage {dsv.dsv_sparse_stage}")
        keep = self.keep_ratio()
        if math.isnan(keep):
            return Decision(False, "dense: its budget has not been measured yet")
        return use_sparse(keep, num_tokens=num_tokens, num_heads=len(self.query_heads), head_dim=self.head_dim,
                          q_block_size=dsv.dsv_q_block_size, kv_block_size=dsv.dsv_kv_block_size,
                          num_kv_heads=self.num_kv_heads, dtype=self.dtype, deterministic=dsv.dsv_deterministic,
                          dense_above=dsv.dsv_dense_above, device=device_name(),
                          sparse_backend=dsv.dsv_sparse_backend, dense_backend=dsv.dsv_dense_backend)

    def window(self, layout: TokenLayout, q_lr: Tensor, k_lr: Tensor, head_ids: Sequence[int],
               query_group_ids: Sequence[int]) -> KVSelection:
        """The window baseline of ``layout`` for these heads and query groups; layers share its tensors.

        With the key-major twin where a backward reads one: of blocks, when these are all heads and groups of the layer.

        Args: as of ``__call__``; of ``q_lr`` and ``k_lr`` only the shapes are read.
        """
        dsv, device = self.dsv, k_lr.device
        assert dsv.window_fraction is not None
        whole = query_group_ids == range(-(-layout.padded_length // dsv.dsv_q_block_size))
        selection = window_selection(
            layout, dsv.window_fraction, q_block_size=dsv.dsv_q_block_size, kv_block_size=dsv.dsv_kv_block_size,
            b=k_lr.shape[1], h=len(head_ids), G=k_lr.shape[2], device=device,
            with_twin=whole and len(head_ids) == len(self.query_heads) and dsv.dsv_kv_block_size > 1)
        if whole:
            return selection
        ids = on_device(tuple(query_group_ids), torch.int64, device)
        return replace(selection, row_start=selection.row_start[:, :, ids], row_count=selection.row_count[:, :, ids],
                       num_queries=len(query_group_ids) * selection.q_block_size)

    def budgets(self, num_blocks: int) -> list[int] | None:
        """Blocks that each local head keeps of ``num_blocks`` valid ones; None before the first profile."""
        assert self.statistics is not None
        fractions = self.statistics.block_fractions()
        if self.dsv.dsv_keep_ratio is None and any(math.isnan(fraction) for fraction in fractions):
            return None
        return head_budgets(fractions, num_blocks, forced_keep_ratio=self.dsv.dsv_keep_ratio,
                            min_keep_ratio=self.dsv.dsv_min_keep_ratio)

    def __call__(self, q_lr: Tensor, k_lr: Tensor, head_ids: Sequence[int], query_group_ids: Sequence[int], *,
                 kv_length: Tensor) -> KVSelection:
        """Selection from proxies q_lr [Nq * P, b, h, r] and keys k_lr [S, b, G, r]; kv_length int32 [b] on the CPU.

        Without a budget (nothing measured yet) every block is selected.

        Args:
            head_ids: global numbers of the h query heads passed, a part of this layer's.
            query_group_ids: numbers, in the whole sequence, of the Nq groups passed.
        """
        dsv, num_keys = self.dsv, k_lr.shape[0]
        # The last group may be ragged where one rank holds the whole sequence.
        num_queries = min(len(query_group_ids) * dsv.dsv_q_block_size, num_keys)
        budgets = self.budgets(-(-int(kv_length.max()) // dsv.dsv_kv_block_size))
        if budgets is not None:
            budgets = [budgets[head - self.query_heads.start] for head in head_ids]
        whole = query_group_ids == range(-(-num_keys // dsv.dsv_q_block_size))
        group_numbers = None if whole else on_device(tuple(query_group_ids), torch.int64, k_lr.device)
        if (dsv.dsv_kv_block_size == 1 and dsv.dsv_selection_rule == "topk" and budgets is not None
                and not dsv.dsv_freeze_selection):
            # Scores of single tokens are as many as dense attention's: this rule needs none of them in memory.
            return token_topk(
                q_lr, k_lr, head_budgets=budgets, num_queries=num_queries, q_block_size=dsv.dsv_q_block_size,
                proxies=dsv.dsv_predictor_proxies, reduction=dsv.dsv_score_reduction, kv_length=kv_length,
                query_length=kv_length, query_group_ids=group_numbers, keep_own_tokens=dsv.dsv_keep_own_block)
        scores: Tensor | ChunkedScores
        if dsv.dsv_freeze_selection:
            scores = self._frozen_scores(head_ids, q_lr.shape[1], query_group_ids, kv_length, num_keys, q_lr.device)
        else:
            scores = chunked_block_scores(
                q_lr, k_lr, kv_length=kv_length, kv_block_size=dsv.dsv_kv_block_size,
                proxies=dsv.dsv_predictor_proxies, reduction=dsv.dsv_score_reduction,
                softmax_scale=k_lr.shape[-1]**-0.5)
        return select(
            scores, rule=dsv.dsv_selection_rule if budgets is not None else "all", num_kv_heads=k_lr.shape[2],
            num_queries=num_queries, num_keys=num_keys, q_block_size=dsv.dsv_q_block_size,
            kv_block_size=dsv.dsv_kv_block_size, head_budgets=budgets, theta=dsv.dsv_budget_mass,
            score_kind=dsv.dsv_score_reduction, kv_length=kv_length, query_length=kv_length,
            query_group_ids=group_numbers,
            keep_own_block=dsv.dsv_keep_own_block)

    def _frozen_scores(self, heads: Sequence[int], batch: int, query_groups: Sequence[int], kv_length: Tensor,
                       num_keys: int, device: torch.device) -> Tensor:
        """Scores that depend on layer, head and block numbers alone: the same selection in every layout and step."""
        # Padding differs between layouts; no rule reads the scores of its blocks.
        blocks = -(-int(kv_length.max()) // self.dsv.dsv_kv_block_size)
        padding = -(-num_keys // self.dsv.dsv_kv_block_size) - blocks
        rows = []
        for head in heads:
            digest = hashlib.sha256(f"frozen/{self.layer_number}/{head}/{blocks}".encode()).digest()
            generator = torch.Generator().manual_seed(int.from_bytes(digest[:4], "little"))
            rows.append(torch.rand(max(query_groups) + 1, blocks, generator=generator)[list(query_groups)])
        scores = torch.nn.functional.pad(torch.stack(rows), (0, padding))
        return scores[None].expand(batch, -1, -1, -1).to(device)
