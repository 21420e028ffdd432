"""The passes of token selection that write lists, and the one before the search that sums each proxy's exponentials.

Dims: b batch, h query heads, G key/value heads, Nq query groups, P proxies per query group, m rows of a program, n keys
of a tile, c places for candidates. A row is (batch, query head, query group).
"""

import triton
import triton.language as tl

from megatron_dsv.kernels.token_topk.triton.scores import (
    forced,
    load_keys,
    load_lse,
    load_proxies,
    needs_care,
    own_span,
    own_tokens,
    ranks,
)

UNDECIDED = tl.constexpr(0x40000000)
"""Marks a token in a draft whose rank lies within its row's bracket."""


@triton.jit
def _token_topk_draft_kernel(
        q_ptr, k_ptr, lse_ptr, group_ids_ptr, kv_length_ptr, low_ptr, high_ptr, remaining_ptr, row_start_ptr,
        draft_ptr, drafted_ptr, candidate_ptr, found_ptr, stride_qs, stride_qb, stride_qh, stride_ks, stride_kb,
        stride_kg, num_groups, heads, kv_heads, prefix, scale_log2, places, candidates, first_batch_head,
        PROXIES: tl.constexpr, REDUCTION: tl.constexpr, KEEP_OWN: tl.constexpr, Q_BLOCK: tl.constexpr,
        RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """draft [rows, places]: forced keys, those above the bracket and those within it, ascending; drafted: their number.

    candidate [rows, c]: the ranks of those within, in the same order; found: their number. Where all ranks within are
    equal, the first of them stay and nothing is left to decide.
    """
    batch_head = first_batch_head + tl.program_id(1).to(tl.int64)
    batch, head = batch_head // heads, batch_head % heads
    kv_head = head // (heads // kv_heads)
    group = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = group < num_groups
    row = batch_head * num_groups + group
    place = tl.program_id(1) * num_groups + group
    listed = exists & (tl.load(row_start_ptr + row, mask=exists, other=-1) >= 0)
    if tl.max(listed.to(tl.int32), 0) > 0:
        low = tl.load(low_ptr + row, mask=listed, other=2147483647)
        high = tl.load(high_ptr + row, mask=listed, other=2147483647)
        level = (high - low) == 1
        levels = tl.max(level.to(tl.int32), 0) > 0
        most = tl.where(level, tl.load(remaining_ptr + row, mask=listed, other=0), 2147483647)
        decided = tl.where(level, 65537, 1)
        length = tl.load(kv_length_ptr + batch * kv_heads + kv_head).to(tl.int32)
        begin, end = own_tokens(group_ids_ptr, group, exists, KEEP_OWN, Q_BLOCK)
        own_first, own_last = own_span(begin, end)
        proxies = load_proxies(q_ptr + batch * stride_qb + head * stride_qh, stride_qs, group, exists, PROXIES, RANK,
                               BLOCK_R)
        lse = load_lse(lse_ptr + batch_head * num_groups * PROXIES, group, exists, PROXIES, REDUCTION)
        k_base = k_ptr + batch * stride_kb + kv_head * stride_kg
        draft_row = draft_ptr + place.to(tl.int64) * places - 1
        candidate_row = candidate_ptr + place.to(tl.int64) * candidates - 1
        written = tl.zeros([BLOCK_M], tl.int32)
        found = tl.zeros([BLOCK_M], tl.int32)
        for first_n in range(0, length, BLOCK_N):
            token = first_n + tl.arange(0, BLOCK_N)
            k = load_keys(k_base, stride_ks, token, length, RANK, BLOCK_R)
            rank = ranks(proxies, lse, k, scale_log2, PROXIES, REDUCTION)
            # 1 for what stays, 65537 for what lies within the bracket: one scan counts both.
            kind = tl.where(rank >= high[:, None], 1, tl.where(rank >= low[:, None], 65537, 0))
            if needs_care(first_n, length, prefix, own_first, own_last, BLOCK_N):
                must = forced(token, length, prefix, begin, end) & listed[:, None]
                kind = tl.where(must, 1, tl.where((token < length)[None, :], kind, 0))
            scan = tl.cumsum(kind, 1)
            total = tl.sum(kind, 1)
            nth = found[:, None] + (scan >> 16)
            target = written[:, None] + (scan & 65535)
            if levels:
                target -= tl.maximum(nth - most[:, None], 0)
                kind = tl.where((kind > 1) & (nth > most[:, None]), 0, kind)
            undecided = kind > decided[:, None]
            tl.store(draft_row[:, None] + target, token[None, :] + tl.where(undecided, UNDECIDED, 0), mask=kind > 0)
            tl.store(candidate_row[:, None] + nth, rank, mask=undecided)
            written += total & 65535
            found += total >> 16
        tl.store(drafted_ptr + place, written - tl.maximum(found - most, 0), mask=listed)
        tl.store(found_ptr + place, found, mask=listed)
@triton.jit
def _token_topk_final_kernel(
        draft_ptr, drafted_ptr, candidate_ptr, row_start_ptr, kept_ptr, kv_indices_ptr, places, candidates, first_row,
        BLOCK_N: tl.constexpr):
    """kv_indices from row_start on: the draft without the candidates that do not stay. One row a program."""
    place = tl.program_id(0).to(tl.int64)
    row = first_row + place
    start = tl.load(row_start_ptr + row)
    kept = tl.load(kept_ptr + row)
    if (start >= 0) & (kept > 0):
        drafted = tl.load(drafted_ptr + place)
        written, decided = kept * 0, kept * 0
        for first in range(0, drafted, BLOCK_N):
            lane = first + tl.arange(0, BLOCK_N)
            token = tl.load(draft_ptr + place * places + lane, mask=lane < drafted, other=-1)
            marked = (token >= 0x40000000).to(tl.int32)
            nth = decided + tl.cumsum(marked, 0) - 1
            stays = tl.load(candidate_ptr + place * candidates + nth, mask=marked != 0, other=1) != 0
            keep = stays & (token >= 0)
            target = written + tl.cumsum(keep.to(tl.int32), 0) - 1
            tl.store(kv_indices_ptr + start + target, token & 0x3FFFFFFF, mask=keep & (target < kept))
            written += tl.sum(keep.to(tl.int32), 0)
            decided += tl.sum(marked, 0)


@triton.jit
def _token_topk_lse_kernel(
        q_ptr, k_ptr, lse_ptr, kv_length_ptr, stride_qs, stride_qb, stride_qh, stride_ks, stride_kb, stride_kg,
        num_rows, heads, kv_heads, scale_log2, RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr):
    """lse [b, h, Nq * P]: log-sum-exp, in units of log 2, of each proxy's logits over the valid keys."""
    batch_head = tl.program_id(1).to(tl.int64)
    batch, head = batch_head // heads, batch_head % heads
    kv_head = head // (heads // kv_heads)
    row = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = row < num_rows
    length = tl.load(kv_length_ptr + batch * kv_heads + kv_head).to(tl.int32)
    q = load_proxies(q_ptr + batch * stride_qb + head * stride_qh, stride_qs, row, exists, 1, RANK, BLOCK_R)[0]
    k_base = k_ptr + batch * stride_kb + kv_head * stride_kg
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for first_n in range(0, length, BLOCK_N):
        token = first_n + tl.arange(0, BLOCK_N)
        k = load_keys(k_base, stride_ks, token, length, RANK, BLOCK_R)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        logits = tl.where((token < length)[None, :], logits, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(logits, 1))
        # A logit of -inf alone leaves the maximum at -inf, and -inf - -inf is NaN.
        reference = tl.where(new_max == float("-inf"), 0.0, new_max)
        row_sum = row_sum * tl.exp2(row_max - reference)[:, None] + tl.exp2(logits - reference[:, None])
        row_max = new_max
    lse = row_max + tl.log2(tl.sum(row_sum, 1))
    tl.store(lse_ptr + batch_head * num_rows + row, tl.where(row_max == float("-inf"), 0.0, lse), mask=exists)
