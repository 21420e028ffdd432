"""The search for each row's threshold: a bracket around it by sampling, and where that misses by counting.

Dims: b batch, h query heads, G key/value heads, Nq query groups, m query groups of a program, n keys of a tile. A row
is (batch, query head, query group).
"""

import triton
import triton.language as tl

from megatron_dsv.kernels.sparse_attention.triton.lists import load_length
from megatron_dsv.kernels.token_topk.triton.scores import (
    BEST_RANK,
    NOTHING,
    forced,
    load_keys,
    load_lse,
    load_proxies,
    needs_care,
    own_span,
    own_tokens,
    ranks,
)

MOST_TILES = 65535
"""Tiles of keys that a row's counts hold."""


@triton.jit
def _search_ranks(proxies, lse, k, token, length, prefix, begin, end, care, scale_log2, PROXIES: tl.constexpr,
                  REDUCTION: tl.constexpr):
    """``ranks`` with ``NOTHING`` in place of padding and forced keys."""
    rank = ranks(proxies, lse, k, scale_log2, PROXIES, REDUCTION)
    if care:
        searched = (token < length)[None, :] & (forced(token, length, prefix, begin, end) == 0)
        rank = tl.where(searched, rank, NOTHING)
    return rank


@triton.jit
def _quantile(sample, wanted, lowest, highest):
    """int32 [m]: about the largest value that at least ``wanted`` entries of sample [m, samples] reach."""
    low, high = lowest, highest
    for _ in range(20):
        middle = low + ((high - low).to(tl.uint32, bitcast=True) >> 1).to(tl.int32, bitcast=True)
        reached = tl.sum((sample >= middle[:, None]).to(tl.int32), 1) >= wanted
        low, high = tl.where(reached, middle, low), tl.where(reached, high, middle)
    return low


