"""Three passes over (sampled row, key) scores, none of which is stored: row sums, dq of the rows, dk of the keys.

Every pass recomputes teacher scores q k^T and student scores q_lr k_lr^T, both without their scales, which the
coefficients carry. No atomics: sums over keys go through one partial result a span of keys, sums over rows stay inside
a program. The query heads that read one key/value head count as further rows: row i of a program's head is sampled row
i // RATIO of head i % RATIO.

Dims: R sampled rows (num_rows), s keys (num_keys), b batch, h query heads, G key/value heads, RATIO = h / G, d head
dim (HEAD_DIM), r predictor rank (RANK).
"""

import triton
import triton.language as tl

from megatron_dsv.kernels.sparse_attention.triton.lists import load_length, load_rows


@triton.jit
def _load_sampled(base_ptr, row, head, stride_s, stride_h, valid, DIM: tl.constexpr, BLOCK: tl.constexpr):
    """Tile [rows, BLOCK] of sampled rows of several heads; 0 where a row is not valid or a column lies past DIM."""
    dims = tl.arange(0, BLOCK)
    pointers = base_ptr + row[:, None] * stride_s + head[:, None] * stride_h + dims[None, :]
    return tl.load(pointers, mask=valid[:, None] & (dims < DIM)[None, :], other=0.0)


@triton.jit
def _scores(x, y):
    """x y^T in fp32."""
    return tl.dot(x, tl.trans(y), input_precision="ieee")


@triton.jit
def _weighted_sum(weights, values, acc):
    """acc + weights values in fp32, for fp32 weights. Two bf16 parts of a weight keep 16 of its bits."""
    if values.dtype == tl.bfloat16:
        high = weights.to(tl.bfloat16)
        acc = tl.dot((weights - high.to(tl.float32)).to(tl.bfloat16), values, acc)
        acc = tl.dot(high, values, acc)
    else:
        # fp16 has no room for the weights' range.
        acc = tl.dot(weights, values.to(tl.float32), acc, input_precision="ieee")
    return acc


@triton.jit
def _load_coefficients(base_ptr, size, place, valid):
    """(mean_a, mean_t, alpha, beta, learns) of rows; all 0 and not learning where a row is not valid."""
    mean_a = tl.load(base_ptr + place, mask=valid, other=0.0)
    mean_t = tl.load(base_ptr + size + place, mask=valid, other=0.0)
    alpha = tl.load(base_ptr + 2 * size + place, mask=valid, other=0.0)
    beta = tl.load(base_ptr + 3 * size + place, mask=valid, other=0.0)
    # Queries without a gradient are not read: they may be padding, and hold anything.
    learns = (alpha != 0) | (beta != 0)
    return mean_a, mean_t, alpha, beta, learns


