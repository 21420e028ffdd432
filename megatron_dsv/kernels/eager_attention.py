"""Exact attention in eager torch, over chunks of heads and query rows: the engine of both reference backends.

Dims: s query tokens, sk key tokens, b batch, h query heads, G key/value heads, n = h / G heads per key/value head,
r rows of a chunk, d head dim. Inside, q is [b, G, n, s, d] and k, v are [b, G, sk, d].
Works in fp32, or in fp64 when the inputs are fp64. No chunk holds more than ``_CHUNK_SCORES`` scores, unless one step
of rows of one key/value head already does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from megatron_dsv.kernels.attention_layout import lse_dtype

_CHUNK_SCORES = 1 << 23

ChunkMask = Callable[[slice, slice], Tensor]
"""(key/value heads, query rows) -> bool, broadcastable to [b, G', n, r, sk]; True where a query attends to a key."""


def chunked_forward(q: Tensor, k: Tensor, v: Tensor, valid: Tensor, mask: ChunkMask, *, softmax_scale: float,
                    row_step: int) -> tuple[Tensor, Tensor]:
    """Attention under a boolean mask.

    Args:
        q: [s, b, h, d].
        k, v: [sk, b, G, d]. What lies where ``valid`` is False is never read, so it may be anything, NaN included.
        valid: bool [b, G, sk]; False for padding keys.
        mask: the mask of a chunk; it must be False wherever ``valid`` is.
        row_step: chunks begin at multiples of this many query rows.

    Returns:
        out [s, b, h, d] in q's dtype, lse [b, h, s]; rows that attend to nothing get 0 and -inf.
    """
    s, b, h, d = q.shape
    heads_kv = k.shape[2]
    out = torch.empty((s, b, h, d), dtype=q.dtype, device=q.device)
    lse = torch.empty((b, h, s), dtype=lse_dtype(q), device=q.device)
    q5, out5 = _split_heads(q, heads_kv), _split_heads(out, heads_kv)
    lse4 = lse.unflatten(1, (heads_kv, -1))
    for heads, row_chunks in _chunks(q, k, row_step):
        keys, values = _load_kv(k, heads, valid, lse.dtype), _load_kv(v, heads, valid, lse.dtype)
        for rows in row_chunks:
            scores = _scores(q5[:, heads, :, rows].to(lse.dtype), keys, softmax_scale)
            scores = scores.masked_fill(~mask(heads, rows), -torch.inf)
            row_lse = torch.logsumexp(scores, -1)
            probs = torch.exp(scores - _finite(row_lse)[..., None])
            out5[:, heads, :, rows] = _times(probs, values).to(q.dtype)
            lse4[:, heads, :, rows] = row_lse
    return out, lse


def chunked_backward(dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, valid: Tensor,
                     mask: ChunkMask, *, softmax_scale: float, row_step: int) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of ``chunked_forward``: dS = P * (dP - delta), with P = exp(S - lse) and delta = sum(out * dout).

    ``out`` and ``lse`` may belong to a softmax over more keys than the k, v passed (partial attention, merged).

    Returns:
        dq [s, b, h, d], dk and dv [sk, b, G, d] in the inputs' dtype.
    """
    heads_kv = k.shape[2]
    dq = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    dk = torch.empty(k.shape, dtype=k.dtype, device=k.device)
    dv = torch.empty(v.shape, dtype=v.dtype, device=v.device)
    q5, dq5, out5, dout5 = (_split_heads(x, heads_kv) for x in (q, dq, out, dout))
    lse4 = lse.unflatten(1, (heads_kv, -1))
    for heads, row_chunks in _chunks(q, k, row_step):
        keys, values = _load_kv(k, heads, valid, lse.dtype), _load_kv(v, heads, valid, lse.dtype)
        dkeys, dvalues = torch.zeros_like(keys), torch.zeros_like(values)
        for rows in row_chunks:
            queries, douts, outs = (x[:, heads, :, rows].to(lse.dtype) for x in (q5, dout5, out5))
            scores = _scores(queries, keys, softmax_scale).masked_fill(~mask(heads, rows), -torch.inf)
            probs = torch.exp(scores - _finite(lse4[:, heads, :, rows])[..., None])
            delta = (outs * douts).sum(-1, keepdim=True)
            dscores = probs * (_scores(douts, values, 1.0) - delta) * softmax_scale
            dq5[:, heads, :, rows] = _times(dscores, keys).to(q.dtype)
            dkeys += _reduce_rows(dscores, queries)
            dvalues += _reduce_rows(probs, douts)
        dk[:, :, heads] = dkeys.permute(2, 0, 1, 3).to(k.dtype)
        dv[:, :, heads] = dvalues.permute(2, 0, 1, 3).to(v.dtype)
    return dq, dk, dv


def _chunks(q: Tensor, k: Tensor, row_step: int) -> Iterator[tuple[slice, list[slice]]]:
    """Slices of key/value heads, each with the slices of query rows that keep the scores within the bound."""
    s, b, h, _ = q.shape
    sk, _, heads_kv, _ = k.shape
    step_scores = max(1, b * (h // heads_kv) * row_step * sk)
    head_step = max(1, min(heads_kv, _CHUNK_SCORES // step_scores))
    rows = row_step * max(1, _CHUNK_SCORES // (step_scores * head_step))
    row_chunks = [slice(r, min(s, r + rows)) for r in range(0, s, rows)]
    for head in range(0, heads_kv, head_step):
        yield slice(head, min(heads_kv, head + head_step)), row_chunks


def _split_heads(x: Tensor, heads_kv: int) -> Tensor:
    """View of [s, b, h, d] as [b, G, n, s, d]."""
    return x.permute(1, 2, 0, 3).unflatten(1, (heads_kv, -1))


def _load_kv(x: Tensor, heads: slice, valid: Tensor, dtype: torch.dtype) -> Tensor:
    """[sk, b, G, d] -> [b, G', sk, d] with padding set to 0: NaN there would survive a product with probability 0."""
    return x[:, :, heads].permute(1, 2, 0, 3).to(dtype).masked_fill(~valid[:, heads, :, None], 0)


def _scores(rows: Tensor, keys: Tensor, scale: float) -> Tensor:
    """[b, G', n, r, d] x [b, G', sk, d] -> [b, G', n, r, sk]."""
    return (rows.flatten(2, 3) @ keys.transpose(-1, -2)).mul_(scale).unflatten(2, rows.shape[2:4])


def _times(weights: Tensor, keys: Tensor) -> Tensor:
    """[b, G', n, r, sk] x [b, G', sk, d] -> [b, G', n, r, d]."""
    return (weights.flatten(2, 3) @ keys).unflatten(2, weights.shape[2:4])


def _reduce_rows(weights: Tensor, rows: Tensor) -> Tensor:
    """[b, G', n, r, sk] x [b, G', n, r, d] -> [b, G', sk, d], summed over the heads of a key/value head and rows."""
    return weights.flatten(2, 3).transpose(-1, -2) @ rows.flatten(2, 3)


def _finite(lse: Tensor) -> Tensor:
    """0 in place of -inf, so that exp(-inf - lse) is 0 for rows that attend to nothing, not NaN."""
    return lse.masked_fill(lse == -torch.inf, 0.0)