@triton.jit
def _token_topk_bracket_kernel(
        q_ptr, k_ptr, lse_ptr, group_ids_ptr, budget_ptr, kv_length_ptr, query_length_ptr, low_ptr, high_ptr,
        kept_ptr, flag_ptr, stride_qs, stride_qb, stride_qh, stride_ks, stride_kb, stride_kg, num_keys, num_groups,
        heads, kv_heads, prefix, scale_log2, lse_stride, lse_spans, candidates, EXACT: tl.constexpr,
        SPREAD: tl.constexpr, PROXIES: tl.constexpr, REDUCTION: tl.constexpr, KEEP_OWN: tl.constexpr,
        Q_BLOCK: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr, SAMPLES: tl.constexpr):
    """low, high [b, h, Nq]: finite ranks above the worst that enclose a row's threshold, by sampling: very probably.

    With EXACT, for flagged rows only and in any case: at most ``candidates`` ranks lie in low..high - 1, or all of
    them are equal, or low == high. ``kept`` is the number of keys that the row keeps in all.
    """
    batch_head = tl.program_id(1).to(tl.int64)
    batch, head = batch_head // heads, batch_head % heads
    kv_head = head // (heads // kv_heads)
    group = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = group < num_groups
    row = batch_head * num_groups + group
    written = exists
    if EXACT:
        written = exists & (tl.load(flag_ptr + row, mask=exists, other=0) != 0)
    if tl.max(written.to(tl.int32), 0) > 0:
        length = load_length(kv_length_ptr + batch * kv_heads + kv_head, num_keys)
        begin, end = own_tokens(group_ids_ptr, group, exists, KEEP_OWN, Q_BLOCK)
        number = tl.load(group_ids_ptr + group, mask=exists, other=0)
        real = exists & (number * Q_BLOCK < tl.load(query_length_ptr + batch))
        proxies = load_proxies(q_ptr + batch * stride_qb + head * stride_qh, stride_qs, group, exists, PROXIES, RANK,
                               BLOCK_R)
        lse = load_lse(lse_ptr + batch_head * num_groups * PROXIES, lse_stride, lse_spans, group, exists, PROXIES,
                       REDUCTION)
        k_base = k_ptr + batch * stride_kb + kv_head * stride_kg

        own_first, own_last = own_span(begin, end)
        leading = tl.minimum(prefix, length)
        own = tl.minimum(tl.maximum(end, leading), length) - tl.minimum(tl.maximum(begin, leading), length)
        kept = tl.where(real, tl.minimum(tl.load(budget_ptr + head).to(tl.int32), length), 0)
        wanted = tl.where(real, kept - leading - own, 0)
        searched = length - leading - own

        # A sample of the keys says about where the threshold lies.
        spacing = tl.maximum(length // SAMPLES, 1)
        index = tl.arange(0, SAMPLES)
        drawn_token = index * spacing + index * 37 % spacing
        drawn_k = load_keys(k_base, stride_ks, drawn_token, length, RANK, BLOCK_R)
        sample = _search_ranks(proxies, lse, drawn_k, drawn_token, length, prefix, begin, end, True, scale_log2,
                               PROXIES, REDUCTION)
        taken = sample != NOTHING
        highest = tl.max(sample, 1)
        lowest = tl.min(tl.where(taken, sample, 2147483647), 1)
        lowest = tl.where(highest == NOTHING, 0, lowest)
        highest = tl.where(highest == NOTHING, 1, highest + 1)
        drawn = tl.sum(taken.to(tl.int32), 1).to(tl.float32)
        expected = wanted.to(tl.float32) * drawn / tl.maximum(searched, 1).to(tl.float32)
        margin = 4.5 * tl.sqrt(tl.maximum(expected * (1.0 - expected / tl.maximum(drawn, 1.0)), 0.0)) + 1.0
        first = _quantile(sample, (expected + margin).to(tl.int32), lowest, highest)
        last = _quantile(sample, tl.maximum((expected - margin).to(tl.int32), 1), lowest, highest)
        stride = tl.maximum((last - first).to(tl.uint32, bitcast=True) // 7, 1).to(tl.int32, bitcast=True)

        # One key in SPREAD says it better: the counts at eight thresholds give two that enclose it closely.
        counts, _ = _count(
            proxies, lse, k_base, stride_ks, length, prefix, begin, end, own_first, own_last, first, stride,
            scale_log2, PROXIES, REDUCTION, RANK, BLOCK_R, BLOCK_M, BLOCK_N, 4, SPREAD)
        drawn = tl.maximum(searched // SPREAD, 1).to(tl.float32)
        expected = wanted.to(tl.float32) / SPREAD
        margin = 4.5 * tl.sqrt(tl.maximum(expected * (1.0 - expected / drawn), 0.0)) + 1.0
        near = _interpolate(counts, first, stride, expected + margin)
        far = _interpolate(counts, first, stride, expected - margin)
        if EXACT:
            low, high = _enclose(
                proxies, lse, k_base, stride_ks, length, prefix, begin, end, own_first, own_last, near,
                tl.maximum(far - near, 1), scale_log2, wanted, searched, candidates, PROXIES, REDUCTION, RANK, BLOCK_R,
                BLOCK_M, BLOCK_N)
        else:
            far = tl.where(expected < margin + 1.0, BEST_RANK, far)
            # Rows that keep nothing, or all, of what is searched.
            low = tl.where(wanted == 0, BEST_RANK, tl.where(wanted == searched, -BEST_RANK, near))
            high = tl.where(wanted == 0, BEST_RANK, tl.where(wanted == searched, -BEST_RANK, far))
            low = tl.minimum(tl.maximum(low, 1 - BEST_RANK), BEST_RANK)
            high = tl.minimum(tl.maximum(high, low), BEST_RANK)
        tl.store(low_ptr + row, low, mask=written)
        tl.store(high_ptr + row, high, mask=written)
        tl.store(kept_ptr + row, kept, mask=written)


@triton.jit
def _enclose(proxies, lse, k_base, stride_ks, length, prefix, begin, end, own_first, own_last, first, stride,
             scale_log2, wanted, searched, candidates, PROXIES: tl.constexpr, REDUCTION: tl.constexpr,
             RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """(low, high) by counting all keys, first at ``first`` and ``first + stride``, until the bracket is narrow."""
    low = tl.full([BLOCK_M], -2147483647, tl.int32)
    high = tl.full([BLOCK_M], 2147483647, tl.int32)
    at_low, at_high = searched, searched * 0
    settled = (wanted == 0) | (wanted == searched)
    if tl.max((settled == 0).to(tl.int32), 0) > 0:
        ends, top = _count(
            proxies, lse, k_base, stride_ks, length, prefix, begin, end, own_first, own_last, first, stride, scale_log2,
            PROXIES, REDUCTION, RANK, BLOCK_R, BLOCK_M, BLOCK_N, 1, 1)
        # No rank lies above the largest, so the bracket need not reach further.
        high = tl.minimum(high, top + 1)
        low, high, at_low, at_high = _narrow(ends[0], ends[1], first, stride, wanted, low, high, at_low, at_high)
    settled = settled | (at_low == wanted)
    width = (high - low).to(tl.uint32, bitcast=True)
    pending = tl.max(((settled == 0) & (at_low - at_high > candidates) & (width > 1)).to(tl.int32), 0) > 0
    while pending:
        stride = tl.maximum(width // 9, 1).to(tl.int32, bitcast=True)
        first = low + stride
        counts, _ = _count(
            proxies, lse, k_base, stride_ks, length, prefix, begin, end, own_first, own_last, first, stride, scale_log2,
            PROXIES, REDUCTION, RANK, BLOCK_R, BLOCK_M, BLOCK_N, 4, 1)
        for pair in tl.static_range(4):
            low, high, at_low, at_high = _narrow(counts[2 * pair], counts[2 * pair + 1], first + 2 * pair * stride,
                                                 stride, wanted, low, high, at_low, at_high)
        settled = settled | (at_low == wanted)
        width = (high - low).to(tl.uint32, bitcast=True)
        pending = tl.max(((settled == 0) & (at_low - at_high > candidates) & (width > 1)).to(tl.int32), 0) > 0
    low = tl.where(wanted == 0, 2147483647, low)
    return low, tl.where(settled, low, high)


@triton.jit
def _count(proxies, lse, k_base, stride_ks, length, prefix, begin, end, own_first, own_last, first, stride, scale_log2,
           PROXIES: tl.constexpr, REDUCTION: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr,
           BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PAIRS: tl.constexpr, SPREAD: tl.constexpr):
    """How many ranks reach first, first + stride, ... (2 * PAIRS thresholds, int32 [m] each), and the largest rank.

    Looks at one key in SPREAD.
    """
    # Two counts of at most one a tile, and so of at most ``MOST_TILES``, share a register.
    counts: tl.tuple = ()
    for _ in tl.static_range(PAIRS):
        counts = counts + (tl.zeros([BLOCK_M, BLOCK_N], tl.int32),)  # noqa: RUF005
    largest = tl.full([BLOCK_M, BLOCK_N], NOTHING, tl.int32)
    for first_n in range(0, tl.cdiv(length, SPREAD), BLOCK_N):
        index = first_n + tl.arange(0, BLOCK_N)
        token = index * SPREAD + index // 5 % SPREAD
        k = load_keys(k_base, stride_ks, token, length, RANK, BLOCK_R)
        care = needs_care(first_n * SPREAD, length, prefix, own_first, own_last, BLOCK_N * SPREAD)
        rank = _search_ranks(proxies, lse, k, token, length, prefix, begin, end, care, scale_log2, PROXIES, REDUCTION)
        more: tl.tuple = ()
        for pair in tl.static_range(PAIRS):
            lower = first + 2 * pair * stride
            second = tl.where(rank >= (lower + stride)[:, None], 65537, (rank >= lower[:, None]).to(tl.int32))
            more = more + (counts[pair] + second,)  # noqa: RUF005
        counts = more
        largest = tl.maximum(largest, rank)
    totals: tl.tuple = ()
    for pair in tl.static_range(PAIRS):
        upper = (counts[pair].to(tl.uint32, bitcast=True) >> 16).to(tl.int32)
        totals = totals + (tl.sum(counts[pair] & 65535, 1), tl.sum(upper, 1))  # noqa: RUF005
    return totals, tl.max(largest, 1)


@triton.jit
def _interpolate(counts, first, stride, wanted):
    """int32 [m]: about the threshold that ``wanted`` (fp32) ranks reach, from the counts at eight of them.

    Beyond their ends it lies twice as far as the nearest counts say: too wide a bracket costs little, a miss much.
    """
    most, least = counts[0].to(tl.float32), counts[7].to(tl.float32)
    below = 1.0 + 2.0 * (wanted - most) / tl.maximum(most - counts[1].to(tl.float32), 1.0)
    above = 8.0 + 2.0 * (least - wanted) / tl.maximum(counts[6].to(tl.float32) - least, 1.0)
    steps = tl.where(most < wanted, -below, above)
    for place in tl.static_range(7):
        upper, lower = counts[place].to(tl.float32), counts[place + 1].to(tl.float32)
        share = (upper - wanted) / tl.maximum(upper - lower, 1.0)
        steps = tl.where((upper >= wanted) & (lower < wanted), place + share, steps)
    # Neither the offset nor the sum may leave the range of ranks.
    room = tl.minimum(2.1e9 - first.to(tl.float32), 2.1e9)
    depth = tl.maximum(-2.1e9 - first.to(tl.float32), -2.1e9)
    return first + tl.minimum(tl.maximum(steps * stride.to(tl.float32), depth), room).to(tl.int32)


@triton.jit
def _narrow(count_first, count_second, first, stride, wanted, low, high, at_low, at_high):
    """The bracket after two more thresholds and their counts; at_low, at_high count the ranks at or above its ends."""
    for second in tl.static_range(2):
        value = first + stride if second else first
        count = count_second if second else count_first
        raise_low = (count >= wanted) & (value > low)
        lower_high = (count < wanted) & (value < high)
        low, at_low = tl.where(raise_low, value, low), tl.where(raise_low, count, at_low)
        high, at_high = tl.where(lower_high, value, high), tl.where(lower_high, count, at_high)
    return low, high, at_low, at_high
