"""Trains and examines a layer's predictor on the queries and keys that the layer has just computed.

Everything here reads detached copies: no gradient, random state or buffer of the backbone is touched.

Dims: S tokens, b batch, H hidden, h local query heads, G local key/value heads, d head dim, r predictor rank, R rows.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dsv.config import DSVConfig
from megatron_dsv.context_parallel.local import LocalScheme
from megatron_dsv.kernels.selection import KVSelection
from megatron_dsv.sparsity.predictor_loss import predictor_loss
from megatron_dsv.sparsity.profile import GroupProfile, profile_query_groups
from megatron_dsv.sparsity.sampling import sample_groups, sample_rows
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
          kv_length: Tensor, softmax_scale: float, step: int, scheme: LocalScheme) -> None:
    """Adds the gradients of one micro-batch's predictor loss to the predictor.

    Args:
        q, k: true queries [S, b, h, d] and keys [S, b, G, d].
        kv_length: int32 [b] on the CPU.
        step: of the run; it moves the sampled rows.
        scheme: knows where rows of q live.
    """
    rows = _training_rows(int(kv_length.min()), dsv.dsv_predictor_query_stride, step, dsv.dsv_q_block_size, q.device)
    leaves = [weight.detach().requires_grad_() for weight in predictor.weights()]
    with torch.enable_grad():
        q_lr = low_rank_queries(predictor, source, rows, leaves)
        k_lr = low_rank_keys(predictor, source, leaves)
        loss = predictor_loss(q_lr, k_lr, scheme.gather_rows(q.detach(), rows), k.detach(), kv_length=kv_length,
                              softmax_scale=softmax_scale, cosine_weight=dsv.dsv_predictor_cosine_weight,
                              norm_weight=dsv.dsv_predictor_norm_weight, reduce_rows=scheme.reduce_rows)
        grads = torch.autograd.grad(loss, leaves)
    predictor.accumulate(loss.detach(), grads, dsv.dsv_predictor_loss_weight)


@torch.no_grad()
def examine(q: Tensor, k: Tensor, selection: KVSelection | None, *, dsv: DSVConfig, kv_length: Tensor,
            softmax_scale: float, step: int) -> GroupProfile:
    """Profile of held-out query groups: true sparsity, the blocks they need, and the mass that ``selection`` keeps."""
    groups = _profiled_groups(int(kv_length.min()), dsv.dsv_profile_groups, step // dsv.dsv_profile_interval,
                              dsv.dsv_q_block_size, q.device)
    return profile_query_groups(
        q.detach(), k.detach(), group_ids=groups, q_block_size=dsv.dsv_q_block_size,
        kv_block_size=dsv.dsv_kv_block_size, kv_length=kv_length, query_length=kv_length, softmax_scale=softmax_scale,
        theta=dsv.dsv_theta, budget_mass=dsv.dsv_budget_mass, selection=selection,
        # A query's sparsity needs all its keys in memory; the paper samples one query in sixteen too.
        sparsity_stride=min(16, dsv.dsv_q_block_size))


@functools.lru_cache(maxsize=4)
def _training_rows(length: int, stride: int, step: int, q_block_size: int, device: torch.device) -> Tensor:
    """Rows that train the predictors at a step, on the device; one entry serves all layers."""
    return _moved(sample_rows(length, stride, step, q_block_size=q_block_size), device)


@functools.lru_cache(maxsize=4)
def _profiled_groups(length: int, count: int, number: int, q_block_size: int, device: torch.device) -> Tensor:
    """Held-out groups of a profile, on the device; one entry serves all layers."""
    return _moved(sample_groups(length, count, number, q_block_size=q_block_size), device)


def _moved(x: Tensor, device: torch.device) -> Tensor:
    # A copy from pageable memory would wait for the device.
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x


def _rotated(x: Tensor, rope: RopeTables | None, rows: Tensor | None) -> Tensor:
    if rope is None:
        return x
    cos, sin = rope.predictor_cos, rope.predictor_sin
    if rows is not None:
        cos, sin = cos.index_select(0, rows), sin.index_select(0, rows)
    return apply_rope(x, cos, sin)
