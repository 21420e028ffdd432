"""Token selection in plain torch: scores of a few query groups at a time, and a full stable sort of each row.

Dims: sk key tokens, b batch, h query heads, G key/value heads, r predictor rank, P proxies per query group, Nq query
groups, n = h / G, c groups of a chunk.
"""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK_SCORES = 1 << 24


def token_topk(q_pooled: Tensor, k_lr: Tensor, row_start: Tensor, kv_indices: Tensor, *, budgets: Tensor,
               kv_length: Tensor, query_length: Tensor, group_ids: Tensor, proxies: int, reduction: str,
               keep_own: bool, prefix: int, q_block_size: int, softmax_scale: float, longest: int) -> Tensor:
    """As ``triton.launch.token_topk``; writes anything to the last, spare place of kv_indices."""
    rows, b, h, _ = q_pooled.shape
    sk, _, heads_kv, _ = k_lr.shape
    groups = rows // proxies
    token = torch.arange(sk, device=k_lr.device)
    length = kv_length.repeat_interleave(h // heads_kv, 1)[:, :, None]
    real = (group_ids * q_block_size < query_length[:, None])[:, None]
    kept = torch.where(real, torch.minimum(budgets[None, :, None], length), 0).to(torch.int32)
    step = max(1, _CHUNK_SCORES // max(1, b * h * proxies * sk))
    for first in range(0, groups, step):
        part = slice(first, min(first + step, groups))
        scores = _scores(q_pooled[part.start * proxies:part.stop * proxies], k_lr, kv_length, proxies, reduction,
                         softmax_scale)
        own = torch.zeros((part.stop - part.start, sk), dtype=torch.bool, device=k_lr.device)
        if keep_own:
            begin = group_ids[part, None] * q_block_size
            own = (token >= begin) & (token < begin + q_block_size)
        largest = torch.finfo(scores.dtype).max
        ranking = scores.nan_to_num(nan=-largest, posinf=largest, neginf=-largest)
        ranking = ranking.masked_fill(own | (token < prefix), torch.inf)
        ranking = ranking.masked_fill(token >= length[..., None], -torch.inf)
        order = ranking.argsort(dim=-1, descending=True, stable=True)
        stays = torch.zeros_like(ranking, dtype=torch.bool)
        stays.scatter_(-1, order, token < kept[:, :, part, None])
        stays &= (row_start[:, :, part] >= 0)[..., None]
        # What does not stay goes to the spare place: a mask as index would wait for the device.
        target = torch.where(stays, row_start[:, :, part, None] + stays.cumsum(-1) - 1, kv_indices.numel() - 1)
        kv_indices.scatter_(0, target.reshape(-1), token.to(torch.int32).expand_as(stays).reshape(-1))
    return kept


def _scores(q: Tensor, k_lr: Tensor, kv_length: Tensor, proxies: int, reduction: str, scale: float) -> Tensor:
    """fp32 (fp64 for fp64) [b, h, c, sk] of q [c * P, b, h, r]; what padding gets does not matter."""
    dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    heads, heads_kv = q.shape[2], k_lr.shape[2]
    valid = torch.arange(k_lr.shape[0], device=k_lr.device) < kv_length[..., None]
    keys = k_lr.permute(1, 2, 0, 3).to(dtype).masked_fill(~valid[..., None], 0)
    queries = q.permute(1, 2, 0, 3).to(dtype).unflatten(1, (heads_kv, -1)).flatten(2, 3)
    logits = (queries @ keys.transpose(-1, -2)).unflatten(2, (heads // heads_kv, -1, proxies))
    if proxies == 1:
        # The order of the logits is the order of every reduction.
        return logits[..., 0, :].flatten(1, 2)
    logits = logits * scale
    match reduction:
        case "mass":
            padded = logits.masked_fill(~valid[:, :, None, None, None], -torch.inf)
            lse = torch.logsumexp(padded, -1, keepdim=True)
            return torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0.0)).sum(-2).flatten(1, 2)
        case "lse":
            return torch.logsumexp(logits, -2).flatten(1, 2)
        case "max":
            return logits.amax(-2).flatten(1, 2)
        case _:
            raise AssertionError(f"reduction {reduction!r} passed validation")
