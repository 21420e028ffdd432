"""In which order programs take the rows of a selection: the long ones first.

Dims: b batch, h query heads, G key/value heads, R rows of one head (query groups, or key blocks in a twin). A row that
many times outlasts the others must not be the last to start. The rest stay in place: neighbours share a head, whose
keys then stay in the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK = 4096
_FEWEST_ROWS = 2048
"""Below it a launch is too short to pay for the sorting one."""


@triton.jit
def _heavy_first_kernel(start_ptr, count_ptr, order_ptr, rows, rows_per_head, members, dense_count,
                        BLOCK: tl.constexpr):
    total = tl.zeros((), tl.int64)
    for first in range(0, rows, BLOCK):
        total += tl.sum(_work(start_ptr, count_ptr, first, rows, rows_per_head, members, dense_count, BLOCK))
    heavy_rows = 0
    for first in range(0, rows, BLOCK):
        work = _work(start_ptr, count_ptr, first, rows, rows_per_head, members, dense_count, BLOCK)
        heavy_rows += tl.sum((work * rows > 2 * total).to(tl.int32))
    heavy_before = 0
    for first in range(0, rows, BLOCK):
        work = _work(start_ptr, count_ptr, first, rows, rows_per_head, members, dense_count, BLOCK)
        heavy = (work * rows > 2 * total).to(tl.int32)
        row = first + tl.arange(0, BLOCK)
        rank = heavy_before + tl.cumsum(heavy) - heavy
        tl.store(order_ptr + tl.where(heavy > 0, rank, heavy_rows + row - rank), row, mask=row < rows)
        heavy_before += tl.sum(heavy)


@triton.jit
def _work(start_ptr, count_ptr, first, rows, rows_per_head, members, dense_count, BLOCK: tl.constexpr):
    """int64 [BLOCK]: entries of the rows from ``first`` on, summed over the query heads of a key/value head."""
    row = first + tl.arange(0, BLOCK)
    source = (row // rows_per_head * members).to(tl.int64) * rows_per_head + row % rows_per_head
    work = tl.zeros([BLOCK], tl.int64)
    for member in range(members):
        at = source + member * rows_per_head
        listed = tl.load(start_ptr + at, mask=row < rows, other=0) >= 0
        work += tl.where(listed, tl.load(count_ptr + at, mask=row < rows, other=0), dense_count)
    return work


def heavy_first(row_start: Tensor, row_count: Tensor, *, kv_heads: int, dense_count: int) -> Tensor | None:
    """int32 [b * kv_heads * R]: all rows, those of more than twice the mean work first; None where it does not pay.

    Args:
        row_start, row_count: [b, h, R] contiguous, of a selection or a twin.
        kv_heads: h for a query-major pass; G where one program serves all query heads of a key/value head.
        dense_count: entries of a row with start -1.
    """
    b, h, rows_per_head = row_start.shape
    rows = b * kv_heads * rows_per_head
    if rows < _FEWEST_ROWS:
        return None
    order = torch.empty(rows, dtype=torch.int32, device=row_start.device)
    if not order.is_meta:
        _heavy_first_kernel[(1,)](row_start, row_count, order, rows, rows_per_head, h // kv_heads, dense_count,
                                  BLOCK=_BLOCK, num_warps=16)
    return order
