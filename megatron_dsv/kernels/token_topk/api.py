"""Token selection: each query group's k best single keys by predicted score, without a stored score.

A row (batch, query head, query group) keeps exactly min(budget of its head, valid keys) keys: first the forced ones
(the leading ``prefix_tokens`` and the group's own tokens), then those of the best scores; equal scores go to the lower
token. Padding is never kept; NaN and -inf are the worst scores, and +inf counts as the largest finite one. With several
proxies, ``mass`` and ``lse`` may subtract a logit of +inf from itself: what its keys score is then not defined, and
backends differ.

The score of a key reduces S = softmax_scale * q k^T over the group's P proxies: ``mass`` sums their softmax shares
(each over all valid keys), ``lse`` takes log-sum-exp, ``max`` the maximum. With one proxy all three rank alike, and its
logits are compared. The scores are fp32, from a product in the inputs' dtype.

Backends: ``reference`` (torch, a full sort), ``triton`` (bf16, fp16, fp32; ranks up to 256; 2,097,120 keys in fp32, and
in 16 bits twice as many, or four times up to rank 64; CUDA, or TRITON_INTERPRET=1 on the CPU), ``auto`` (triton on CUDA
where it can serve the request, reference elsewhere; logged once). Neither is differentiable. ``triton`` encloses each
row's threshold by a sample and marks in one pass over the keys which reach either end; only what lies between is
ranked. Rows that the sample misses, as where many scores are equal, are enclosed by counting, slower. Memory beyond the
lists is about 512 MiB at most, or what one head needs. Nothing waits for the device.

Dims: s query tokens, sk key tokens, b batch, h query heads, G key/value heads (h % G == 0), r predictor rank, P
proxies per query group, Nq query groups.
"""

from __future__ import annotations

from collections.abc import Sequence
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from megatron_dsv.kernels.attention_layout import resolve_scale
from megatron_dsv.kernels.host_values import on_device
from megatron_dsv.kernels.launching import choose_or_log
from megatron_dsv.kernels.lengths import Length, key_lengths, longest_on_host, query_lengths
from megatron_dsv.kernels.selection import DENSE_ROW, KVSelection
from megatron_dsv.kernels.token_topk import reference

REDUCTIONS = ("mass", "lse", "max")
BACKENDS = ("auto", "reference", "triton")


@torch.no_grad()
def token_topk(q_pooled: Tensor, k_lr: Tensor, *, head_budgets: Sequence[int], num_queries: int, q_block_size: int,
               proxies: int = 1, reduction: str = "mass", kv_length: Length = None,
               query_length: Length = None, query_group_ids: Tensor | None = None,
               keep_own_tokens: bool = True, prefix_tokens: int = 0, softmax_scale: float | None = None,
               backend: str = "auto") -> KVSelection:
    """Select ``head_budgets[i]`` keys for every query group of head i.

    Args:
        q_pooled: [Nq * P, b, h, r], as ``block_scores.api.pool_queries`` returns it.
        k_lr: [sk, b, G, r], same dtype.
        head_budgets: h host ints of at least 1; raised to the largest possible number of forced keys, lowered to sk.
        num_queries: query tokens of the q that goes with the selection, padding included; Nq groups of them.
        q_block_size: tokens per query group.
        proxies: P.
        reduction: one of ``REDUCTIONS``.
        kv_length: keys at or after it are padding, whatever they hold: None, an int, or an integer tensor [b] or
            [b, G] (never waited for; on the CPU it also bounds the lists).
        query_length: real query tokens of the whole sequence: None for ``num_queries``, an int, or [b]. Groups behind
            it attend to nothing.
        query_group_ids: integer tensor [Nq], each group's number in the whole sequence; default 0, 1, ...
        keep_own_tokens: force the group's own tokens (self-attention).
        prefix_tokens: force this many leading tokens, at least 0.
        softmax_scale: default 1 / sqrt(r); positive.
        backend: one of ``BACKENDS``.

    Returns:
        A selection with kv_block_size 1, rows one after another, each with its head's budget of places. A head whose
        budget covers every key that may be valid has dense rows; nothing is stored for them.

    Raises:
        ValueError: shapes, sizes, budgets, reduction or backend do not fit.
        NotImplementedError: ``triton`` cannot serve the request; the message names the way out.
    """
    b, h, groups = _check(q_pooled, k_lr, proxies, reduction, backend, num_queries, q_block_size, head_budgets,
                          query_group_ids, query_length, prefix_tokens)
    sk, device = k_lr.shape[0], k_lr.device
    lengths = key_lengths(kv_length, batch=b, num_kv_heads=k_lr.shape[2], num_keys=sk, device=device)
    reals = query_lengths(query_length, batch=b, num_queries=num_queries, device=device)
    most = longest_on_host(kv_length, sk)
    forced = prefix_tokens + (q_block_size if keep_own_tokens else 0)
    caps = [min(max(budget, forced), max(most, 1)) for budget in head_budgets]
    widths = [0 if cap >= most else cap for cap in caps]

    starts = [b * groups * sum(widths[:head]) if widths[head] else DENSE_ROW for head in range(h)]
    table = on_device((tuple(starts), tuple(widths), tuple(caps)), torch.int64, device)
    row = torch.arange(b * groups, device=device).view(b, 1, groups)
    row_start = torch.addcmul(table[0, :, None], row, table[1, :, None])
    # The last place is spare.
    kv_indices = torch.empty(b * groups * sum(widths) + 1, dtype=torch.int32, device=device)
    ids = torch.arange(groups, device=device) if query_group_ids is None else query_group_ids.to(device)
    arguments: dict[str, Any] = {
        "budgets": table[2], "kv_length": lengths, "query_length": reals, "group_ids": ids,
        "proxies": proxies, "reduction": reduction, "keep_own": keep_own_tokens, "prefix": prefix_tokens,
        "q_block_size": q_block_size, "longest": max(widths),
        "softmax_scale": resolve_scale(softmax_scale, q_pooled)}
    match choose_or_log("token_topk", backend, k_lr.device, lambda: _triton().limit(q_pooled, k_lr)):
        case "reference":
            row_count = reference.token_topk(q_pooled, k_lr, row_start, kv_indices, **arguments)
        case "triton":
            row_count = _triton().token_topk(q_pooled, k_lr, row_start, kv_indices, **arguments)
    if 0 in widths:
        # A group of padding attends to nothing, in a dense head, too.
        row_start = torch.where(row_count == 0, row_start.clamp_min(0), row_start)
    return KVSelection(kv_indices=kv_indices[:-1], row_start=row_start, row_count=row_count, kv_length=lengths,
                       num_queries=num_queries, num_keys=sk, q_block_size=q_block_size, kv_block_size=1,
                       max_row_count=sk if 0 in widths else max(caps),
                       max_entries=b * groups * sum(width or sk for width in widths))


