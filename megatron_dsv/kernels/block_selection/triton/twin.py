"""The key-major twin of a selection: a bit mask of the rows, then one program for every 32 key blocks.

Integer atomics alone build the mask and the counts, so the twin is the same in every run.

Dims: b batch, h query heads, Nq query groups (num_groups), Nk key blocks (num_blocks), W words of 32 key blocks;
pairs are (batch, head), and a launch takes those from ``first_pair`` on.
"""

import triton
import triton.language as tl

from megatron_dsv.kernels.sparse_attention.triton.lists import load_length


@triton.jit
def _mark_rows_kernel(
        indices_ptr, row_start_ptr, row_count_ptr, kv_length_ptr, mask_ptr, count_ptr, total_ptr, excess_ptr,
        first_pair, num_groups, num_blocks, words, heads, kv_heads, most, KV_BLOCK: tl.constexpr, STEP: tl.constexpr):
    """mask [pairs, W, Nq] gets a bit for every entry; count [b, h, Nk] and total [b, h] the numbers of them."""
    group = tl.program_id(0) % num_groups
    chunk_pair = (tl.program_id(0) // num_groups).to(tl.int64)
    pair = first_pair + chunk_pair
    start = tl.load(row_start_ptr + pair * num_groups + group)
    listed = start >= 0
    kv_head = pair // heads * kv_heads + pair % heads // (heads // kv_heads)
    every = tl.cdiv(load_length(kv_length_ptr + kv_head, num_blocks * KV_BLOCK), KV_BLOCK)
    entries = tl.where(listed, tl.load(row_count_ptr + pair * num_groups + group), every)
    if entries > most:
        tl.store(excess_ptr, 1)
    else:
        tl.atomic_add(total_ptr + pair, entries.to(tl.int64), sem="relaxed")
        for first in range(0, entries, STEP):
            lane = first + tl.arange(0, STEP)
            inside = lane < entries
            block = tl.load(indices_ptr + tl.where(listed, start, 0) + lane, mask=inside & listed, other=0)
            block = tl.where(listed, block, lane)
            word = (chunk_pair * words + block // 32) * num_groups + group
            tl.atomic_or(mask_ptr + word, tl.full([STEP], 1, tl.int32) << (block % 32), mask=inside, sem="relaxed")
            tl.atomic_add(count_ptr + pair * num_blocks + block, tl.full([STEP], 1, tl.int32), mask=inside,
                          sem="relaxed")


@triton.jit
def _fill_twin_kernel(
        mask_ptr, count_ptr, total_ptr, excess_ptr, twin_indices_ptr, twin_start_ptr, fits_ptr, first_pair, num_groups,
        num_blocks, words, capacity, GROUPS: tl.constexpr, STEP: tl.constexpr):
    """twin_start [b, h, Nk] and the groups of each of 32 key blocks, ascending, packed behind all earlier lists."""
    word = tl.program_id(0) % words
    chunk_pair = (tl.program_id(0) // words).to(tl.int64)
    pair = first_pair + chunk_pair
    lane = tl.arange(0, STEP)
    earlier = tl.zeros([STEP], tl.int64)
    for first in range(0, pair, STEP):
        earlier += tl.load(total_ptr + first + lane, mask=first + lane < pair, other=0)
    for first in range(0, word * 32, STEP):
        earlier += tl.load(count_ptr + pair * num_blocks + first + lane, mask=first + lane < word * 32, other=0)
    base = tl.sum(earlier, 0)

    bit = tl.arange(0, 32)
    block = word * 32 + bit
    count = tl.load(count_ptr + pair * num_blocks + block, mask=block < num_blocks, other=0)
    ends = base + tl.cumsum(count, 0)
    start = ends - count
    tl.store(twin_start_ptr + pair * num_blocks + block, start, mask=block < num_blocks)
    fits = (tl.load(excess_ptr) == 0) & (tl.max(ends, 0) <= capacity)
    if (word == words - 1) & (tl.program_id(0) == tl.num_programs(0) - 1):
        # The last list of all ends where the entries do.
        tl.store(fits_ptr, fits.to(tl.int32))
    if fits:
        place = start - 1
        for first in range(0, num_groups, GROUPS):
            group = first + tl.arange(0, GROUPS)
            bits = tl.load(mask_ptr + (chunk_pair * words + word) * num_groups + group, mask=group < num_groups,
                           other=0)
            marked = (bits[:, None] >> bit[None, :]) & 1
            tl.store(twin_indices_ptr + place[None, :] + tl.cumsum(marked, 0),
                     tl.broadcast_to(group[:, None], [GROUPS, 32]), mask=marked != 0)
            place += tl.sum(marked, 0)