@triton.jit
def _predictor_loss_fwd_kernel(
        q_ptr, k_ptr, q_lr_ptr, k_lr_ptr, kv_length_ptr, sums_ptr,
        stride_qs, stride_qb, stride_qh, stride_ks, stride_kb, stride_kg,
        stride_qls, stride_qlb, stride_qlh, stride_kls, stride_klb, stride_klg,
        num_rows, num_keys, batches, kv_heads, spans,
        RATIO: tl.constexpr, SPAN: tl.constexpr, HEAD_DIM: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr):
    """sums fp64 [6, spans, b, h, R]: number of keys, sums of t, t^2, a, a^2 and a t over each span's real keys."""
    tiles = tl.cdiv(num_rows * RATIO, BLOCK_M)
    tile = tl.program_id(0) % tiles
    span = tl.program_id(0) // tiles % spans
    batch_head = (tl.program_id(0) // tiles // spans).to(tl.int64)
    batch, kv_head = batch_head // kv_heads, batch_head % kv_heads

    index = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    valid_m = index < num_rows * RATIO
    row, head = (index // RATIO).to(tl.int64), kv_head * RATIO + index % RATIO
    q = _load_sampled(q_ptr + batch * stride_qb, row, head, stride_qs, stride_qh, valid_m, HEAD_DIM, BLOCK_D)
    q_lr = _load_sampled(q_lr_ptr + batch * stride_qlb, row, head, stride_qls, stride_qlh, valid_m, RANK, BLOCK_R)
    k_base = k_ptr + batch * stride_kb + kv_head * stride_kg
    k_lr_base = k_lr_ptr + batch * stride_klb + kv_head * stride_klg
    length = load_length(kv_length_ptr + batch_head, num_keys)
    first_n = (span * SPAN).to(tl.int64)
    keys = tl.maximum(tl.minimum(length - span * SPAN, SPAN), 0)
    lane_n = tl.arange(0, BLOCK_N)

    # Squares are taken of scores less the mean of the span's first tile: the rows' own mean may dwarf their variation.
    valid_n = lane_n < keys
    around = 1.0 / tl.maximum(tl.minimum(keys, BLOCK_N), 1)
    k = load_rows(k_base, first_n, lane_n, stride_ks, valid_n, HEAD_DIM, BLOCK_D)
    k_lr = load_rows(k_lr_base, first_n, lane_n, stride_kls, valid_n, RANK, BLOCK_R)
    shift_t = tl.sum(_scores(q, k), 1) * around
    shift_a = tl.sum(_scores(q_lr, k_lr), 1) * around
    sum_t = tl.zeros([BLOCK_M], tl.float32)
    sum_tt = tl.zeros([BLOCK_M], tl.float32)
    sum_a = tl.zeros([BLOCK_M], tl.float32)
    sum_aa = tl.zeros([BLOCK_M], tl.float32)
    sum_at = tl.zeros([BLOCK_M], tl.float32)
    for step in range(0, keys, BLOCK_N):
        valid_n = lane_n < keys - step
        k = load_rows(k_base, first_n + step, lane_n, stride_ks, valid_n, HEAD_DIM, BLOCK_D)
        k_lr = load_rows(k_lr_base, first_n + step, lane_n, stride_kls, valid_n, RANK, BLOCK_R)
        t = tl.where(valid_n[None, :], _scores(q, k) - shift_t[:, None], 0.0)
        a = tl.where(valid_n[None, :], _scores(q_lr, k_lr) - shift_a[:, None], 0.0)
        sum_t += tl.sum(t, 1)
        sum_tt += tl.sum(t * t, 1)
        sum_a += tl.sum(a, 1)
        sum_aa += tl.sum(a * a, 1)
        sum_at += tl.sum(a * t, 1)

    # Undoing the shift in fp64 makes plain sums, which add up over spans and over ranks.
    count = tl.zeros([BLOCK_M], tl.float64) + keys.to(tl.float64)
    t0, t1 = shift_t.to(tl.float64), sum_t.to(tl.float64)
    a0, a1 = shift_a.to(tl.float64), sum_a.to(tl.float64)
    size = (tl.zeros((), tl.int64) + spans) * batches * kv_heads * RATIO * num_rows
    out = sums_ptr + ((span * batches + batch) * kv_heads * RATIO + head) * num_rows + row
    tl.store(out, count, mask=valid_m)
    tl.store(out + size, t1 + count * t0, mask=valid_m)
    tl.store(out + 2 * size, sum_tt.to(tl.float64) + t0 * (2 * t1 + count * t0), mask=valid_m)
    tl.store(out + 3 * size, a1 + count * a0, mask=valid_m)
    tl.store(out + 4 * size, sum_aa.to(tl.float64) + a0 * (2 * a1 + count * a0), mask=valid_m)
    tl.store(out + 5 * size, sum_at.to(tl.float64) + a0 * t1 + t0 * a1 + count * a0 * t0, mask=valid_m)


@triton.jit
def _predictor_loss_bwd_dq_kernel(
        q_ptr, k_ptr, q_lr_ptr, k_lr_ptr, kv_length_ptr, coefficients_ptr, dq_ptr,
        stride_qs, stride_qb, stride_qh, stride_ks, stride_kb, stride_kg,
        stride_qls, stride_qlb, stride_qlh, stride_kls, stride_klb, stride_klg,
        num_rows, num_keys, batches, kv_heads, spans,
        RATIO: tl.constexpr, SPAN: tl.constexpr, HEAD_DIM: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr):
    """dq fp32 [spans, R, b, h, r]: each span's share of (alpha (a - mean_a) + beta (t - mean_t)) k_lr."""
    tiles = tl.cdiv(num_rows * RATIO, BLOCK_M)
    tile = tl.program_id(0) % tiles
    span = tl.program_id(0) // tiles % spans
    batch_head = (tl.program_id(0) // tiles // spans).to(tl.int64)
    batch, kv_head = batch_head // kv_heads, batch_head % kv_heads
    heads = kv_heads * RATIO

    index = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    valid_m = index < num_rows * RATIO
    row, head = (index // RATIO).to(tl.int64), kv_head * RATIO + index % RATIO
    size = (tl.zeros((), tl.int64) + batches) * heads * num_rows
    place = (batch * heads + head) * num_rows + row
    mean_a, mean_t, alpha, beta, learns = _load_coefficients(coefficients_ptr, size, place, valid_m)
    q = _load_sampled(q_ptr + batch * stride_qb, row, head, stride_qs, stride_qh, learns, HEAD_DIM, BLOCK_D)
    q_lr = _load_sampled(q_lr_ptr + batch * stride_qlb, row, head, stride_qls, stride_qlh, learns, RANK, BLOCK_R)
    k_base = k_ptr + batch * stride_kb + kv_head * stride_kg
    k_lr_base = k_lr_ptr + batch * stride_klb + kv_head * stride_klg
    length = load_length(kv_length_ptr + batch_head, num_keys)
    first_n = (span * SPAN).to(tl.int64)
    keys = tl.minimum(length - span * SPAN, SPAN)
    lane_n = tl.arange(0, BLOCK_N)
    dq = tl.zeros([BLOCK_M, BLOCK_R], tl.float32)
    for step in range(0, keys, BLOCK_N):
        valid_n = lane_n < keys - step
        k = load_rows(k_base, first_n + step, lane_n, stride_ks, valid_n, HEAD_DIM, BLOCK_D)
        k_lr = load_rows(k_lr_base, first_n + step, lane_n, stride_kls, valid_n, RANK, BLOCK_R)
        # Keys that are not valid were loaded as 0 and add nothing, whatever their weight.
        weights = alpha[:, None] * (_scores(q_lr, k_lr) - mean_a[:, None])
        weights += beta[:, None] * (_scores(q, k) - mean_t[:, None])
        dq = _weighted_sum(weights, k_lr, dq)
    dims = tl.arange(0, BLOCK_R)
    out = dq_ptr + (((span * num_rows + row) * batches + batch) * heads + head)[:, None] * RANK + dims[None, :]
    tl.store(out, dq, mask=valid_m[:, None] & (dims < RANK)[None, :])


@triton.jit
def _predictor_loss_bwd_dk_kernel(
        q_ptr, k_ptr, q_lr_ptr, k_lr_ptr, kv_length_ptr, coefficients_ptr, dk_ptr,
        stride_qs, stride_qb, stride_qh, stride_ks, stride_kb, stride_kg,
        stride_qls, stride_qlb, stride_qlh, stride_kls, stride_klb, stride_klg,
        num_rows, num_keys, batches, kv_heads,
        RATIO: tl.constexpr, HEAD_DIM: tl.constexpr, RANK: tl.constexpr, BLOCK_M: tl.constexpr,
        BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_R: tl.constexpr):
    """dk [s, b, G, r] in its own dtype: sum over rows of (alpha (a - mean_a) + beta (t - mean_t)) q_lr; padding 0."""
    tiles = tl.cdiv(num_keys, BLOCK_N)
    tile = tl.program_id(0) % tiles
    batch_head = (tl.program_id(0) // tiles).to(tl.int64)
    batch, kv_head = batch_head // kv_heads, batch_head % kv_heads
    heads = kv_heads * RATIO
    size = (tl.zeros((), tl.int64) + batches) * heads * num_rows

    first_n = (tile * BLOCK_N).to(tl.int64)
    lane_n = tl.arange(0, BLOCK_N)
    length = load_length(kv_length_ptr + batch_head, num_keys)
    valid_n = lane_n < length - tile * BLOCK_N
    k = load_rows(k_ptr + batch * stride_kb + kv_head * stride_kg, first_n, lane_n, stride_ks, valid_n, HEAD_DIM,
                  BLOCK_D)
    k_lr = load_rows(k_lr_ptr + batch * stride_klb + kv_head * stride_klg, first_n, lane_n, stride_kls, valid_n, RANK,
                     BLOCK_R)
    dk = tl.zeros([BLOCK_N, BLOCK_R], tl.float32)
    for first_m in range(0, tl.where(tile * BLOCK_N < length, num_rows * RATIO, 0), BLOCK_M):
        index = first_m + tl.arange(0, BLOCK_M)
        valid_m = index < num_rows * RATIO
        row, head = (index // RATIO).to(tl.int64), kv_head * RATIO + index % RATIO
        place = (batch * heads + head) * num_rows + row
        mean_a, mean_t, alpha, beta, learns = _load_coefficients(coefficients_ptr, size, place, valid_m)
        q = _load_sampled(q_ptr + batch * stride_qb, row, head, stride_qs, stride_qh, learns, HEAD_DIM, BLOCK_D)
        q_lr = _load_sampled(q_lr_ptr + batch * stride_qlb, row, head, stride_qls, stride_qlh, learns, RANK, BLOCK_R)
        weights = alpha[None, :] * (_scores(k_lr, q_lr) - mean_a[None, :])
        weights += beta[None, :] * (_scores(k, q) - mean_t[None, :])
        dk = _weighted_sum(weights, q_lr, dk)
    dk = tl.where(valid_n[:, None], dk, 0.0).to(dk_ptr.dtype.element_ty)
    dims = tl.arange(0, BLOCK_R)
    out = dk_ptr + (((first_n + lane_n) * batches + batch) * kv_heads + kv_head)[:, None] * RANK + dims[None, :]
    tl.store(out, dk, mask=(first_n + lane_n < num_keys)[:, None] & (dims < RANK)[None, :])
