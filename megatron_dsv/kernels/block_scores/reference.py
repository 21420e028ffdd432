"""Pooled predictor scores in plain torch, in chunks of query groups; runs on any device without waiting for it.

Dims: s query tokens, sk key tokens, b batch, h query heads, G key/value heads, n = h / G, r predictor rank, P proxies
per query group, Nq query groups, Nk key/value blocks, c groups of a chunk.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dsv.kernels.fusion import fused_on_cuda

_TEMPORARY_BYTES = 256 << 20


def pool_queries(q_lr: Tensor, query_length: Tensor, *, q_block_size: int, proxies: int) -> Tensor:
    """[Nq * P, b, h, r] means over the valid tokens of q_lr [s, b, h, r]; query_length [b]."""
    s, b, h, r = q_lr.shape
    groups = -(-s // q_block_size)
    valid = torch.arange(s, device=q_lr.device)[:, None] < query_length
    acc = torch.float64 if q_lr.dtype == torch.float64 else torch.float32
    kept = q_lr.to(acc).masked_fill(~valid[..., None, None], 0)
    tail = groups * q_block_size - s
    chunks = F.pad(kept, (0, 0, 0, 0, 0, 0, 0, tail)).reshape(groups * proxies, q_block_size // proxies, b, h, r).sum(1)
    counts = F.pad(valid.to(acc), (0, 0, 0, tail)).reshape(groups * proxies, q_block_size // proxies, b).sum(1)
    return (chunks / counts.clamp_min(1)[..., None, None]).to(q_lr.dtype)


def block_scores(q_pooled: Tensor, k_lr: Tensor, kv_length: Tensor, *, kv_block_size: int, proxies: int,
                 reduction: str, softmax_scale: float) -> Tensor:
    """fp32 [b, h, Nq, Nk] of q_pooled [Nq * P, b, h, r] and k_lr [sk, b, G, r]; kv_length [b, G]."""
    parts = [scores for _, scores in score_chunks(q_pooled, k_lr, kv_length, kv_block_size=kv_block_size,
                                                  proxies=proxies, reduction=reduction, softmax_scale=softmax_scale)]
    if not parts:
        shape = (*q_pooled.shape[1:3], 0, -(-k_lr.shape[0] // kv_block_size))
        return torch.empty(shape, dtype=torch.float32, device=k_lr.device)
    return torch.cat(parts, dim=2)


def score_chunks(q_pooled: Tensor, k_lr: Tensor, kv_length: Tensor, *, kv_block_size: int, proxies: int,
                 reduction: str, softmax_scale: float) -> Iterator[tuple[int, Tensor]]:
    """(first group, fp32 [b, h, groups, Nk]) of the query groups in turn; arguments as of ``block_scores``."""
    rows, b, h, _ = q_pooled.shape
    sk, _, heads_kv, _ = k_lr.shape
    groups = rows // proxies
    queries = q_pooled.unflatten(0, (groups, proxies)).permute(2, 3, 0, 1, 4)
    queries = queries.unflatten(1, (heads_kv, h // heads_kv))
    keys = k_lr.permute(1, 2, 3, 0)
    padding = (torch.arange(sk, device=k_lr.device) >= kv_length[..., None])[:, :, None, None, None, :]
    # A chunk holds the logits, their exponentials and a padded copy at once.
    step = max(1, _TEMPORARY_BYTES // (3 * 4 * max(1, b * h * proxies * sk)))
    for first in range(0, groups, step):
        logits = _logits(queries[:, :, :, first:first + step], keys)
        yield first, _reduce(logits, padding, softmax_scale, kv_block_size, reduction).flatten(1, 2).float()


def _logits(queries: Tensor, keys: Tensor) -> Tensor:
    """[b, G, n, c, P, r] x [b, G, r, sk] -> [b, G, n, c, P, sk], fp32 (fp64 for fp64 inputs), not yet scaled."""
    left, right = queries.flatten(2, 4).flatten(0, 1), keys.flatten(0, 1)
    if queries.is_cuda and queries.dtype in (torch.bfloat16, torch.float16):
        scores = torch.bmm(left, right, out_dtype=torch.float32)
    elif queries.dtype == torch.float64:
        scores = torch.bmm(left, right)
    else:
        scores = torch.bmm(left.float(), right.float())
    return scores.unflatten(0, keys.shape[:2]).unflatten(2, queries.shape[2:5])


@fused_on_cuda
def _reduce(logits: Tensor, padding: Tensor, scale: float, kv_block_size: int, reduction: str) -> Tensor:
    """[b, G, n, c, P, sk] and what of it is padding -> [b, G, n, c, Nk]."""
    logits = (logits * scale).masked_fill(padding, -torch.inf)
    match reduction:
        case "mass":
            lse = torch.logsumexp(logits, -1, keepdim=True)
            # Without any valid key the lse is -inf, and -inf - -inf is NaN.
            probs = torch.exp(logits - lse.masked_fill(lse == -torch.inf, 0.0))
            return _blocks(probs, kv_block_size, 0.0).sum(-1).sum(-2)
        case "lse":
            return torch.logsumexp(torch.logsumexp(_blocks(logits, kv_block_size, -torch.inf), -1), -2)
        case "max":
            return _blocks(logits, kv_block_size, -torch.inf).amax(-1).amax(-2)
        case _:
            raise AssertionError(f"reduction {reduction!r} passed validation")


def _blocks(x: Tensor, block: int, fill: float) -> Tensor:
    """[..., sk] -> [..., Nk, block], the tail padded with ``fill``."""
    tail = -x.shape[-1] % block
    return (F.pad(x, (0, tail), value=fill) if tail else x).unflatten(-1, (-1, block))
