"""From bits to lists: which of the keys within a row's bracket stay, and the ascending indices of all that do.

A row is (batch, query head, query group), one a program; its bits are words of 32 keys, lowest key first.

Dims: b batch, h query heads, Nq query groups, P proxies per query group, c places for candidates.
"""

import triton
import triton.language as tl

from megatron_dsv.kernels.sparse_attention.triton.lists import load_length
from megatron_dsv.kernels.token_topk.triton.scores import NOTHING, load_keys, load_lse, load_proxies, ranks


@triton.jit
def _ones(word):
    """int32: how many bits of a uint32 are set."""
    word = word - ((word >> 1) & 0x55555555)
    word = (word & 0x33333333) + ((word >> 2) & 0x33333333)
    word = (word + (word >> 4)) & 0x0F0F0F0F
    word = word + (word >> 8)
    return ((word + (word >> 16)) & 0x3F).to(tl.int32)


@triton.jit
def _load_words(bits_ptr, first, words, WORDS: tl.constexpr):
    """uint32 [WORDS] from word ``first`` on; 0 behind the last."""
    lane = first + tl.arange(0, WORDS)
    return tl.load(bits_ptr + lane, mask=lane < words, other=0).to(tl.uint32, bitcast=True)


@triton.jit
def _write_tokens(out_ptr, before, most, word, first, WORDS: tl.constexpr):
    """Writes the keys of the bits of word [WORDS], ascending, from place ``before`` on, none behind ``most``.

    Returns the next place.
    """
    count = _ones(word)
    place = before + tl.cumsum(count, 0) - count
    base = (first + tl.arange(0, WORDS)) * 32
    for _ in range(tl.max(count, 0)):
        rest = word & (word - 1)
        bit = _ones((word ^ rest) - 1)
        tl.store(out_ptr + place, base + bit, mask=(word != 0) & (place < most))
        word = rest
        place += 1
    return before + tl.sum(count, 0)


@triton.jit(do_not_specialize=["first_row"])
def _token_topk_settle_kernel(
        q_ptr, k_ptr, lse_ptr, kv_length_ptr, low_ptr, high_ptr, kept_ptr, flag_ptr, row_start_ptr, above_ptr,
        reached_ptr, token_ptr, rank_ptr, stride_qs, stride_qb, stride_qh, stride_ks, stride_kb, stride_kg, num_keys,
        num_groups, heads, kv_heads, scale_log2, lse_stride, lse_spans, words_stride, first_row, EXACT: tl.constexpr,
        PROXIES: tl.constexpr, REDUCTION: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr,
        CANDIDATES: tl.constexpr, WORDS: tl.constexpr, STEP: tl.constexpr):
    """Adds to above [rows, words] the keys within the bracket that stay; flags a row whose bracket does not serve.

    token, rank [rows, c] are scratch. With EXACT only flagged rows are settled; they always can be.
    """
    place = tl.program_id(0).to(tl.int64)
    row = first_row + place
    kept = tl.load(kept_ptr + row)
    wanted = (tl.load(row_start_ptr + row) >= 0) & (kept > 0)
    if EXACT:
        wanted = wanted & (tl.load(flag_ptr + row) != 0)
    if wanted:
        batch_head, group = row // num_groups, (row % num_groups).to(tl.int32)
        batch, head = batch_head // heads, batch_head % heads
        kv_head = head // (heads // kv_heads)
        length = load_length(kv_length_ptr + batch * kv_heads + kv_head, num_keys)
        words = tl.cdiv(length, 32)
        above_row, reached_row = above_ptr + place * words_stride, reached_ptr + place * words_stride
        low, high = tl.load(low_ptr + row), tl.load(high_ptr + row)
        at_high, at_low = kept * 0, kept * 0
        for first in range(0, words, WORDS):
            at_high += tl.sum(_ones(_load_words(above_row, first, words, WORDS)), 0)
            at_low += tl.sum(_ones(_load_words(reached_row, first, words, WORDS)), 0)
        remaining, found = kept - at_high, at_low - at_high
        # Equal ranks need no places: the first of them stay.
        level = (high - low).to(tl.uint32, bitcast=True) == 1
        serves = (remaining >= 0) & (remaining <= found) & (level | (found <= CANDIDATES))
        tl.store(flag_ptr + row, (serves == 0).to(tl.int32))
        if serves & (remaining > 0):
            if level:
                _keep_first(above_row, reached_row, words, remaining, WORDS)
            else:
                tokens, found_ranks = token_ptr + place * CANDIDATES, rank_ptr + place * CANDIDATES
                written = kept * 0
                for first in range(0, words, WORDS):
                    within = (_load_words(reached_row, first, words, WORDS)
                              ^ _load_words(above_row, first, words, WORDS))
                    written = _write_tokens(tokens, written, CANDIDATES, within, first, WORDS)
                tl.debug_barrier()
                same_group = tl.zeros([16], tl.int32) + group
                proxies = load_proxies(q_ptr + batch * stride_qb + head * stride_qh, stride_qs, same_group,
                                       same_group >= 0, PROXIES, RANK, BLOCK_R)
                lse = load_lse(lse_ptr + batch_head * num_groups * PROXIES, lse_stride, lse_spans, same_group,
                               same_group >= 0, PROXIES, REDUCTION)
                k_base = k_ptr + batch * stride_kb + kv_head * stride_kg
                for first in range(0, found, STEP):
                    lane = first + tl.arange(0, STEP)
                    token = tl.load(tokens + lane, mask=lane < found, other=0)
                    k = load_keys(k_base, stride_ks, token, length, RANK, BLOCK_R)
                    rank = tl.max(ranks(proxies, lse, k, scale_log2, PROXIES, REDUCTION), 0)
                    tl.store(found_ranks + lane, rank, mask=lane < found)
                tl.debug_barrier()
                _keep_best(above_row, tokens, found_ranks, found, remaining, low, high, CANDIDATES)


