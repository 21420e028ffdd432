"""Budgets, the gate and the dispatcher: small decisions, checked case by case."""

from __future__ import annotations

import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dsv.config import STAGES
from megatron_dsv.sparsity.budget import head_budgets
from megatron_dsv.sparsity.schedule import (
    LayerState,
    Stage,
    advance,
    attends_sparsely,
    decode_states,
    encode_states,
    profile_due,
    profiled_lengths,
)

NAN = float("nan")


@settings(max_examples=100, deadline=None)
@given(kept=st.integers(0, 700), blocks=st.integers(1, 700), floor=st.sampled_from([0.0, 0.02, 0.5]))
def test_a_share_of_whole_blocks_is_kept_exactly_in_fp32(kept, blocks, floor):
    kept = min(kept, blocks)
    share = torch.tensor([kept / blocks], dtype=torch.float32)
    expected = max(kept, 1, math.ceil(Fraction(str(floor)) * blocks))
    assert head_budgets(share, blocks, min_keep_ratio=floor) == [expected]


def test_shares_between_blocks_are_rounded_up():
    assert head_budgets([0.101, 0.199, 0.2, 0.2001], 10) == [2, 2, 2, 3]
    assert head_budgets(torch.tensor([0.0, 0.001, 1.0]), 10, min_keep_ratio=0.0) == [1, 1, 10]


def test_unmeasured_heads_keep_everything_and_a_forced_share_overrides():
    assert head_budgets([NAN, 0.1], 64) == [64, 7]
    assert head_budgets([NAN, 0.1], 64, forced_keep_ratio=0.2) == [13, 13]
    assert head_budgets([0.9], 64, forced_keep_ratio=0.001, min_keep_ratio=0.5) == [1]


@pytest.mark.parametrize(("call", "message"), [
    (lambda: head_budgets([0.1], 0), "num_kv_blocks must be at least 1, got 0"),
    (lambda: head_budgets([1.1], 4), r"block_fraction must be in \[0, 1\], got \[1.1\]"),
    (lambda: head_budgets([0.1], 4, forced_keep_ratio=0.0), r"--dsv-keep-ratio must be in \(0, 1\], got 0.0"),
    (lambda: head_budgets([0.1], 4, min_keep_ratio=1.5), r"--dsv-min-keep-ratio must be in \[0, 1\], got 1.5"),
    (lambda: head_budgets(torch.zeros(1, 2), 4), r"block_fraction must be \[h\] on the CPU"),
])
def test_budget_misuse_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def run(recalls, state=None, **limits):
    states = []
    state = LayerState() if state is None else state
    for recall in recalls:
        state = advance(state, recall, **limits)
        states.append(state.sparse)
    return states, state


def test_two_profiles_running_open_the_gate_and_two_failures_close_it():
    assert run([0.95, 0.85, 0.9, 0.9])[0] == [False, False, False, True]
    states, last = run([0.9, 0.9, 0.89, 0.95, 0.89, 0.89, 0.95, 0.95])
    assert states == [False, True, True, True, True, False, False, True]
    assert last == LayerState(sparse=True)


def test_nan_passes_nothing():
    assert run([0.99, NAN, 0.99, NAN, 0.99])[0] == [False] * 5
    assert run([NAN, NAN], LayerState(sparse=True))[0] == [True, False]


def test_limits_of_the_gate_can_be_set():
    assert run([0.5] * 3, gate_recall=0.5, gate_passes=3)[0] == [False, False, True]
    assert run([0.85] * 9, LayerState(sparse=True), rollback_recall=0.8)[0] == [True] * 9
    assert run([0.7] * 3, LayerState(sparse=True), rollback_recall=0.8, rollback_failures=3)[0] == [True, True, False]


@given(recalls=st.lists(st.one_of(st.floats(0, 1), st.just(NAN)), max_size=30), passes=st.integers(1, 3))
def test_a_layer_is_sparse_exactly_by_the_last_decisive_run(recalls, passes):
    """The state machine against a definition by runs: ``passes`` equal verdicts since the last switch switch it."""
    sparse, since = False, []
    for recall in recalls:
        since.append(recall >= 0.9)
        if len(since) >= passes and all(verdict is not sparse for verdict in since[-passes:]):
            sparse, since = not sparse, []
    assert run(recalls, gate_passes=passes)[1].sparse is sparse


def test_states_survive_a_checkpoint():
    states = [LayerState(), LayerState(passes=1), LayerState(sparse=True), LayerState(sparse=True, failures=1)]
    encoded = encode_states(states)
    assert encoded.dtype == torch.int32
    assert decode_states(encoded) == states
    assert decode_states(encode_states([])) == []


def test_stages():
    assert tuple(Stage) == STAGES
    on, off = LayerState(sparse=True), LayerState()
    assert [attends_sparsely(stage, on) for stage in Stage] == [False, False, True, True]
    assert [attends_sparsely(stage, off) for stage in Stage] == [False, False, True, False]


@pytest.mark.parametrize(("call", "message"), [
    (lambda: advance(LayerState(), 1.0, gate_recall=0.0), r"--dsv-gate-recall must be in \(0, 1\], got 0.0"),
    (lambda: advance(LayerState(), 1.0, gate_passes=0), r"--dsv-gate-passes must be at least 1"),
    (lambda: advance(LayerState(), 1.0, rollback_recall=0.95), r"rollback_recall must be in \(0, gate_recall=0.9\]"),
    (lambda: LayerState(passes=-1), r"counts must be at least 0"),
    (lambda: decode_states(torch.zeros(2, 3)), r"must be int32 \[layers, 3\]"),
    (lambda: decode_states(torch.full((1, 3), 2, dtype=torch.int32)), r"must start with 0 or 1"),
])
def test_schedule_misuse_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()


@pytest.mark.parametrize(("samples", "profiled"), [
    ({72: 1}, {72}),
    ({24: 14, 864: 6}, {864}),
    # Aspect ratios of one size are one class, whichever is the longest.
    ({24: 900, 840: 5, 864: 1, 1200: 1}, {840, 864, 1200}),
    # One long outlier must not keep the gate waiting: 9,000 x 1,000^2 is more than 1 x 30,000^2.
    ({1000: 9000, 30000: 1}, {1000}),
    ({1000: 9000, 30000: 20}, {30000}),
    ({1000: 900, 30000: 1}, {30000}),
])
def test_the_lengths_that_attention_spends_most_on_are_profiled(samples, profiled):
    assert profiled_lengths(samples) == profiled


def test_without_samples_there_is_no_length_to_profile():
    with pytest.raises(ValueError, match="needs a sample and a span of at least 1"):
        profiled_lengths({})


def test_a_run_of_one_length_is_profiled_at_every_interval():
    for interval in (1, 2, 7, 50):
        assert all(profile_due(step, interval, lambda step: True) == (step % interval == 0) for step in range(120))


@settings(max_examples=100, deadline=None)
@given(long=st.lists(st.booleans(), min_size=1, max_size=60), interval=st.integers(1, 12))
def test_a_due_profile_waits_for_its_length(long, interval):
    waits, expected = False, []
    for step, has_length in enumerate(long):
        waits = waits or step % interval == 0
        expected.append(waits and has_length)
        waits = waits and not has_length
    # Asked for each step by itself, as a resumed run asks.
    assert [profile_due(step, interval, long.__getitem__) for step in range(len(long))] == expected
