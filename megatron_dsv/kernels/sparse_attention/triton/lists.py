"""How a kernel walks a row of a selection, and how it reads and writes tiles: device functions shared by every pass.

A row lists entries of BLOCK tokens each. If BLOCK is a multiple of the step, a step is a contiguous piece of one entry;
if not (``GATHER``), a step gathers tokens from as many entries as it needs. Entries ascend, so those that reach into
padding come last: the steps before them need no mask.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import triton
import triton.language as tl


class Rows(NamedTuple):
    """A [s, b, h, d] tensor as a kernel takes it: its address and its strides over tokens, batch and heads."""

    ptr: Any
    stride_s: int
    stride_b: int
    stride_h: int


class Lists(NamedTuple):
    """The three tensors of a selection, or of its key-major twin: int32 indices, int64 starts, int32 counts."""

    indices: Any
    start: Any
    count: Any


@triton.jit
def program_row(order_ptr, tiles: tl.constexpr):
    """(row, tile) of this program; rows are taken in the order given, or as they lie where it is None."""
    row = tl.program_id(0) // tiles
    if order_ptr is not None:
        row = tl.load(order_ptr + row)
    return row, tl.program_id(0) % tiles


@triton.jit
def load_length(length_ptr, num_keys):
    """How many of ``num_keys`` keys are valid, in 32 bits; what a length says beyond 0 and ``num_keys`` is no key."""
    return tl.minimum(tl.maximum(tl.load(length_ptr).to(tl.int32), 0), num_keys)


@triton.jit
def load_row(lists, row, length, BLOCK: tl.constexpr):
    """(start, entries, listed) of a row; an unlisted (dense) row has every entry that begins before ``length``."""
    start = tl.load(lists.start + row)
    listed = start >= 0
    count = tl.where(listed, tl.load(lists.count + row), tl.cdiv(length, BLOCK))
    return tl.where(listed, start, 0), count, listed


@triton.jit
def whole_entries(lists, start, count, listed, length, BLOCK: tl.constexpr):
    """How many of a row's entries, from its first on, lie wholly before ``length`` >= 0."""
    whole_blocks = length // BLOCK
    entries = tl.where(listed, count, tl.minimum(count, whole_blocks))
    last = tl.load(lists.indices + start + entries - 1, mask=listed & (entries > 0), other=-1)
    while last >= whole_blocks:
        entries -= 1
        last = tl.load(lists.indices + start + entries - 1, mask=entries > 0, other=-1)
    return entries


@triton.jit
def load_entry(lists, start, entry, count, listed):
    """The block number of a row's ``entry``; loaded a step ahead of its use, its latency is hidden."""
    return tl.load(lists.indices + start + entry, mask=listed & (entry < count), other=entry)


@triton.jit
def num_steps(count, BLOCK: tl.constexpr, STEP: tl.constexpr, GATHER: tl.constexpr):
    """Steps of STEP tokens that a row of ``count`` entries takes."""
    if GATHER:
        steps = tl.cdiv(count * BLOCK, STEP)
    else:
        steps = count * (BLOCK // STEP)
    return steps


@triton.jit
def step_tokens(i, lists, start, count, listed, length, BLOCK: tl.constexpr, STEP: tl.constexpr,
                GATHER: tl.constexpr):
    """(first, lane, valid) of step ``i``: its tokens are first + lane [STEP], of which ``valid`` are to be attended.

    ``first`` is 64-bit; where steps are contiguous, lane is 0..STEP-1 and keeps address arithmetic in 32 bits.
    """
    if GATHER:
        position = i * STEP + tl.arange(0, STEP)
        entry = position // BLOCK
        inside = entry < count
        index = tl.load(lists.indices + start + entry, mask=inside & listed, other=0)
        lane = (tl.where(listed, index, entry) * BLOCK + position % BLOCK).to(tl.int64)
        first = tl.zeros((), tl.int64)
        valid = inside & (lane < length)
    else:
        per_entry: tl.constexpr = BLOCK // STEP
        index = load_entry(lists, start, i // per_entry, count, listed)
        first = (index * BLOCK + (i % per_entry) * STEP).to(tl.int64)
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
def load_tile(tiles, rows, batch, head, first, ROWS: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Tile [ROWS, BLOCK_D] that begins at token ``first`` and lies wholly inside the tensor.

    By the tensor memory accelerator if ``tiles`` is a descriptor over [b, h, s, d], which costs neither registers nor
    address arithmetic; from ``rows`` if it is None.
    """
    if tiles is None:
        lane = tl.arange(0, ROWS)
        dims = tl.arange(0, BLOCK_D)
        pointers = (rows.ptr + batch * rows.stride_b + head * rows.stride_h + first.to(tl.int64) * rows.stride_s
                    + (lane[:, None] * rows.stride_s + dims[None, :]))
        if HEAD_DIM == BLOCK_D:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=(dims < HEAD_DIM)[None, :], other=0.0)
    else:
        tile = tiles.load([batch.to(tl.int32), head.to(tl.int32), first, 0]).reshape([ROWS, BLOCK_D])
    return tile


@triton.jit
def store_rows(base_ptr, first, lane, stride, valid, tile, HEAD_DIM: tl.constexpr, BLOCK_D: tl.constexpr):
    """Counterpart of ``load_rows``; converts to the pointer's type."""
    dims = tl.arange(0, BLOCK_D)
    pointers = base_ptr + first * stride + (lane[:, None] * stride + dims[None, :])
    tl.store(pointers, tile.to(base_ptr.dtype.element_ty), mask=valid[:, None] & (dims < HEAD_DIM)[None, :])
