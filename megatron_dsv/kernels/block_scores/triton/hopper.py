"""The pass over keys for Hopper, in Gluon: the block values of ``kernels._block_partial_kernel`` for long blocks.

A program copies a chunk of keys at a time into shared memory and walks it in steps of BLOCK_N keys without a barrier,
so that its warpgroups drift apart: one multiplies while the other takes exponentials.

Dims as in ``kernels``; a step is one block (PER_STEP 1).
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait

from megatron_dsv.kernels.block_scores.triton.exponentials import LOG2_CODE, MIXED_CODE, MIXED_CONSTRAINTS, SAFE_LOG2


@gluon.jit
def _block_partial_hopper_kernel(
        q_ptr, k_ptr, bound_ptr, partial_ptr, total_ptr, kv_length_ptr, stride_qs, stride_qb, stride_qh, stride_ks,
        stride_kb, stride_kg, first_pair, first_row, num_rows, num_keys, num_steps, heads, kv_heads, spans,
        bound_spans, scale_log2,
        KV_BLOCK: gl.constexpr, SPAN: gl.constexpr, BOUND_SPANS: gl.constexpr, RANK: gl.constexpr,
        BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, CHUNK: gl.constexpr, NUM_WARPS: gl.constexpr):
    """partial [pairs, Nk, num_rows], total [pairs, spans, num_rows]; SPAN chunks of CHUNK keys make a span."""
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[NUM_WARPS, 1],
                                                  instr_shape=[16, BLOCK_N, 16])
    ROWS: gl.constexpr = gl.SliceLayout(1, MMA)
    LOADS: gl.constexpr = gl.BlockedLayout([1, 8], [256 // RANK, RANK // 8], [NUM_WARPS, 1], [1, 0])
    SHARED: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=RANK * 2, element_bitwidth=16, rank=2)
    STEPS: gl.constexpr = CHUNK // BLOCK_N
    tiles = gl.cdiv(num_rows, BLOCK_M)
    span = gl.program_id(0) % spans
    first_m = (gl.program_id(0) // spans) % tiles * BLOCK_M
    pair = gl.program_id(0) // spans // tiles
    batch, head = ((first_pair + pair) // heads).to(gl.int64), ((first_pair + pair) % heads).to(gl.int64)
    kv_head = head // (heads // kv_heads)
    length = gl.minimum(gl.load(kv_length_ptr + batch * kv_heads + kv_head).to(gl.int32), num_keys)
    k_base = k_ptr + batch * stride_kb + kv_head * stride_kg

    lane_q = gl.arange(0, BLOCK_M, gl.SliceLayout(1, LOADS))
    dims = gl.arange(0, RANK, gl.SliceLayout(0, LOADS))
    q_base = q_ptr + batch * stride_qb + head * stride_qh + (first_row + first_m).to(gl.int64) * stride_qs
    q = gl.load(q_base + (lane_q[:, None] * stride_qs + dims[None, :]), mask=(first_m + lane_q < num_rows)[:, None],
                other=0.0)
    q_shared = gl.allocate_shared_memory(q_ptr.dtype.element_ty, [BLOCK_M, RANK], SHARED)
    q_shared.store(q)
    keys = gl.allocate_shared_memory(q_ptr.dtype.element_ty, [2 * STEPS, BLOCK_N, RANK], SHARED)

    query = q.to(gl.float32)
    query_bound = gl.sum(query * query, 1)
    lane_b = gl.arange(0, BOUND_SPANS, gl.SliceLayout(1, LOADS))
    key_bound = gl.load(bound_ptr + (batch * kv_heads + kv_head) * bound_spans + lane_b, mask=lane_b < bound_spans,
                        other=0.0)
    broken = gl.max((query_bound != query_bound).to(gl.int32), 0)
    # |q k| <= |q| |k|
    bound = gl.sqrt(gl.max(query_bound, 0)) * gl.sqrt(gl.max(key_bound, 0)) * gl.abs(scale_log2)

    lane_m = gl.arange(0, BLOCK_M, ROWS)
    valid_m = first_m + lane_m < num_rows
    out = partial_ptr + pair.to(gl.int64) * num_steps * num_rows + first_m + lane_m
    row_most = gl.zeros([BLOCK_M], gl.float32, ROWS)
    row_total = gl.zeros([BLOCK_M], gl.float32, ROWS)
    first = span * SPAN
    last = gl.minimum(first + SPAN, gl.cdiv(num_steps * KV_BLOCK, CHUNK))
    whole = gl.maximum(gl.minimum(length // CHUNK, last), first)
    if (bound <= SAFE_LOG2) & (broken == 0):
        row_most, row_total = _walk(
            q_shared, keys, k_base, stride_ks, first, whole, length, out, num_rows, num_steps, valid_m, scale_log2,
            row_most, row_total, True, False, KV_BLOCK, CHUNK, RANK, BLOCK_M, BLOCK_N, MMA, LOADS)
        row_most, row_total = _walk(
            q_shared, keys, k_base, stride_ks, whole, last, length, out, num_rows, num_steps, valid_m, scale_log2,
            row_most, row_total, True, True, KV_BLOCK, CHUNK, RANK, BLOCK_M, BLOCK_N, MMA, LOADS)
    else:
        row_most, row_total = _walk(
            q_shared, keys, k_base, stride_ks, first, last, length, out, num_rows, num_steps, valid_m, scale_log2,
            row_most + float("-inf"), row_total, False, True, KV_BLOCK, CHUNK, RANK, BLOCK_M, BLOCK_N, MMA, LOADS)
    gl.store(total_ptr + (pair * spans + span).to(gl.int64) * num_rows + first_m + lane_m,
             row_most + gl.log2(row_total), mask=valid_m)


@gluon.jit
def _walk(q_shared, keys, k_base, stride_ks, first, last, length, out, num_rows, num_steps, valid_m, scale_log2,
          row_most, row_total, SMALL: gl.constexpr, MASKED: gl.constexpr, KV_BLOCK: gl.constexpr,
          CHUNK: gl.constexpr, RANK: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, MMA: gl.constexpr,
          LOADS: gl.constexpr):
    """Chunks first..last - 1 of keys: stores the value of each block, returns the (most, total) of the rows."""
    PIECES: gl.constexpr = KV_BLOCK // BLOCK_N
    STEPS: gl.constexpr = CHUNK // BLOCK_N
    nothing = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, MMA)
    if first < last:
        # The buffers may still be read by the walk before this one.
        gl.thread_barrier()
        _copy_keys(keys, first * 0, k_base, stride_ks, first * CHUNK, length, CHUNK, RANK, BLOCK_N, LOADS)
    for chunk in range(first, last):
        parity = (chunk - first) % 2
        async_copy.wait_group(0)
        gl.thread_barrier()
        fence_async_shared()
        if chunk + 1 < last:
            _copy_keys(keys, 1 - parity, k_base, stride_ks, (chunk + 1) * CHUNK, length, CHUNK, RANK, BLOCK_N, LOADS)
        product = warpgroup_mma(q_shared, keys.index(parity * STEPS).permute([1, 0]), nothing, use_acc=False,
                                is_async=True)
        for block in range(0, STEPS // PIECES):
            for piece in gl.static_range(PIECES):
                step = block * PIECES + piece
                logits = warpgroup_mma_wait(0, deps=[product])
                # The product after the last one of the chunk is computed again, and dropped.
                ahead = parity * STEPS + gl.minimum(step + 1, STEPS - 1)
                product = warpgroup_mma(q_shared, keys.index(ahead).permute([1, 0]), nothing, use_acc=False,
                                        is_async=True)
                most, total = _sums(logits, scale_log2, chunk * CHUNK + step * BLOCK_N, length, SMALL, MASKED,
                                    BLOCK_N, MMA)
                if piece == 0:
                    block_most, block_total = most, total
                else:
                    block_most, block_total = _join(block_most, block_total, most, total, SMALL)
            row_most, row_total = _join(row_most, row_total, block_most, block_total, SMALL)
            if SMALL:
                value = gl.inline_asm_elementwise(LOG2_CODE, "=f,f", [block_total], dtype=gl.float32, is_pure=True,
                                                  pack=1)
            else:
                value = block_most + gl.log2(block_total)
            number = chunk * (STEPS // PIECES) + block
            gl.store(out + number.to(gl.int64) * num_rows, value, mask=valid_m & (number < num_steps))
        warpgroup_mma_wait(0, deps=[product])
    return row_most, row_total


@gluon.jit
def _copy_keys(keys, buffer, k_base, stride_ks, first, length, CHUNK: gl.constexpr, RANK: gl.constexpr,
               BLOCK_N: gl.constexpr, LOADS: gl.constexpr):
    """Starts the copy of the chunk of keys from ``first`` on into one of the two buffers; padding becomes 0."""
    STEPS: gl.constexpr = CHUNK // BLOCK_N
    lane = gl.arange(0, BLOCK_N, gl.SliceLayout(1, LOADS))
    dims = gl.arange(0, RANK, gl.SliceLayout(0, LOADS))
    pointers = k_base + first.to(gl.int64) * stride_ks + (lane[:, None] * stride_ks + dims[None, :])
    for step in gl.static_range(STEPS):
        async_copy.async_copy_global_to_shared(keys.index(buffer * STEPS + step), pointers + step * BLOCK_N * stride_ks,
                                               mask=(first + step * BLOCK_N + lane < length)[:, None])
    async_copy.commit_group()


@gluon.jit
def _sums(logits, scale_log2, first, length, SMALL: gl.constexpr, MASKED: gl.constexpr, BLOCK_N: gl.constexpr,
          MMA: gl.constexpr):
    """(most, total) of the keys from ``first`` on for every row: the sum of their powers is total * 2^most."""
    valid = first + gl.arange(0, BLOCK_N, gl.SliceLayout(0, MMA)) < length
    if SMALL:
        powers = gl.inline_asm_elementwise(MIXED_CODE, MIXED_CONSTRAINTS, [logits, scale_log2], dtype=gl.float32,
                                           is_pure=True, pack=8)
        if MASKED:
            powers = gl.where(valid[None, :], powers, 0.0)
        total = gl.sum(powers, 1)
        most = gl.zeros_like(total)
    else:
        logits = gl.where(valid[None, :], logits * scale_log2, float("-inf"))
        most = gl.max(logits, 1)
        # Without a valid key the maximum is -inf, and -inf - -inf is NaN.
        reference = gl.where(most == float("-inf"), 0.0, most)
        total = gl.sum(gl.exp2(logits - reference[:, None]), 1)
    return most, total


@gluon.jit
def _join(most, total, other_most, other_total, SMALL: gl.constexpr):
    """(most, total) of two sets of keys together; those of small logits have most 0."""
    if SMALL:
        total += other_total
    else:
        joint = gl.maximum(most, other_most)
        reference = gl.where(joint == float("-inf"), 0.0, joint)
        total = total * gl.exp2(most - reference) + other_total * gl.exp2(other_most - reference)
        most = joint
    return most, total
