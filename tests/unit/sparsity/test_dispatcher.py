"""The dispatcher: a given threshold, measured times, the default; in that order."""

from __future__ import annotations

import itertools

import pytest
import torch

from megatron_dsv.kernels import timings
from megatron_dsv.kernels.sparse_attention.choice import serves_kind
from megatron_dsv.kernels.timing_rows import DenseRow, SelectionRow, SparseRow
from megatron_dsv.sparsity import dispatcher
from megatron_dsv.sparsity.dispatcher import DEFAULT_DENSE_ABOVE, use_sparse

SHAPE = {"num_tokens": 4096, "num_heads": 8, "head_dim": 64, "q_block_size": 64, "kv_block_size": 64}


@pytest.fixture
def measured(monkeypatch):
    """A device on which dense takes 11 ms and sparse 19 ms at full density, 0.6 ms of selection apart."""
    def rows(backend, forward, backward):
        return tuple(SparseRow(backend, 64, 64, 4096, 8, 64, density, forward * density, backward * density)
                     for density in (0.01, 1.0))

    dense = (DenseRow("sdpa", 4096, 8, 64, 4.0, 7.0), DenseRow("sdpa", 8192, 8, 64, 16.0, 28.0),
             DenseRow("flash4", 4096, 8, 64, 2.0, 3.0))
    monkeypatch.setattr(timings, "DENSE", {"toy": dense})
    monkeypatch.setattr(timings, "SPARSE", {"toy": rows("triton", 8.0, 11.0) + rows("flash4", 4.0, 12.0)})
    monkeypatch.setattr(timings, "SELECTION", {"toy": (SelectionRow(64, 64, 4096, 8, 0.6),)})
    monkeypatch.setattr(dispatcher, "installed", lambda backend: backend in ("sdpa", "triton"))
    monkeypatch.setattr(dispatcher, "serves_kind", lambda backend, **kind: True)
    dispatcher._by_cost.cache_clear()
    yield
    dispatcher._by_cost.cache_clear()


def _break_even(**arguments):
    dispatcher._by_cost.cache_clear()
    return max((keep / 100 for keep in range(1, 101)
                if use_sparse(keep / 100, device="toy", **(SHAPE | arguments)).sparse), default=0.0)


def test_a_given_threshold_decides_alone_and_includes_itself(measured):
    assert use_sparse(0.3, dense_above=0.3, **SHAPE) == (
        True, "sparse: keep ratio 0.300 is within 0.300, --dsv-dense-above")
    assert use_sparse(0.301, dense_above=0.3, device="toy", **SHAPE) == (
        False, "dense: keep ratio 0.301 is above 0.300, --dsv-dense-above")
    assert use_sparse(1.0, dense_above=1.0, device="toy", **SHAPE).sparse
    assert not use_sparse(1e-6, dense_above=0.0, device="toy", **SHAPE).sparse


def test_measured_times_with_selection_decide_with_something_to_spare(measured):
    # 11 / 1.1 = 10 = 19 * 0.4947 + 0.6
    assert use_sparse(0.494, device="toy", **SHAPE).sparse
    assert use_sparse(0.495, device="toy", **SHAPE) == (
        False, "dense: toy takes 9.4 ms sparse at keep ratio 0.495 and 0.6 ms to select, 11 ms dense")
    assert use_sparse(0.4, device="toy", **(SHAPE | {"num_tokens": 6000, "num_heads": 3})).sparse


def test_only_backends_that_will_run_count(measured, monkeypatch):
    assert _break_even() == _break_even(sparse_backend="triton", dense_backend="sdpa") == 0.49
    assert _break_even(sparse_backend="flash4") == 0.58
    monkeypatch.setattr(dispatcher, "installed", lambda backend: True)
    assert _break_even(dense_backend="sdpa") == 0.62
    assert _break_even() == 0.26
    assert use_sparse(0.4, device="toy", **SHAPE, sparse_backend="reference").reason.endswith("nothing was measured")


