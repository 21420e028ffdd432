"""Block lists as rectangles, for library kernels that want one: written on the device, nothing waits for it.

Dims: b batch, h query heads, G key/value heads, Nq query groups, Nk key blocks, W entries of the widest row. A list
block may be finer than the selection's: ``split`` list blocks make one block of the selection.
Only a row's own entries are written; what follows them is not initialised and must not be read.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from megatron_dsv.kernels.selection import KVSelection
from megatron_dsv.kernels.sparse_attention.triton.lists import load_length

_STEP = 128


class Rectangle(NamedTuple):
    """Lists of list blocks, ascending, none of them wholly padding.

    Attributes:
        indices: int32 [b, h, rows, width].
        whole: int32 [b, h, rows]; entries that need no mask.
        cut: int32 [b, h, rows]; entries of which ``kv_length`` cuts off a part. By query rows that is the last entry
            (0 or 1 of them), by key rows all entries of the row or none.
        cut_indices: int32 [b, h, rows, n]; the entries that ``cut`` counts.
    """

    indices: Tensor
    whole: Tensor
    cut: Tensor
    cut_indices: Tensor


def by_query(selection: KVSelection, heads: slice, *, split: int = 1, multiple: int = 1) -> Rectangle:
    """Key blocks of every query group of some query heads: rows [b, heads, Nq], W = max_row_count * split, rounded up.

    Raises (on the device) where a row has more entries than ``max_row_count``.
    """
    start, count = (x[:, heads].contiguous() for x in (selection.row_start, selection.row_count))
    width = -(-max(1, selection.max_row_count) * split // multiple) * multiple
    indices = torch.empty((*start.shape, width), dtype=torch.int32, device=start.device)
    whole, cut, last = (torch.empty_like(count) for _ in range(3))
    fits = torch.ones((), dtype=torch.bool, device=start.device)
    if start.numel():
        _by_query_kernel[(start.numel(),)](
            selection.kv_indices, start, count, selection.kv_length.contiguous(), indices, whole, cut, last, fits,
            *_sizes(selection, heads, start), selection.max_row_count * split, width, BLOCK=selection.kv_block_size,
            SPLIT=split, STEP=_STEP, num_warps=1)
    torch._assert_async(fits, "KVSelection.max_row_count must bound the entries of every row; a dense row has one for "
                              "each valid block")
    return Rectangle(indices, whole, cut, last[..., None])


def by_key(selection: KVSelection, heads: slice, *, split: int = 1) -> Rectangle:
    """Query groups of every key block of some query heads, from the twin: rows [b, heads, Nk * split], W = Nq."""
    assert selection.transposed is not None, "lists by key come from the twin"
    twin = selection.transposed
    start, count = (x[:, heads].contiguous() for x in (twin.row_start, twin.row_count))
    shape = (*start.shape[:2], start.shape[2] * split)
    width = max(1, selection.num_query_groups)
    indices = torch.empty((*shape, width), dtype=torch.int32, device=start.device)
    whole, cut = (torch.empty(shape, dtype=torch.int32, device=start.device) for _ in range(2))
    if whole.numel():
        _by_key_kernel[(whole.numel(),)](
            twin.kv_indices, start, count, selection.kv_length.contiguous(), indices, whole, cut,
            *_sizes(selection, heads, start), width, BLOCK=selection.kv_block_size, SPLIT=split, STEP=_STEP,
            num_warps=1)
    return Rectangle(indices, whole, cut, indices)


def _sizes(selection: KVSelection, heads: slice, rows: Tensor) -> tuple[int, int, int, int, int, int]:
    """What finds the key length of a flat row: heads and rows of a head here, first head, h / G, G, sk."""
    kv_heads = selection.kv_length.shape[1]
    ratio = selection.row_start.shape[1] // kv_heads
    return rows.shape[1], rows.shape[2], heads.start or 0, ratio, kv_heads, selection.num_keys


@triton.jit
def _key_length(head, length_ptr, heads, first_head, ratio, kv_heads, num_keys):
    """Key length of flat head batch * heads + head."""
    return load_length(length_ptr + head // heads * kv_heads + (first_head + head % heads) // ratio, num_keys)


@triton.jit
def _by_query_kernel(indices_ptr, start_ptr, count_ptr, length_ptr, out_ptr, whole_ptr, cut_ptr, last_ptr, fits_ptr,
                     heads, rows, first_head, ratio, kv_heads, num_keys, bound, width, BLOCK: tl.constexpr,
                     SPLIT: tl.constexpr, STEP: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    length = _key_length(row // rows, length_ptr, heads, first_head, ratio, kv_heads, num_keys)
    start = tl.load(start_ptr + row)
    listed = start >= 0
    count = tl.where(listed, tl.load(count_ptr + row), tl.cdiv(length, BLOCK)) * SPLIT
    if count > bound:
        tl.store(fits_ptr, 0)
    count = tl.minimum(count, bound)
    sub: tl.constexpr = BLOCK // SPLIT
    kept = tl.zeros((), tl.int32)
    last = tl.full((), -1, tl.int32)
    for first in range(0, count, STEP):
        lane = first + tl.arange(0, STEP)
        inside = lane < count
        entry = lane // SPLIT
        index = tl.load(indices_ptr + tl.where(listed, start, 0) + entry, mask=inside & listed, other=0)
        index = tl.where(listed, index, entry) * SPLIT + lane % SPLIT
        inside &= index * sub < length
        tl.store(out_ptr + row * width + lane, index, mask=inside)
        kept += tl.sum(inside.to(tl.int32), 0)
        last = tl.maximum(last, tl.max(tl.where(inside, index, -1), 0))
    cut = ((last + 1) * sub > length).to(tl.int32)
    tl.store(whole_ptr + row, kept - cut)
    tl.store(cut_ptr + row, cut)
    tl.store(last_ptr + row, last)


@triton.jit
def _by_key_kernel(indices_ptr, start_ptr, count_ptr, length_ptr, out_ptr, whole_ptr, cut_ptr, heads, rows, first_head,
                   ratio, kv_heads, num_keys, width, BLOCK: tl.constexpr, SPLIT: tl.constexpr, STEP: tl.constexpr):
    out_row = tl.program_id(0).to(tl.int64)
    row = out_row // SPLIT
    length = _key_length(row // rows, length_ptr, heads, first_head, ratio, kv_heads, num_keys)
    sub: tl.constexpr = BLOCK // SPLIT
    block = out_row % (rows * SPLIT)
    start = tl.load(start_ptr + row)
    count = tl.where(block * sub < length, tl.load(count_ptr + row), 0)
    for first in range(0, count, STEP):
        lane = first + tl.arange(0, STEP)
        index = tl.load(indices_ptr + start + lane, mask=lane < count, other=0)
        tl.store(out_ptr + out_row * width + lane, index, mask=lane < count)
    cut = (block + 1) * sub > length
    tl.store(whole_ptr + out_row, tl.where(cut, 0, count))
    tl.store(cut_ptr + out_row, tl.where(cut, count, 0))
