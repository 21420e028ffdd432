"""The two passes in plain torch, a few heads or rows of a batch item at a time; runs on any device.

Scores are fp32 (fp64 for fp64 inputs), sums fp64.

Dims: R sampled rows, s keys, b batch, h query heads, G key/value heads, d head dim, r predictor rank, n key/value heads
of a tile, rows = sampled rows of a tile x query heads of a key/value head.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from megatron_dsv.kernels.fusion import fused_on_cuda

_TILE_ELEMENTS = 2**24
"""Scores of teacher or student held at once (64 MiB in fp32); a few such tiles live at a time."""


class _Tile(NamedTuple):
    batch: int
    kv_heads: slice
    heads: slice
    rows: slice


def row_sums(q_lr: Tensor, k_lr: Tensor, q: Tensor, k: Tensor, kv_length: Tensor) -> Tensor:
    """fp64 [6, b, h, R] of q_lr [R, b, h, r], k_lr [s, b, G, r], q [R, b, h, d], k [s, b, G, d]; kv_length [b, G]."""
    rows, b, h, _ = q.shape
    ratio = h // k.shape[2]
    sums = torch.zeros((6, b, h, rows), dtype=torch.float64, device=k.device)
    for tile in _tiles(q, k):
        student, teacher, real = _tile_scores(tile, q_lr, k_lr, q, k, kv_length)
        found = _sums_of_scores(student, teacher, real)
        sums[:, tile.batch, tile.heads, tile.rows] = found.unflatten(2, (-1, ratio)).transpose(2, 3).flatten(1, 2)
    return sums


def gradients(q_lr: Tensor, k_lr: Tensor, q: Tensor, k: Tensor, kv_length: Tensor,
              coefficients: Tensor) -> tuple[Tensor, Tensor]:
    """dq [R, b, h, r] and dk [s, b, G, r] in the dtypes of q_lr and k_lr; coefficients [4, b, h, R]."""
    ratio = q.shape[2] // k.shape[2]
    dtype = _score_dtype(k_lr)
    dq, dk = (torch.zeros(x.shape, dtype=dtype, device=k.device) for x in (q_lr, k_lr))
    for tile in _tiles(q, k):
        student, teacher, real = _tile_scores(tile, q_lr, k_lr, q, k, kv_length)
        wanted = coefficients[:, tile.batch, tile.heads, tile.rows].to(dtype)
        wanted = wanted.unflatten(1, (-1, ratio)).transpose(2, 3).flatten(2, 3)
        weights, learns = _weights_of_scores(student, teacher, real, wanted)
        keys = k_lr[:, tile.batch, tile.kv_heads].transpose(0, 1).to(dtype).masked_fill(~real.mT, 0.0)
        queries = _by_kv_head(q_lr[tile.rows, tile.batch, tile.heads], ratio).to(dtype).masked_fill(~learns, 0.0)
        dq[tile.rows, tile.batch, tile.heads] = (weights @ keys).unflatten(1, (-1, ratio)).transpose(0, 1).flatten(1, 2)
        dk[:, tile.batch, tile.kv_heads] += (weights.mT @ queries).transpose(0, 1)
    return dq.to(q_lr.dtype), dk.to(k_lr.dtype)


def _tiles(q: Tensor, k: Tensor) -> Iterator[_Tile]:
    rows, b, h, _ = q.shape
    s, _, g_kv, _ = k.shape
    ratio = h // g_kv
    row_step = max(1, min(rows, _TILE_ELEMENTS // max(1, s * ratio)))
    head_step = max(1, _TILE_ELEMENTS // max(1, s * ratio * row_step))
    for batch in range(b):
        for first_head in range(0, g_kv, head_step):
            kv_heads = slice(first_head, min(first_head + head_step, g_kv))
            for first in range(0, rows, row_step):
                yield _Tile(batch, kv_heads, slice(kv_heads.start * ratio, kv_heads.stop * ratio),
                            slice(first, min(first + row_step, rows)))


def _tile_scores(tile: _Tile, q_lr: Tensor, k_lr: Tensor, q: Tensor, k: Tensor,
                 kv_length: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Unscaled scores [n, rows, s] of student and teacher, and which keys are real [n, 1, s]."""
    ratio = q.shape[2] // k.shape[2]
    student, teacher = (
        _products(_by_kv_head(queries[tile.rows, tile.batch, tile.heads], ratio),
                  keys[:, tile.batch, tile.kv_heads].transpose(0, 1), _score_dtype(k_lr))
        for queries, keys in ((q_lr, k_lr), (q, k)))
    real = torch.arange(k.shape[0], device=k.device) < kv_length[tile.batch, tile.kv_heads, None]
    return student, teacher, real[:, None]


def _score_dtype(k_lr: Tensor) -> torch.dtype:
    return torch.float64 if k_lr.dtype == torch.float64 else torch.float32


def _by_kv_head(rows: Tensor, ratio: int) -> Tensor:
    """[R, n * ratio, x] -> [n, R * ratio, x]."""
    return rows.unflatten(1, (-1, ratio)).transpose(0, 1).flatten(1, 2)


def _products(queries: Tensor, keys: Tensor, dtype: torch.dtype) -> Tensor:
    """[n, rows, x] by [n, s, x] -> [n, rows, s] in ``dtype``. Products of 16-bit numbers are exact in fp32."""
    if queries.is_cuda and queries.dtype == keys.dtype and keys.dtype in (torch.bfloat16, torch.float16):
        return torch.bmm(queries, keys.mT, out_dtype=torch.float32)
    return queries.to(dtype) @ keys.to(dtype).mT


@fused_on_cuda
def _sums_of_scores(student: Tensor, teacher: Tensor, real: Tensor) -> Tensor:
    """[6, n, rows], fp64."""
    a, t = (scores.double().masked_fill(~real, 0.0) for scores in (student, teacher))
    count = real.sum(-1, dtype=torch.float64).expand(a.shape[:-1])
    return torch.stack((count, t.sum(-1), (t * t).sum(-1), a.sum(-1), (a * a).sum(-1), (a * t).sum(-1)))


@fused_on_cuda
def _weights_of_scores(student: Tensor, teacher: Tensor, real: Tensor, coefficients: Tensor) -> tuple[Tensor, Tensor]:
    """Gradient by the student's scores [n, rows, s], and which rows have one [n, rows, 1]."""
    mean_a, mean_t, alpha, beta = coefficients[..., None].unbind(0)
    learns = (alpha != 0) | (beta != 0)
    weights = alpha * (student - mean_a) + beta * (teacher - mean_t)
    return weights.masked_fill(~(learns & real), 0.0), learns
