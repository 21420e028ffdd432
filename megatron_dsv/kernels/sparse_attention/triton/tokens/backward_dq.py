"""Backward over query rows of token lists: dQ, and delta = sum(out * dout), which the dK/dV pass reads.

Dims: s query tokens, sk key tokens, b batch, h query heads, G key/value heads, Nq query groups, d head dim.
Sums run in list order and nothing is shared between programs, so repeats agree bitwise.
"""

import triton
import triton.language as tl

from megatron_dsv.kernels.sparse_attention.triton.lists import load_length
from megatron_dsv.kernels.sparse_attention.triton.tokens.rows import gather, load_keys, load_list, load_lse_log2, store


@triton.jit
def _add_step(q, dout, lse, delta, k_base, v_base, token, valid, stride_ks, stride_vs, dq, scale_log2,
              HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """dq (without softmax_scale) after one more step of keys; ``valid`` None: all of them count."""
    # A row of k that is not valid is 0: what dS holds there adds nothing.
    k = gather(k_base, token, stride_ks, valid, HEAD_DIM, BLOCK_D)
    v = gather(v_base, token, stride_vs, valid, HEAD_DIM, BLOCK_D)
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2 - lse[:, None]
    if valid is not None:
        scores = tl.where(valid[None, :], scores, float("-inf"))
    probs = tl.exp2(scores)
    dprobs = tl.dot(dout, tl.trans(v), input_precision="ieee")
    dscores = probs * (dprobs - delta[:, None])
    return tl.dot(dscores.to(k.dtype), k, dq, input_precision="ieee")


@triton.jit
def _token_attention_bwd_dq_kernel(
        q_ptr, k_ptr, v_ptr, out_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, kv_indices_ptr, row_start_ptr,
        row_count_ptr, kv_length_ptr, stride_qs, stride_qb, stride_qh, stride_ks, stride_kb, stride_kg, stride_vs,
        stride_vb, stride_vg, stride_os, stride_ob, stride_oh, stride_dos, stride_dob, stride_doh, stride_dqs,
        stride_dqb, stride_dqh, num_queries, num_keys, num_groups, heads, kv_heads, scale, scale_log2,
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
    out = gather(out_ptr + batch * stride_ob + head * stride_oh, query, stride_os, valid_m, HEAD_DIM, BLOCK_D)
    dout = gather(dout_ptr + batch * stride_dob + head * stride_doh, query, stride_dos, valid_m, HEAD_DIM, BLOCK_D)
    delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
    tl.store(delta_ptr + batch_head * num_queries + query, delta, mask=valid_m)
    q = gather(q_ptr + batch * stride_qb + head * stride_qh, query, stride_qs, valid_m, HEAD_DIM, BLOCK_D)
    lse = load_lse_log2(lse_ptr + batch_head * num_queries, query, valid_m)
    k_base = k_ptr + batch * stride_kb + kv_head * stride_kg
    v_base = v_ptr + batch * stride_vb + kv_head * stride_vg

    length = load_length(kv_length_ptr + batch * kv_heads + kv_head, num_keys)
    start, count, listed = load_list(kv_indices_ptr, row_start_ptr, row_count_ptr, batch_head * num_groups + group,
                                     length)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    whole = count // BLOCK_N * BLOCK_N
    token = load_keys(kv_indices_ptr, start, 0, count, listed, BLOCK_N)
    for step in range(0, whole, BLOCK_N):
        following = load_keys(kv_indices_ptr, start, step + BLOCK_N, count, listed, BLOCK_N)
        dq = _add_step(q, dout, lse, delta, k_base, v_base, token, None, stride_ks, stride_vs, dq, scale_log2,
                       HEAD_DIM, BLOCK_D)
        token = following
    if whole < count:
        dq = _add_step(q, dout, lse, delta, k_base, v_base, token, whole + tl.arange(0, BLOCK_N) < count, stride_ks,
                       stride_vs, dq, scale_log2, HEAD_DIM, BLOCK_D)

    store(dq_ptr + batch * stride_dqb + head * stride_dqh, query, stride_dqs, valid_m, dq * scale, HEAD_DIM, BLOCK_D)
