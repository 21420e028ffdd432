"""The passes over all keys: each proxy's log-sum-exp, and two bits a score that say on which side of a bracket it lies.

One warp owns m query groups and a span of keys. In the product of tensor cores, lane t of four holds the columns
8 j + 2 t and 8 j + 2 t + 1 of its rows. Keys are dealt to columns such that these are neighbours: a lane then packs its
own bits, and sums its own exponentials, without asking another.

Dims: b batch, h query heads, G key/value heads, Nq query groups, P proxies per query group, m query groups of a
program, n keys of a tile. A row is (batch, query head, query group).
"""

import triton
import triton.language as tl

from megatron_dsv.kernels.sparse_attention.triton.lists import load_length
from megatron_dsv.kernels.token_topk.triton.scores import (
    forced,
    load_keys,
    load_lse,
    load_proxies,
    needs_care,
    own_span,
    own_tokens,
    ranks,
    score_of_rank,
    scores,
)


@triton.jit
def _lane_sums(tile, COLUMNS: tl.constexpr):
    """[m, 4]: the sums of tile [m, COLUMNS] over the columns of each of four lanes."""
    split = tl.reshape(tile, [tile.shape[0], COLUMNS // 8, 4, 2])
    return tl.sum(tl.sum(split, 3), 1)


@triton.jit(do_not_specialize=["first_batch_head"])
def _token_topk_mark_kernel(
        q_ptr, k_ptr, lse_ptr, group_ids_ptr, kv_length_ptr, low_ptr, high_ptr, flag_ptr, row_start_ptr, above_ptr,
        reached_ptr, stride_qs, stride_qb, stride_qh, stride_ks, stride_kb, stride_kg, num_keys, num_groups, heads,
        kv_heads, prefix, scale_log2, lse_stride, lse_spans, pieces, first_batch_head, EXACT: tl.constexpr,
        SPAN: tl.constexpr, PROXIES: tl.constexpr, REDUCTION: tl.constexpr, KEEP_OWN: tl.constexpr,
        Q_BLOCK: tl.constexpr, RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr):
    """above, reached [rows, pieces]: a bit for every key whose rank reaches ``high`` or is forced; or ``low``.

    A piece is BLOCK_N / 4 bits, lowest key first. Without EXACT both ends of the bracket are finite scores, neither the
    worst; with it, only flagged rows are marked.
    """
    tiles = tl.cdiv(num_groups, BLOCK_M)
    span = tl.program_id(0) // tiles
    batch_head = first_batch_head + tl.program_id(1).to(tl.int64)
    batch, head = batch_head // heads, batch_head % heads
    kv_head = head // (heads // kv_heads)
    group = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = group < num_groups
    row = batch_head * num_groups + group
    marked = exists & (tl.load(row_start_ptr + row, mask=exists, other=-1) >= 0)
    if EXACT:
        marked = marked & (tl.load(flag_ptr + row, mask=exists, other=0) != 0)
    length = load_length(kv_length_ptr + batch * kv_heads + kv_head, num_keys)
    first = span * SPAN
    if (tl.max(marked.to(tl.int32), 0) > 0) & (first < length):
        low = tl.load(low_ptr + row, mask=marked, other=0)
        high = tl.load(high_ptr + row, mask=marked, other=0)
        low_score, high_score = score_of_rank(low), score_of_rank(high)
        begin, end = own_tokens(group_ids_ptr, group, exists, KEEP_OWN, Q_BLOCK)
        own_first, own_last = own_span(begin, end)
        proxies = load_proxies(q_ptr + batch * stride_qb + head * stride_qh, stride_qs, group, exists, PROXIES, RANK,
                               BLOCK_R)
        lse = load_lse(lse_ptr + batch_head * num_groups * PROXIES, lse_stride, lse_spans, group, exists, PROXIES,
                       REDUCTION)
        k_base = k_ptr + batch * stride_kb + kv_head * stride_kg
        place = (tl.program_id(1) * num_groups + group).to(tl.int64) * pieces
        lane = tl.arange(0, 4)
        column = tl.arange(0, BLOCK_N)
        bit = column // 8 * 2 + column % 2
        offset = column % 8 // 2 * (BLOCK_N // 4) + bit
        bits = (tl.full([BLOCK_N], 1, tl.int32) << bit)[None, :]
        for first_n in range(first, tl.minimum(first + SPAN, length), BLOCK_N):
            token = first_n + offset
            k = load_keys(k_base, stride_ks, token, length, RANK, BLOCK_R)
            if EXACT:
                value = ranks(proxies, lse, k, scale_log2, PROXIES, REDUCTION)
                least, most = low[:, None], high[:, None]
            else:
                value = scores(proxies, lse, k, scale_log2, PROXIES, REDUCTION)
                least, most = low_score[:, None], high_score[:, None]
            # Both ways to the end: predicates that outlive a branch cost more than the scores.
            if needs_care(first_n, length, prefix, own_first, own_last, BLOCK_N):
                must = forced(token, length, prefix, begin, end)
                valid = (token < length)[None, :]
                above_bits = _lane_sums(tl.where(((value >= most) | must) & valid, bits, 0), BLOCK_N)
                reached_bits = _lane_sums(tl.where(((value >= least) | must) & valid, bits, 0), BLOCK_N)
            else:
                above_bits = _lane_sums(tl.where(value >= most, bits, 0), BLOCK_N)
                reached_bits = _lane_sums(tl.where(value >= least, bits, 0), BLOCK_N)
            piece = place[:, None] + (first_n // (BLOCK_N // 4) + lane)[None, :]
            tl.store(above_ptr + piece, above_bits.to(above_ptr.dtype.element_ty), mask=marked[:, None])
            tl.store(reached_ptr + piece, reached_bits.to(above_ptr.dtype.element_ty), mask=marked[:, None])


@triton.jit
def _add_exponentials(proxies, k, valid, most, total, scale_log2, PROXIES: tl.constexpr, BLOCK_N: tl.constexpr):
    """Each proxy's running maximum [m] and sums [m, 4] after one more tile of keys; ``valid`` None: all of them."""
    k_t = tl.trans(k)
    new_most: tl.tuple = ()
    new_total: tl.tuple = ()
    for proxy in tl.static_range(PROXIES):
        logits = tl.dot(proxies[proxy], k_t, input_precision="ieee")
        if valid is not None:
            logits = tl.where(valid[None, :], logits, float("-inf"))
        larger = tl.maximum(most[proxy], tl.max(logits, 1) * scale_log2)
        # A logit of -inf alone leaves the maximum at -inf, and -inf - -inf is NaN.
        reference = tl.where(larger == float("-inf"), 0.0, larger)
        powers = tl.exp2(tl.fma(logits, scale_log2, -reference[:, None]))
        rescale = tl.exp2(most[proxy] - reference)
        new_total = new_total + (tl.fma(total[proxy], rescale[:, None], _lane_sums(powers, BLOCK_N)),)  # noqa: RUF005
        new_most = new_most + (larger,)  # noqa: RUF005
    return new_most, new_total


@triton.jit
def _token_topk_lse_kernel(
        q_ptr, k_ptr, lse_ptr, kv_length_ptr, stride_qs, stride_qb, stride_qh, stride_ks, stride_kb, stride_kg,
        num_keys, num_groups, heads, kv_heads, scale_log2, lse_stride, SPAN: tl.constexpr, PROXIES: tl.constexpr,
        RANK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """lse [spans, b, h, Nq * P]: log-sum-exp, in units of log 2, of each proxy's logits over a span's valid keys."""
    tiles = tl.cdiv(num_groups, BLOCK_M)
    span = tl.program_id(0) // tiles
    batch_head = tl.program_id(1).to(tl.int64)
    batch, head = batch_head // heads, batch_head % heads
    kv_head = head // (heads // kv_heads)
    group = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    exists = group < num_groups
    length = load_length(kv_length_ptr + batch * kv_heads + kv_head, num_keys)
    proxies = load_proxies(q_ptr + batch * stride_qb + head * stride_qh, stride_qs, group, exists, PROXIES, RANK,
                           BLOCK_R)
    k_base = k_ptr + batch * stride_kb + kv_head * stride_kg
    most: tl.tuple = ()
    total: tl.tuple = ()
    for _ in tl.static_range(PROXIES):
        most = most + (tl.full([BLOCK_M], float("-inf"), tl.float32),)  # noqa: RUF005
        total = total + (tl.zeros([BLOCK_M, 4], tl.float32),)  # noqa: RUF005
    first = span * SPAN
    last = tl.minimum(first + SPAN, length)
    whole = first + tl.maximum(last - first, 0) // BLOCK_N * BLOCK_N
    for first_n in range(first, whole, BLOCK_N):
        k = load_keys(k_base, stride_ks, first_n + tl.arange(0, BLOCK_N), length, RANK, BLOCK_R)
        most, total = _add_exponentials(proxies, k, None, most, total, scale_log2, PROXIES, BLOCK_N)
    if whole < last:
        token = whole + tl.arange(0, BLOCK_N)
        k = load_keys(k_base, stride_ks, token, length, RANK, BLOCK_R)
        most, total = _add_exponentials(proxies, k, token < length, most, total, scale_log2, PROXIES, BLOCK_N)
    out = lse_ptr + span.to(tl.int64) * lse_stride + batch_head * num_groups * PROXIES
    for proxy in tl.static_range(PROXIES):
        whole_sum = tl.sum(total[proxy], 1)
        # Without a finite logit the maximum is -inf, and says so.
        lse = most[proxy] + tl.log2(tl.where(whole_sum == 0, 1.0, whole_sum))
        tl.store(out + group * PROXIES + proxy, lse, mask=exists)
