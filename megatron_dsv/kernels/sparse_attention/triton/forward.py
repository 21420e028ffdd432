"""Forward kernel: one program per tile of query rows walks the keys that the tile's query group lists.

Dims: s query tokens, sk key tokens, b batch, h query heads, G key/value heads, Nq query groups, d head dim.
Addresses are 64-bit from the tile's base on, so tensors may exceed 2^31 elements.
"""

import triton
import triton.language as tl

from megatron_dsv.kernels.sparse_attention.triton.lists import (
    load_row,
    load_rows,
    num_steps,
    step_tokens,
    store_rows,
)


@triton.jit
def _sparse_attention_fwd_kernel(
        q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, kv_indices_ptr, row_start_ptr, row_count_ptr, kv_length_ptr,
        stride_qs, stride_qb, stride_qh, stride_ks, stride_kb, stride_kg, stride_vs, stride_vb, stride_vg,
        stride_os, stride_ob, stride_oh, num_queries, num_groups, heads, kv_heads, scale_log2,
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
    q = load_rows(q_ptr + batch * stride_qb + head * stride_qh, first_m, lane_m, stride_qs, valid_m, HEAD_DIM, BLOCK_D)
    k_base = k_ptr + batch * stride_kb + kv_head * stride_kg
    v_base = v_ptr + batch * stride_vb + kv_head * stride_vg

    length = tl.load(kv_length_ptr + batch * kv_heads + kv_head)
    start, count, listed = load_row(row_start_ptr, row_count_ptr, batch_head * num_groups + group, length, KV_BLOCK)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    for i in range(num_steps(count, KV_BLOCK, BLOCK_N, GATHER)):
        first_n, lane_n, valid_n = step_tokens(i, kv_indices_ptr, start, count, listed, length, KV_BLOCK, BLOCK_N,
                                               GATHER)
        k = load_rows(k_base, first_n, lane_n, stride_ks, valid_n, HEAD_DIM, BLOCK_D)
        scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(valid_n[None, :], scores, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(scores, 1))
        # A step of padding alone leaves the maximum at -inf, and -inf - -inf is NaN.
        reference = tl.where(new_max == float("-inf"), 0.0, new_max)
        probs = tl.exp2(scores - reference[:, None])
        rescale = tl.exp2(row_max - reference)
        row_sum = row_sum * rescale + tl.sum(probs, 1)
        v = load_rows(v_base, first_n, lane_n, stride_vs, valid_n, HEAD_DIM, BLOCK_D)
        acc = tl.dot(probs.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
        row_max = new_max

    attended = row_sum > 0
    row_sum = tl.where(attended, row_sum, 1.0)
    out = acc / row_sum[:, None]
    store_rows(out_ptr + batch * stride_ob + head * stride_oh, first_m, lane_m, stride_os, valid_m, out, HEAD_DIM,
               BLOCK_D)
    lse = tl.where(attended, (row_max + tl.log2(row_sum)) * 0.6931471805599453, float("-inf"))
    tl.store(lse_ptr + batch_head * num_queries + first_m + lane_m, lse, mask=valid_m)
