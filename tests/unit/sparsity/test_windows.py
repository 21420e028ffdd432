"""Window selections against a search over every token of the video."""

from __future__ import annotations

import itertools
from fractions import Fraction

import pytest
import torch

from megatron_dsv.config import WINDOWS, DSVConfig
from megatron_dsv.kernels.selection import DENSE_ROW
from megatron_dsv.sparsity.token_layout import TokenLayout
from megatron_dsv.sparsity.windows import kept_share, window_selection, window_size
from megatron_dsv.transformer.selector import Selector


def oracle(layout: TokenLayout, fraction: float, qb: int, kvb: int) -> tuple[list[set[int]], list[tuple[range, ...]]]:
    """Blocks and box of every group."""
    places = [tuple(map(int, p)) for p in layout.positions()[: layout.num_tokens]]
    rows, windows = [], []
    for start in range(0, layout.padded_length, qb):
        members = places[start : start + qb]
        if not members:
            rows.append(set())
            windows.append(())
            continue
        mean = [Fraction(sum(axis), len(members)) for axis in zip(*members, strict=True)]
        centre = min(members, key=lambda p: sum(abs(x - m) for x, m in zip(p, mean, strict=True)))
        boxes = []
        for c, length in zip(centre, layout.grid, strict=True):
            size = max(1, int(fraction * length + 0.5))
            low = min(max(c - size // 2, 0), length - size)
            boxes.append(range(low, low + size))
        box = set(itertools.product(*boxes))
        rows.append({slot // kvb for slot, place in enumerate(places) if place in box})
        windows.append(tuple(boxes))
    return rows, windows


@pytest.mark.parametrize("fraction", [1 / 3, 2 / 3, 1.0])
@pytest.mark.parametrize(("grid", "cube", "qb", "kvb"), [
    ((1, 7, 9), (2, 2, 2), 8, 8), ((5, 13, 3), (2, 2, 4), 16, 8), ((6, 6, 6), (2, 2, 2), 8, 1),
    ((3, 4, 5), (4, 4, 4), 64, 16),
])
def test_rows_are_the_blocks_that_touch_the_box(grid, cube, qb, kvb, fraction):
    layout = TokenLayout(grid, cube, 2 * qb)
    selection = window_selection(layout, fraction, q_block_size=qb, kv_block_size=kvb, b=2, h=4, G=2, device="cpu")
    mask = selection.block_mask()
    expected, boxes = oracle(layout, fraction, qb, kvb)
    for i, j in itertools.product(range(2), range(4)):
        assert [set(torch.nonzero(row)[:, 0].tolist()) for row in mask[i, j]] == expected
    assert selection.kv_length.eq(layout.num_tokens).all()
    assert selection.kv_length.shape == (2, 2)
    valid_blocks = -(-layout.num_tokens // kvb)
    full = [len(row) == valid_blocks for row in expected]
    assert selection.row_start[0, 0].eq(DENSE_ROW).tolist() == full
    # Groups of one box share a list.
    stored = {box: len(row) for row, box, is_full in zip(expected, boxes, full, strict=True) if row and not is_full}
    assert selection.kv_indices.numel() == sum(stored.values())
    assert selection.entries_bound == 2 * 4 * sum(map(len, expected))


def test_the_twin_is_that_of_every_head():
    layout = TokenLayout((5, 13, 3), (2, 2, 4), 32)
    sizes = {"q_block_size": 16, "kv_block_size": 8, "b": 2, "h": 4, "G": 2, "device": "cpu"}
    selection = window_selection(layout, 1 / 3, **sizes)
    twin, exact = window_selection(layout, 1 / 3, **sizes, with_twin=True).transposed, selection.with_transposed()
    assert twin.row_start.shape == exact.transposed.row_start.shape
    groups = selection.num_query_groups
    listed = torch.zeros(2, 4, selection.num_kv_blocks, groups + 1, dtype=torch.bool)
    listed.scatter_(-1, twin.padded(fill=groups)[0].long(), True)
    assert torch.equal(listed[..., :-1].mT, selection.block_mask())
    # A list for all heads, and room for what it holds.
    assert twin.kv_indices.numel() * 8 <= exact.transposed.kv_indices.numel()


def test_a_search_is_made_once_for_all_callers_and_may_be_saved_for_a_backward():
    layout = TokenLayout((4, 6, 5), (2, 2, 2), 8)
    sizes = {"q_block_size": 8, "kv_block_size": 8, "device": "cpu"}
    with torch.inference_mode():
        first = window_selection(layout, 1 / 3, **sizes, b=1, h=2, G=2)
    assert window_selection(TokenLayout((4, 6, 5), (2, 2, 2), 8), 1 / 3, **sizes, b=1, h=2, G=2) is first
    other = window_selection(layout, 1 / 3, **sizes, b=3, h=4, G=4, with_twin=True)
    assert other.kv_indices is first.kv_indices
    assert not any(x.is_inference() for x in (first.kv_indices, first.row_start, first.row_count, first.kv_length))
    assert window_selection(layout, 2 / 3, **sizes, b=1, h=2, G=2).kv_indices is not first.kv_indices


def test_layers_share_a_window_and_make_a_twin_only_where_one_is_read():
    def selector(number, kv_block):
        dsv = DSVConfig(dsv_attention="window-1/3", dsv_q_block_size=8, dsv_kv_block_size=kv_block)
        return Selector(dsv, layer_number=number, query_heads=range(4), num_kv_heads=4, head_dim=8,
                        dtype=torch.float32, statistics=None)

    layout = TokenLayout((4, 6, 5), (2, 2, 2), 16)
    groups, low = layout.padded_length // 8, torch.empty(layout.padded_length, 2, 4, 8)
    whole = [selector(number, 8).window(layout, low, low, range(4), range(groups)) for number in (1, 2)]
    assert whole[0] is whole[1]
    assert whole[0].transposed is not None
    assert selector(1, 1).window(layout, low, low, range(4), range(groups)).transposed is None
    part = selector(1, 8).window(layout, low[:, :, :2], low[:, :, :2], range(1, 3), (5, 2))
    assert part.transposed is None
    assert torch.equal(part.block_mask(), whole[0].block_mask()[:, 1:3, [5, 2]])
    assert part.kv_length.shape == (2, 2)


def test_a_long_video_is_searched_at_once():
    """262,144 tokens in whole cubes: along each axis a box touches the cubes between its ends."""
    layout = TokenLayout((64, 64, 64), (4, 4, 4), 64)
    selection = window_selection(layout, 1 / 3, q_block_size=64, kv_block_size=64, b=1, h=1, G=1, device="cpu")
    # Of four tokens in a row, the second is the first of the two nearest to the mean.
    low = (torch.arange(1, 64, 4) - 10).clamp(0, 43)
    cubes = (low + 20) // 4 - low // 4 + 1
    expected = (cubes[:, None, None] * cubes[:, None] * cubes).flatten()
    assert torch.equal(selection.row_count[0, 0].long(), expected)
    assert selection.max_entries == int(expected.sum())


def test_token_windows_keep_the_papers_share():
    layout = TokenLayout((6, 9, 12), (2, 2, 2), 8)
    for name, share in (("window-1/3", 1 / 27), ("window-2/3", 8 / 27)):
        selection = window_selection(layout, WINDOWS[name], q_block_size=8, kv_block_size=1, b=1, h=1, G=1,
                                     device="cpu")
        kept = selection.row_count[selection.row_count > 0].float() / layout.num_tokens
        assert torch.allclose(kept, torch.full_like(kept, share))


@pytest.mark.parametrize(("qb", "kvb"), [(8, 8), (8, 1), (16, 4), (4, 64)])
def test_the_kept_share_counts_what_real_groups_read(qb, kvb):
    layout = TokenLayout((4, 6, 5), (2, 2, 2), 64)
    rows, _ = oracle(layout, 1 / 3, qb, kvb)
    shares = [Fraction(len(row), -(-layout.num_tokens // kvb)) for row in rows[:-(-layout.num_tokens // qb)]]
    share = kept_share(layout, 1 / 3, q_block_size=qb, kv_block_size=kvb)
    assert share == pytest.approx(float(sum(shares) / len(shares)))


def test_window_size_rounds_half_up_and_never_vanishes():
    assert [window_size(n, 1 / 3) for n in (1, 3, 4, 5, 21)] == [1, 1, 1, 2, 7]
    assert window_size(3, 0.5) == 2


def test_misuse_is_named():
    layout = TokenLayout((2, 2, 2), (2, 2, 2))
    with pytest.raises(ValueError, match=r"fraction of a window must be in \(0, 1\], got 0"):
        window_selection(layout, 0, q_block_size=8, kv_block_size=8, b=1, h=1, G=1, device="cpu")
    with pytest.raises(ValueError, match="block sizes must be at least 1"):
        window_selection(layout, 0.5, q_block_size=8, kv_block_size=0, b=1, h=1, G=1, device="cpu")
