"""Hopper kernel of the backward pass over keys: dK and dV.

What it computes is that of ``triton/backward_dkv.py``. Here S and dP are issued together; exp2 runs while dP is
multiplied, dS is formed while dV is, and dK while the next step's S is waited for. Dims as there.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

from megatron_dsv.kernels.sparse_attention.triton.hopper.rings import (
    drop_barriers,
    load_rows,
    new_barriers,
    open_list,
    place_pair,
    product_layout,
    step_token,
    store_rows,
)
from megatron_dsv.kernels.sparse_attention.triton.lists import load_entry, load_length, program_row


@gluon.jit
def _fetch_step(q_tiles, dout_tiles, stats_tiles, q_ring, dout_ring, lse_ring, delta_ring, barriers, stage, batch, head,
                lse_row, delta_row, first, wanted):
    """Begins to load the query rows from token ``first`` on: Q, dOut, lse and delta, behind one barrier."""
    rows: gl.constexpr = q_ring.shape[1]
    nbytes: gl.constexpr = rows * (q_ring.shape[2] * 4 + 8)
    barrier = barriers.index(stage)
    mbarrier.expect(barrier, nbytes, pred=wanted)
    tma.async_copy_global_to_shared(q_tiles, [batch, head, first, 0], barrier, q_ring.index(stage), pred=wanted)
    tma.async_copy_global_to_shared(stats_tiles, [lse_row, first], barrier, lse_ring.index(stage), pred=wanted)
    tma.async_copy_global_to_shared(dout_tiles, [batch, head, first, 0], barrier, dout_ring.index(stage), pred=wanted)
    tma.async_copy_global_to_shared(stats_tiles, [delta_row, first], barrier, delta_ring.index(stage), pred=wanted)


@gluon.jit
def _sparse_attention_hopper_bwd_dkv_kernel(
        q, k, v, dout, dk, dv, q_tiles, dout_tiles, stats_tiles, stats_ptr, stride_stats, stats_rows, twin, order_ptr,
        kv_length_ptr, num_queries, num_keys, num_blocks, heads, kv_heads, scale, scale_log2, Q_BLOCK: gl.constexpr,
        KV_BLOCK: gl.constexpr, HEAD_DIM: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
        BLOCK_D: gl.constexpr, STAGES: gl.constexpr):
    dtype: gl.constexpr = q.ptr.dtype.element_ty
    scores_layout: gl.constexpr = product_layout(BLOCK_N, BLOCK_M, gl.num_warps())
    sums_layout: gl.constexpr = product_layout(BLOCK_N, BLOCK_D, gl.num_warps())
    operand_layout: gl.constexpr = gl.DotOperandLayout(0, sums_layout, 2)
    column_layout: gl.constexpr = gl.SliceLayout(0, scores_layout)
    shared: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    vector: gl.constexpr = gl.NVMMASharedLayout(0, 32, rank=1)
    tiles: gl.constexpr = KV_BLOCK // BLOCK_N
    per_entry: gl.constexpr = Q_BLOCK // BLOCK_M
    row, tile = program_row(order_ptr, tiles)
    batch_kv_head, block = (row // num_blocks).to(gl.int64), row % num_blocks
    first_n = (block * KV_BLOCK + tile * BLOCK_N).to(gl.int64)
    batch, kv_head = batch_kv_head // kv_heads, batch_kv_head % kv_heads
    heads_per_kv = heads // kv_heads
    tma_batch = batch.to(gl.int32)

    length = load_length(kv_length_ptr + batch_kv_head, num_keys)
    k_tile = load_rows(k, batch, kv_head, first_n, length, HEAD_DIM, BLOCK_N, BLOCK_D)
    k_shared = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_D], shared, k_tile)
    v_tile = load_rows(v, batch, kv_head, first_n, length, HEAD_DIM, BLOCK_N, BLOCK_D)
    v_shared = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_D], shared, v_tile)
    q_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_D], shared)
    dout_ring = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_D], shared)
    lse_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], vector)
    delta_ring = gl.allocate_shared_memory(gl.float32, [STAGES, BLOCK_M], vector)
    barriers = new_barriers(STAGES)
    fence_async_shared()

    zeros = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, scores_layout)
    dk_total = gl.zeros([BLOCK_N, BLOCK_D], gl.float32, sums_layout)
    dv_total = gl.zeros([BLOCK_N, BLOCK_D], gl.float32, sums_layout)
    stage = 0
    parity = 0
    for member in range(heads_per_kv):
        head = kv_head * heads_per_kv + member
        batch_head = batch * heads + head
        tma_head, lse_row = head.to(gl.int32), batch_head.to(gl.int32)
        delta_row = lse_row + stats_rows
        start, count, listed, whole, steps, index = open_list(
            twin, batch_head * num_blocks + block, num_queries, Q_BLOCK, BLOCK_M)
        # The ring is empty here, and every warp must know before it is filled for the next head.
        fence_async_shared()
        gl.thread_barrier()
        free = stage
        for j in gl.static_range(STAGES - 1):
            _fetch_step(q_tiles, dout_tiles, stats_tiles, q_ring, dout_ring, lse_ring, delta_ring, barriers, free,
                        tma_batch, tma_head, lse_row, delta_row, index * Q_BLOCK + (j % per_entry) * BLOCK_M, j < steps)
            index = load_entry(twin, start, (j + 1) // per_entry, whole, listed)
            free += 1
            if free == STAGES:
                free = 0
        dk_acc = warpgroup_mma_init(dk_total)
        dv_acc = warpgroup_mma_init(dv_total)
        for i in range(steps):
            mbarrier.wait(barriers.index(stage), parity)
            q_tile, dout_tile = q_ring.index(stage), dout_ring.index(stage)
            scores = warpgroup_mma(k_shared, q_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
            dprobs = warpgroup_mma(v_shared, dout_tile.permute((1, 0)), zeros, use_acc=False, is_async=True)
            scores, dk_summed, dv_summed = warpgroup_mma_wait(1, deps=[scores, dk_acc, dv_acc])
            # dK and dV of the step before are done in every warp past this point, and so are the buffers they read.
            gl.thread_barrier()
            ahead = i + STAGES - 1
            _fetch_step(q_tiles, dout_tiles, stats_tiles, q_ring, dout_ring, lse_ring, delta_ring, barriers, free,
                        tma_batch, tma_head, lse_row, delta_row, index * Q_BLOCK + (ahead % per_entry) * BLOCK_M,
                        ahead < steps)
            index = load_entry(twin, start, (ahead + 1) // per_entry, whole, listed)
            lse = lse_ring.index(stage).load(column_layout)
            probs = gl.exp2(scores * scale_log2 - gl.expand_dims(lse, 0))
            dv_acc = warpgroup_mma(gl.convert_layout(probs.to(dtype), operand_layout), dout_tile, dv_summed,
                                   is_async=True)
            dprobs = warpgroup_mma_wait(1, deps=[dprobs])
            delta = delta_ring.index(stage).load(column_layout)
            dscores = probs * (dprobs - gl.expand_dims(delta, 0))
            dk_acc = warpgroup_mma(gl.convert_layout(dscores.to(dtype), operand_layout), q_tile, dk_summed,
                                   is_async=True)
            free = stage
            stage += 1
            if stage == STAGES:
                stage = 0
                parity ^= 1
        dk_total, dv_total = warpgroup_mma_wait(0, deps=[dk_acc, dv_acc])

        lane_m = gl.arange(0, BLOCK_M, column_layout)
        for i in range(steps, count * per_entry):
            first_m = step_token(twin, start, count, listed, i, Q_BLOCK, BLOCK_M)
            q_tile, dout_tile = q_ring.index(0), dout_ring.index(0)
            place_pair(q, dout, q_tile, dout_tile, batch, head, first_m, num_queries, HEAD_DIM)
            row_stats = stats_ptr + batch_head * stride_stats + first_m + lane_m
            valid_m = first_m + lane_m < num_queries
            scores = warpgroup_mma(k_shared, q_tile.permute((1, 0)), zeros, use_acc=False)
            lse = gl.load(row_stats, mask=valid_m, other=float("inf"))
            probs = gl.exp2(scores * scale_log2 - gl.expand_dims(lse, 0))
            dv_total = warpgroup_mma(gl.convert_layout(probs.to(dtype), operand_layout), dout_tile, dv_total)
            dprobs = warpgroup_mma(v_shared, dout_tile.permute((1, 0)), zeros, use_acc=False)
            delta_stats = stats_ptr + (batch_head + stats_rows) * stride_stats + first_m + lane_m
            delta = gl.load(delta_stats, mask=valid_m, other=0.0)
            dscores = probs * (dprobs - gl.expand_dims(delta, 0))
            dk_total = warpgroup_mma(gl.convert_layout(dscores.to(dtype), operand_layout), q_tile, dk_total)

    drop_barriers(barriers, STAGES)
    # Padding keys were loaded as 0 and have collected garbage in their own rows only.
    valid_n = gl.expand_dims(first_n + gl.arange(0, BLOCK_N, gl.SliceLayout(1, sums_layout)) < length, 1)
    store_rows(dk, batch, kv_head, first_n, num_keys, gl.where(valid_n, dk_total * scale, 0.0), HEAD_DIM, BLOCK_N,
               BLOCK_D)
    store_rows(dv, batch, kv_head, first_n, num_keys, gl.where(valid_n, dv_total, 0.0), HEAD_DIM, BLOCK_N, BLOCK_D)