def test_a_backend_that_does_not_take_the_head_dim_does_not_count(measured, monkeypatch):
    monkeypatch.setattr(dispatcher, "installed", lambda backend: True)
    monkeypatch.setattr(dispatcher, "serves_kind", serves_kind)
    monkeypatch.setattr(timings, "SPARSE", {"toy": timings.SPARSE["toy"] + (
        SparseRow("cudnn", 64, 64, 4096, 8, 128, 1.0, 0.1, 0.1),)})
    assert not use_sparse(1.0, device="toy", **SHAPE, sparse_backend="cudnn").sparse
    assert use_sparse(1.0, device="toy", **(SHAPE | {"head_dim": 128}), sparse_backend="cudnn").sparse


def test_a_granularity_that_was_not_measured_is_bounded_by_those_that_were(measured, monkeypatch):
    assert _break_even(q_block_size=128) == _break_even(q_block_size=64, kv_block_size=128) == _break_even() == 0.49
    # Two pieces: 10 = 2 * (19 * 0.231 + 0.6).
    assert _break_even(kv_block_size=32) == _break_even(q_block_size=32, kv_block_size=4096) == 0.23
    assert _break_even(q_block_size=8, kv_block_size=8) == 0.0
    tokens = tuple(SparseRow("triton", 64, 1, 4096, 8, 64, density, 10 * density, 10 * density)
                   for density in (0.01, 1.0))
    monkeypatch.setattr(timings, "SPARSE", {"toy": timings.SPARSE["toy"] + tokens})
    # Single tokens in groups as long bound blocks of 32 more closely than two halves of blocks of 64.
    assert _break_even(kv_block_size=32) == 0.44


def test_kinds_that_a_backend_does_not_serve_are_not_promised_its_times(measured, monkeypatch):
    monkeypatch.setattr(dispatcher, "installed", lambda backend: True)
    monkeypatch.setattr(dispatcher, "serves_kind", serves_kind)
    rows = tuple(SparseRow(backend, blocks, blocks, 4096, 8, 128, 1.0, ms, ms)
                 for backend, blocks, ms in (("cudnn", 128, 0.1), ("flash4", 128, 1.0), ("triton", 64, 30.0)))
    monkeypatch.setattr(timings, "SPARSE", {"toy": rows})
    monkeypatch.setattr(timings, "DENSE", {"toy": (DenseRow("sdpa", 4096, 8, 128, 2.0, 3.0),)})
    kind = {"head_dim": 128, "q_block_size": 128, "kv_block_size": 128}

    def sparse_ms(**more):
        dispatcher._by_cost.cache_clear()
        reason = use_sparse(1.0, device="toy", **(SHAPE | kind | more)).reason
        return float(reason.split("takes ")[1].split(" ms")[0])

    assert sparse_ms() == 0.2
    assert sparse_ms(num_kv_heads=4) == sparse_ms(dtype=torch.float16) == 2.0
    assert sparse_ms(dtype=torch.float32) == sparse_ms(deterministic=True) == 60.0
    assert sparse_ms(kv_block_size=64) == 60.0


def test_single_tokens_that_repeat_bitwise_cost_more(measured, monkeypatch):
    rows = tuple(SparseRow("triton", 64, 1, 4096, 8, 64, density, 10 * density, 10 * density)
                 for density in (0.01, 1.0))
    monkeypatch.setattr(timings, "SPARSE", {"toy": rows})
    monkeypatch.setattr(timings, "SELECTION", {"toy": (SelectionRow(64, 1, 4096, 8, 0.6),)})
    assert _break_even(kv_block_size=1) == 0.47
    assert _break_even(kv_block_size=1, deterministic=True) == 0.38


def test_a_layer_that_is_sparse_is_sparse_at_every_smaller_share(monkeypatch):
    """On the shipped rows, whose shortest times fall here and there as work grows."""
    monkeypatch.setattr(dispatcher, "installed", lambda backend: True)
    shares = [share / 20 for share in range(1, 21)]
    seen = set()
    for tokens, heads, head_dim, blocks, (sparse_backend, dense_backend) in itertools.product(
            (4096, 8192, 12000, 65536), (3, 24), (64, 128), ((64, 64), (128, 128), (128, 1), (64, 128)),
            (("triton", "sdpa"), ("flash4", "flash4"), ("cudnn", "flash4"), ("auto", "auto"))):
        chosen = [use_sparse(
            share, num_tokens=tokens, num_heads=heads, head_dim=head_dim, q_block_size=blocks[0],
            kv_block_size=blocks[1], device="NVIDIA H200", sparse_backend=sparse_backend,
            dense_backend=dense_backend).sparse for share in shares]
        assert chosen == sorted(chosen, reverse=True), (tokens, heads, head_dim, blocks, sparse_backend)
        seen.add(sum(chosen))
    assert len(seen) >= 10
    dispatcher._by_cost.cache_clear()


