"""Backward over the keys of token lists: dK and dV, and dQ where the whole query group fits one tile.

A program owns one query group and walks its list. For every key it sums over all queries of the group, then hands the
row on once: added atomically to fp32 dk and dv, or written to a place of its own (``PARTIAL``) for an ordered sum.

Dims: s query tokens, sk key tokens, b batch, h query heads, G key/value heads, Nq query groups, d head dim.
"""

import triton
import triton.language as tl

from megatron_dsv.kernels.sparse_attention.triton.lists import load_length
from megatron_dsv.kernels.sparse_attention.triton.tokens.rows import (
    add,
    gather,
    load_keys,
    load_list,
    load_lse_log2,
    store,
)


@triton.jit
def _accumulate(k, v, q, dout, lse, delta, valid_n, dq, dk, dv, scale_log2, FUSED: tl.constexpr):
    """Adds to dk, dv [BLOCK_N, d] what the queries q, dout [BLOCK_M, d] contribute, and to dq [BLOCK_M, d] if FUSED.

    dq and dk lack softmax_scale. Queries run along the rows of S, where lse and delta take few registers.
    """
    scores = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2 - lse[:, None]
    if valid_n is not None:
        scores = tl.where(valid_n[None, :], scores, float("-inf"))
    probs = tl.exp2(scores)
    dv = tl.dot(tl.trans(probs.to(dout.dtype)), dout, dv, input_precision="ieee")
    dprobs = tl.dot(dout, tl.trans(v), input_precision="ieee")
    dscores = (probs * (dprobs - delta[:, None])).to(q.dtype)
    dk = tl.dot(tl.trans(dscores), q, dk, input_precision="ieee")
    if FUSED:
        dq = tl.dot(dscores, k, dq, input_precision="ieee")
    return dq, dk, dv


@triton.jit
def _hand_on(dk_base, dv_base, token, place, stride_dks, stride_dvs, valid_n, dk, dv, HEAD_DIM: tl.constexpr,
             BLOCK_D: tl.constexpr, PARTIAL: tl.constexpr):
    """Passes the rows of dk and dv on: to their places, or added to their keys."""
    if PARTIAL:
        store(dk_base, place, stride_dks, valid_n, dk, HEAD_DIM, BLOCK_D)
        store(dv_base, place, stride_dvs, valid_n, dv, HEAD_DIM, BLOCK_D)
    else:
        add(dk_base, token, stride_dks, valid_n, dk, HEAD_DIM, BLOCK_D)
        add(dv_base, token, stride_dvs, valid_n, dv, HEAD_DIM, BLOCK_D)


