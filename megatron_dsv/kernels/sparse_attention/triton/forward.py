"""Forward kernel: one program per tile of query rows walks the keys that the tile's query group lists.

Dims: s query tokens, sk key tokens, b batch, h query heads, G key/value heads, Nq query groups, d head dim.
Addresses are 64-bit from the tile's base on, so tensors may exceed 2^31 elements.
"""

import triton
import triton.language as tl

from megatron_dsv.kernels.sparse_attention.triton.lists import (
    load_entry,
    load_length,
    load_row,
    load_rows,
    load_tile,
    num_steps,
    program_row,
    step_tokens,
    store_rows,
    whole_entries,
)


@triton.jit
def _sparse_attention_fwd_kernel(
        q, k, v, out, k_tiles, v_tiles, lse_ptr, lists, order_ptr, kv_length_ptr, num_queries, num_keys, num_groups,
        heads, kv_heads, scale_log2, Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, TAIL_N: tl.constexpr, GATHER: tl.constexpr,
        TAIL_STAGES: tl.constexpr):
    tiles: tl.constexpr = (Q_BLOCK + BLOCK_M - 1) // BLOCK_M
    row, tile = program_row(order_ptr, tiles)
    batch_head, group = (row // num_groups).to(tl.int64), row % num_groups
    in_group = tile * BLOCK_M
    batch, head = batch_head // heads, batch_head % heads
    kv_head = head // (heads // kv_heads)

    lane_m = tl.arange(0, BLOCK_M)
    first_m = (group * Q_BLOCK + in_group).to(tl.int64)
    valid_m = (in_group + lane_m < Q_BLOCK) & (first_m + lane_m < num_queries)
    q_tile = load_rows(q.ptr + batch * q.stride_b + head * q.stride_h, first_m, lane_m, q.stride_s, valid_m, HEAD_DIM,
                       BLOCK_D)
    k_base = k.ptr + batch * k.stride_b + kv_head * k.stride_h
    v_base = v.ptr + batch * v.stride_b + kv_head * v.stride_h

    length = load_length(kv_length_ptr + batch * kv_heads + kv_head, num_keys)
    start, count, listed = load_row(lists, row, length, KV_BLOCK)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    first_tail = 0
    if not GATHER:
        per_entry: tl.constexpr = KV_BLOCK // BLOCK_N
        whole = whole_entries(lists, start, count, listed, length, KV_BLOCK)
        first_tail = num_steps(whole, KV_BLOCK, TAIL_N, GATHER)
        index = load_entry(lists, start, 0, whole, listed)
        for i in tl.range(whole * per_entry):
            first_n = index * KV_BLOCK + (i % per_entry) * BLOCK_N
            index = load_entry(lists, start, (i + 1) // per_entry, whole, listed)
            k_tile = load_tile(k_tiles, k, batch, kv_head, first_n, BLOCK_N, HEAD_DIM, BLOCK_D)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
            new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
            probs = tl.exp2(scores * scale_log2 - new_max[:, None])
            rescale = tl.exp2(row_max - new_max)
            row_sum = row_sum * rescale + tl.sum(probs, 1)
            v_tile = load_tile(v_tiles, v, batch, kv_head, first_n, BLOCK_N, HEAD_DIM, BLOCK_D)
            acc = tl.dot(probs.to(v_tile.dtype), v_tile, acc * rescale[:, None], input_precision="ieee")
            row_max = new_max
    for i in tl.range(first_tail, num_steps(count, KV_BLOCK, TAIL_N, GATHER), num_stages=TAIL_STAGES):
        first_n, lane_n, valid_n = step_tokens(i, lists, start, count, listed, length, KV_BLOCK, TAIL_N, GATHER)
        k_tile = load_rows(k_base, first_n, lane_n, k.stride_s, valid_n, HEAD_DIM, BLOCK_D)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        scores = tl.where(valid_n[None, :], scores * scale_log2, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # A step of padding alone leaves the maximum at -inf, and -inf - -inf is NaN.
        reference = tl.where(new_max == float("-inf"), 0.0, new_max)
        probs = tl.exp2(scores - reference[:, None])
        rescale = tl.exp2(row_max - reference)
        row_sum = row_sum * rescale + tl.sum(probs, 1)
        v_tile = load_rows(v_base, first_n, lane_n, v.stride_s, valid_n, HEAD_DIM, BLOCK_D)
        acc = tl.dot(probs.to(v_tile.dtype), v_tile, acc * rescale[:, None], input_precision="ieee")
        row_max = new_max

    attended = row_sum > 0
    row_sum = tl.where(attended, row_sum, 1.0)
    store_rows(out.ptr + batch * out.stride_b + head * out.stride_h, first_m, lane_m, out.stride_s, valid_m,
               acc / row_sum[:, None], HEAD_DIM, BLOCK_D)
    lse = tl.where(attended, (row_max + tl.log2(row_sum)) * 0.6931471805599453, float("-inf"))
    tl.store(lse_ptr + batch_head * num_queries + first_m + lane_m, lse, mask=valid_m)
