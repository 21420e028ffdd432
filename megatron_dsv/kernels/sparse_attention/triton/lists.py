"""How a kernel walks a row of a selection: device functions shared by every pass.

A row lists entries of BLOCK tokens each. If BLOCK is a multiple of the step, a step is a contiguous piece of one entry
and its address is one 64-bit scalar; if not (``GATHER``), a step gathers tokens from as many entries as it needs.
"""

import triton
import triton.language as tl


@triton.jit
def load_row(row_start_ptr, row_count_ptr, row, length, BLOCK: tl.constexpr):
    """(start, entries, listed) of a row; an unlisted (dense) row has every entry that begins before ``length``."""
    start = tl.load(row_start_ptr + row)
    listed = start >= 0
    count = tl.where(listed, tl.load(row_count_ptr + row), tl.cdiv(length, BLOCK))
    return start, count, listed


@triton.jit
def num_steps(count, BLOCK: tl.constexpr, STEP: tl.constexpr, GATHER: tl.constexpr):
    """Steps of STEP tokens that a row of ``count`` entries takes."""
    if GATHER:
        steps = tl.cdiv(count * BLOCK, STEP)
    else:
        steps = count * (BLOCK // STEP)
    return steps


@triton.jit
def step_tokens(i, indices_ptr, start, count, listed, length, BLOCK: tl.constexpr, STEP: tl.constexpr,
                GATHER: tl.constexpr):
    """(first, lane, valid) of step ``i``: its tokens are first + lane [STEP], of which ``valid`` are to be attended.

    ``first`` is 64-bit; where steps are contiguous, lane is 0..STEP-1 and keeps address arithmetic in 32 bits.
    """
    if GATHER:
        position = i * STEP + tl.arange(0, STEP)
        entry = position // BLOCK
        inside = entry < count
        index = tl.load(indices_ptr + tl.where(listed, start, 0) + entry, mask=inside & listed, other=0)
        lane = (tl.where(listed, index, entry) * BLOCK + position % BLOCK).to(tl.int64)
        first = tl.zeros((), tl.int64)
        valid = inside & (lane < length)
    else:
        per_entry: tl.constexpr = BLOCK // STEP
        entry = i // per_entry
        index = tl.load(indices_ptr + tl.where(listed, start, 0) + entry, mask=listed, other=0)
        first = (tl.where(listed, index, entry) * BLOCK + (i % per_entry) * STEP).to(tl.int64)
        lane = tl.arange(0, STEP)
        valid = lane < length - first
    return first, lane, valid


@triton.jit
def load_rows(base_ptr, first, lane, stride, valid, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Tile [lanes, BLOCK_D] of rows first + lane; 0 where a row is not valid or a column lies past HEAD_DIM."""
    dims = tl.arange(0, BLOCK_D)
    pointers = base_ptr + first * stride + (lane[:, None] * stride + dims[None, :])
    if HEAD_DIM == BLOCK_D:
        tile = tl.load(pointers, mask=valid[:, None], other=0.0)
    else:
        tile = tl.load(pointers, mask=valid[:, None] & (dims < HEAD_DIM)[None, :], other=0.0)
    return tile


@triton.jit
def store_rows(base_ptr, first, lane, stride, valid, tile, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Counterpart of ``load_rows``; converts to the pointer's type."""
    dims = tl.arange(0, BLOCK_D)
    pointers = base_ptr + first * stride + (lane[:, None] * stride + dims[None, :])
    tl.store(pointers, tile.to(base_ptr.dtype.element_ty), mask=valid[:, None] & (dims < HEAD_DIM)[None, :])


@triton.jit
def load_lse_log2(lse_ptr, first, lane, valid):
    """lse in units of log 2; +inf for rows that attend to nothing or do not exist, so that exp2(x - lse) is 0."""
    lse = tl.load(lse_ptr + first + lane, mask=valid, other=float("inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)
