"""Window attention as a KVSelection: the baselines WA-M (1/3 of each dimension) and WA-L (2/3) of the DSV paper.

The fractions that ``--dsv-attention`` offers are ``megatron_dsv.config.WINDOWS`` (DSV, section 5).

Dims: T, H, W video tokens along time, height, width; s slots of the layout; Nq query groups, Nk key/value blocks;
b batch, h query heads, G key/value heads.
"""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from megatron_dsv.kernels.selection import DENSE_ROW, KVSelection
from megatron_dsv.sparsity.token_layout import TokenLayout


def window_size(length: int, fraction: float) -> int:
    """Tokens of the window along one dimension: ``fraction * length`` rounded to the nearest (half up), at least 1."""
    return max(1, math.floor(fraction * length + 0.5))


def window_selection(layout: TokenLayout, fraction: float, *, q_block_size: int, kv_block_size: int, b: int, h: int,
                     G: int, device: torch.device | str, with_twin: bool = False) -> KVSelection:
    """Every query group attends to the blocks that touch a window of the video around the group.

    The window is a box of ``window_size`` tokens along each of T, H and W. It is centred on the group's centre token,
    the real token of the group that is nearest (Manhattan distance, the first on a tie) to the mean position of the
    group's real tokens. A box that would stick out of the video is moved inside, never cut, so every group sees a box
    of the same size. The group attends to every block that holds at least one token of the box, as a whole: the kept
    share is at least the box's share of the video, and more by what the block edges add. Groups of one box share a
    list. Found on the host once for each video shape and kept, as are the results: callers share their tensors and must
    not write to them.

    Args:
        layout: order and padding of the tokens; queries and keys are its slots.
        fraction: share of each dimension, in (0, 1].
        q_block_size: slots per query group.
        kv_block_size: slots per key/value block; 1 selects exactly the tokens of the box.
        b: batch. All batch elements and heads share one list.
        h: query heads.
        G: key/value heads.
        device: where the selection lives.
        with_twin: attach the key-major twin; all heads share its lists, too.

    Returns:
        A selection for ``layout.padded_length`` queries and keys. Groups of padding attend to nothing; a row that
        touches every block is dense.

    Raises:
        ValueError: ``fraction`` or a block size out of range.
    """
    if not 0.0 < fraction <= 1.0:
        raise ValueError(f"fraction of a window must be in (0, 1], got {fraction}")
    if q_block_size < 1 or kv_block_size < 1:
        raise ValueError("block sizes must be at least 1, got "
                         f"q_block_size={q_block_size}, kv_block_size={kv_block_size}")
    return _of_heads(b, h, G, layout, fraction, q_block_size, kv_block_size, torch.device(device), with_twin)


