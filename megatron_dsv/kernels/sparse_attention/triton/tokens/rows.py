"""How the token kernels walk a list of single keys and move rows of k, v, dk and dv: device functions of every pass.

Dims: n keys of a step, d head dim (HEAD_DIM, padded to BLOCK_D). Addresses are 64-bit.
"""

import triton
import triton.language as tl


@triton.jit
def load_list(indices_ptr, row_start_ptr, row_count_ptr, row, length):
    """(start, count, listed) of a row's valid keys; an unlisted (dense) row has the keys 0..length."""
    start = tl.load(row_start_ptr + row)
    listed = start >= 0
    start = tl.where(listed, start, 0)
    count = tl.where(listed, tl.load(row_count_ptr + row), length)
    # Keys ascend, so those past the length are the last; there seldom are any.
    last = tl.load(indices_ptr + start + count - 1, mask=listed & (count > 0), other=-1)
    if last >= length:
        low = count * 0
        while low < count:
            middle = (low + count) // 2
            inside = tl.load(indices_ptr + start + middle) < length
            low, count = tl.where(inside, middle + 1, low), tl.where(inside, count, middle)
    return start, count, listed


@triton.jit
def load_keys(indices_ptr, start, step, count, listed, BLOCK_N: tl.constexpr):
    """Keys [BLOCK_N] int32 of the list from place ``step`` on; 0 behind its end.

    The kernels call it a step ahead: a load of k or v that waits for its own index would wait twice.
    """
    place = step + tl.arange(0, BLOCK_N)
    token = tl.load(indices_ptr + start + place, mask=(place < count) & listed, other=0)
    return tl.where(listed | (place >= count), token, place)


@triton.jit
def gather(base_ptr, token, stride, valid, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Tile [n, BLOCK_D] of rows ``token``; 0 where a row is not valid or a column lies past HEAD_DIM.

    ``valid`` None: every row is.
    """
    dims = tl.arange(0, BLOCK_D)
    pointers = base_ptr + (token.to(tl.int64) * stride)[:, None] + dims[None, :]
    if HEAD_DIM == BLOCK_D:
        if valid is None:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=valid[:, None], other=0.0)
    else:
        inside = (dims < HEAD_DIM)[None, :]
        if valid is not None:
            inside = inside & valid[:, None]
        tile = tl.load(pointers, mask=inside, other=0.0)
    return tile


@triton.jit
def store(base_ptr, token, stride, valid, tile, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Counterpart of ``gather``; converts to the pointer's type."""
    dims = tl.arange(0, BLOCK_D)
    pointers = base_ptr + (token.to(tl.int64) * stride)[:, None] + dims[None, :]
    inside = (dims < HEAD_DIM)[None, :]
    if valid is not None:
        inside = inside & valid[:, None]
    tl.store(pointers, tile.to(base_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add(base_ptr, token, stride, valid, tile, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Adds the rows of ``tile`` to fp32 memory, atomically and in no fixed order; arguments as in ``store``."""
    dims = tl.arange(0, BLOCK_D)
    pointers = base_ptr + (token.to(tl.int64) * stride)[:, None] + dims[None, :]
    inside = (dims < HEAD_DIM)[None, :]
    if valid is not None:
        inside = inside & valid[:, None]
    tl.atomic_add(pointers, tile, mask=inside, sem="relaxed")


@triton.jit
def load_lse_log2(lse_ptr, row, valid):
    """lse in units of log 2; +inf for rows that attend to nothing or do not exist, so that exp2(x - lse) is 0."""
    lse = tl.load(lse_ptr + row, mask=valid, other=float("inf"))
    return tl.where(lse == float("-inf"), float("inf"), lse * 1.4426950408889634)