@triton.jit
def _keep_first(above_row, reached_row, words, remaining, WORDS: tl.constexpr):
    """Adds to the row's bits the first ``remaining`` keys within its bracket."""
    seen = remaining * 0
    for first in range(0, words, WORDS):
        above = _load_words(above_row, first, words, WORDS)
        word = _load_words(reached_row, first, words, WORDS) ^ above
        count = _ones(word)
        nth = seen + tl.cumsum(count, 0) - count
        for _ in range(tl.max(count, 0)):
            rest = word & (word - 1)
            above = tl.where(nth < remaining, above | (word ^ rest), above)
            word = rest
            nth += 1
        lane = first + tl.arange(0, WORDS)
        tl.store(above_row + lane, above.to(tl.int32, bitcast=True), mask=lane < words)
        seen += tl.sum(count, 0)


@triton.jit
def _keep_best(above_row, tokens, found_ranks, found, remaining, low, high, CANDIDATES: tl.constexpr):
    """Adds to the row's bits the ``remaining`` candidates of the highest ranks, of equal ones the first."""
    lane = tl.arange(0, CANDIDATES)
    valid = lane < found
    rank = tl.load(found_ranks + lane, mask=valid, other=0)
    # The count within the bracket holds even if a product of another shape rounded otherwise.
    rank = tl.where(valid, tl.maximum(tl.minimum(rank, high - 1), low), NOTHING)
    width = (high - low).to(tl.uint32, bitcast=True)
    while width > 1:
        middle = low + (width >> 1).to(tl.int32, bitcast=True)
        reached = tl.sum((rank >= middle).to(tl.int32), 0)
        low, high = tl.where(reached >= remaining, middle, low), tl.where(reached >= remaining, high, middle)
        width = tl.where(reached == remaining, 0, (high - low).to(tl.uint32, bitcast=True))
    level = valid & (rank == low)
    places = remaining - tl.sum((rank > low).to(tl.int32), 0)
    stays = (rank > low) | (level & (tl.cumsum(level.to(tl.int32), 0) <= places))
    token = tl.load(tokens + lane, mask=stays, other=0)
    tl.atomic_or(above_row + token // 32, tl.full([CANDIDATES], 1, tl.int32) << (token % 32), mask=stays,
                 sem="relaxed")


@triton.jit(do_not_specialize=["first_row"])
def _token_topk_lists_kernel(
        above_ptr, row_start_ptr, kept_ptr, kv_length_ptr, kv_indices_ptr, num_keys, num_groups, heads, kv_heads,
        words_stride, first_row, WORDS: tl.constexpr):
    """kv_indices from row_start on: the keys of the row's bits."""
    place = tl.program_id(0).to(tl.int64)
    row = first_row + place
    start = tl.load(row_start_ptr + row)
    kept = tl.load(kept_ptr + row)
    if (start >= 0) & (kept > 0):
        batch_head = row // num_groups
        kv_head = batch_head // heads * kv_heads + batch_head % heads // (heads // kv_heads)
        words = tl.cdiv(load_length(kv_length_ptr + kv_head, num_keys), 32)
        written = kept * 0
        for first in range(0, words, WORDS):
            word = _load_words(above_ptr + place * words_stride, first, words, WORDS)
            written = _write_tokens(kv_indices_ptr + start, written, kept, word, first, WORDS)
