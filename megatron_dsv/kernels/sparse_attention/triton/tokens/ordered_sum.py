"""The ordered sum of dK and dV: every query group's rows, written apart, are added key by key in a fixed order.

Dims: h query heads, G key/value heads, Nq query groups, d head dim, t tiles of BLOCK_N keys.
"""

import triton
import triton.language as tl

from megatron_dsv.kernels.sparse_attention.triton.lists import load_length
from megatron_dsv.kernels.sparse_attention.triton.tokens.rows import gather, load_list


@triton.jit
def _token_bounds_kernel(
        bounds_ptr, kv_indices_ptr, row_start_ptr, row_count_ptr, kv_length_ptr, first_row, num_keys, num_groups, heads,
        kv_heads, num_tiles, BLOCK_N: tl.constexpr, LANES: tl.constexpr):
    """bounds [rows, t + 1]: the first place of a row's list whose key lies in tile 0..t or after it."""
    row = first_row + tl.program_id(0).to(tl.int64)
    batch_head = row // num_groups
    kv_head = batch_head // heads * kv_heads + batch_head % heads // (heads // kv_heads)
    length = load_length(kv_length_ptr + kv_head, num_keys)
    start, count, listed = load_list(kv_indices_ptr, row_start_ptr, row_count_ptr, row, length)
    tile = tl.program_id(1) * LANES + tl.arange(0, LANES)
    key = tile * BLOCK_N
    low, high = tl.zeros([LANES], tl.int32), tl.zeros([LANES], tl.int32) + count
    remaining = tl.where(listed, count, 0)
    while remaining > 0:
        middle = (low + high) // 2
        token = tl.load(kv_indices_ptr + start + middle, mask=low < high, other=0)
        after = (low < high) & (token < key)
        low, high = tl.where(after, middle + 1, low), tl.where(after, high, middle)
        remaining = remaining // 2
    low = tl.where(listed, low, tl.minimum(key, count))
    tl.store(bounds_ptr + tl.program_id(0).to(tl.int64) * (num_tiles + 1) + tile, low, mask=tile <= num_tiles)


@triton.jit
def _token_ordered_sum_kernel(
        part_ptr, total_ptr, bounds_ptr, kv_indices_ptr, row_start_ptr, kv_length_ptr, stride_ps, stride_pb,
        stride_ts, stride_tb, stride_tg, first_row, num_rows, num_groups, heads, kv_heads, num_keys, first_kv_head,
        num_tiles, HEAD_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
        LANES: tl.constexpr):
    """Adds to total [sk, b, G, d] (fp32) the rows part [rows, places, d] of a tile of keys, by a product with 0 and 1.

    Rows ``first_row`` .. ``first_row + num_rows`` were written; a program adds those of its own key/value head.
    """
    tile = tl.program_id(0)
    batch_kv_head = first_kv_head + tl.program_id(1).to(tl.int64)
    rows_per_kv_head = heads // kv_heads * num_groups
    begin = tl.maximum(batch_kv_head * rows_per_kv_head - first_row, 0)
    end = tl.minimum((batch_kv_head + 1) * rows_per_kv_head - first_row, num_rows)
    length = load_length(kv_length_ptr + batch_kv_head, num_keys)

    lane_n = tl.arange(0, BLOCK_N)
    key = (tile * BLOCK_N + lane_n).to(tl.int64)
    dims = tl.arange(0, BLOCK_D)
    base = total_ptr + batch_kv_head // kv_heads * stride_tb + batch_kv_head % kv_heads * stride_tg
    pointers = base + (key * stride_ts)[:, None] + dims[None, :]
    inside = (key < num_keys)[:, None] & (dims < HEAD_DIM)[None, :]
    total = tl.load(pointers, mask=inside, other=0.0)
    member = tl.arange(0, ROWS * LANES) // LANES
    lane = tl.arange(0, ROWS * LANES) % LANES
    for first in range(begin, end, ROWS):
        row = first + member
        exists = row < end
        bound = bounds_ptr + row * (num_tiles + 1) + tile
        low = tl.load(bound, mask=exists, other=0)
        high = tl.load(bound + 1, mask=exists, other=0)
        start = tl.load(row_start_ptr + first_row + row, mask=exists, other=0)
        longest = tl.max(high - low, 0)
        for step in range(0, longest, LANES):
            place = low + step + lane
            valid = place < high
            token = tl.load(kv_indices_ptr + start + place, mask=valid & (start >= 0), other=0)
            token = tl.where(start >= 0, token, place)
            valid = valid & (token < length)
            part = gather(part_ptr, row * stride_pb + place.to(tl.int64) * stride_ps, 1, valid, HEAD_DIM, BLOCK_D)
            chosen = ((token - tile * BLOCK_N)[None, :] == lane_n[:, None]) & valid[None, :]
            total = tl.dot(chosen.to(part.dtype), part, total, input_precision="ieee")
    tl.store(pointers, total, mask=inside)