@triton.jit
def _token_attention_bwd_dkv_kernel(
        q_ptr, k_ptr, v_ptr, out_ptr, dout_ptr, lse_ptr, delta_ptr, dq_ptr, dk_ptr, dv_ptr, kv_indices_ptr,
        row_start_ptr, row_count_ptr, kv_length_ptr, stride_qs, stride_qb, stride_qh, stride_ks, stride_kb, stride_kg,
        stride_vs, stride_vb, stride_vg, stride_os, stride_ob, stride_oh, stride_dos, stride_dob, stride_doh,
        stride_dqs, stride_dqb, stride_dqh, stride_dks, stride_dkb, stride_dkg, stride_dvs, stride_dvb, stride_dvg,
        first_row, num_queries, num_keys, num_groups, heads, kv_heads, scale, scale_log2,
        Q_BLOCK: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
        BLOCK_D: tl.constexpr, FUSED: tl.constexpr, PARTIAL: tl.constexpr):
    """Rows from ``first_row`` on, one a program.

    ``FUSED`` (one tile a group) computes delta and dq as well; else delta is read. With ``PARTIAL`` dk and dv are
    [rows, places, d] with strides stride_d*b, stride_d*s, and a key's place is its place in the list; else they are
    [sk, b, G, d], fp32 and zeroed.
    """
    tiles: tl.constexpr = (Q_BLOCK + BLOCK_M - 1) // BLOCK_M
    row = first_row + tl.program_id(0).to(tl.int64)
    batch_head, group = row // num_groups, row % num_groups
    batch, head = batch_head // heads, batch_head % heads
    kv_head = head // (heads // kv_heads)
    q_base = q_ptr + batch * stride_qb + head * stride_qh
    dout_base = dout_ptr + batch * stride_dob + head * stride_doh
    lse_base = lse_ptr + batch_head * num_queries
    delta_base = delta_ptr + batch_head * num_queries
    k_base = k_ptr + batch * stride_kb + kv_head * stride_kg
    v_base = v_ptr + batch * stride_vb + kv_head * stride_vg
    if PARTIAL:
        dk_base = dk_ptr + tl.program_id(0).to(tl.int64) * stride_dkb
        dv_base = dv_ptr + tl.program_id(0).to(tl.int64) * stride_dvb
    else:
        dk_base = dk_ptr + batch * stride_dkb + kv_head * stride_dkg
        dv_base = dv_ptr + batch * stride_dvb + kv_head * stride_dvg

    lane = tl.arange(0, BLOCK_M)
    first = group * Q_BLOCK
    valid = (lane < Q_BLOCK) & (first + lane < num_queries)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    if tiles == 1:
        # The group stays in shared memory.
        q = gather(q_base, first + lane, stride_qs, valid, HEAD_DIM, BLOCK_D)
        dout = gather(dout_base, first + lane, stride_dos, valid, HEAD_DIM, BLOCK_D)
        lse = load_lse_log2(lse_base, first + lane, valid)
        if FUSED:
            out = gather(out_ptr + batch * stride_ob + head * stride_oh, first + lane, stride_os, valid, HEAD_DIM,
                         BLOCK_D)
            delta = tl.sum(out.to(tl.float32) * dout.to(tl.float32), 1)
        else:
            delta = tl.load(delta_base + first + lane, mask=valid, other=0.0)

    length = load_length(kv_length_ptr + batch * kv_heads + kv_head, num_keys)
    start, count, listed = load_list(kv_indices_ptr, row_start_ptr, row_count_ptr, row, length)
    whole = count // BLOCK_N * BLOCK_N
    token = load_keys(kv_indices_ptr, start, 0, count, listed, BLOCK_N)
    place = tl.arange(0, BLOCK_N)
    none = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    if tiles == 1:
        for step in range(0, whole, BLOCK_N):
            following = load_keys(kv_indices_ptr, start, step + BLOCK_N, count, listed, BLOCK_N)
            k = gather(k_base, token, stride_ks, None, HEAD_DIM, BLOCK_D)
            v = gather(v_base, token, stride_vs, None, HEAD_DIM, BLOCK_D)
            dq, dk, dv = _accumulate(k, v, q, dout, lse, delta, None, dq, none, none, scale_log2, FUSED)
            _hand_on(dk_base, dv_base, token, place + step, stride_dks, stride_dvs, None, dk * scale, dv, HEAD_DIM,
                     BLOCK_D, PARTIAL)
            token = following
        if whole < count:
            valid_n = whole + place < count
            k = gather(k_base, token, stride_ks, valid_n, HEAD_DIM, BLOCK_D)
            v = gather(v_base, token, stride_vs, valid_n, HEAD_DIM, BLOCK_D)
            dq, dk, dv = _accumulate(k, v, q, dout, lse, delta, valid_n, dq, none, none, scale_log2, FUSED)
            _hand_on(dk_base, dv_base, token, place + whole, stride_dks, stride_dvs, valid_n, dk * scale, dv,
                     HEAD_DIM, BLOCK_D, PARTIAL)
    else:
        for step in range(0, count, BLOCK_N):
            following = load_keys(kv_indices_ptr, start, step + BLOCK_N, count, listed, BLOCK_N)
            valid_n = step + place < count
            k = gather(k_base, token, stride_ks, valid_n, HEAD_DIM, BLOCK_D)
            v = gather(v_base, token, stride_vs, valid_n, HEAD_DIM, BLOCK_D)
            dk, dv = none, none
            for tile in range(tiles):
                lane_t = tile * BLOCK_M + lane
                valid_t = (lane_t < Q_BLOCK) & (first + lane_t < num_queries)
                q_t = gather(q_base, first + lane_t, stride_qs, valid_t, HEAD_DIM, BLOCK_D)
                dout_t = gather(dout_base, first + lane_t, stride_dos, valid_t, HEAD_DIM, BLOCK_D)
                lse_t = load_lse_log2(lse_base, first + lane_t, valid_t)
                delta_t = tl.load(delta_base + first + lane_t, mask=valid_t, other=0.0)
                dq, dk, dv = _accumulate(k, v, q_t, dout_t, lse_t, delta_t, valid_n, dq, dk, dv, scale_log2, False)
            _hand_on(dk_base, dv_base, token, place + step, stride_dks, stride_dvs, valid_n, dk * scale, dv, HEAD_DIM,
                     BLOCK_D, PARTIAL)
            token = following
    if FUSED:
        store(dq_ptr + batch * stride_dqb + head * stride_dqh, first + lane, stride_dqs, valid, dq * scale, HEAD_DIM,
              BLOCK_D)
