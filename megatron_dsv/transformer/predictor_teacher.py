"""Trains and examines a layer's predictor on the queries and keys that the layer has just computed.

Everything here reads detached copies: no gradient, random state or buffer of the backbone is touched.

Dims: s tokens of this rank, S of the whole sequence, b batch, H hidden, h local query heads, G local key/value heads,
d head dim, r predictor rank, R rows, n query groups of g tokens, P proxies a group. Rows and groups are numbered in the
whole sequence; s is S without context parallelism.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dsv.config import DSVConfig
from megatron_dsv.context_parallel.scheme import AttentionScheme
from megatron_dsv.kernels.block_scores.api import pool_queries
from megatron_dsv.sparsity.predictor_loss import predictor_loss
from megatron_dsv.sparsity.profile import FIELDS, GroupProfile, gathered_rows, profile_gathered_groups
from megatron_dsv.sparsity.sampling import sample_groups, sample_rows
from megatron_dsv.transformer.predictor import LowRankPredictor
from megatron_dsv.transformer.rope3d import RopeTables, apply_rope
from megatron_dsv.transformer.selector import Selector


@dataclass(frozen=True)
class PredictorInput:
    """What the predictor reads, detached: ``queries`` and ``keys`` are both the hidden state [s, b, H] for input
    ``hidden``, or [s, b, h, d] and [s, b, G, d] for input ``qk``; ``rope`` rotates what comes out of ``hidden``."""

    queries: Tensor
    keys: Tensor
    rope: RopeTables | None


def low_rank_queries(predictor: LowRankPredictor, source: PredictorInput,
                     weights: list[Tensor] | None = None) -> Tensor:
    """Low-rank queries [s, b, h, r], or those of the rows of a ``source`` that ``sampled`` made."""
    return _rotated(predictor.project_queries(source.queries, weights), source.rope)


def low_rank_keys(predictor: LowRankPredictor, source: PredictorInput, weights: list[Tensor] | None = None) -> Tensor:
    """Low-rank keys [s, b, G, r]."""
    return _rotated(predictor.project_keys(source.keys, weights), source.rope)


@torch.no_grad()
def sampled(predictor: LowRankPredictor, source: PredictorInput, q: Tensor, rows: Tensor,
            scheme: AttentionScheme) -> tuple[PredictorInput, Tensor]:
    """``rows`` (int64 [R]) of the predictor's input and of q, on every rank; keys are those of ``source``, unrotated.

    One call: what a predictor with input ``qk`` reads is q.
    """
    reads = [q.detach()] if predictor.input_kind == "qk" else [q.detach(), source.queries]
    found = scheme.gather_rows(reads, rows)
    rope = source.rope
    if rope is not None:
        rope = rope._replace(predictor_cos=rope.row_cos.index_select(0, rows),
                             predictor_sin=rope.row_sin.index_select(0, rows))
    return PredictorInput(found[-1], source.keys, rope), found[0]


def learn(predictor: LowRankPredictor, source: PredictorInput, q: Tensor, k: Tensor, *, dsv: DSVConfig,
          kv_length: Tensor, softmax_scale: float, step: int, scheme: AttentionScheme) -> None:
    """Adds the gradients of one micro-batch's predictor loss to the predictor.

    Under context parallelism the loss is that of the whole sequence, on every rank, and the gradients are what this
    rank's keys add to them.

    Args:
        q, k: true queries [s, b, h, d] and keys [s, b, G, d].
        kv_length: int32 [b] on the CPU.
        step: of the run; it moves the sampled rows.
        scheme: knows where rows of q live.
    """
    rows = _training_rows(int(kv_length.min()), dsv.dsv_predictor_query_stride, step, dsv.dsv_q_block_size, q.device)
    leaves = [weight.detach().requires_grad_() for weight in predictor.weights()]
    of_rows, queries = sampled(predictor, source, q, rows, scheme)
    with torch.enable_grad():
        q_lr = low_rank_queries(predictor, of_rows, leaves)
        k_lr = low_rank_keys(predictor, source, leaves)
        loss = predictor_loss(q_lr, k_lr, queries, k.detach(),
                              kv_length=scheme.own_length(kv_length, len(k)), softmax_scale=softmax_scale, 
                              cosine_weight=dsv.dsv_predictor_cosine_weight,
                              norm_weight=dsv.dsv_predictor_norm_weight, reduce_rows=scheme.reduce_rows)
        grads = torch.autograd.grad(loss, leaves)
    predictor.accumulate(loss.detach(), grads, dsv.dsv_predictor_loss_weight)


@torch.no_grad()
def examine(predictor: LowRankPredictor, source: PredictorInput, q: Tensor, k: Tensor, selector: Selector, *,
            dsv: DSVConfig, kv_length: Tensor, softmax_scale: float, step: int,
            scheme: AttentionScheme) -> GroupProfile:
    """Profile of held-out query groups: true sparsity, the blocks they need, and the mass that the selector keeps.

    A row's softmax needs all its keys, so under context parallelism tokens are traded for heads: each rank profiles
    some heads over the whole sequence and leaves zeros at the others. The arguments are those of ``learn``.
    """
    groups = _profiled_groups(int(kv_length.min()), dsv.dsv_profile_groups, step // dsv.dsv_profile_interval,
                              dsv.dsv_q_block_size)
    positions = gathered_rows(groups, dsv.dsv_q_block_size)
    keys, units = scheme.by_heads(k.detach())
    ratio = q.shape[2] // k.shape[2]
    heads = slice(units.start * ratio, units.stop * ratio)
    rows = _moved(positions.clamp_max(keys.shape[0] - 1), q.device)
    of_rows, queries = sampled(predictor, source, q, rows, scheme)
    queries, kept = queries[:, :, heads], None
    if selector.budgets(1) is not None:
        q_lr = low_rank_queries(predictor, of_rows)[:, :, heads]
        k_lr, _ = scheme.by_heads(low_rank_keys(predictor, source))
        kept = _kept_blocks(q_lr, k_lr, selector, heads, groups, positions, kv_length) if len(units) else None
    sums = torch.zeros(2, len(FIELDS), q.shape[2], device=q.device,
                       dtype=torch.float64 if q.dtype == torch.float64 else torch.float32)
    if len(units):
        sums[..., heads] = profile_gathered_groups(
            queries, keys, valid_rows=_moved(positions[:, None] < kv_length, q.device),
            q_block_size=dsv.dsv_q_block_size, kv_block_size=dsv.dsv_kv_block_size, kv_length=kv_length,
            softmax_scale=softmax_scale, theta=dsv.dsv_theta, budget_mass=dsv.dsv_budget_mass, kept_blocks=kept,
            # A query's sparsity needs all its keys in memory; the paper samples one query in sixteen too.
            sparsity_stride=min(16, dsv.dsv_q_block_size)).stacked()
    return GroupProfile.from_stacked(sums)


def _kept_blocks(q_lr: Tensor, k_lr: Tensor, selector: Selector, heads: slice, groups: Tensor, positions: Tensor,
                 kv_length: Tensor) -> Tensor:
    """bool [b, h', n, Nk]: what the selector keeps of n groups, from their low-rank queries [n * g, b, h', r].

    What is selected for a group depends on no other group.
    """
    # Groups ascend, so that what is padding lies behind all that is not.
    real = (positions[:, None] < kv_length).sum(0)
    pooled = pool_queries(q_lr, q_block_size=selector.dsv.dsv_q_block_size,
                          proxies=selector.dsv.dsv_predictor_proxies, query_length=real)
    return selector(pooled, k_lr, selector.query_heads[heads], groups.tolist(), kv_length=kv_length).block_mask()


@functools.lru_cache(maxsize=4)
def _training_rows(length: int, stride: int, step: int, q_block_size: int, device: torch.device) -> Tensor:
    """Rows that train the predictors at a step, on the device; one entry serves all layers."""
    return _moved(sample_rows(length, stride, step, q_block_size=q_block_size), device)


@functools.lru_cache(maxsize=4)
def _profiled_groups(length: int, count: int, number: int, q_block_size: int) -> Tensor:
    """Held-out groups of a profile, on the CPU; one entry serves all layers."""
    return sample_groups(length, count, number, q_block_size=q_block_size)


def _moved(x: Tensor, device: torch.device) -> Tensor:
    # A copy from pageable memory would wait for the device.
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


def _rotated(x: Tensor, rope: RopeTables | None) -> Tensor:
    return x if rope is None else apply_rope(x, rope.predictor_cos, rope.predictor_sin)
