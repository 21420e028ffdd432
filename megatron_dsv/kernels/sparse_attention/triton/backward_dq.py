"""Backward pass over query rows: dQ, and the two numbers per row that the dK/dV pass reads.

Dims: s query tokens, sk key tokens, b batch, h query heads, G key/value heads, Nq query groups, d head dim.
Those numbers are stats [2, b * h, stride_stats] fp32: lse in units of log 2, +inf for rows that attend to nothing, so
that exp2(x - lse) is 0; and delta = sum(out * dout). Sums run in list order and nothing is shared between programs, so
repeats agree bitwise.
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
def _sparse_attention_bwd_dq_kernel(
        q, k, v, out, dout, dq, k_tiles, v_tiles, lse_ptr, stats_ptr, stride_stats, stats_rows, lists, order_ptr,
        kv_length_ptr, num_queries, num_keys, num_groups, heads, kv_heads, scale, scale_log2, Q_BLOCK: tl.constexpr,
        KV_BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
        BLOCK_D: tl.constexpr, TAIL_N: tl.constexpr, GATHER: tl.constexpr, TAIL_STAGES: tl.constexpr):
    tiles: tl.constexpr = (Q_BLOCK + BLOCK_M - 1) // BLOCK_M
    row, tile = program_row(order_ptr, tiles)
    batch_head, group = (row // num_groups).to(tl.int64), row % num_groups
    in_group = tile * BLOCK_M
    batch, head = batch_head // heads, batch_head % heads
    kv_head = head // (heads // kv_heads)

    lane_m = tl.arange(0, BLOCK_M)
    first_m = (group * Q_BLOCK + in_group).to(tl.int64)
    valid_m = (in_group + lane_m < Q_BLOCK) & (first_m + lane_m < num_queries)
    out_tile = load_rows(out.ptr + batch * out.stride_b + head * out.stride_h, first_m, lane_m, out.stride_s, valid_m,
                         HEAD_DIM, BLOCK_D)
    dout_tile = load_rows(dout.ptr + batch * dout.stride_b + head * dout.stride_h, first_m, lane_m, dout.stride_s,
                          valid_m, HEAD_DIM, BLOCK_D)
    delta = tl.sum(out_tile.to(tl.float32) * dout_tile.to(tl.float32), 1)
    lse = tl.load(lse_ptr + batch_head * num_queries + first_m + lane_m, mask=valid_m, other=float("inf"))
    lse = tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)
    row_stats = stats_ptr + batch_head * stride_stats + first_m + lane_m
    tl.store(row_stats, lse, mask=valid_m)
    tl.store(stats_ptr + (batch_head + stats_rows) * stride_stats + first_m + lane_m, delta, mask=valid_m)
    q_tile = load_rows(q.ptr + batch * q.stride_b + head * q.stride_h, first_m, lane_m, q.stride_s, valid_m, HEAD_DIM,
                       BLOCK_D)
    k_base = k.ptr + batch * k.stride_b + kv_head * k.stride_h
    v_base = v.ptr + batch * v.stride_b + kv_head * v.stride_h

    length = load_length(kv_length_ptr + batch * kv_heads + kv_head, num_keys)
    start, count, listed = load_row(lists, row, length, KV_BLOCK)
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
            v_tile = load_tile(v_tiles, v, batch, kv_head, first_n, BLOCK_N, HEAD_DIM, BLOCK_D)
            scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
            dprobs = tl.dot(dout_tile, tl.trans(v_tile), input_precision="ieee")
            probs = tl.exp2(scores * scale_log2 - lse[:, None])
            dscores = probs * (dprobs - delta[:, None])
            acc = tl.dot(dscores.to(k_tile.dtype), k_tile, acc, input_precision="ieee")
    for i in tl.range(first_tail, num_steps(count, KV_BLOCK, TAIL_N, GATHER), num_stages=TAIL_STAGES):
        first_n, lane_n, valid_n = step_tokens(i, lists, start, count, listed, length, KV_BLOCK, TAIL_N, GATHER)
        k_tile = load_rows(k_base, first_n, lane_n, k.stride_s, valid_n, HEAD_DIM, BLOCK_D)
        v_tile = load_rows(v_base, first_n, lane_n, v.stride_s, valid_n, HEAD_DIM, BLOCK_D)
        scores = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee")
        probs = tl.where(valid_n[None, :], tl.exp2(scores * scale_log2 - lse[:, None]), 0.0)
        dprobs = tl.dot(dout_tile, tl.trans(v_tile), input_precision="ieee")
        dscores = probs * (dprobs - delta[:, None])
        acc = tl.dot(dscores.to(k_tile.dtype), k_tile, acc, input_precision="ieee")

    store_rows(dq.ptr + batch * dq.stride_b + head * dq.stride_h, first_m, lane_m, dq.stride_s, valid_m, acc * scale,
               HEAD_DIM, BLOCK_D)
