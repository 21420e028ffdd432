"""Backward passes over keys: dK and dV.

Dims: s query tokens, sk key tokens, b batch, h query heads, G key/value heads, Nq query groups, Nk key blocks, d head
dim. The key-major kernel walks the selection's twin and shares nothing between programs: repeats agree bitwise. The
scatter kernel serves token lists, whose twin would leave one key to a tile: a program sums over its whole query group
and adds each row once, with fp32 atomics.
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
def _accumulate(k, v, q, dout, lse, delta, dk, dv, scale_log2):
    """dk, dv [BLOCK_N, d] plus what the query rows q, dout [BLOCK_M, d] add to them (dk without softmax_scale)."""
    scores = tl.dot(k, tl.trans(q), input_precision="ieee") * scale_log2
    probs = tl.exp2(scores - lse[None, :])
    dv = tl.dot(probs.to(dout.dtype), dout, dv, input_precision="ieee")
    dprobs = tl.dot(v, tl.trans(dout), input_precision="ieee")
    dscores = probs * (dprobs - delta[None, :])
    dk = tl.dot(dscores.to(q.dtype), q, dk, input_precision="ieee")
    return dk, dv


@triton.jit
def _sparse_attention_bwd_dkv_kernel(
        q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, twin_indices_ptr, twin_start_ptr,
        twin_count_ptr, kv_length_ptr, stride_qs, stride_qb, stride_qh, stride_ks, stride_kb, stride_kg, stride_vs,
        stride_vb, stride_vg, stride_dos, stride_dob, stride_doh, stride_dks, stride_dkb, stride_dkg, stride_dvs,
        stride_dvb, stride_dvg, num_queries, num_keys, num_blocks, heads, kv_heads, scale, scale_log2,
        Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, GATHER: tl.constexpr):
    tiles: tl.constexpr = (KV_BLOCK + BLOCK_N - 1) // BLOCK_N
    block = tl.program_id(0) // tiles
    in_block = (tl.program_id(0) % tiles) * BLOCK_N
    batch_kv_head = tl.program_id(1).to(tl.int64)
    batch, kv_head = batch_kv_head // kv_heads, batch_kv_head % kv_heads
    heads_per_kv = heads // kv_heads

    length = tl.load(kv_length_ptr + batch_kv_head)
    lane_n = tl.arange(0, BLOCK_N)
    first_n = (block * KV_BLOCK + in_block).to(tl.int64)
    stored_n = (in_block + lane_n < KV_BLOCK) & (first_n + lane_n < num_keys)
    valid_n = stored_n & (first_n + lane_n < length)
    k = load_rows(k_ptr + batch * stride_kb + kv_head * stride_kg, first_n, lane_n, stride_ks, valid_n, HEAD_DIM,
                  BLOCK_D)
    v = load_rows(v_ptr + batch * stride_vb + kv_head * stride_vg, first_n, lane_n, stride_vs, valid_n, HEAD_DIM,
                  BLOCK_D)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    for member in range(heads_per_kv):
        batch_head = batch * heads + kv_head * heads_per_kv + member
        head = kv_head * heads_per_kv + member
        q_base = q_ptr + batch * stride_qb + head * stride_qh
        dout_base = dout_ptr + batch * stride_dob + head * stride_doh
        lse_base = lse_ptr + batch_head * num_queries
        delta_base = delta_ptr + batch_head * num_queries
        start, count, listed = load_row(twin_start_ptr, twin_count_ptr, batch_head * num_blocks + block, num_queries,
                                        Q_BLOCK)
        for i in range(num_steps(count, Q_BLOCK, BLOCK_M, GATHER)):
            first_m, lane_m, valid_m = step_tokens(i, twin_indices_ptr, start, count, listed, num_queries, Q_BLOCK,
                                                   BLOCK_M, GATHER)
            q = load_rows(q_base, first_m, lane_m, stride_qs, valid_m, HEAD_DIM, BLOCK_D)
            dout = load_rows(dout_base, first_m, lane_m, stride_dos, valid_m, HEAD_DIM, BLOCK_D)
            lse = load_lse_log2(lse_base, first_m, lane_m, valid_m)
            delta = tl.load(delta_base + first_m + lane_m, mask=valid_m, other=0.0)
            dk, dv = _accumulate(k, v, q, dout, lse, delta, dk, dv, scale_log2)

    # Padding keys were loaded as 0 and have collected garbage in their own rows only.
    dk = tl.where(valid_n[:, None], dk * scale, 0.0)
    dv = tl.where(valid_n[:, None], dv, 0.0)
    store_rows(dk_ptr + batch * stride_dkb + kv_head * stride_dkg, first_n, lane_n, stride_dks, stored_n, dk, HEAD_DIM,
               BLOCK_D)
    store_rows(dv_ptr + batch * stride_dvb + kv_head * stride_dvg, first_n, lane_n, stride_dvs, stored_n, dv, HEAD_DIM,
               BLOCK_D)


@triton.jit
def _sparse_attention_bwd_dkv_scatter_kernel(
        q_ptr, k_ptr, v_ptr, dout_ptr, lse_ptr, delta_ptr, dk_ptr, dv_ptr, kv_indices_ptr, row_start_ptr,
        row_count_ptr, kv_length_ptr, stride_qs, stride_qb, stride_qh, stride_ks, stride_kb, stride_kg, stride_vs,
        stride_vb, stride_vg, stride_dos, stride_dob, stride_doh, stride_dks, stride_dkb, stride_dkg, stride_dvs,
        stride_dvb, stride_dvg, num_queries, num_groups, heads, kv_heads, scale, scale_log2,
        Q_BLOCK: tl.constexpr, KV_BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, GATHER: tl.constexpr):
    tiles: tl.constexpr = (Q_BLOCK + BLOCK_M - 1) // BLOCK_M
    group = tl.program_id(0)
    batch_head = tl.program_id(1).to(tl.int64)
    batch, head = batch_head // heads, batch_head % heads
    kv_head = head // (heads // kv_heads)
    lane_m = tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    q_base = q_ptr + batch * stride_qb + head * stride_qh
    dout_base = dout_ptr + batch * stride_dob + head * stride_doh
    lse_base = lse_ptr + batch_head * num_queries
    delta_base = delta_ptr + batch_head * num_queries
    k_base = k_ptr + batch * stride_kb + kv_head * stride_kg
    v_base = v_ptr + batch * stride_vb + kv_head * stride_vg
    dk_base = dk_ptr + batch * stride_dkb + kv_head * stride_dkg
    dv_base = dv_ptr + batch * stride_dvb + kv_head * stride_dvg

    length = tl.load(kv_length_ptr + batch * kv_heads + kv_head)
    start, count, listed = load_row(row_start_ptr, row_count_ptr, batch_head * num_groups + group, length, KV_BLOCK)
    for i in range(num_steps(count, KV_BLOCK, BLOCK_N, GATHER)):
        first_n, lane_n, valid_n = step_tokens(i, kv_indices_ptr, start, count, listed, length, KV_BLOCK, BLOCK_N,
                                               GATHER)
        k = load_rows(k_base, first_n, lane_n, stride_ks, valid_n, HEAD_DIM, BLOCK_D)
        v = load_rows(v_base, first_n, lane_n, stride_vs, valid_n, HEAD_DIM, BLOCK_D)
        dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
        for tile in range(tiles):
            first_m = (group * Q_BLOCK + tile * BLOCK_M).to(tl.int64)
            valid_m = (tile * BLOCK_M + lane_m < Q_BLOCK) & (first_m + lane_m < num_queries)
            q = load_rows(q_base, first_m, lane_m, stride_qs, valid_m, HEAD_DIM, BLOCK_D)
            dout = load_rows(dout_base, first_m, lane_m, stride_dos, valid_m, HEAD_DIM, BLOCK_D)
            lse = load_lse_log2(lse_base, first_m, lane_m, valid_m)
            delta = tl.load(delta_base + first_m + lane_m, mask=valid_m, other=0.0)
            dk, dv = _accumulate(k, v, q, dout, lse, delta, dk, dv, scale_log2)
        stored = valid_n[:, None] & (dims < HEAD_DIM)[None, :]
        tl.atomic_add(dk_base + first_n * stride_dks + (lane_n[:, None] * stride_dks + dims[None, :]), dk * scale,
                      mask=stored, sem="relaxed")
        tl.atomic_add(dv_base + first_n * stride_dvs + (lane_n[:, None] * stride_dvs + dims[None, :]), dv,
                      mask=stored, sem="relaxed")
