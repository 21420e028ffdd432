"""The dispatcher: a given threshold, measured times, the default; in that order."""

from __future__ import annotations

import pytest

from megatron_dsv.kernels import timings
from megatron_dsv.sparsity.dispatcher import DEFAULT_DENSE_ABOVE, use_sparse

SHAPE = {"num_tokens": 4096, "num_heads": 8, "head_dim": 64, "q_block_size": 64, "kv_block_size": 64}


@pytest.fixture
def measured(monkeypatch):
    """A device on which dense takes 11 ms and sparse 20 ms at full density: with 10% to spare, even at one half."""
    dense = (timings.DenseRow(4096, 8, 64, 4.0, 7.0), timings.DenseRow(8192, 8, 64, 16.0, 28.0))
    sparse = (timings.SparseRow(64, 64, 4096, 8, 64, 0.25, 2.0, 3.0),)
    monkeypatch.setattr(timings, "DENSE", {"toy": dense})
    monkeypatch.setattr(timings, "SPARSE", {"toy": sparse})


def test_a_given_threshold_decides_alone_and_includes_itself(measured):
    assert use_sparse(0.3, dense_above=0.3, **SHAPE) == (
        True, "sparse: keep ratio 0.300 is within 0.300, --dsv-dense-above")
    assert use_sparse(0.301, dense_above=0.3, device="toy", **SHAPE) == (
        False, "dense: keep ratio 0.301 is above 0.300, --dsv-dense-above")
    assert use_sparse(1.0, dense_above=1.0, device="toy", **SHAPE).sparse
    assert not use_sparse(1e-6, dense_above=0.0, device="toy", **SHAPE).sparse


def test_measured_times_decide_with_something_to_spare(measured):
    assert use_sparse(0.499, device="toy", **SHAPE).sparse
    assert use_sparse(0.501, device="toy", **SHAPE) == (
        False, "dense: kernels on toy take 10 ms sparse at keep ratio 0.501, 11 ms dense")
    assert use_sparse(0.499, device="toy", **(SHAPE | {"num_tokens": 6000, "num_heads": 3})).sparse


@pytest.mark.parametrize("change", [
    {"device": None}, {"device": "other"}, {"num_tokens": 2048}, {"num_tokens": 16384}, {"head_dim": 128},
    {"kv_block_size": 32}, {"q_block_size": 128}])
def test_what_was_not_measured_falls_to_the_default_and_says_so(measured, change):
    arguments = SHAPE | {"device": "toy"} | change
    below, above = use_sparse(DEFAULT_DENSE_ABOVE, **arguments), use_sparse(DEFAULT_DENSE_ABOVE + 0.01, **arguments)
    assert (below.sparse, above.sparse) == (True, False)
    assert "nothing was measured" in below.reason
    assert "nothing was measured" in above.reason


def test_the_shipped_h200_rows_keep_coarse_blocks_sparse_longer_than_tokens():
    shape = {"num_tokens": 65536, "num_heads": 24, "head_dim": 128, "device": "NVIDIA H200"}
    break_even = {
        blocks: max(keep / 100 for keep in range(1, 101)
                    if use_sparse(keep / 100, q_block_size=blocks[0], kv_block_size=blocks[1], **shape).sparse)
        for blocks in ((64, 64), (128, 1), (64, 1))}
    dense = 85.2 + 244.1
    for blocks, full in (((64, 64), 45.44 / 0.0996), ((128, 1), 69.3 / 0.0996), ((64, 1), 118.6 / 0.0996)):
        assert break_even[blocks] == pytest.approx(dense / 1.1 / full, abs=0.01)


@pytest.mark.parametrize(("keep", "above", "message"), [
    (0.0, None, r"keep_ratio must be in \(0, 1\], got 0.0"), (float("nan"), None, r"keep_ratio must be in"),
    (0.5, 1.5, r"--dsv-dense-above must be in \[0, 1\], got 1.5")])
def test_misuse_is_named(keep, above, message):
    with pytest.raises(ValueError, match=message):
        use_sparse(keep, dense_above=above, **SHAPE)
