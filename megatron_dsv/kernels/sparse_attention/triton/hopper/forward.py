"""Hopper kernel of the forward pass.

What it computes is that of ``triton/forward.py``; dims as there. Registers and shared memory are kept low enough for
three programs to a multiprocessor: one's softmax runs under the others' products. Q stays in shared memory although
registers would take it: ptxas (CUDA 13.0) gave the registers of such an operand away inside the loop.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from megatron_dsv.kernels.sparse_attention.triton.hopper.rings import (
    fetch_tile,
    load_rows,
    new_barriers,
    open_list,
    place_pair,
    product_layout,
    query_tile,
    step_token,
    store_rows,
)
from megatron_dsv.kernels.sparse_attention.triton.lists import load_entry, load_length


@gluon.jit
def _sparse_attention_hopper_fwd_kernel(
        q, k, v, out, k_tiles, v_tiles, lse_ptr, lists, order_ptr, kv_length_ptr, num_queries, num_keys, num_groups,
        heads, kv_heads, scale_log2, Q_BLOCK: gl.constexpr, KV_BLOCK: gl.constexpr, HEAD_DIM: gl.constexpr,
        BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_D: gl.constexpr, STAGES: gl.constexpr):
    dtype: gl.constexpr = q.ptr.dtype.element_ty
    scores_layout: gl.constexpr = product_layout(BLOCK_M, BLOCK_N, gl.num_warps())
    sums_layout: gl.constexpr = product_layout(BLOCK_M, BLOCK_D, gl.num_warps())
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, sums_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, scores_layout)
    sums_row_layout: gl.constexpr = gl.SliceLayout(1, sums_layout)
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    per_entry: gl.constexpr = KV_BLOCK // BLOCK_N
    row, batch_head, batch, head, kv_head, first_m = query_tile(
        order_ptr, num_groups, heads, kv_heads, Q_BLOCK, BLOCK_M)
    tma_batch, tma_head = batch.to(gl.int32), kv_head.to(gl.int32)

    q_shared = gl.allocate_shared_memory(
        dtype, [BLOCK_M, BLOCK_D], shared,
        load_rows(q, batch, head, first_m, num_queries, HEAD_DIM, BLOCK_M, BLOCK_D))
    k_ring = gl.allocate_shared_memory(dtype, [STAGES - 1, BLOCK_N, BLOCK_D], shared)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], shared)
    k_barriers, v_barriers = new_barriers(STAGES - 1), new_barriers(STAGES)
    fence_async_shared()

    length = load_length(kv_length_ptr + batch * kv_heads + kv_head, num_keys)
    start, count, listed, whole, steps, index = open_list(lists, row, length, KV_BLOCK, BLOCK_N)
    # V needs one buffer more than K: the product that reads it is still under way when the next step's are fetched.
    for j in gl.static_range(STAGES - 1):
        first_n = index * KV_BLOCK + (j % per_entry) * BLOCK_N
        fetch_tile(k_tiles, k_ring, k_barriers, j, tma_batch, tma_head, first_n, j < steps)
        fetch_tile(v_tiles, v_ring, v_barriers, j, tma_batch, tma_head, first_n, j < steps)
        index = load_entry(lists, start, (j + 1) // per_entry, whole, listed)

    zeros = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores_layout)
    row_max = gl.full([BLOCK_M], float("-inf"), gl.float32, row_layout)
    row_sum = gl.zeros([BLOCK_M], gl.float32, row_layout)
    acc = warpgroup_mma_init(gl.zeros([BLOCK_M, BLOCK_D], gl.float32, sums_layout))
    k_stage = 0
    k_parity = 0
    v_stage = 0
    v_parity = 0
    v_free = STAGES - 1
    for i in range(steps):
        mbarrier.wait(k_barriers.index(k_stage), k_parity)
        scores = warpgroup_mma(q_shared, k_ring.index(k_stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores, summed = warpgroup_mma_wait(0, deps=[scores, acc])
        # Past this point every warp is done with this step's K and with the V of the step before.
        gl.thread_barrier()
        ahead = i + STAGES - 1
        first_n = index * KV_BLOCK + (ahead % per_entry) * BLOCK_N
        fetch_tile(k_tiles, k_ring, k_barriers, k_stage, tma_batch, tma_head, first_n, ahead < steps)
        fetch_tile(v_tiles, v_ring, v_barriers, v_free, tma_batch, tma_head, first_n, ahead < steps)
        index = load_entry(lists, start, (ahead + 1) // per_entry, whole, listed)
        new_max = gl.maximum(row_max, gl.max(scores, 1) * scale_log2)
        probs = gl.exp2(scores * scale_log2 - gl.expand_dims(new_max, 1))
        rescale = gl.exp2(row_max - new_max)
        row_sum = row_sum * rescale + gl.sum(probs, 1)
        row_max = new_max
        summed = summed * gl.expand_dims(gl.convert_layout(rescale, sums_row_layout), 1)
        mbarrier.wait(v_barriers.index(v_stage), v_parity)
        acc = warpgroup_mma(gl.convert_layout(probs.to(dtype), operand_layout), v_ring.index(v_stage), summed,
                            is_async=True)
        k_stage += 1
        if k_stage == STAGES - 1:
            k_stage = 0
            k_parity ^= 1
        v_free = v_stage
        v_stage += 1
        if v_stage == STAGES:
            v_stage = 0
            v_parity ^= 1
    total = warpgroup_mma_wait(0, deps=[acc])

    lane_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores_layout))
    for i in range(steps, count * per_entry):
        tail_n = step_token(lists, start, count, listed, i, KV_BLOCK, BLOCK_N)
        place_pair(k, v, k_ring.index(0), v_ring.index(0), batch, kv_head, tail_n, length, HEAD_DIM)
        scores = warpgroup_mma(q_shared, k_ring.index(0).permute((1, 0)), zeros, use_acc=False)
        scores = gl.where(gl.expand_dims(tail_n + lane_n < length, 0), scores * scale_log2, float("-inf"))
        new_max = gl.maximum(row_max, gl.max(scores, 1))
        # A step of padding alone leaves the maximum at -inf, and -inf - -inf is NaN.
        reference = gl.where(new_max == float("-inf"), 0.0, new_max)
        probs = gl.exp2(scores - gl.expand_dims(reference, 1))
        rescale = gl.exp2(row_max - reference)
        row_sum = row_sum * rescale + gl.sum(probs, 1)
        row_max = new_max
        total = total * gl.expand_dims(gl.convert_layout(rescale, sums_row_layout), 1)
        total = warpgroup_mma(gl.convert_layout(probs.to(dtype), operand_layout), v_ring.index(0), total)

    for j in gl.static_range(STAGES):
        mbarrier.invalidate(v_barriers.index(j))
        if j < STAGES - 1:
            mbarrier.invalidate(k_barriers.index(j))
    attended = row_sum > 0
    row_sum = gl.where(attended, row_sum, 1.0)
    total = total / gl.expand_dims(gl.convert_layout(row_sum, sums_row_layout), 1)
    store_rows(out, batch, head, first_m, num_queries, total, HEAD_DIM, BLOCK_M, BLOCK_D)
    token = first_m + gl.arange(0, BLOCK_M, row_layout)
    lse = gl.where(attended, (row_max + gl.log2(row_sum)) * 0.6931471805599453, float("-inf"))
    gl.store(lse_ptr + batch_head * num_queries + token, lse, mask=token < num_queries)