@functools.lru_cache(maxsize=256)
def kept_share(layout: TokenLayout, fraction: float, *, q_block_size: int, kv_block_size: int) -> float:
    """Share of the real key blocks that ``window_selection`` keeps, mean over the query groups with a real token.

    Args: as of ``window_selection``, and so are the errors.
    """
    # The lists of another device hold the same; counted on the host, none of its work is waited for.
    counts = window_selection(layout, fraction, q_block_size=q_block_size, kv_block_size=kv_block_size, b=1, h=1, G=1,
                              device="cpu").row_count
    return int(counts.sum()) / (-(-layout.num_tokens // q_block_size) * -(-layout.num_tokens // kv_block_size))


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)  # kept under inference mode, it could not be saved for a later backward
def _of_heads(b: int, h: int, G: int, *of_one: Any) -> KVSelection:
    """``_of_one_head`` for b batch elements, h query heads and G key/value heads."""
    def spread(rows: KVSelection) -> KVSelection:
        return replace(
            rows, row_start=rows.row_start.expand(b, h, -1).contiguous(),
            row_count=rows.row_count.expand(b, h, -1).contiguous(),
            kv_length=rows.kv_length.expand(b, G).contiguous(), max_entries=b * h * rows.entries_bound,
            transposed=None if rows.transposed is None else spread(rows.transposed))

    return spread(_of_one_head(*of_one))


@functools.lru_cache(maxsize=64)
@torch.inference_mode(False)
def _of_one_head(layout: TokenLayout, fraction: float, q_block_size: int, kv_block_size: int, device: torch.device,
                 with_twin: bool) -> KVSelection:
    """The selection of one batch element and head."""
    if with_twin:
        return _of_one_head(layout, fraction, q_block_size, kv_block_size, device, False).with_transposed()
    boxes, box_of_group = _boxes(layout, fraction, q_block_size).unique(dim=0, return_inverse=True)
    padding = -(-layout.padded_length // q_block_size) - len(box_of_group)
    valid_blocks = -(-layout.num_tokens // kv_block_size)
    lists = _touched_blocks(boxes, layout, fraction, kv_block_size)
    sizes = torch.tensor([len(blocks) for blocks in lists])
    stored = [blocks for blocks in lists if len(blocks) < valid_blocks]
    widths = torch.where(sizes == valid_blocks, 0, sizes)
    starts = torch.where(sizes == valid_blocks, DENSE_ROW, widths.cumsum(0) - widths)
    row_start, row_count = (F.pad(x[box_of_group], (0, padding))[None, None] for x in (starts, sizes))
    num_blocks = -(-layout.padded_length // kv_block_size)
    return KVSelection(
        kv_indices=torch.cat([*stored, torch.empty(0, dtype=torch.int32)]).to(device), row_start=row_start.to(device),
        row_count=row_count.to(device=device, dtype=torch.int32),
        kv_length=torch.full((1, 1), layout.num_tokens, dtype=torch.int32, device=device),
        num_queries=layout.padded_length, num_keys=layout.padded_length, q_block_size=q_block_size,
        kv_block_size=kv_block_size, max_row_count=num_blocks if len(stored) < len(lists) else int(sizes.max()),
        max_entries=int(row_count.sum()))


def _box_size(layout: TokenLayout, fraction: float) -> tuple[int, ...]:
    return tuple(window_size(length, fraction) for length in layout.grid)


def _boxes(layout: TokenLayout, fraction: float, q_block_size: int) -> Tensor:
    """int64 [groups that hold a real token, 3]: the first t, h and w of every group's box."""
    positions = layout.positions()[:layout.num_tokens]
    groups = layout.num_tokens // q_block_size
    whole = groups * q_block_size
    parts = [positions[:whole].view(groups, q_block_size, 3), positions[whole:][None]]
    centres = torch.cat([_centres(part) for part in parts if part.numel()])
    size = torch.tensor(_box_size(layout, fraction))
    return torch.minimum((centres - size // 2).clamp_min(0), torch.tensor(layout.grid) - size)


def _centres(members: Tensor) -> Tensor:
    """[n, 3] of [n, tokens, 3]: each group's token nearest to the mean, in integers, so that ties are ties."""
    distance = (members * members.shape[1] - members.sum(1, keepdim=True)).abs().sum(2)
    return members[torch.arange(len(members)), distance.argmin(1)]


def _touched_blocks(boxes: Tensor, layout: TokenLayout, fraction: float, kv_block_size: int) -> list[Tensor]:
    """Ascending int32 numbers of the blocks with a token inside each box."""
    size = _box_size(layout, fraction)
    block_of = (layout.inverse() // kv_block_size).view(layout.grid)
    touched = torch.empty(-(-layout.num_tokens // kv_block_size), dtype=torch.bool)
    lists = []
    for first in boxes.tolist():
        t, h, w = (slice(low, low + length) for low, length in zip(first, size, strict=True))
        touched.zero_()
        touched[block_of[t, h, w].reshape(-1)] = True
        lists.append(touched.nonzero()[:, 0].to(torch.int32))
    return lists
