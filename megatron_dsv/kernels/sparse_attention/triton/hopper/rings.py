"""What the Hopper kernels share: their rows and lists, tiles between registers and memory, rings that TMA fills.

A ring has STAGES buffers and a barrier for each. A load is issued as soon as nobody reads the buffer it will overwrite,
and waited for by the parity of its turn around the ring. Dims: s tokens, b batch, h heads, d head dim.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from megatron_dsv.kernels.sparse_attention.triton.lists import load_entry, load_row, program_row, whole_entries


@gluon.constexpr_function
def product_layout(rows, columns, warps):
    """Registers of a product [rows, columns]: 16 rows to a warp; warps beyond the rows share out the columns."""
    row_warps = min(warps, rows // 16)
    column_warps = warps // row_warps
    return gl.NVMMADistributedLayout([3, 0], [row_warps, column_warps], [16, columns // column_warps, 16])


@gluon.jit
def query_tile(order_ptr, num_groups, heads, kv_heads, Q_BLOCK: gl.constexpr, BLOCK_M: gl.constexpr):
    """This program's row of the selection, (batch, head) pair, batch, head, key/value head and first query."""
    tiles: gl.constexpr = Q_BLOCK // BLOCK_M
    row, tile = program_row(order_ptr, tiles)
    batch_head, group = (row // num_groups).to(gl.int64), row % num_groups
    first_m = (group * Q_BLOCK + tile * BLOCK_M).to(gl.int64)
    batch, head = batch_head // heads, batch_head % heads
    return row, batch_head, batch, head, head // (heads // kv_heads), first_m


@gluon.jit
def open_list(lists, row, length, BLOCK: gl.constexpr, TILE: gl.constexpr):
    """Start, count and whether a row is listed, as of ``load_row``; its entries that need no mask, their steps of TILE
    tokens, and the first of them."""
    start, count, listed = load_row(lists, row, length, BLOCK)
    whole = whole_entries(lists, start, count, listed, length, BLOCK)
    steps = whole * (BLOCK // TILE)
    return start, count, listed, whole, steps, load_entry(lists, start, 0, whole, listed)


@gluon.jit
def step_token(lists, start, count, listed, step, BLOCK: gl.constexpr, TILE: gl.constexpr):
    """First token of a step of the tail, TILE tokens of a BLOCK."""
    per_entry: gl.constexpr = BLOCK // TILE
    return (load_entry(lists, start, step // per_entry, count, listed) * BLOCK + (step % per_entry) * TILE).to(gl.int64)


@gluon.jit
def load_rows(rows, batch, head, first, limit, HEAD_DIM: gl.constexpr, ROWS: gl.constexpr, BLOCK_D: gl.constexpr):
    """Tile [ROWS, BLOCK_D] from token ``first`` on; 0 where a token is not before ``limit`` or a column past d."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [gl.num_warps(), 1], [1, 0])
    lane = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    dims = gl.arange(0, BLOCK_D, gl.SliceLayout(0, layout))
    base = rows.ptr + batch * rows.stride_b + head * rows.stride_h + first * rows.stride_s
    offsets = gl.expand_dims(lane * rows.stride_s, 1) + gl.expand_dims(dims, 0)
    stored = gl.expand_dims(first + lane < limit, 1) & gl.expand_dims(dims < HEAD_DIM, 0)
    return gl.load(base + offsets, mask=stored, other=0.0)


@gluon.jit
def store_rows(rows, batch, head, first, limit, tile, HEAD_DIM: gl.constexpr, ROWS: gl.constexpr,
               BLOCK_D: gl.constexpr):
    """Counterpart of ``load_rows``; converts to the pointer's type."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [256 // BLOCK_D, BLOCK_D // 8], [gl.num_warps(), 1], [1, 0])
    lane = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    dims = gl.arange(0, BLOCK_D, gl.SliceLayout(0, layout))
    base = rows.ptr + batch * rows.stride_b + head * rows.stride_h + first * rows.stride_s
    offsets = gl.expand_dims(lane * rows.stride_s, 1) + gl.expand_dims(dims, 0)
    stored = gl.expand_dims(first + lane < limit, 1) & gl.expand_dims(dims < HEAD_DIM, 0)
    gl.store(base + offsets, gl.convert_layout(tile.to(rows.ptr.dtype.element_ty), layout), mask=stored)


@gluon.jit
def new_barriers(STAGES: gl.constexpr):
    """One barrier for each buffer of a ring, signalled once its bytes have arrived."""
    barriers = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for stage in gl.static_range(STAGES):
        mbarrier.init(barriers.index(stage), count=1)
    return barriers


@gluon.jit
def drop_barriers(barriers, STAGES: gl.constexpr):
    """Counterpart of ``new_barriers``: their memory may be used again."""
    for stage in gl.static_range(STAGES):
        mbarrier.invalidate(barriers.index(stage))


@gluon.jit
def place_pair(a, b, a_buffer, b_buffer, batch, head, first, limit, HEAD_DIM: gl.constexpr):
    """Tiles of two tensors at one place, ``load_rows`` of each, into buffers that every warp may then multiply."""
    gl.thread_barrier()
    a_buffer.store(load_rows(a, batch, head, first, limit, HEAD_DIM, a_buffer.shape[0], a_buffer.shape[1]))
    b_buffer.store(load_rows(b, batch, head, first, limit, HEAD_DIM, b_buffer.shape[0], b_buffer.shape[1]))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def fetch_tile(tiles, ring, barriers, stage, batch, head, first, wanted):
    """Begins to load the tile at token ``first`` into a buffer of the ring, if ``wanted``."""
    nbytes: gl.constexpr = ring.shape[1] * ring.shape[2] * 2
    mbarrier.expect(barriers.index(stage), nbytes, pred=wanted)
    tma.async_copy_global_to_shared(tiles, [batch, head, first, 0], barriers.index(stage), ring.index(stage),
                                    pred=wanted)


@gluon.jit
def fetch_pair(a_tiles, b_tiles, a_ring, b_ring, barriers, stage, batch, head, first, wanted):
    """``fetch_tile`` of two tensors at one place, behind one barrier."""
    nbytes: gl.constexpr = a_ring.shape[1] * a_ring.shape[2] * 4
    barrier = barriers.index(stage)
    mbarrier.expect(barrier, nbytes, pred=wanted)
    tma.async_copy_global_to_shared(a_tiles, [batch, head, first, 0], barrier, a_ring.index(stage), pred=wanted)
    tma.async_copy_global_to_shared(b_tiles, [batch, head, first, 0], barrier, b_ring.index(stage), pred=wanted)
