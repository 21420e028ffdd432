"""From a row of scores to its ascending list: one program a row, the whole row in registers.

Scores become unsigned integers of the same order, so that the k-th largest is found bit by bit: 32 counts, no sort.
Masses become integers, too (23 bits below the row's largest), so that their sums do not depend on the order.

Dims: b batch, h query heads, G key/value heads (kv_heads), Nq query groups (num_groups), Nk key/value blocks
(num_blocks); a launch takes the (batch, head) pairs from ``first_pair`` and the groups from ``first_group`` on.
"""

import triton
import triton.language as tl

from megatron_dsv.kernels.sparse_attention.triton.lists import load_length

LARGEST = tl.constexpr(3.4028234663852886e38)


@triton.jit
def _select_rows_kernel(
        scores_ptr, limits_ptr, kv_length_ptr, query_length_ptr, group_ids_ptr, indices_ptr, row_start_ptr,
        row_count_ptr, first_pair, first_group, chunk_groups, num_groups, num_blocks, heads, kv_heads, theta, prefix,
        BY_MASS: tl.constexpr, LSE: tl.constexpr, OWN: tl.constexpr, HAS_IDS: tl.constexpr, Q_BLOCK: tl.constexpr,
        KV_BLOCK: tl.constexpr, BLOCK: tl.constexpr):
    """Writes one row of a KVSelection; see ``api.select_rows``. theta is in units of 2^-22."""
    pair = first_pair + tl.program_id(0) // chunk_groups
    group = first_group + tl.program_id(0) % chunk_groups
    batch, head = pair // heads, pair % heads
    row = pair.to(tl.int64) * num_groups + group
    start = tl.load(limits_ptr + head)
    width = tl.load(limits_ptr + heads + head)
    cap = tl.load(limits_ptr + 2 * heads + head).to(tl.int32)
    floor = tl.load(limits_ptr + 3 * heads + head).to(tl.int32)
    start += (batch.to(tl.int64) * num_groups + group) * width
    # Asked for before they are needed: a row is short, and a load takes as long as half of it.
    block = tl.arange(0, BLOCK)
    scores = tl.load(scores_ptr + tl.program_id(0).to(tl.int64) * num_blocks + block, mask=block < num_blocks,
                     other=0.0)
    length = load_length(kv_length_ptr + batch * kv_heads + head // (heads // kv_heads), num_blocks * KV_BLOCK)
    number = group.to(tl.int64)
    if HAS_IDS:
        number = tl.load(group_ids_ptr + group).to(tl.int64)
    real = number * Q_BLOCK < tl.load(query_length_ptr + batch)
    dense = width == 0
    tl.store(row_start_ptr + row, tl.where(dense & real, -1, start))
    if dense | (real == 0):
        tl.store(row_count_ptr + row, 0)
    else:
        valid = block * KV_BLOCK < length
        forced = block < prefix
        if OWN:
            forced |= (block >= number * Q_BLOCK // KV_BLOCK) & (block <= ((number + 1) * Q_BLOCK - 1) // KV_BLOCK)
        forced &= valid

        # A real block beats padding even if its score is -inf or NaN, and does not pass for a forced one.
        scores = tl.where(scores == scores, scores, -LARGEST)
        scores = tl.minimum(tl.maximum(scores, -LARGEST), LARGEST)
        order = _order(tl.where(forced, float("inf"), scores))
        order = tl.where(valid, order, tl.zeros_like(order))
        count = cap
        if BY_MASS:
            if LSE:
                most = tl.max(tl.where(valid, scores, -LARGEST), 0)
                mass = tl.exp2((scores - most) * 1.4426950408889634)
            else:
                mass = tl.maximum(scores, 0.0)
            count = _count_of_mass(order, _fixed_point(tl.where(valid, mass, 0.0)), theta)
            count = tl.minimum(tl.maximum(tl.maximum(count, tl.sum(forced.to(tl.int32), 0)), floor), cap)

        threshold = tl.zeros((), tl.uint32)
        bit = tl.full((), 0x80000000, tl.uint32)
        reached = tl.full((), BLOCK + 1, tl.int32)
        # Once as many as wanted are above, finer bits change nothing.
        while (bit != 0) & (reached != count):
            candidate = threshold | bit
            bit >>= 1
            above_it = tl.sum((order >= candidate).to(tl.int32), 0)
            threshold = tl.where(above_it >= count, candidate, threshold)
            reached = tl.where(above_it >= count, above_it, reached)
        above, level = order > threshold, (order == threshold) & valid
        # Both counts in one scan: above in the low half, ties in the high half.
        seen = tl.cumsum(above.to(tl.int32) + (level.to(tl.int32) << 16), 0)
        places = count - tl.sum(above.to(tl.int32), 0)
        ties = seen >> 16
        kept = above | (level & (ties <= places))
        position = (seen & 0xFFFF) + tl.minimum(ties, places) - 1
        tl.store(indices_ptr + start + position, block, mask=kept)
        tl.store(row_count_ptr + row, tl.sum(kept.to(tl.int32), 0))


@triton.jit
def _order(values):
    """fp32 -> uint32 of the same order; both zeros are one."""
    bits = tl.where(values == 0.0, 0.0, values).to(tl.int32, bitcast=True)
    return (bits ^ ((bits >> 31) | -2147483648)).to(tl.uint32, bitcast=True)


@triton.jit
def _fixed_point(mass):
    """int64 multiples of 2^-23 of the power of two below the largest mass, rounded down."""
    exponent = tl.maximum(tl.max(mass, 0).to(tl.int32, bitcast=True) >> 23, 23)
    return (mass * ((277 - exponent) << 23).to(tl.float32, bitcast=True)).to(tl.int64)


@triton.jit
def _count_of_mass(order, mass, theta):
    """How many of the best blocks reach theta of the whole mass, where equal scores have equal mass."""
    target = (tl.sum(mass, 0) * theta + 4194303) >> 22
    threshold = tl.zeros((), tl.uint32)
    bit = tl.full((), 0x80000000, tl.uint32)
    for _ in range(32):
        candidate = threshold | bit
        bit >>= 1
        enough = tl.sum(tl.where(order >= candidate, mass, 0), 0) >= target
        threshold = tl.where(enough, candidate, threshold)
    above = order > threshold
    missing = target - tl.sum(tl.where(above, mass, 0), 0)
    each = tl.maximum(tl.max(tl.where(order == threshold, mass, 0), 0), 1)
    ties = tl.maximum((missing + each - 1) // each, 1)
    return tl.sum(above.to(tl.int32), 0) + ties.to(tl.int32)
