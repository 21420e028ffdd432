"""Block scores without stored logits: one pass for the softmax denominators, one for the blocks.

Both passes cut the keys into spans, so that a few query groups still fill a GPU. Logits are in units of log 2.

Dims: sk key tokens, b batch, h query heads, G key/value heads (kv_heads), r predictor rank (RANK), P proxies per query
group, Nq query groups, Nk key/value blocks.
"""

import triton
import triton.language as tl

from megatron_dsv.kernels.sparse_attention.triton.lists import load_rows


@triton.jit
def _block_scores_lse_kernel(
        q_ptr, k_ptr, lse_ptr, kv_length_ptr, stride_qs, stride_qb, stride_qh, stride_ks, stride_kb, stride_kg,
        num_rows, num_keys, heads, kv_heads, spans, scale_log2,
        SPAN: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """lse [b, h, rows, spans]: natural logsumexp of each proxy's logits over the valid keys of each span of keys."""
    tiles = tl.cdiv(num_rows, BLOCK_M)
    span = tl.program_id(0) % spans
    first_m = ((tl.program_id(0) // spans) % tiles * BLOCK_M).to(tl.int64)
    batch_head = (tl.program_id(0) // spans // tiles).to(tl.int64)
    batch, head = batch_head // heads, batch_head % heads
    kv_head = head // (heads // kv_heads)

    lane_m = tl.arange(0, BLOCK_M)
    valid_m = first_m + lane_m < num_rows
    q = load_rows(q_ptr + batch * stride_qb + head * stride_qh, first_m, lane_m, stride_qs, valid_m, RANK, BLOCK_D)
    k_base = k_ptr + batch * stride_kb + kv_head * stride_kg
    length = tl.load(kv_length_ptr + batch * kv_heads + kv_head).to(tl.int32)
    first_n = (span * SPAN).to(tl.int64)
    keys = tl.minimum(tl.minimum(length, num_keys) - span * SPAN, SPAN)
    lane_n = tl.arange(0, BLOCK_N)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    for step in range(0, keys, BLOCK_N):
        valid_n = lane_n < keys - step
        k = load_rows(k_base, first_n + step, lane_n, stride_ks, valid_n, RANK, BLOCK_D)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        logits = tl.where(valid_n[None, :], logits, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(logits, 1))
        # A logit of -inf alone leaves the maximum at -inf, and -inf - -inf is NaN.
        reference = tl.where(new_max == float("-inf"), 0.0, new_max)
        row_sum = row_sum * tl.exp2(row_max - reference) + tl.sum(tl.exp2(logits - reference[:, None]), 1)
        row_max = new_max
    # log2(0) is -inf where the span holds no valid key, and the maximum is too; NaN stays NaN.
    lse = (tl.where(row_sum == 0, 0.0, row_max) + tl.log2(row_sum)) * 0.6931471805599453
    tl.store(lse_ptr + (batch_head * num_rows + first_m + lane_m) * spans + span, lse, mask=valid_m)


@triton.jit
def _block_scores_kernel(
        q_ptr, k_ptr, lse_ptr, out_ptr, kv_length_ptr, stride_qs, stride_qb, stride_qh, stride_ks, stride_kb,
        stride_kg, num_groups, num_keys, num_blocks, heads, kv_heads, spans, scale_log2,
        REDUCTION: tl.constexpr, PROXIES: tl.constexpr, KV_BLOCK: tl.constexpr, KV_PADDED: tl.constexpr,
        SPAN: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr):
    """out [b, h, Nq, Nk]; a program owns BLOCK_M groups and SPAN blocks. lse [b, h, Nq * P] is read for mass alone.

    A block is padded to KV_PADDED lanes, a power of two. A tile of BLOCK_N lanes holds several short blocks, or one
    of the pieces of a long one. The proxies of a group come one after the other, so their sum stays in registers.
    """
    per_tile: tl.constexpr = (BLOCK_N + KV_PADDED - 1) // KV_PADDED
    pieces: tl.constexpr = (KV_PADDED + BLOCK_N - 1) // BLOCK_N
    block_lanes: tl.constexpr = BLOCK_N // per_tile
    tiles = tl.cdiv(num_groups, BLOCK_M)
    span = tl.program_id(0) % spans
    first_m = ((tl.program_id(0) // spans) % tiles * BLOCK_M).to(tl.int64)
    batch_head = (tl.program_id(0) // spans // tiles).to(tl.int64)
    batch, head = batch_head // heads, batch_head % heads
    kv_head = head // (heads // kv_heads)

    lane_m = tl.arange(0, BLOCK_M).to(tl.int64)
    valid_m = first_m + lane_m < num_groups
    q_base = q_ptr + batch * stride_qb + head * stride_qh
    k_base = k_ptr + batch * stride_kb + kv_head * stride_kg
    lse_base = lse_ptr + (batch_head * num_groups + first_m) * PROXIES
    out_base = out_ptr + (batch_head * num_groups + first_m) * num_blocks
    length = tl.load(kv_length_ptr + batch * kv_heads + kv_head).to(tl.int32)
    length = tl.minimum(length, num_keys)
    lane_n = tl.arange(0, BLOCK_N)
    blocks = tl.arange(0, per_tile)
    for step in range(0, tl.minimum(num_blocks - span * SPAN, SPAN), per_tile):
        first_block = span.to(tl.int64) * SPAN + step
        first_n = first_block * KV_BLOCK
        if REDUCTION == "mass":
            acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        else:
            acc = tl.full([BLOCK_M, BLOCK_N], float("-inf"), tl.float32)
        if REDUCTION == "lse":
            acc_sum = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for piece in tl.static_range(pieces):
            in_block = piece * BLOCK_N + lane_n % block_lanes
            token = lane_n // block_lanes * KV_BLOCK + in_block
            valid_n = (in_block < KV_BLOCK) & (token < length - first_n)
            k = load_rows(k_base, first_n, token, stride_ks, valid_n, RANK, BLOCK_D)
            if REDUCTION == "mass":
                probs = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            for proxy in range(PROXIES):
                q = load_rows(q_base, first_m * PROXIES + proxy, lane_m * PROXIES, stride_qs, valid_m, RANK, BLOCK_D)
                logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
                if REDUCTION == "mass":
                    lse = tl.load(lse_base + lane_m * PROXIES + proxy, mask=valid_m, other=float("inf"))
                    # A proxy without any valid key has lse -inf, and -inf - -inf is NaN.
                    lse = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)
                    probs += tl.exp2(logits - lse[:, None])
                elif REDUCTION == "max":
                    logits = tl.where(valid_n[None, :], logits, float("-inf"))
                    acc = tl.where((acc > logits) | (acc != acc), acc, logits)
                else:
                    logits = tl.where(valid_n[None, :], logits, float("-inf"))
                    new_max = tl.maximum(acc, logits)
                    reference = tl.where(new_max == float("-inf"), 0.0, new_max)
                    acc_sum = acc_sum * tl.exp2(acc - reference) + tl.exp2(logits - reference)
                    acc = new_max
            if REDUCTION == "mass":
                # Keys that are not valid were loaded as 0, whatever they hold: masking once a piece is enough.
                acc += tl.where(valid_n[None, :], probs, 0.0)
        split = tl.reshape(acc, [BLOCK_M, per_tile, block_lanes])
        if REDUCTION == "mass":
            scores = tl.sum(split, 2)
        elif REDUCTION == "max":
            # The built-in maximum drops NaN, which must show up.
            has_nan = tl.max((split != split).to(tl.int32), 2) > 0
            scores = tl.where(has_nan, float("nan"), tl.max(split, 2) * 0.6931471805599453)
        else:
            block_max = tl.max(split, 2)
            reference = tl.where(block_max == float("-inf"), 0.0, block_max)
            shares = tl.reshape(acc_sum * tl.exp2(acc - _spread(reference, block_lanes)), split.shape)
            scores = (reference + tl.log2(tl.sum(shares, 2))) * 0.6931471805599453
        wanted = valid_m[:, None] & (first_block + blocks < num_blocks)[None, :]
        tl.store(out_base + lane_m[:, None] * num_blocks + (first_block + blocks)[None, :], scores,
                 mask=wanted)


@triton.jit
def _spread(per_block, LANES: tl.constexpr):
    """[rows, blocks] -> [rows, blocks * LANES]."""
    rows: tl.constexpr = per_block.shape[0]
    blocks: tl.constexpr = per_block.shape[1]
    return tl.reshape(tl.broadcast_to(per_block[:, :, None], [rows, blocks, LANES]), [rows, blocks * LANES])
