"""Window attention as a KVSelection: the baselines WA-M (1/3 of each dimension) and WA-L (2/3) of the DSV paper.

The fractions that ``--dsv-attention`` offers are ``megatron_dsv.config.WINDOWS`` (DSV, section 5).

Dims: T, H, W video tokens along time, height, width; s slots of the layout; Nq query groups, Nk key/value blocks;
b batch, h query heads, G key/value heads.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from megatron_dsv.kernels.selection import DENSE_ROW, KVSelection
from megatron_dsv.sparsity.token_layout import TokenLayout


def window_size(length: int, fraction: float) -> int:
    """Tokens of the window along one dimension: ``fraction * length`` rounded to the nearest (half up), at least 1."""
    return max(1, math.floor(fraction * length + 0.5))


def window_selection(layout: TokenLayout, fraction: float, *, q_block_size: int, kv_block_size: int, b: int, h: int,
                     G: int, device: torch.device | str) -> KVSelection:
    """Every query group attends to the blocks that touch a window of the video around the group.

    The window is a box of ``window_size`` tokens along each of T, H and W. It is centred on the group's centre token,
    the real token of the group that is nearest (Manhattan distance, the first on a tie) to the mean position of the
    group's real tokens. A box that would stick out of the video is moved inside, never cut, so every group sees a box
    of the same size. The group attends to every block that holds at least one token of the box, as a whole: the kept
    share is at least the box's share of the video, and more by what the block edges add. Found by a search on the host,
    about a second at 32,760 tokens in groups of 64: build it once for each video shape.

    Args:
        layout: order and padding of the tokens; queries and keys are its slots.
        fraction: share of each dimension, in (0, 1].
        q_block_size: slots per query group.
        kv_block_size: slots per key/value block; 1 selects exactly the tokens of the box.
        b: batch. All batch elements and heads share one list.
        h: query heads.
        G: key/value heads.
        device: where the selection lives.

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
    positions = layout.positions()[: layout.num_tokens]
    num_groups = -(-layout.padded_length // q_block_size)
    valid_blocks = -(-layout.num_tokens // kv_block_size)
    size = torch.tensor([window_size(length, fraction) for length in layout.grid])
    rows = []
    for group in range(num_groups):
        members = positions[group * q_block_size : (group + 1) * q_block_size]
        rows.append(_touched_blocks(members, positions, size, torch.tensor(layout.grid), kv_block_size)
                    if len(members) else torch.empty(0, dtype=torch.int64))
    counts = torch.tensor([len(row) for row in rows])
    full = counts == valid_blocks
    stored = [row for row, is_full in zip(rows, full.tolist(), strict=True) if not is_full]
    widths = torch.where(full, 0, counts)
    starts = torch.where(full, DENSE_ROW, widths.cumsum(0) - widths)
    flat = torch.cat([*stored, torch.empty(0, dtype=torch.int64)])
    return KVSelection(
        kv_indices=flat.to(device=device, dtype=torch.int32),
        row_start=starts.to(device).expand(b, h, num_groups).contiguous(),
        row_count=counts.to(device=device, dtype=torch.int32).expand(b, h, num_groups).contiguous(),
        kv_length=torch.full((b, G), layout.num_tokens, dtype=torch.int32, device=device),
        num_queries=layout.padded_length, num_keys=layout.padded_length, q_block_size=q_block_size,
        kv_block_size=kv_block_size,
        max_row_count=-(-layout.padded_length // kv_block_size) if bool(full.any()) else int(counts.max()))


def _touched_blocks(members: Tensor, positions: Tensor, size: Tensor, grid: Tensor, kv_block_size: int) -> Tensor:
    """Ascending numbers of the blocks with a token inside the group's box."""
    distance = (members - members.double().mean(0)).abs().sum(1)
    centre = members[int(distance.argmin())]
    low = torch.minimum((centre - size // 2).clamp_min(0), grid - size)
    inside = ((positions >= low) & (positions < low + size)).all(1)
    return torch.unique(torch.nonzero(inside)[:, 0] // kv_block_size)