@pytest.mark.parametrize(("tokens", "heads", "sparse"), [(4096, 24, False), (16384, 3, False), (8192, 24, True)])
def test_what_takes_longer_to_launch_than_dense_attention_takes_is_dense(monkeypatch, tokens, heads, sparse):
    """Of 4,096 tokens and 24 heads a twentieth took 3.5 ms, dense attention 1.2; of 16,384 and 3, 2.0 and 2.3."""
    monkeypatch.setattr(dispatcher, "installed", lambda backend: True)
    decision = use_sparse(0.05, num_tokens=tokens, num_heads=heads, head_dim=128, q_block_size=128, kv_block_size=128,
                          device="NVIDIA H200")
    assert (decision.sparse, "3.51 ms allowed for launches" in decision.reason) == (sparse, True)


def test_shorter_than_measured_is_dense(measured):
    assert use_sparse(0.01, device="toy", **(SHAPE | {"num_tokens": 2048})) == (
        False, "dense: 2048 tokens are fewer than were measured, 4096")


@pytest.mark.parametrize("change", [
    {"device": None}, {"device": "other"}, {"num_tokens": 16384}])
def test_what_was_not_measured_falls_to_the_default_and_says_so(measured, change):
    arguments = SHAPE | {"device": "toy"} | change
    below, above = use_sparse(DEFAULT_DENSE_ABOVE, **arguments), use_sparse(DEFAULT_DENSE_ABOVE + 0.01, **arguments)
    assert (below.sparse, above.sparse) == (True, False)
    assert "nothing was measured" in below.reason
    assert "nothing was measured" in above.reason


def test_the_shipped_h200_rows_never_promise_what_they_do_not_hold(monkeypatch):
    monkeypatch.setattr(dispatcher, "installed", lambda backend: True)
    dispatcher._by_cost.cache_clear()
    for tokens, heads, blocks in ((4096, 24, 128), (16384, 24, 64), (65536, 24, 64), (65536, 24, 128), (65536, 3, 128)):
        shape = {"tokens": tokens, "heads": heads, "head_dim": 128}
        granularity = {"q_block_size": blocks, "kv_block_size": blocks}
        dense = sum(timings.dense_ms("NVIDIA H200", **shape))
        chosen = []
        for keep in (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.8, 1.0):
            decision = use_sparse(keep, num_tokens=tokens, num_heads=heads, head_dim=128, device="NVIDIA H200",
                                  **granularity)
            chosen.append(decision.sparse)
            if decision.sparse:
                cost = sum(timings.sparse_ms("NVIDIA H200", **shape, density=keep, **granularity))
                assert cost + timings.selection_ms("NVIDIA H200", tokens=tokens, heads=heads, **granularity) < dense
        assert chosen == sorted(chosen, reverse=True)
        assert not chosen[-1]
        assert chosen[2] or tokens < 16384
    dispatcher._by_cost.cache_clear()


@pytest.mark.parametrize("name", ["num_tokens", "num_heads", "head_dim", "q_block_size", "kv_block_size",
                                  "num_kv_heads"])
def test_sizes_below_one_are_refused(name):
    with pytest.raises(ValueError, match=f"{name} must be at least 1, got 0"):
        use_sparse(0.5, **(SHAPE | {name: 0}))


@pytest.mark.parametrize(("keep", "above", "message"), [
    (0.0, None, r"keep_ratio must be in \(0, 1\], got 0.0"), (float("nan"), None, r"keep_ratio must be in"),
    (0.5, 1.5, r"--dsv-dense-above must be in \[0, 1\], got 1.5")])
def test_misuse_is_named(keep, above, message):
    with pytest.raises(ValueError, match=message):
        use_sparse(keep, dense_above=above, **SHAPE)
