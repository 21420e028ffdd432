"""Sampled rows and held-out groups: disjoint, complete, repeatable."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dsv.sparsity.sampling import HELD_OUT_PERIOD, is_held_out, sample_groups, sample_rows


@settings(max_examples=40, deadline=None)
@given(n=st.integers(1, 400), stride=st.integers(1, 40), g=st.sampled_from([1, 4, 8, 16]), start=st.integers(0, 10**9))
def test_rows_take_turns_and_never_come_from_held_out_groups(n, stride, g, start):
    num_groups = -(-n // g)
    steps = [sample_rows(n, stride, start + step, q_block_size=g).tolist() for step in range(stride)]
    seen = sorted({row for rows in steps for row in rows})
    held = {row for row in range(n) if is_held_out(torch.tensor(row // g), num_groups)}
    assert seen == [row for row in range(n) if row not in held]
    assert all(rows for rows in steps)
    if len(seen) % stride == 0:
        assert len({row for rows in steps for row in rows}) == sum(map(len, steps))
    groups = {group for step in range(num_groups) for group in sample_groups(n, 2, start + step,
                                                                             q_block_size=g).tolist()}
    if num_groups > 1:
        assert groups == {row // g for row in held}
        assert groups.isdisjoint({row // g for row in seen})
    else:
        assert groups == {0}


def test_held_out_groups_are_an_eighth_and_walk_through_the_columns():
    groups = torch.arange(64 * HELD_OUT_PERIOD)
    held = groups[is_held_out(groups, len(groups))]
    assert len(held) == 64
    assert set((held // HELD_OUT_PERIOD).tolist()) == set(range(64))
    assert set((held % HELD_OUT_PERIOD).tolist()) == set(range(HELD_OUT_PERIOD))


@settings(max_examples=30, deadline=None)
@given(n=st.integers(1, 2000), count=st.integers(1, 20), offset=st.integers(0, 50))
def test_groups_are_distinct_and_as_many_as_asked_for(n, count, offset):
    groups = sample_groups(n, count, offset, q_block_size=8).tolist()
    available = int(is_held_out(torch.arange(-(-n // 8)), -(-n // 8)).sum()) or 1
    assert len(set(groups)) == len(groups) == min(count, available)
    assert groups == sorted(groups)
    assert groups == sample_groups(n, count, offset, q_block_size=8).tolist()


@pytest.mark.parametrize("call", [
    lambda: sample_rows(0, 4, 0, q_block_size=8), lambda: sample_rows(4, 0, 0, q_block_size=8),
    lambda: sample_groups(0, 4, 0, q_block_size=8), lambda: sample_groups(4, 0, 0, q_block_size=8)])
def test_misuse_is_named(call):
    with pytest.raises(ValueError, match=r"of at least 1, got .*--dsv-p"):
        call()
