"""Backward pass over keys: dK and dV.

Dims: s query tokens, sk key tokens, b batch, h query heads, G key/value heads, Nq query groups, Nk key blocks, d head
dim. The kernel walks the selection's key-major twin and shares nothing between programs: repeats agree bitwise. Scores
are computed transposed, [keys, queries], so that they feed the sums over queries from registers.
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
def _load_stats(stats_tiles, stats_ptr, stride_stats, row, first, ROWS: tl.constexpr):
    """Numbers [ROWS] of one row of stats, from token ``first`` on."""
    if stats_tiles is None:
        values = tl.load(stats_ptr + row * stride_stats + first + tl.arange(0, ROWS))
    else:
        values = stats_tiles.load([row.to(tl.int32), first]).reshape([ROWS])
    return values


@triton.jit
def _sparse_attention_bwd_dkv_kernel(
        q, k, v, dout, dk, dv, q_tiles, dout_tiles, stats_tiles, stats_ptr, stride_stats, stats_rows, twin, order_ptr,
        kv_length_ptr, num_queries, num_keys, num_blocks, heads, kv_heads, scale, scale_log2, Q_BLOCK: tl.constexpr,
        KV_BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
        BLOCK_D: tl.constexpr, TAIL_M: tl.constexpr, GATHER: tl.constexpr, TAIL_STAGES: tl.constexpr):
    tiles: tl.constexpr = (KV_BLOCK + BLOCK_N - 1) // BLOCK_N
    row, tile = program_row(order_ptr, tiles)
    batch_kv_head, block = (row // num_blocks).to(tl.int64), row % num_blocks
    in_block = tile * BLOCK_N
    batch, kv_head = batch_kv_head // kv_heads, batch_kv_head % kv_heads
    heads_per_kv = heads // kv_heads

    length = load_length(kv_length_ptr + batch_kv_head, num_keys)
    lane_n = tl.arange(0, BLOCK_N)
    first_n = (block * KV_BLOCK + in_block).to(tl.int64)
    stored_n = (in_block + lane_n < KV_BLOCK) & (first_n + lane_n < num_keys)
    valid_n = stored_n & (first_n + lane_n < length)
    k_tile = load_rows(k.ptr + batch * k.stride_b + kv_head * k.stride_h, first_n, lane_n, k.stride_s, valid_n,
                       HEAD_DIM, BLOCK_D)
    v_tile = load_rows(v.ptr + batch * v.stride_b + kv_head * v.stride_h, first_n, lane_n, v.stride_s, valid_n,
                       HEAD_DIM, BLOCK_D)
    dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for member in range(heads_per_kv):
        head = kv_head * heads_per_kv + member
        batch_head = batch * heads + head
        q_base = q.ptr + batch * q.stride_b + head * q.stride_h
        dout_base = dout.ptr + batch * dout.stride_b + head * dout.stride_h
        start, count, listed = load_row(twin, batch_head * num_blocks + block, num_queries, Q_BLOCK)
        first_tail = 0
        if not GATHER:
            per_entry: tl.constexpr = Q_BLOCK // BLOCK_M
            whole = whole_entries(twin, start, count, listed, num_queries, Q_BLOCK)
            first_tail = num_steps(whole, Q_BLOCK, TAIL_M, GATHER)
            index = load_entry(twin, start, 0, whole, listed)
            for i in tl.range(whole * per_entry):
                first_m = index * Q_BLOCK + (i % per_entry) * BLOCK_M
                index = load_entry(twin, start, (i + 1) // per_entry, whole, listed)
                q_tile = load_tile(q_tiles, q, batch, head, first_m, BLOCK_M, HEAD_DIM, BLOCK_D)
                dout_tile = load_tile(dout_tiles, dout, batch, head, first_m, BLOCK_M, HEAD_DIM, BLOCK_D)
                scores = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")
                # lse and delta are read as late as can be: each takes a register per column.
                lse = _load_stats(stats_tiles, stats_ptr, stride_stats, batch_head, first_m, BLOCK_M)
                probs = tl.exp2(scores * scale_log2 - lse[None, :])
                dv_acc = tl.dot(probs.to(dout_tile.dtype), dout_tile, dv_acc, input_precision="ieee")
                dprobs = tl.dot(v_tile, tl.trans(dout_tile), input_precision="ieee")
                delta = _load_stats(stats_tiles, stats_ptr, stride_stats, batch_head + stats_rows, first_m, BLOCK_M)
                dscores = probs * (dprobs - delta[None, :])
                dk_acc = tl.dot(dscores.to(q_tile.dtype), q_tile, dk_acc, input_precision="ieee")
        row_stats = stats_ptr + batch_head * stride_stats
        for i in tl.range(first_tail, num_steps(count, Q_BLOCK, TAIL_M, GATHER), num_stages=TAIL_STAGES):
            first_m, lane_m, valid_m = step_tokens(i, twin, start, count, listed, num_queries, Q_BLOCK, TAIL_M, GATHER)
            q_tile = load_rows(q_base, first_m, lane_m, q.stride_s, valid_m, HEAD_DIM, BLOCK_D)
            dout_tile = load_rows(dout_base, first_m, lane_m, dout.stride_s, valid_m, HEAD_DIM, BLOCK_D)
            scores = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")
            lse = tl.load(row_stats + first_m + lane_m, mask=valid_m, other=float("inf"))
            probs = tl.exp2(scores * scale_log2 - lse[None, :])
            dv_acc = tl.dot(probs.to(dout_tile.dtype), dout_tile, dv_acc, input_precision="ieee")
            dprobs = tl.dot(v_tile, tl.trans(dout_tile), input_precision="ieee")
            delta_row = stats_ptr + (batch_head + stats_rows) * stride_stats
            delta = tl.load(delta_row + first_m + lane_m, mask=valid_m, other=0.0)
            dscores = probs * (dprobs - delta[None, :])
            dk_acc = tl.dot(dscores.to(q_tile.dtype), q_tile, dk_acc, input_precision="ieee")

    # Padding keys were loaded as 0 and have collected garbage in their own rows only.
    dk_acc = tl.where(valid_n[:, None], dk_acc * scale, 0.0)
    dv_acc = tl.where(valid_n[:, None], dv_acc, 0.0)
    store_rows(dk.ptr + batch * dk.stride_b + kv_head * dk.stride_h, first_n, lane_n, dk.stride_s, stored_n, dk_acc,
               HEAD_DIM, BLOCK_D)
    store_rows(dv.ptr + batch * dv.stride_b + kv_head * dv.stride_h, first_n, lane_n, dv.stride_s, stored_n, dv_acc,
               HEAD_DIM, BLOCK_D)
