"""The dispatcher: a given threshold, measured costs, the default; in that order."""

from __future__ import annotations

import pytest

from megatron_dsv.sparsity.dispatcher import DEFAULT_DENSE_ABOVE, use_sparse

SHAPE = {"num_tokens": 4096, "num_heads": 8, "head_dim": 64, "q_block_size": 64, "kv_block_size": 64}


class Costs:
    """Dense 10 ms; sparse 1 ms of overhead and 18 ms at full density: break-even at exactly one half."""

    def __init__(self, dense=10.0, overhead=1.0):
        self.dense, self.overhead, self.asked = dense, overhead, []

    def dense_ms(self, **shape):
        self.asked.append(shape)
        return self.dense

    def sparse_ms(self, *, keep_ratio, **shape):
        self.asked.append(shape)
        return None if self.overhead is None else self.overhead + 18.0 * keep_ratio


def test_a_given_threshold_decides_alone_and_includes_itself():
    assert use_sparse(0.3, dense_above=0.3, **SHAPE) == (
        True, "sparse: keep ratio 0.300 is within 0.300, --dsv-dense-above")
    assert use_sparse(0.301, dense_above=0.3, costs=Costs(), **SHAPE) == (
        False, "dense: keep ratio 0.301 is above 0.300, --dsv-dense-above")
    assert use_sparse(1.0, dense_above=1.0, **SHAPE).sparse
    assert not use_sparse(1e-6, dense_above=0.0, **SHAPE).sparse


def test_measured_costs_decide_and_a_draw_stays_dense():
    costs = Costs()
    assert use_sparse(0.49, costs=costs, **SHAPE).sparse
    decision = use_sparse(0.5, costs=costs, **SHAPE)
    assert decision == (False, "dense: measured 10 ms sparse at keep ratio 0.500, 10 ms dense")
    assert costs.asked[:2] == [{"num_tokens": 4096, "num_heads": 8, "head_dim": 64}, SHAPE]


@pytest.mark.parametrize("costs", [None, Costs(dense=None), Costs(overhead=None)])
def test_without_a_measurement_the_default_decides_and_says_so(costs):
    below = use_sparse(DEFAULT_DENSE_ABOVE, costs=costs, **SHAPE)
    above = use_sparse(DEFAULT_DENSE_ABOVE + 0.01, costs=costs, **SHAPE)
    assert (below.sparse, above.sparse) == (True, False)
    assert "nothing measured" in above.reason


@pytest.mark.parametrize(("keep", "above", "message"), [
    (0.0, None, r"keep_ratio must be in \(0, 1\], got 0.0"), (float("nan"), None, r"keep_ratio must be in"),
    (0.5, 1.5, r"--dsv-dense-above must be in \[0, 1\], got 1.5")])
def test_misuse_is_named(keep, above, message):
    with pytest.raises(ValueError, match=message):
        use_sparse(keep, dense_above=above, **SHAPE)
