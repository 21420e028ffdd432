"""Window selections against a search over every token of the video."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron_dsv.config import WINDOWS
from megatron_dsv.kernels.selection import DENSE_ROW
from megatron_dsv.sparsity.token_layout import TokenLayout
from megatron_dsv.sparsity.windows import window_selection, window_size


def oracle(layout: TokenLayout, fraction: float, qb: int, kvb: int) -> list[set[int]]:
    places = [tuple(map(int, p)) for p in layout.positions()[: layout.num_tokens]]
    rows = []
    for start in range(0, layout.padded_length, qb):
        members = places[start : start + qb]
        if not members:
            rows.append(set())
            continue
        mean = [sum(axis) / len(members) for axis in zip(*members, strict=True)]
        centre = min(members, key=lambda p: sum(abs(x - m) for x, m in zip(p, mean, strict=True)))
        boxes = []
        for c, length in zip(centre, layout.grid, strict=True):
            size = max(1, int(fraction * length + 0.5))
            low = min(max(c - size // 2, 0), length - size)
            boxes.append(range(low, low + size))
        box = set(itertools.product(*boxes))
        rows.append({slot // kvb for slot, place in enumerate(places) if place in box})
    return rows


@pytest.mark.parametrize("fraction", [1 / 3, 2 / 3, 1.0])
@pytest.mark.parametrize(("grid", "cube", "qb", "kvb"), [
    ((1, 7, 9), (2, 2, 2), 8, 8), ((5, 13, 3), (2, 2, 4), 16, 8), ((6, 6, 6), (2, 2, 2), 8, 1),
    ((3, 4, 5), (4, 4, 4), 64, 16),
])
def test_rows_are_the_blocks_that_touch_the_box(grid, cube, qb, kvb, fraction):
    layout = TokenLayout(grid, cube, 2 * qb)
    selection = window_selection(layout, fraction, q_block_size=qb, kv_block_size=kvb, b=2, h=4, G=2, device="cpu")
    mask = selection.block_mask()
    expected = oracle(layout, fraction, qb, kvb)
    for i, j in itertools.product(range(2), range(4)):
        assert [set(torch.nonzero(row)[:, 0].tolist()) for row in mask[i, j]] == expected
    assert selection.kv_length.eq(layout.num_tokens).all()
    assert selection.kv_length.shape == (2, 2)
    valid_blocks = -(-layout.num_tokens // kvb)
    full = [len(row) == valid_blocks for row in expected]
    assert selection.row_start[0, 0].eq(DENSE_ROW).tolist() == full
    assert selection.kv_indices.numel() == sum(len(r) for r, is_full in zip(expected, full, strict=True) if not is_full)


def test_token_windows_keep_the_papers_share():
    layout = TokenLayout((6, 9, 12), (2, 2, 2), 8)
    for name, share in (("window-1/3", 1 / 27), ("window-2/3", 8 / 27)):
        selection = window_selection(layout, WINDOWS[name], q_block_size=8, kv_block_size=1, b=1, h=1, G=1,
                                     device="cpu")
        kept = selection.row_count[selection.row_count > 0].float() / layout.num_tokens
        assert torch.allclose(kept, torch.full_like(kept, share))


def test_window_size_rounds_half_up_and_never_vanishes():
    assert [window_size(n, 1 / 3) for n in (1, 3, 4, 5, 21)] == [1, 1, 1, 2, 7]
    assert window_size(3, 0.5) == 2


def test_misuse_is_named():
    layout = TokenLayout((2, 2, 2), (2, 2, 2))
    with pytest.raises(ValueError, match=r"fraction of a window must be in \(0, 1\], got 0"):
        window_selection(layout, 0, q_block_size=8, kv_block_size=8, b=1, h=1, G=1, device="cpu")
    with pytest.raises(ValueError, match="block sizes must be at least 1"):
        window_selection(layout, 0.5, q_block_size=8, kv_block_size=0, b=1, h=1, G=1, device="cpu")
