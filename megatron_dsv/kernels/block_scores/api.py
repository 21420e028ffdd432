"""Predictor scores, reduced to one value per (query group, key/value block).

A query group is represented by P proxies, each the mean of one of P equal sub-chunks of its low-rank queries. Several
proxies, each with its own softmax, keep far more recall than one mean query.

Backends: ``reference`` (torch, exact, differentiable), ``triton`` (bf16, fp16, fp32; ranks up to 256; no gradients;
CUDA, or TRITON_INTERPRET=1 on the CPU), ``auto`` (on CUDA triton where it can serve the request, reference elsewhere;
logged once).

Dims: s query tokens, sk key tokens, b batch, h query heads, G key/value heads (h % G == 0), r predictor rank,
P proxies per query group, Nq query groups, Nk key/value blocks.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_dsv.kernels.block_scores import reference
from megatron_dsv.kernels.launching import choose_or_log
from megatron_dsv.kernels.lengths import Length, key_lengths, query_lengths

REDUCTIONS = ("mass", "lse", "max")
BACKENDS = ("auto", "reference", "triton")


@dataclass(frozen=True)
class ScoreChunk:
    """Scores [pairs, groups, Nk] of the (batch, head) pairs from ``first_pair`` and the groups from ``first_group``."""

    first_pair: int
    first_group: int
    scores: Tensor


@dataclass(frozen=True)
class ChunkedScores:
    """Scores [b, h, Nq, Nk] that are computed part by part, when they are iterated.

    Attributes:
        shape: (b, h, Nq, Nk).
        device: where the chunks will lie.
        chunks: starts a pass over all rows; every chunk is fp32 and contiguous.
    """

    shape: tuple[int, int, int, int]
    device: torch.device
    chunks: Callable[[], Iterator[ScoreChunk]]

    def __iter__(self) -> Iterator[ScoreChunk]:
        return self.chunks()

    def whole(self) -> Tensor:
        """All scores at once, fp32 [b, h, Nq, Nk]."""
        out = torch.empty(self.shape, dtype=torch.float32, device=self.device)
        for chunk in self:
            pairs, groups, _ = chunk.scores.shape
            rows = out.flatten(0, 1)[chunk.first_pair:chunk.first_pair + pairs]
            rows[:, chunk.first_group:chunk.first_group + groups] = chunk.scores
        return out


def pool_queries(q_lr: Tensor, *, q_block_size: int, proxies: int = 1, query_length: Length = None,
                 backend: str = "auto") -> Tensor:
    """Mean of the valid tokens of each of the ``proxies`` equal sub-chunks of each query group.

    Args:
        q_lr: [s, b, h, r].
        q_block_size: tokens per query group, a multiple of ``proxies``; the last group may be ragged.
        query_length: queries at or after it are padding: None, an int, or an integer tensor [b] (never waited for).
        backend: one of ``BACKENDS``; ``auto`` takes ``reference`` when autograd records.

    Returns:
        [Nq * P, b, h, r] in q_lr's dtype, accumulated in fp32 (fp64 for fp64); a chunk without valid tokens is 0.

    Raises:
        ValueError: shapes, sizes or backend do not fit.
        NotImplementedError: ``triton`` cannot serve the request; the message names the way out.
    """
    if q_lr.dim() != 4:
        raise ValueError(f"q_lr must be [s, b, h, r], got {tuple(q_lr.shape)}")
    if proxies < 1 or q_block_size < 1 or q_block_size % proxies:
        raise ValueError(f"proxies must divide q_block_size, got proxies={proxies}, q_block_size={q_block_size}")
    length = query_lengths(query_length, batch=q_lr.shape[1], num_queries=q_lr.shape[0], device=q_lr.device,
                           limit=q_lr.shape[0])
    match choose_or_log("pool_queries", backend, q_lr.device, lambda: _triton().limit(q_block_size, q_lr)):
        case "reference":
            return reference.pool_queries(q_lr, length, q_block_size=q_block_size, proxies=proxies)
        case "triton":
            return _triton().pool_queries(q_lr, length, q_block_size=q_block_size, proxies=proxies)
        case _:
            raise ValueError(f"backend of pool_queries must be one of {', '.join(BACKENDS)}, got {backend!r}")


def block_scores(q_pooled: Tensor, k_lr: Tensor, *, kv_block_size: int, proxies: int = 1, reduction: str = "mass",
                 kv_length: Length = None, softmax_scale: float | None = None,
                 backend: str = "auto") -> Tensor:
    """Scores of the key/value blocks for each query group, S = softmax_scale * q k^T being a proxy's logits.

    * ``mass``: softmax of S over all valid keys, summed over each block and the group's proxies; a row sums to P.
    * ``lse``: logsumexp of S over each block's valid keys and the group's proxies.
    * ``max``: maximum of S over each block's valid keys and the group's proxies.

    Args:
        q_pooled: [Nq * P, b, h, r], as ``pool_queries`` returns it.
        k_lr: [sk, b, G, r], same dtype; query head i reads key head i // (h // G).
        kv_block_size: tokens per block; the last may be ragged; 1 scores single tokens.
        kv_length: keys at or after it are padding, whatever they hold: None, an int, or an integer tensor [b] or
            [b, G] (never waited for).
        softmax_scale: default 1 / sqrt(r).
        backend: one of ``BACKENDS``. Only ``reference`` is differentiable: ``auto`` takes it when autograd records.

    Returns:
        fp32 [b, h, Nq, Nk]. A block of padding alone gets 0 for ``mass`` and -inf otherwise. A logit of +inf leaves
        ``mass`` and ``lse`` undefined, as it is subtracted from itself. The matrix product runs in the inputs' dtype
        with fp32 results. ``reference`` holds no temporary above 256 MiB unless one group of all
        heads exceeds it; ``triton`` stores no logits, and takes 2^x within 1e-4 where logits are moderate.

    Raises:
        ValueError: shapes, sizes, reduction or backend do not fit.
        NotImplementedError: ``triton`` cannot serve the request; the message names the way out.
    """
    arguments = _checked(q_pooled, k_lr, kv_block_size, proxies, reduction, kv_length, softmax_scale)
    match choose_or_log("block_scores", backend, k_lr.device, lambda: _triton().limit(kv_block_size, q_pooled, k_lr)):
        case "reference":
            return reference.block_scores(**arguments)
        case "triton":
            return _triton().block_scores(**arguments)
        case _:
            raise ValueError(f"backend of block_scores must be one of {', '.join(BACKENDS)}, got {backend!r}")


def chunked_block_scores(q_pooled: Tensor, k_lr: Tensor, *, kv_block_size: int, proxies: int = 1,
                         reduction: str = "mass", kv_length: Length = None,
                         softmax_scale: float | None = None, backend: str = "auto") -> ChunkedScores:
    """``block_scores``, bit for bit, but computed when consumed, and not all of them at once.

    Arguments and errors as in ``block_scores``; a chunk takes part of the heads or of the groups.
    """
    arguments = _checked(q_pooled, k_lr, kv_block_size, proxies, reduction, kv_length, softmax_scale)
    rows, b, h, _ = q_pooled.shape
    shape = (b, h, rows // proxies, -(-k_lr.shape[0] // kv_block_size))
    match choose_or_log("block_scores", backend, k_lr.device, lambda: _triton().limit(kv_block_size, q_pooled, k_lr)):
        case "reference":
            def chunks() -> Iterator[ScoreChunk]:
                for first, scores in reference.score_chunks(**arguments):
                    yield ScoreChunk(0, first, scores.flatten(0, 1))
        case "triton":
            def chunks() -> Iterator[ScoreChunk]:
                for chunk, scores in _triton().score_chunks(**arguments):
                    yield ScoreChunk(chunk.first_pair, chunk.first_group, scores)
        case _:
            raise ValueError(f"backend of block_scores must be one of {', '.join(BACKENDS)}, got {backend!r}")
    return ChunkedScores(shape, k_lr.device, chunks)


def _checked(q_pooled: Tensor, k_lr: Tensor, kv_block_size: int, proxies: int, reduction: str,
             kv_length: Length, softmax_scale: float | None) -> dict[str, Any]:
    """The arguments of a backend."""
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    if q_pooled.dim() != 4 or k_lr.dim() != 4:
        raise ValueError("q_pooled must be [Nq * P, b, h, r] and k_lr [sk, b, G, r], got "
                         f"{tuple(q_pooled.shape)} and {tuple(k_lr.shape)}")
    (rows, b, h, r), (sk, b_k, heads_kv, r_k) = q_pooled.shape, k_lr.shape
    if (b, r) != (b_k, r_k) or heads_kv == 0 or h % heads_kv or q_pooled.dtype != k_lr.dtype:
        raise ValueError("q_pooled and k_lr must agree in batch, rank and dtype, with h a multiple of G, got "
                         f"{tuple(q_pooled.shape)} {q_pooled.dtype} and {tuple(k_lr.shape)} {k_lr.dtype}")
    if proxies < 1 or rows % proxies:
        raise ValueError(f"q_pooled must hold a multiple of proxies={proxies} rows, got {rows}")
    if kv_block_size < 1:
        raise ValueError(f"kv_block_size must be at least 1, got {kv_block_size}")
    length = key_lengths(kv_length, batch=b, num_kv_heads=heads_kv, num_keys=sk, device=k_lr.device)
    return {"q_pooled": q_pooled, "k_lr": k_lr, "kv_length": length, "kv_block_size": kv_block_size,
            "proxies": proxies, "reduction": reduction,
            "softmax_scale": r ** -0.5 if softmax_scale is None else float(softmax_scale)}


def _triton() -> ModuleType:
    from megatron_dsv.kernels.block_scores.triton import launch
    return launch
