"""dK and dV of token lists, whose key-major twin would leave one key to a tile: added with fp32 atomics.

Dims: s query tokens, sk key tokens, b batch, h query heads, G key/value heads, Nq query groups, d head dim. A program
sums over its whole query group and adds each key's row once.
"""

import triton
import triton.language as tl

from megatron_dsv.kernels.sparse_attention.triton.lists import load_row, load_rows, num_steps, step_tokens


@triton.jit
def _sparse_attention_bwd_dkv_scatter_kernel(
        q, k, v, dout, dk, dv, stats_ptr, stride_stats, lists, kv_length_ptr, num_queries, num_groups, heads, kv_heads,
        scale, scale_log2, Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr,
        BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, GATHER: tl.constexpr):
    tiles: tl.constexpr = (Q_BLOCK + BLOCK_M - 1) // BLOCK_M
    group = tl.program_id(0)
    batch_head = tl.program_id(1).to(tl.int64)
    batch, head = batch_head // heads, batch_head % heads
    kv_head = head // (heads // kv_heads)
    lane_m = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    q_base = q.ptr + batch * q.stride_b + head * q.stride_h
    dout_base = dout.ptr + batch * dout.stride_b + head * dout.stride_h
    lse_base = stats_ptr + batch_head * stride_stats
    delta_base = lse_base + tl.num_programs(1).to(tl.int64) * stride_stats
    k_base = k.ptr + batch * k.stride_b + kv_head * k.stride_h
    v_base = v.ptr + batch * v.stride_b + kv_head * v.stride_h
    dk_base = dk.ptr + batch * dk.stride_b + kv_head * dk.stride_h
    dv_base = dv.ptr + batch * dv.stride_b + kv_head * dv.stride_h

    length = tl.load(kv_length_ptr + batch * kv_heads + kv_head)
    start, count, listed = load_row(lists, batch_head * num_groups + group, length, KV_BLOCK)
    for i in range(num_steps(count, KV_BLOCK, BLOCK_N, GATHER)):
        first_n, lane_n, valid_n = step_tokens(i, lists, start, count, listed, length, KV_BLOCK, BLOCK_N, GATHER)
        k_tile = load_rows(k_base, first_n, lane_n, k.stride_s, valid_n, HEAD_DIM, BLOCK_D)
        v_tile = load_rows(v_base, first_n, lane_n, v.stride_s, valid_n, HEAD_DIM, BLOCK_D)
        dk_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv_acc = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        for tile in range(tiles):
            first_m = (group * Q_BLOCK + tile * BLOCK_M).to(tl.int64)
            valid_m = (tile * BLOCK_M + lane_m < Q_BLOCK) & (first_m + lane_m < num_queries)
            q_tile = load_rows(q_base, first_m, lane_m, q.stride_s, valid_m, HEAD_DIM, BLOCK_D)
            dout_tile = load_rows(dout_base, first_m, lane_m, dout.stride_s, valid_m, HEAD_DIM, BLOCK_D)
            lse = tl.load(lse_base + first_m + lane_m, mask=valid_m, other=float("inf"))
            delta = tl.load(delta_base + first_m + lane_m, mask=valid_m, other=0.0)
            scores = tl.dot(k_tile, tl.trans(q_tile), input_precision="ieee")
            probs = tl.exp2(scores * scale_log2 - lse[None, :])
            dv_acc = tl.dot(probs.to(dout_tile.dtype), dout_tile, dv_acc, input_precision="ieee")
            dprobs = tl.dot(v_tile, tl.trans(dout_tile), input_precision="ieee")
            dscores = probs * (dprobs - delta[None, :])
            dk_acc = tl.dot(dscores.to(q_tile.dtype), q_tile, dk_acc, input_precision="ieee")
        stored = valid_n[:, None] & (dims < HEAD_DIM)[None, :]
        tl.atomic_add(dk_base + first_n * dk.stride_s + (lane_n[:, None] * dk.stride_s + dims[None, :]),
                      dk_acc * scale, mask=stored, sem="relaxed")
        tl.atomic_add(dv_base + first_n * dv.stride_s + (lane_n[:, None] * dv.stride_s + dims[None, :]), dv_acc,
                      mask=stored, sem="relaxed")
