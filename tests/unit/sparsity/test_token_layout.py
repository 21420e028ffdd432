"""TokenLayout: a bijection between raster and cube order whose cubes are contiguous pieces of 3-D video."""

from __future__ import annotations

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dsv.sparsity.token_layout import TokenLayout, default_cube

SHAPES = [(1, 7, 9), (5, 13, 3), (1, 1, 1), (4, 8, 8), (3, 5, 17)]
sizes = st.integers(1, 9)
cubes = st.sampled_from([1, 2, 3, 4, 8])


def expected_order(grid: tuple[int, ...], cube: tuple[int, ...]) -> list[tuple[int, int, int]]:
    """Coordinates in cube order by six plain loops."""
    starts = [range(0, size, step) for size, step in zip(grid, cube, strict=True)]
    order = []
    for corner in itertools.product(*starts):
        ends = [min(low + step, size) for low, step, size in zip(corner, cube, grid, strict=True)]
        order += itertools.product(*(range(low, high) for low, high in zip(corner, ends, strict=True)))
    return order


@settings(max_examples=25, deadline=None)
@given(grid=st.tuples(sizes, sizes, sizes), cube=st.tuples(cubes, cubes, cubes), pad=st.integers(1, 50))
def test_order_is_that_of_plain_loops_and_round_trips(grid, cube, pad):
    layout = TokenLayout(grid, cube, pad)
    n, (_, H, W) = layout.num_tokens, grid
    order = expected_order(grid, cube)
    assert layout.permutation().tolist() == [(t * H + h) * W + w for t, h, w in order]
    assert layout.inverse()[layout.permutation()].tolist() == list(range(n))
    assert layout.positions()[:n].tolist() == [list(position) for position in order]
    assert not layout.positions()[n:].any()
    assert layout.padded_length % pad == 0
    assert 0 <= layout.padded_length - n < pad

    x = torch.randn(2, n, 3, dtype=torch.float64)
    slots = layout.to_cube_order(x, dim=1)
    assert slots.shape == (2, layout.padded_length, 3)
    assert torch.equal(slots[:, :n], x[:, layout.permutation()])
    assert not slots[:, n:].any()
    assert torch.equal(layout.to_raster_order(slots, dim=-2), x)


@settings(max_examples=30, deadline=None)
@given(grid=st.tuples(sizes, sizes, sizes), cube=st.tuples(cubes, cubes, cubes))
def test_every_cube_is_contiguous_and_adjacent_in_the_video(grid, cube):
    layout = TokenLayout(grid, cube)
    number = [tuple(int(x) // c for x, c in zip(p, cube, strict=True)) for p in layout.positions()]
    runs = [key for key, _ in itertools.groupby(number)]
    assert len(runs) == len(set(runs)), "a cube is split over two places of the sequence"
    for key in runs:
        members = layout.positions()[[n == key for n in number]]
        extent = members.amax(0) - members.amin(0) + 1
        assert int(extent.prod()) == len(members), "a cube is not a full box of neighbours"
        assert all(int(e) <= c for e, c in zip(extent, cube, strict=True))


@pytest.mark.parametrize("grid", SHAPES)
def test_gradients_flow_to_real_tokens_only(grid):
    layout = TokenLayout(grid, (4, 4, 4), 64)
    x = torch.randn(layout.num_tokens, 2, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(layout.padded_length, 2, dtype=torch.float64)
    (layout.to_cube_order(x) * weight).sum().backward()
    assert torch.equal(x.grad, layout.to_raster_order(weight))

    slots = torch.randn(layout.padded_length, 2, dtype=torch.float64, requires_grad=True)
    layout.to_raster_order(slots).sum().backward()
    assert slots.grad[: layout.num_tokens].eq(1).all()
    assert not slots.grad[layout.num_tokens :].any()


def test_layout_first_used_under_inference_mode_still_trains():
    layout = TokenLayout((2, 3, 5), (2, 2, 2), 8)
    with torch.inference_mode():
        layout.to_raster_order(layout.to_cube_order(torch.randn(30, 1)))
    x = torch.randn(30, 1, requires_grad=True)
    layout.to_raster_order(layout.to_cube_order(x)).sum().backward()
    assert x.grad.eq(1).all()


def test_equal_layouts_are_equal_and_hash_alike():
    assert TokenLayout([2, 3, 4], [2, 2, 2], 8) == TokenLayout((2, 3, 4), (2, 2, 2), 8)
    assert len({TokenLayout((2, 3, 4), (2, 2, 2)), TokenLayout((2, 3, 4), (2, 2, 2))}) == 1


def test_default_cube_multiplies_to_the_block_and_is_nearly_cubic():
    assert default_cube(32) == (2, 4, 4)
    assert default_cube(64) == (4, 4, 4)
    assert default_cube(128) == (4, 4, 8)
    assert default_cube(256) == (4, 8, 8)
    for exponent in range(12):
        t, h, w = default_cube(2**exponent)
        assert t * h * w == 2**exponent
        assert t <= h <= w <= 2 * t


@pytest.mark.parametrize(("make", "message"), [
    (lambda: TokenLayout((0, 3, 4), (4, 4, 4)), r"grid must be three sizes.*got \(0, 3, 4\)"),
    (lambda: TokenLayout((2, 3), (4, 4, 4)), r"grid must be three sizes"),
    (lambda: TokenLayout((2, 3, 4), (4, 0, 4)), r"cube must be three sizes"),
    (lambda: TokenLayout((2, 3, 4), (4, 4, 4), 0), r"pad_multiple must be at least 1, got 0"),
    (lambda: TokenLayout((2, 3, 4), (4, 4, 4)).to_cube_order(torch.zeros(23, 2)), r"num_tokens=24 long along dim 0"),
    (lambda: TokenLayout((2, 3, 4), (4, 4, 4), 32).to_raster_order(torch.zeros(24)), r"padded_length=32"),
    (lambda: default_cube(48), r"--dsv-q-block-size must be a power of two.*got 48"),
])
def test_misuse_is_named(make, message):
    with pytest.raises(ValueError, match=message):
        make()