def _check(q_pooled: Tensor, k_lr: Tensor, proxies: int, reduction: str, backend: str, num_queries: int,
           q_block_size: int, head_budgets: Sequence[int], query_group_ids: Tensor | None,
           query_length: Length, prefix_tokens: int) -> tuple[int, int, int]:
    """(b, h, Nq)."""
    if backend not in BACKENDS:
        raise ValueError(f"backend of token_topk must be one of {', '.join(BACKENDS)}, got {backend!r}")
    if reduction not in REDUCTIONS:
        raise ValueError(f"reduction must be one of {', '.join(REDUCTIONS)}, got {reduction!r}")
    if q_pooled.dim() != 4 or k_lr.dim() != 4:
        raise ValueError("q_pooled must be [Nq * P, b, h, r] and k_lr [sk, b, G, r], got "
                         f"{tuple(q_pooled.shape)} and {tuple(k_lr.shape)}")
    (rows, b, h, r), (_, b_k, heads_kv, r_k) = q_pooled.shape, k_lr.shape
    if (b, r) != (b_k, r_k) or heads_kv == 0 or h % heads_kv or q_pooled.dtype != k_lr.dtype:
        raise ValueError("q_pooled and k_lr must agree in batch, rank and dtype, with h a multiple of G, got "
                         f"{tuple(q_pooled.shape)} {q_pooled.dtype} and {tuple(k_lr.shape)} {k_lr.dtype}")
    if q_block_size < 1 or proxies < 1 or q_block_size % proxies:
        raise ValueError(f"proxies must divide q_block_size, got proxies={proxies}, q_block_size={q_block_size}")
    groups = -(-num_queries // q_block_size)
    if rows != groups * proxies:
        raise ValueError(f"q_pooled must hold {proxies} rows for each of the {groups} groups of {num_queries} "
                         f"queries, got {rows}")
    if len(head_budgets) != h or not all(isinstance(budget, int) and budget >= 1 for budget in head_budgets):
        raise ValueError(f"head_budgets must be {h} ints of at least 1, one for each head, got {list(head_budgets)}")
    if prefix_tokens < 0:
        raise ValueError(f"prefix_tokens must be at least 0, got {prefix_tokens}")
    if query_group_ids is not None and (query_group_ids.shape != (groups,) or query_group_ids.is_floating_point()):
        raise ValueError(f"query_group_ids must be [{groups}] integers, got {query_group_ids.dtype} "
                         f"{tuple(query_group_ids.shape)}")
    if query_group_ids is not None and query_length is None:
        raise ValueError("query_length must be given along with query_group_ids: the rows are a part of the sequence")
    return b, h, groups


def _triton() -> ModuleType:
    from megatron_dsv.kernels.token_topk.triton import launch
    return launch
