"""Block scores in two passes: the exponentials of every logit once, then one value per (proxy, block) to combine.

Logits are in units of log 2. The first pass leaves a proxy's value for each block (``partial``): log2-sum-exp2 over
the block's valid keys, or their maximum; and the log2-sum-exp2 of each span of keys (``total``). The second normalises
each proxy and adds the proxies of a group.

Dims: sk key tokens, b batch, h query heads, G key/value heads (kv_heads), r predictor rank (RANK), P proxies per query
group, Nq query groups, Nk key/value blocks; bh (batch, head) pairs, T steps of PER_STEP blocks. A launch handles the
pairs from ``first_pair`` and the groups from ``first_group`` on.
"""

import triton
import triton.language as tl

from megatron_dsv.kernels.block_scores.triton.exponentials import SAFE_LOG2, exp2_scaled, log2_fast
from megatron_dsv.kernels.sparse_attention.triton.lists import load_length, load_rows

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _key_bound_kernel(k_ptr, bound_ptr, kv_length_ptr, stride_ks, stride_kb, stride_kg, num_keys, kv_heads, spans,
                      SPAN: tl.constexpr, RANK: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """bound [b, G, spans]: largest squared norm of the valid keys of each span; NaN and inf stay what they are."""
    span = tl.program_id(0)
    batch, kv_head = tl.program_id(1).to(tl.int64) // kv_heads, tl.program_id(1).to(tl.int64) % kv_heads
    length = load_length(kv_length_ptr + tl.program_id(1), num_keys)
    lane_n = tl.arange(0, BLOCK_N)
    most = tl.zeros([BLOCK_N], tl.float32)
    for step in range(0, SPAN, BLOCK_N):
        first = span * SPAN + step
        # A tile may hold more tokens than ``check_reach`` answers for.
        k = load_rows(k_ptr + batch * stride_kb + kv_head * stride_kg, tl.zeros((), tl.int64) + first,
                      lane_n.to(tl.int64), stride_ks, lane_n < length - first, RANK, BLOCK_D).to(tl.float32)
        squared = tl.sum(k * k, 1)
        # Once NaN, always NaN.
        most = tl.where((squared > most) | (squared != squared), squared, most)
    broken = tl.max((most != most).to(tl.int32), 0) > 0
    tl.store(bound_ptr + tl.program_id(1) * spans + span, tl.where(broken, float("inf"), tl.max(most, 0)))


@triton.jit
def _block_partial_kernel(
        q_ptr, k_ptr, bound_ptr, partial_ptr, total_ptr, kv_length_ptr, stride_qs, stride_qb, stride_qh, stride_ks,
        stride_kb, stride_kg, first_pair, first_row, num_rows, num_keys, num_steps, heads, kv_heads, spans,
        bound_spans, scale_log2,
        TAKE_MAX: tl.constexpr, MIXED: tl.constexpr, KV_BLOCK: tl.constexpr, PER_STEP: tl.constexpr,
        SPAN: tl.constexpr, BOUND_SPANS: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """partial [pairs, T, num_rows, PER_STEP], total [pairs, spans, num_rows] (not of maxima).

    A program owns BLOCK_M proxies and SPAN steps of PER_STEP blocks.

    A block is padded to a power of two lanes; one longer than BLOCK_N is taken in pieces.
    """
    tiles = tl.cdiv(num_rows, BLOCK_M)
    span = tl.program_id(0) % spans
    first_m = (tl.program_id(0) // spans) % tiles * BLOCK_M
    pair = tl.program_id(0) // spans // tiles
    batch, head = ((first_pair + pair) // heads).to(tl.int64), ((first_pair + pair) % heads).to(tl.int64)
    kv_head = head // (heads // kv_heads)

    lane_m = tl.arange(0, BLOCK_M)
    valid_m = first_m + lane_m < num_rows
    q = load_rows(q_ptr + batch * stride_qb + head * stride_qh, (first_row + first_m).to(tl.int64), lane_m, stride_qs,
                  valid_m, RANK, BLOCK_D)
    k_base = k_ptr + batch * stride_kb + kv_head * stride_kg
    length = load_length(kv_length_ptr + batch * kv_heads + kv_head, num_keys)
    out = partial_ptr + (pair.to(tl.int64) * num_steps * num_rows + first_m) * PER_STEP

    first_step = span * SPAN
    last_step = tl.minimum(first_step + SPAN, num_steps)
    if TAKE_MAX:
        for step in range(first_step, last_step):
            value = _step_max(q, k_base, stride_ks, step, length, scale_log2, KV_BLOCK, PER_STEP, RANK, BLOCK_N)
            _store_step(out, step, num_rows, lane_m, valid_m, value, PER_STEP)
    else:
        lane = tl.arange(0, BOUND_SPANS)
        key_bound = tl.load(bound_ptr + (batch * kv_heads + kv_head) * bound_spans + lane, mask=lane < bound_spans,
                            other=0.0)
        query = q.to(tl.float32)
        query_bound = tl.sum(query * query, 1)
        broken = tl.max((query_bound != query_bound).to(tl.int32), 0) > 0
        # |q k| <= |q| |k|
        bound = tl.sqrt_rn(tl.max(query_bound, 0)) * tl.sqrt_rn(tl.max(key_bound, 0)) * tl.abs(scale_log2)
        row_most = tl.zeros([BLOCK_M], tl.float32)
        row_total = tl.zeros([BLOCK_M], tl.float32)
        if (bound <= SAFE_LOG2) & (broken == 0):
            whole = length // KV_BLOCK // PER_STEP
            # Padded lanes are never whole.
            whole = tl.where(KV_BLOCK * PER_STEP % BLOCK_N == 0, whole, 0)
            middle = tl.maximum(tl.minimum(whole, last_step), first_step)
            for step in range(first_step, middle):
                value = _step_sum(q, k_base, stride_ks, step, length, scale_log2, MIXED, False, KV_BLOCK, PER_STEP,
                                  RANK, BLOCK_N)
                row_total += tl.sum(value, 1)
                _store_step(out, step, num_rows, lane_m, valid_m, log2_fast(value, MIXED), PER_STEP)
            for step in range(middle, last_step):
                value = _step_sum(q, k_base, stride_ks, step, length, scale_log2, MIXED, True, KV_BLOCK, PER_STEP,
                                  RANK, BLOCK_N)
                row_total += tl.sum(value, 1)
                _store_step(out, step, num_rows, lane_m, valid_m, log2_fast(value, MIXED), PER_STEP)
        else:
            row_most = tl.full([BLOCK_M], float("-inf"), tl.float32)
            for step in range(first_step, last_step):
                value = _step_lse(q, k_base, stride_ks, step, length, scale_log2, KV_BLOCK, PER_STEP, RANK, BLOCK_N)
                new_most = tl.maximum(row_most, tl.max(value, 1))
                reference = tl.where(new_most == float("-inf"), 0.0, new_most)
                row_total = row_total * tl.exp2(row_most - reference) + tl.sum(tl.exp2(value - reference[:, None]), 1)
                row_most = new_most
                _store_step(out, step, num_rows, lane_m, valid_m, value, PER_STEP)
        total = total_ptr + (pair * spans + span).to(tl.int64) * num_rows + first_m
        tl.store(total + lane_m, row_most + tl.log2(row_total), mask=valid_m)


@triton.jit
def _store_step(out, step, num_rows, lane_m, valid_m, value, PER_STEP: tl.constexpr):
    """value [BLOCK_M, PER_STEP] of one step, a contiguous run of the scratch."""
    place = lane_m[:, None] * PER_STEP + tl.arange(0, PER_STEP)[None, :]
    tl.store(out + (tl.zeros((), tl.int64) + step) * num_rows * PER_STEP + place, value, mask=valid_m[:, None])


@triton.jit
def _piece(q, k_base, stride_ks, step, piece, length, KV_BLOCK: tl.constexpr, PER_STEP: tl.constexpr,
           RANK: tl.constexpr, BLOCK_N: tl.constexpr):
    """(q k^T [BLOCK_M, BLOCK_N], which of its columns are valid keys) of a piece of a step."""
    lanes: tl.constexpr = BLOCK_N // PER_STEP
    lane_n = tl.arange(0, BLOCK_N)
    in_block = piece * BLOCK_N + lane_n % lanes
    token = lane_n // lanes * KV_BLOCK + in_block
    first_n = (tl.zeros((), tl.int64) + step) * (KV_BLOCK * PER_STEP)
    valid_n = (in_block < KV_BLOCK) & (token < length - first_n)
    k = load_rows(k_base, first_n, token, stride_ks, valid_n, RANK, q.shape[1])
    return tl.dot(q, tl.trans(k), input_precision="ieee"), valid_n


@triton.jit
def _step_sum(q, k_base, stride_ks, step, length, scale_log2, MIXED: tl.constexpr, MASKED: tl.constexpr,
              KV_BLOCK: tl.constexpr, PER_STEP: tl.constexpr, RANK: tl.constexpr, BLOCK_N: tl.constexpr):
    """Sum of exp2 over each block [BLOCK_M, PER_STEP], for logits that are known to be small."""
    pieces: tl.constexpr = (KV_BLOCK + BLOCK_N - 1) // BLOCK_N
    total = tl.zeros([q.shape[0], PER_STEP], tl.float32)
    for piece in range(pieces):
        logits, valid_n = _piece(q, k_base, stride_ks, step, piece, length, KV_BLOCK, PER_STEP, RANK, BLOCK_N)
        powers = exp2_scaled(logits, scale_log2, MIXED)
        if MASKED:
            powers = tl.where(valid_n[None, :], powers, 0.0)
        total += tl.sum(tl.reshape(powers, [q.shape[0], PER_STEP, BLOCK_N // PER_STEP]), 2)
    return total


@triton.jit
def _step_lse(q, k_base, stride_ks, step, length, scale_log2, KV_BLOCK: tl.constexpr, PER_STEP: tl.constexpr,
              RANK: tl.constexpr, BLOCK_N: tl.constexpr):
    """log2-sum-exp2 over each block [BLOCK_M, PER_STEP], for any logits."""
    pieces: tl.constexpr = (KV_BLOCK + BLOCK_N - 1) // BLOCK_N
    lanes: tl.constexpr = BLOCK_N // PER_STEP
    most = tl.full([q.shape[0], PER_STEP], float("-inf"), tl.float32)
    total = tl.zeros([q.shape[0], PER_STEP], tl.float32)
    for piece in range(pieces):
        logits, valid_n = _piece(q, k_base, stride_ks, step, piece, length, KV_BLOCK, PER_STEP, RANK, BLOCK_N)
        logits = tl.where(valid_n[None, :], logits * scale_log2, float("-inf"))
        split = tl.reshape(logits, [q.shape[0], PER_STEP, lanes])
        new_most = tl.maximum(most, tl.max(split, 2))
        # Without a valid key the maximum is -inf, and -inf - -inf is NaN.
        reference = tl.where(new_most == float("-inf"), 0.0, new_most)
        total = total * tl.exp2(most - reference) + tl.sum(tl.exp2(split - reference[:, :, None]), 2)
        most = new_most
    # log2(0) is -inf where no key is valid, and the maximum is too; NaN stays NaN.
    return tl.where(total == 0, 0.0, most) + tl.log2(total)


@triton.jit
def _step_max(q, k_base, stride_ks, step, length, scale_log2, KV_BLOCK: tl.constexpr, PER_STEP: tl.constexpr,
              RANK: tl.constexpr, BLOCK_N: tl.constexpr):
    """Maximum over each block [BLOCK_M, PER_STEP]; NaN shows up."""
    pieces: tl.constexpr = (KV_BLOCK + BLOCK_N - 1) // BLOCK_N
    most = tl.full([q.shape[0], PER_STEP], float("-inf"), tl.float32)
    for piece in range(pieces):
        logits, valid_n = _piece(q, k_base, stride_ks, step, piece, length, KV_BLOCK, PER_STEP, RANK, BLOCK_N)
        logits = tl.where(valid_n[None, :], logits * scale_log2, float("-inf"))
        split = tl.reshape(logits, [q.shape[0], PER_STEP, BLOCK_N // PER_STEP])
        # The built-in maximum drops NaN.
        broken = tl.max((split != split).to(tl.int32), 2) > 0
        most = tl.where(broken, float("nan"), tl.maximum(most, tl.max(split, 2), tl.PropagateNan.ALL))
    return most


@triton.jit
def _block_combine_kernel(
        partial_ptr, total_ptr, out_ptr, num_groups, num_rows, num_blocks, num_steps, spans, block_tiles,
        REDUCTION: tl.constexpr, PROXIES: tl.constexpr, PROXIES_PADDED: tl.constexpr, PER_STEP: tl.constexpr,
        SPANS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_K: tl.constexpr):
    """out [pairs, num_groups, Nk] from partial [pairs, T, num_rows, PER_STEP] and total [pairs, spans, num_rows].

    A program owns BLOCK_K blocks of GROUPS groups.
    """
    ROWS: tl.constexpr = GROUPS * PROXIES_PADDED
    group_tiles = tl.cdiv(num_groups, GROUPS)
    first_block = tl.program_id(0) % block_tiles * BLOCK_K
    first_group = tl.program_id(0) // block_tiles % group_tiles * GROUPS
    pair = (tl.program_id(0) // block_tiles // group_tiles).to(tl.int64)
    lane = tl.arange(0, ROWS)
    valid_row = (first_group + lane // PROXIES_PADDED < num_groups) & (lane % PROXIES_PADDED < PROXIES)
    row = (first_group + lane // PROXIES_PADDED) * PROXIES + lane % PROXIES_PADDED
    block = first_block + tl.arange(0, BLOCK_K)
    valid_block = block < num_blocks
    place = (pair * num_steps + block // PER_STEP) * num_rows * PER_STEP + block % PER_STEP
    value = tl.load(partial_ptr + place[:, None] + (row * PER_STEP)[None, :],
                    mask=valid_block[:, None] & valid_row[None, :], other=float("-inf"))
    if REDUCTION == "mass":
        lane_s = tl.arange(0, SPANS)
        totals = tl.load(total_ptr + (pair * spans + lane_s)[:, None] * num_rows + row[None, :],
                         mask=(lane_s < spans)[:, None] & valid_row[None, :], other=float("-inf"))
        most = tl.max(totals, 0)
        reference = tl.where(most == float("-inf"), 0.0, most)
        whole = tl.sum(tl.exp2(totals - reference[None, :]), 0)
        # A proxy without any valid key has no mass to give; -inf - -inf would be NaN.
        value = tl.exp2(value - tl.where(whole == 0, float("inf"), reference + tl.log2(whole))[None, :])
        scores = tl.sum(tl.reshape(value, [BLOCK_K, GROUPS, PROXIES_PADDED]), 2)
    else:
        value = tl.reshape(value, [BLOCK_K, GROUPS, PROXIES_PADDED])
        most = tl.max(value, 2)
        if REDUCTION == "max":
            broken = tl.max((value != value).to(tl.int32), 2) > 0
            scores = tl.where(broken, float("nan"), most * LN2)
        else:
            reference = tl.where(most == float("-inf"), 0.0, most)
            scores = (reference + tl.log2(tl.sum(tl.exp2(value - reference[:, :, None]), 2))) * LN2
    group = first_group + tl.arange(0, GROUPS)
    tl.store(out_ptr + (pair * num_groups + group[:, None]) * num_blocks + block[None, :], tl.trans(scores),
             mask=(group < num_groups)[:, None] & valid_block[None, :])


@triton.jit
def _pool_queries_kernel(q_ptr, out_ptr, query_length_ptr, stride_qs, stride_qb, stride_qh, tokens, columns, batch,
                         TOKENS: tl.constexpr, RANK: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_C: tl.constexpr):
    """out [rows, b, h * r]: mean over the valid ones of each TOKENS tokens of q [s, b, h, r]."""
    row, item = tl.program_id(0).to(tl.int64), tl.program_id(1) % batch
    column = (tl.program_id(1) // batch * BLOCK_C + tl.arange(0, BLOCK_C)).to(tl.int64)
    length = load_length(query_length_ptr + item, tokens)
    source = q_ptr + row * TOKENS * stride_qs + item.to(tl.int64) * stride_qb
    total = tl.zeros([BLOCK_C], tl.float32)
    count = tl.maximum(tl.minimum(length - row * TOKENS, TOKENS), 0)
    for first in range(0, count, BLOCK_T):
        lane = first + tl.arange(0, BLOCK_T)
        place = lane[:, None] * stride_qs + (column // RANK * stride_qh + column % RANK)[None, :]
        tile = tl.load(source + place, mask=(lane < count)[:, None] & (column < columns)[None, :], other=0.0)
        total += tl.sum(tile.to(tl.float32), 0)
    mean = total / tl.maximum(count, 1).to(tl.float32)
    tl.store(out_ptr + (row * batch + item) * columns + column, mean.to(out_ptr.dtype.element_ty),
             mask=column < columns)
