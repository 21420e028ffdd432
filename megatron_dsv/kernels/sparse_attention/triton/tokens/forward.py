"""Forward over lists of single keys: one program per tile of query rows gathers the rows of k and v it attends to.

Dims: s query tokens, sk key tokens, b batch, h query heads, G key/value heads, Nq query groups, d head dim.
"""

import triton
import triton.language as tl

from megatron_dsv.kernels.sparse_attention.triton.lists import load_length
from megatron_dsv.kernels.sparse_attention.triton.tokens.rows import gather, load_keys, load_list, store


@triton.jit
def _attend(q, k_base, v_base, token, valid, stride_ks, stride_vs, row_max, row_sum, acc, scale_log2,
            HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """The running maximum, sum and output after one more step of keys; ``valid`` None: all of them count."""
    k = gather(k_base, token, stride_ks, valid, HEAD_DIM, BLOCK_D)
    v = gather(v_base, token, stride_vs, valid, HEAD_DIM, BLOCK_D)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee")
    if valid is not None:
        scores = tl.where(valid[None, :], scores, float("-inf"))
    new_max = tl.maximum(row_max, tl.max(scores, 1) * scale_log2)
    probs = tl.exp2(scores * scale_log2 - new_max[:, None])
    rescale = tl.exp2(row_max - new_max)
    row_sum = row_sum * rescale + tl.sum(probs, 1)
    acc = tl.dot(probs.to(v.dtype), v, acc * rescale[:, None], input_precision="ieee")
    return new_max, row_sum, acc


@triton.jit
def _token_attention_fwd_kernel(
        q_ptr, k_ptr, v_ptr, out_ptr, lse_ptr, kv_indices_ptr, row_start_ptr, row_count_ptr, kv_length_ptr,
        stride_qs, stride_qb, stride_qh, stride_ks, stride_kb, stride_kg, stride_vs, stride_vb, stride_vg,
        stride_os, stride_ob, stride_oh, num_queries, num_keys, num_groups, heads, kv_heads, scale_log2,
        Q_BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
        BLOCK_D: tl.constexpr):
    tiles: tl.constexpr = (Q_BLOCK + BLOCK_M - 1) // BLOCK_M
    group = tl.program_id(0) // tiles
    batch_head = tl.program_id(1).to(tl.int64)
    batch, head = batch_head // heads, batch_head % heads
    kv_head = head // (heads // kv_heads)

    lane_m = (tl.program_id(0) % tiles) * BLOCK_M + tl.arange(0, BLOCK_M)
    query = (group * Q_BLOCK + lane_m).to(tl.int64)
    valid_m = (lane_m < Q_BLOCK) & (query < num_queries)
    q = gather(q_ptr + batch * stride_qb + head * stride_qh, query, stride_qs, valid_m, HEAD_DIM, BLOCK_D)
    k_base = k_ptr + batch * stride_kb + kv_head * stride_kg
    v_base = v_ptr + batch * stride_vb + kv_head * stride_vg

    length = load_length(kv_length_ptr + batch * kv_heads + kv_head, num_keys)
    start, count, listed = load_list(kv_indices_ptr, row_start_ptr, row_count_ptr, batch_head * num_groups + group,
                                     length)
    # No step is without a valid key, so the maximum is finite from the first one on.
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    whole = count // BLOCK_N * BLOCK_N
    token = load_keys(kv_indices_ptr, start, 0, count, listed, BLOCK_N)
    for step in range(0, whole, BLOCK_N):
        following = load_keys(kv_indices_ptr, start, step + BLOCK_N, count, listed, BLOCK_N)
        row_max, row_sum, acc = _attend(q, k_base, v_base, token, None, stride_ks, stride_vs, row_max, row_sum, acc,
                                        scale_log2, HEAD_DIM, BLOCK_D)
        token = following
    if whole < count:
        row_max, row_sum, acc = _attend(q, k_base, v_base, token, whole + tl.arange(0, BLOCK_N) < count, stride_ks,
                                        stride_vs, row_max, row_sum, acc, scale_log2, HEAD_DIM, BLOCK_D)

    attended = row_sum > 0
    row_sum = tl.where(attended, row_sum, 1.0)
    store(out_ptr + batch * stride_ob + head * stride_oh, query, stride_os, valid_m, acc / row_sum[:, None], HEAD_DIM,
          BLOCK_D)
    lse = tl.where(attended, (row_max + tl.log2(row_sum)) * 0.6931471805599453, float("-inf"))
    tl.store(lse_ptr + batch_head * num_queries + query, lse, mask=valid_m)
