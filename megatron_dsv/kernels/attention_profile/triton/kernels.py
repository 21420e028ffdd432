"""True attention mass of query groups on key blocks, and smallest sets of a given mass, without stored logits or sorts.

Dims: n query groups of g tokens (GROUP), s keys (num_keys), b batch, h query heads, G key/value heads, d head dim
(HEAD_DIM), Nk key blocks.
"""

import triton
import triton.language as tl

from megatron_dsv.kernels.sparse_attention.triton.lists import load_length, load_rows


@triton.jit
def _attention_profile_lse_kernel(
        q_ptr, k_ptr, lse_ptr, kv_length_ptr, stride_qs, stride_qb, stride_qh, stride_ks, stride_kb, stride_kg,
        num_rows, num_keys, heads, kv_heads, spans, scale_log2,
        SPAN: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
        BLOCK_D: tl.constexpr):
    """lse [b, h, rows, spans]: natural logsumexp of each row's logits over the valid keys of each span of keys."""
    tiles = tl.cdiv(num_rows, BLOCK_M)
    first_m = (tl.program_id(0) % tiles * BLOCK_M).to(tl.int64)
    span = tl.program_id(0) // tiles % spans
    batch_head = (tl.program_id(0) // tiles // spans).to(tl.int64)
    batch, head = batch_head // heads, batch_head % heads
    kv_head = head // (heads // kv_heads)

    lane_m = tl.arange(0, BLOCK_M)
    valid_m = first_m + lane_m < num_rows
    q = load_rows(q_ptr + batch * stride_qb + head * stride_qh, first_m, lane_m, stride_qs, valid_m, HEAD_DIM, BLOCK_D)
    k_base = k_ptr + batch * stride_kb + kv_head * stride_kg
    length = load_length(kv_length_ptr + batch * kv_heads + kv_head, num_keys)
    first_n = (span * SPAN).to(tl.int64)
    keys = tl.minimum(length - span * SPAN, SPAN)
    lane_n = tl.arange(0, BLOCK_N)
    row_max = tl.full([BLOCK_M], float("-inf"), tl.float32)
    row_sum = tl.zeros([BLOCK_M], tl.float32)
    for step in range(0, keys, BLOCK_N):
        valid_n = lane_n < keys - step
        k = load_rows(k_base, first_n + step, lane_n, stride_ks, valid_n, HEAD_DIM, BLOCK_D)
        logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
        logits = tl.where(valid_n[None, :], logits, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(logits, 1))
        # Before the first finite logit the maximum is -inf, and -inf - -inf is NaN.
        around = tl.where(new_max == float("-inf"), 0.0, new_max)
        row_sum = row_sum * tl.exp2(row_max - around) + tl.sum(tl.exp2(logits - around[:, None]), 1)
        row_max = new_max
    # log2(0) is -inf where the span holds no valid key, and the maximum is too; NaN stays NaN.
    lse = (tl.where(row_sum == 0, 0.0, row_max) + tl.log2(row_sum)) * 0.6931471805599453
    tl.store(lse_ptr + (batch_head * num_rows + first_m + lane_m) * spans + span, lse, mask=valid_m)


@triton.jit
def _attention_profile_mass_kernel(
        q_ptr, k_ptr, lse_ptr, valid_ptr, out_ptr, kv_length_ptr, stride_qs, stride_qb, stride_qh, stride_ks, stride_kb,
        stride_kg, num_groups, num_keys, num_blocks, batches, heads, kv_heads, spans, scale_log2,
        GROUP: tl.constexpr, GROUP_PADDED: tl.constexpr, KV_BLOCK: tl.constexpr, KV_PADDED: tl.constexpr,
        SPAN: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
        BLOCK_D: tl.constexpr):
    """out [b, h, n, Nk]: softmax mass of each block, summed over a group's valid rows; lse [b, h, n * g].

    Groups and blocks are padded to powers of two. A tile holds several short ones, or a piece of a long one; the
    pieces of a group and of a block are added up in registers. valid [n * g, b] bytes.
    """
    groups_per_tile: tl.constexpr = (BLOCK_M + GROUP_PADDED - 1) // GROUP_PADDED
    group_pieces: tl.constexpr = (GROUP_PADDED + BLOCK_M - 1) // BLOCK_M
    group_lanes: tl.constexpr = BLOCK_M // groups_per_tile
    blocks_per_tile: tl.constexpr = (BLOCK_N + KV_PADDED - 1) // KV_PADDED
    block_pieces: tl.constexpr = (KV_PADDED + BLOCK_N - 1) // BLOCK_N
    block_lanes: tl.constexpr = BLOCK_N // blocks_per_tile
    tiles = tl.cdiv(num_groups, groups_per_tile)
    first_group = tl.program_id(0) % tiles * groups_per_tile
    span = tl.program_id(0) // tiles % spans
    batch_head = (tl.program_id(0) // tiles // spans).to(tl.int64)
    batch, head = batch_head // heads, batch_head % heads
    kv_head = head // (heads // kv_heads)

    lane_m, lane_n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    q_base = q_ptr + batch * stride_qb + head * stride_qh
    k_base = k_ptr + batch * stride_kb + kv_head * stride_kg
    lse_base = lse_ptr + batch_head * num_groups * GROUP
    length = load_length(kv_length_ptr + batch * kv_heads + kv_head, num_keys)
    group = first_group + tl.arange(0, groups_per_tile)
    for step in range(0, tl.minimum(num_blocks - span * SPAN, SPAN), blocks_per_tile):
        first_block = span * SPAN + step
        first_n = first_block.to(tl.int64) * KV_BLOCK
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for block_piece in tl.static_range(block_pieces):
            in_block = block_piece * BLOCK_N + lane_n % block_lanes
            token = lane_n // block_lanes * KV_BLOCK + in_block
            valid_n = (in_block < KV_BLOCK) & (token < length - first_n)
            k = load_rows(k_base, first_n, token, stride_ks, valid_n, HEAD_DIM, BLOCK_D)
            for group_piece in tl.static_range(group_pieces):
                in_group = group_piece * BLOCK_M + lane_m % group_lanes
                row = (first_group + lane_m // group_lanes) * GROUP + in_group
                valid_m = (in_group < GROUP) & (row < num_groups * GROUP)
                valid_m = tl.load(valid_ptr + row.to(tl.int64) * batches + batch, mask=valid_m, other=0) != 0
                zero = tl.zeros((), tl.int64)
                q = load_rows(q_base, zero, row.to(tl.int64), stride_qs, valid_m, HEAD_DIM, BLOCK_D)
                lse = tl.load(lse_base + row, mask=valid_m, other=0.0) * 1.4426950408889634
                logits = tl.dot(q, tl.trans(k), input_precision="ieee") * scale_log2
                acc += tl.where(valid_n[None, :] & valid_m[:, None], tl.exp2(logits - lse[:, None]), 0.0)
        over_keys = tl.sum(tl.reshape(acc, [BLOCK_M, blocks_per_tile, block_lanes]), 2)
        mass = tl.sum(tl.reshape(over_keys, [groups_per_tile, group_lanes, blocks_per_tile]), 1)
        block = first_block + tl.arange(0, blocks_per_tile)
        out = out_ptr + (batch_head * num_groups + group)[:, None] * num_blocks + block[None, :]
        tl.store(out, mass, mask=(group < num_groups)[:, None] & (block < num_blocks)[None, :])


@triton.jit
def _mass_from(x_ptr, threshold, width, BLOCK: tl.constexpr):
    """Sum and number of the entries of a row whose bits are at least ``threshold``."""
    lanes = tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    count = tl.zeros([BLOCK], tl.int32)
    for first in range(0, width, BLOCK):
        x = tl.load(x_ptr + first + lanes, mask=lanes < width - first, other=0.0)
        inside = (x.to(tl.int32, bitcast=True) >= threshold) & (lanes < width - first)
        total += tl.where(inside, x, 0.0)
        count += inside.to(tl.int32)
    return tl.sum(total, 0), tl.sum(count, 0)


@triton.jit
def _attention_profile_smallest_set_kernel(x_ptr, out_ptr, target, width, BLOCK: tl.constexpr):
    """out [rows]: fewest entries of a row of x [rows, width], none negative, that hold ``target`` of its sum.

    Bisects the bits of the smallest entry that is needed: for floats that are not negative their order is the bits'.
    """
    row = tl.program_id(0).to(tl.int64)
    x_ptr += row * width
    total, _ = _mass_from(x_ptr, 0, width, BLOCK)
    goal = total * target
    low = tl.zeros((), tl.int32)
    high = tl.full((), 0x7F800000, tl.int32)
    for _ in range(31):
        middle = low + (high - low) // 2
        mass, _count = _mass_from(x_ptr, middle, width, BLOCK)
        low = tl.where(mass >= goal, middle, low)
        high = tl.where(mass >= goal, high, middle)
    mass, count = _mass_from(x_ptr, low + 1, width, BLOCK)
    last = tl.maximum(low.to(tl.float32, bitcast=True), 1e-37)
    # A goal met up to rounding needs no further entry.
    more = tl.ceil((goal - mass) / last * (1 - 2.0**-21))
    needed = tl.minimum(tl.maximum(count + more, 1.0), width)
    tl.store(out_ptr + row, tl.where(total == total, needed, total))
