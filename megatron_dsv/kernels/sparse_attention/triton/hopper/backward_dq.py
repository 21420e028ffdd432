"""Hopper kernel of the backward pass over query rows: dQ, and the stats that the dK/dV pass reads.

What it computes, and stats, are those of ``triton/backward_dq.py``. Here S and dP are issued together, exp2 runs while
dP is multiplied, and dQ of a step is multiplied while the next step's S is waited for. Dims as there.
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
    drop_barriers,
    fetch_pair,
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
def _sparse_attention_hopper_bwd_dq_kernel(
        q, k, v, out, dout, dq, k_tiles, v_tiles, lse_ptr, stats_ptr, stride_stats, stats_rows, lists, order_ptr,
        kv_length_ptr, num_queries, num_keys, num_groups, heads, kv_heads, scale, scale_log2, Q_BLOCK: gl.constexpr,
        KV_BLOCK: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
        BLOCK_D: gl.constexpr, STAGES: gl.constexpr):
    dtype: gl.constexpr = q.ptr.dtype.element_ty
    scores_layout: gl.constexpr = product_layout(BLOCK_M, BLOCK_N, gl.num_warps())
    sums_layout: gl.constexpr = product_layout(BLOCK_M, BLOCK_D, gl.num_warps())
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, sums_layout, 2)
    row_layout: gl.constexpr = gl.SliceLayout(1, scores_layout)
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    per_entry: gl.constexpr = KV_BLOCK // BLOCK_N
    row, batch_head, batch, head, kv_head, first_m = query_tile(
        order_ptr, num_groups, heads, kv_heads, Q_BLOCK, BLOCK_M)
    tma_batch, tma_head = batch.to(gl.int32), kv_head.to(gl.int32)

    out_tile = load_rows(out, batch, head, first_m, num_queries, HEAD_DIM, BLOCK_M, BLOCK_D)
    dout_tile = load_rows(dout, batch, head, first_m, num_queries, HEAD_DIM, BLOCK_M, BLOCK_D)
    delta = gl.convert_layout(gl.sum(out_tile.to(gl.float32) * dout_tile.to(gl.float32), 1), row_layout)
    token = first_m + gl.arange(0, BLOCK_M, row_layout)
    valid_m = token < num_queries
    lse = gl.load(lse_ptr + batch_head * num_queries + token, mask=valid_m, other=float("inf"))
    lse = gl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)
    row_stats = stats_ptr + batch_head * stride_stats + token
    gl.store(row_stats, lse, mask=valid_m)
    gl.store(stats_ptr + (batch_head + stats_rows) * stride_stats + token, delta, mask=valid_m)
    q_tile = load_rows(q, batch, head, first_m, num_queries, HEAD_DIM, BLOCK_M, BLOCK_D)
    q_shared = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_D], shared, q_tile)
    dout_shared = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_D], shared, dout_tile)
    k_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], shared)
    v_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], shared)
    barriers = new_barriers(STAGES)
    fence_async_shared()

    length = load_length(kv_length_ptr + batch * kv_heads + kv_head, num_keys)
    start, count, listed, whole, steps, index = open_list(lists, row, length, KV_BLOCK, BLOCK_N)
    for j in gl.static_range(STAGES - 1):
        fetch_pair(k_tiles, v_tiles, k_ring, v_ring, barriers, j, tma_batch, tma_head,
                   index * KV_BLOCK + (j % per_entry) * BLOCK_N, j < steps)
        index = load_entry(lists, start, (j + 1) // per_entry, whole, listed)
    zeros = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores_layout)
    acc = warpgroup_mma_init(gl.zeros([BLOCK_M, BLOCK_D], gl.float32, sums_layout))
    stage = 0
    parity = 0
    free = STAGES - 1
    for i in range(steps):
        mbarrier.wait(barriers.index(stage), parity)
        scores = warpgroup_mma(q_shared, k_ring.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        dprobs = warpgroup_mma(dout_shared, v_ring.index(stage).permute((1, 0)), zeros, use_acc=False, is_async=True)
        scores, summed = warpgroup_mma_wait(1, deps=[scores, acc])
        # dQ of the step before is done in every warp past this point, and with it the buffers that it read.
        gl.thread_barrier()
        ahead = i + STAGES - 1
        fetch_pair(k_tiles, v_tiles, k_ring, v_ring, barriers, free, tma_batch, tma_head,
                   index * KV_BLOCK + (ahead % per_entry) * BLOCK_N, ahead < steps)
        index = load_entry(lists, start, (ahead + 1) // per_entry, whole, listed)
        probs = gl.exp2(scores * scale_log2 - gl.expand_dims(lse, 1))
        dprobs = warpgroup_mma_wait(0, deps=[dprobs])
        dscores = probs * (dprobs - gl.expand_dims(delta, 1))
        acc = warpgroup_mma(gl.convert_layout(dscores.to(dtype), operand_layout), k_ring.index(stage), summed,
                            is_async=True)
        free = stage
        stage += 1
        if stage == STAGES:
            stage = 0
            parity ^= 1
    total = warpgroup_mma_wait(0, deps=[acc])

    lane_n = gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores_layout))
    for i in range(steps, count * per_entry):
        first_n = step_token(lists, start, count, listed, i, KV_BLOCK, BLOCK_N)
        place_pair(k, v, k_ring.index(0), v_ring.index(0), batch, kv_head, first_n, length, HEAD_DIM)
        scores = warpgroup_mma(q_shared, k_ring.index(0).permute((1, 0)), zeros, use_acc=False)
        dprobs = warpgroup_mma(dout_shared, v_ring.index(0).permute((1, 0)), zeros, use_acc=False)
        probs = gl.exp2(scores * scale_log2 - gl.expand_dims(lse, 1))
        probs = gl.where(gl.expand_dims(first_n + lane_n < length, 0), probs, 0.0)
        dscores = probs * (dprobs - gl.expand_dims(delta, 1))
        total = warpgroup_mma(gl.convert_layout(dscores.to(dtype), operand_layout), k_ring.index(0), total)

    drop_barriers(barriers, STAGES)
    store_rows(dq, batch, head, first_m, num_queries, total * scale, HEAD_DIM, BLOCK_M, BLOCK_D)
