"""Trains and examines a layer's predictor on the queries and keys that the layer has just computed.

Everything here reads detached copies: no gradient, random state or buffer of the backbone is touched.

Dims: S tokens, b batch, H hidden, h local query heads, G local key/value heads, d head dim, r predictor rank, R rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dsv.config import DSVConfig
from megatron_dsv.kernels.selection import KVSelection
from megatron_dsv.sparsity.predictor_loss import predictor_loss, sample_rows
from megatron_dsv.sparsity.profile import GroupProfile, profile_query_groups
from megatron_dsv.transformer.predictor import LowRankPredictor
from megatron_dsv.transformer.rope3d import RopeTables, apply_rope


@dataclass(frozen=True)
class PredictorInput:
    """What the predictor reads, detached: ``queries`` and ``keys`` are both the hidden state [S, b, H] for input
    ``hidden``, or [S, b, h, d] and [S, b, G, d] for input ``qk``; ``rope`` rotates what comes out of ``hidden``."""

    queries: Tensor
    keys: Tensor
    rope: RopeTables | None


def low_rank_queries(predictor: LowRankPredictor, source: PredictorInput, rows: Tensor | None = None,
                     weights: list[Tensor] | None = None) -> Tensor:
    """Low-rank queries [S or R, b, h, r], of all tokens or of ``rows`` (int64 [R])."""
    x = source.queries if rows is None else source.queries.index_select(0, rows)
    return _rotated(predictor.project_queries(x, weights), source.rope, rows)


def low_rank_keys(predictor: LowRankPredictor, source: PredictorInput, weights: list[Tensor] | None = None) -> Tensor:
    """Low-rank keys [S, b, G, r]."""
    return _rotated(predictor.project_keys(source.keys, weights), source.rope, None)


def learn(predictor: LowRankPredictor, source: PredictorInput, q: Tensor, k: Tensor, *, dsv: DSVConfig,
          kv_length: Tensor, softmax_scale: float, step: int, held_out: Tensor | None) -> None:
    """Adds the gradients of one micro-batch's predictor loss to the predictor.

    Args:
        q, k: true queries [S, b, h, d] and keys [S, b, G, d].
        kv_length: int32 [b] on the CPU.
        step: of the run; it moves the sampled rows.
        held_out: query groups that a profile examines at this step; their rows are not trained on.
    """
    rows = sample_rows(int(kv_length.min()), dsv.dsv_predictor_query_stride, step)
    if held_out is not None:
        rows = rows[~torch.isin(rows // dsv.dsv_q_block_size, held_out)]
    if rows.numel() == 0:
        return
    rows = rows.to(q.device)
    leaves = [weight.detach().requires_grad_() for weight in predictor.weights()]
    with torch.enable_grad():
        q_lr = low_rank_queries(predictor, source, rows, leaves)
        k_lr = low_rank_keys(predictor, source, leaves)
        loss = predictor_loss(q_lr, k_lr, q.detach().index_select(0, rows), k.detach(), kv_length=kv_length,
                              softmax_scale=softmax_scale, cosine_weight=dsv.dsv_predictor_cosine_weight,
                              norm_weight=dsv.dsv_predictor_norm_weight)
        grads = torch.autograd.grad(loss, leaves)
    predictor.accumulate(loss.detach(), grads, dsv.dsv_predictor_loss_weight)


def held_out_groups(num_tokens: int, q_block_size: int, wanted: int, step: int) -> Tensor:
    """Query groups (int64, on the CPU) that the profile of ``step`` examines: evenly spaced, at most half of all."""
    groups = -(-num_tokens // q_block_size)
    count = max(1, min(wanted, groups // 2))
    return (torch.arange(count) * groups // count + step) % groups


@torch.no_grad()
def examine(q: Tensor, k: Tensor, selection: KVSelection | None, groups: Tensor, *, dsv: DSVConfig, kv_length: Tensor,
            softmax_scale: float) -> GroupProfile:
    """Profile of ``groups``: true sparsity, the blocks they need, and the mass that ``selection`` keeps."""
    return profile_query_groups(
        q.detach(), k.detach(), group_ids=groups, q_block_size=dsv.dsv_q_block_size,
        kv_block_size=dsv.dsv_kv_block_size, kv_length=kv_length, query_length=kv_length, softmax_scale=softmax_scale,
        theta=dsv.dsv_theta, budget_mass=dsv.dsv_budget_mass, selection=selection,
        # A query's sparsity sorts all its keys; the paper samples one query in sixteen too.
        sparsity_stride=min(16, dsv.dsv_q_block_size))


def _rotated(x: Tensor, rope: RopeTables | None, rows: Tensor | None) -> Tensor:
    if rope is None:
        return x
    cos, sin = rope.predictor_cos, rope.predictor_sin
    if rows is not None:
        cos, sin = cos.index_select(0, rows), sin.index_select(0, rows)
    return apply_rope(x, cos, sin)
