"""Backward pass over query rows: dQ, and delta = sum(out * dout), which the dK/dV pass reads.

Dims: s query tokens, sk key tokens, b batch, h query heads, G key/value heads, Nq query groups, d head dim.
Sums run in list order and nothing is shared between programs, so repeats agree bitwise.
"""

import triton
import triton.language as tl

from megatron_dsv.kernels.sparse_attention.triton.lists import (
    load_lse_log2,
    load_row,
    load_rows,
    num_steps,
    step_tokens,
    store_rows,
)


@triton.jit
def _sparse_attention_bwd_dq_kernel(
        q_ptr, k_ptr, v_ptr, out_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, kv_indices_ptr, row_start_ptr,
        row_count_ptr, kv_length_ptr, stride_qs, stride_qb, stride_qh, stride_ks, stride_kb, stride_kg, stride_vs,
        stride_vb, stride_vg, stride_os, stride_ob, stride_oh, stride_dos, stride_dob, stride_doh, stride_dqs,
        stride_dqb, stride_dqh, num_queries, num_groups, heads, kv_heads, scale, scale_log2,
        Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, GATHER: tl.constexpr):
    tiles: tl.constexpr = (Q_BLOCK + BLOCK_M - 1) // BLOCK_M
    group = tl.program_id(0) // tiles
    in_group = (tl.program_id(0) % tiles) * BLOCK_M
    batch_head = tl.program_id(1).to(tl.int64)
    batch, head = batch_head // heads, batch_head % heads
    kv_head = head // (heads // kv_heads)

    lane_m = tl.arange(0, BLOCK_M)
    first_m = (group * Q_BLOCK + in_group).to(tl.int64)
    valid_m = (in_group + lane_m < Q_BLOCK) & (first_m + lane_m < num_queries)
    out = load_rows(out_ptr + batch * stride_ob + head * stride_oh, first_m, lane_m, stride_os, valid_m, HEAD_DIM,
                    BLOCK_D)
    dout = load_rows(dout_ptr + batch * stride_dob + head * stride_doh, first_m, lane_m, stride_dos, valid_m, HEAD_DIM,
                     BLOCK_D)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    tl.store(delta_ptr + batch_head * num_queries + first_m + lane_m, delta, mask=valid_m)
    q = load_rows(q_ptr + batch * stride_qb + head * stride_qh, first_m, lane_m, stride_qs, valid_m, HEAD_DIM, BLOCK_D)
    lse = load_lse_log2(lse_ptr + batch_head * num_queries, first_m, lane_m, valid_m)
    k_base = k_ptr + batch * stride_kb + kv_head * stride_kg
    v_base = v_ptr + batch * stride_vb + kv_head * stride_vg

    length = tl.load(kv_length_ptr + batch * kv_heads + kv_head)
    start, count, listed = load_row(row_start_ptr, row_count_ptr, batch_head * num_groups + group, length, KV_BLOCK)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for i in range(num_steps(count, KV_BLOCK, BLOCK_N, GATHER)):
        first_n, lane_n, valid_n = step_tokens(i, kv_indices_ptr, start, count, listed, length, KV_BLOCK, BLOCK_N,
                                               GATHER)
        k = load_rows(k_base, first_n, lane_n, stride_ks, valid_n, HEAD_DIM, BLOCK_D)
        v = load_rows(v_base, first_n, lane_n, stride_vs, valid_n, HEAD_DIM, BLOCK_D)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        probs = tl.where(valid_n[None, :], tl.exp2(scores - lse[:, None]), 0.0)
        dprobs = tl.dot(dout, tl.trans(v), input_precision="ieee")
        dscores = probs * (dprobs - delta[:, None])
        dq = tl.dot(dscores.to(k.dtype), k, dq, input_precision="ieee")

    store_rows(dq_ptr + batch * stride_dqb + head * stride_dqh, first_m, lane_m, stride_dqs, valid_m, dq * scale,
               HEAD_DIM, BLOCK_D)
