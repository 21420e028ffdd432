"""The cost table's lookups: exact at measured points, monotone between them, the fastest backend of each pass."""

import itertools
from collections import Counter

import pytest

from megatron_dsv.kernels import timings
from megatron_dsv.kernels.timing_rows import DenseRow, SelectionRow, SparseRow
from megatron_dsv.kernels.timings import DENSE, SELECTION, SPARSE, dense_costs, dense_ms, selection_ms, sparse_ms

H200 = "NVIDIA H200"


def _density(row):
    return getattr(row, "density", 1.0)


@pytest.mark.parametrize("rows", [DENSE[H200], SPARSE[H200]], ids=["dense", "sparse"])
def test_measured_points_come_back(rows):
    works = Counter((row.backend, getattr(row, "q_block_size", 0), getattr(row, "kv_block_size", 0), row.head_dim,
                     row.tokens**2 * row.heads * _density(row)) for row in rows)
    assert len(set(rows)) == len(rows)
    for row in rows:
        shape = {"tokens": row.tokens, "heads": row.heads, "head_dim": row.head_dim, "backends": (row.backend,)}
        if isinstance(row, SparseRow):
            blocks = {"q_block_size": row.q_block_size, "kv_block_size": row.kv_block_size}
            got = sparse_ms(H200, **shape, **blocks, density=row.density)
        else:
            got = dense_ms(H200, **shape)
        # Shapes of equal work share one point of their curve.
        key = (row.backend, getattr(row, "q_block_size", 0), getattr(row, "kv_block_size", 0), row.head_dim,
               row.tokens**2 * row.heads * _density(row))
        tolerance = 1e-9 if works[key] == 1 else 0.15
        assert got == pytest.approx((row.forward_ms, row.backward_ms), rel=tolerance)


@pytest.mark.parametrize("table", [DENSE, SPARSE, SELECTION], ids=["dense", "sparse", "selection"])
def test_no_point_stands_twice(table):
    """Densities that differ by rounding alone are one."""
    for one, other in itertools.combinations(table[H200], 2):
        # What comes before the times; a density is the last of it.
        *shape, last = one[:-1 if isinstance(one, SelectionRow) else -2]
        *others, other_last = other[:-1 if isinstance(other, SelectionRow) else -2]
        assert shape != others or last != pytest.approx(other_last, rel=2e-3), (one, other)


def test_selection_comes_back_and_grows():
    for row in SELECTION[H200]:
        got = selection_ms(H200, tokens=row.tokens, heads=row.heads, q_block_size=row.q_block_size,
                           kv_block_size=row.kv_block_size)
        assert got == pytest.approx(row.ms)
    costs = [selection_ms(H200, tokens=n, heads=24, q_block_size=64, kv_block_size=64) for n in (4096, 65536, 300000)]
    assert costs == sorted(costs)


@pytest.fixture
def toy(monkeypatch):
    dense = (DenseRow("one", 4096, 8, 64, 4.0, 7.0), DenseRow("one", 8192, 8, 64, 8.0, 28.0),
             DenseRow("two", 4096, 8, 64, 5.0, 6.0), DenseRow("two", 4096, 8, 128, 1.0, 1.0))
    sparse = (SparseRow("one", 64, 64, 4096, 8, 64, 0.25, 2.0, 3.0),
              SparseRow("two", 64, 64, 4096, 8, 64, 0.25, 1.0, 4.0),
              SparseRow("one", 128, 1, 4096, 8, 64, 0.25, 9.0, 9.0))
    monkeypatch.setattr(timings, "DENSE", {"toy": dense})
    monkeypatch.setattr(timings, "SPARSE", {"toy": sparse})
    monkeypatch.setattr(timings, "SELECTION", {"toy": (SelectionRow(64, 64, 4096, 8, 0.5),)})


def test_each_pass_takes_its_fastest_backend(toy):
    assert dense_ms("toy", tokens=4096, heads=8, head_dim=64) == (4.0, 6.0)
    assert dense_ms("toy", tokens=4096, heads=8, head_dim=64, backends=("two",)) == (5.0, 6.0)
    assert dense_costs("toy", tokens=4096, heads=8, head_dim=64) == {"one": (4.0, 7.0), "two": (5.0, 6.0)}
    blocks = {"q_block_size": 64, "kv_block_size": 64}
    assert sparse_ms("toy", tokens=4096, heads=8, head_dim=64, density=0.25, **blocks) == (1.0, 3.0)
    assert timings.sparse_costs("toy", tokens=4096, heads=8, head_dim=64, density=0.25, q_block_size=64,
                                kv_block_size=32) == {}


def test_between_points_the_rate_is_interpolated_beyond_them_held_but_no_launch_is_free(toy):
    def forward(tokens, heads=8):
        return dense_ms("toy", tokens=tokens, heads=heads, head_dim=64, backends=("one",)).forward

    # Rates of 4096^2 and 8192^2 are 1 and 2; halfway in log2 of the work lies twice the work at rate 1.5.
    assert forward(4096, heads=16) == pytest.approx(4.0 * 2 / 1.5)
    assert forward(8192, heads=80) == pytest.approx(80.0)
    assert forward(1024) == pytest.approx(0.25)
    sparse = timings.sparse_costs("toy", tokens=1024, heads=8, head_dim=64, density=0.25, q_block_size=64,
                                  kv_block_size=64)
    assert sparse == {"one": (2.0, 3.0), "two": (1.0, 4.0)}
    assert selection_ms("toy", tokens=1024, heads=8, q_block_size=64, kv_block_size=64) == 0.5


def test_the_most_below_never_falls_and_is_no_more_than_what_was_measured(monkeypatch):
    times = {0.125: 2.0, 0.25: 1.0, 0.5: 1.5, 1.0: 4.0}
    rows = tuple(SparseRow("one", 64, 64, 4096, 8, 64, density, ms, ms) for density, ms in times.items())
    monkeypatch.setattr(timings, "SPARSE", {"toy": rows})

    def forward(density, **more):
        return timings.sparse_costs("toy", tokens=4096, heads=8, head_dim=64, density=density, q_block_size=64,
                                    kv_block_size=64, **more)["one"].forward

    densities = [i / 64 for i in range(65)]
    most = [forward(density, most_below=True) for density in densities]
    plain = list(map(forward, densities))
    assert most == list(itertools.accumulate(plain, max))
    assert most != plain
    assert (forward(0.5, most_below=True), forward(1.0, most_below=True)) == (2.0, 4.0)


def test_what_was_not_measured_takes_its_neighbour(toy):
    near = sparse_ms("toy", tokens=4096, heads=8, head_dim=64, density=0.25, q_block_size=256, kv_block_size=2)
    assert near == (9.0, 9.0)
    assert dense_ms("toy", tokens=4096, heads=8, head_dim=48, backends=("one",)) == (3.0, 5.25)
    # Dense attention of "two" takes 1 and 1 ms at 128 channels; of both, the fastest takes 4 and 6 ms at 64.
    scaled = timings.sparse_costs("toy", tokens=4096, heads=8, head_dim=128, density=1.0, q_block_size=128,
                                  kv_block_size=1, backends=("one",))
    assert scaled["one"] == pytest.approx((4 * 9.0 / 4.0, 4 * 9.0 / 6.0))
    assert selection_ms("toy", tokens=8192, heads=8, q_block_size=128, kv_block_size=1) == pytest.approx(2.0)


def test_unknown_devices_backends_and_densities_are_refused(toy):
    with pytest.raises(ValueError, match="device must be one that was measured, toy, got 'abacus'"):
        dense_ms("abacus", tokens=1024, heads=1, head_dim=64)
    with pytest.raises(ValueError, match=r"backends must include one that was measured on toy, one, two, got \['ten'"):
        dense_ms("toy", tokens=1024, heads=1, head_dim=64, backends=("ten",))
    with pytest.raises(ValueError, match=r"density must lie in \[0, 1\], got 1.5"):
        sparse_ms("toy", tokens=1024, heads=1, head_dim=64, density=1.5, q_block_size=64, kv_block_size=64)
