"""The order of samples against brute force: it is stateless, fair, and indifferent to the layout of the run."""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from itertools import permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dsv.data import sample_order
from megatron_dsv.data.sample_order import SampleOrder, permuted

sizes = st.lists(st.integers(1, 12), min_size=1, max_size=4)
groups = st.integers(1, 9)
seeds = st.integers(0, 2**63)


def draw(order: SampleOrder, indices: range) -> list[tuple[int, int]]:
    return [(order.bucket(index), order.record(index)) for index in indices]


@settings(max_examples=40, deadline=None)
@given(sizes, seeds, groups)
def test_a_whole_period_gives_every_record_its_share(bucket_sizes: list[int], seed: int, group_size: int) -> None:
    order = SampleOrder(bucket_sizes, seed, group_size)
    period = sum(bucket_sizes) * group_size
    counts = Counter(draw(order, range(period, 2 * period)))
    everything = [(bucket, record) for bucket, size in enumerate(bucket_sizes) for record in range(size)]
    assert sorted(counts) == everything
    spread = Counter(draw(order, range(period)))
    assert all(spread[key] == group_size for key in everything)
    # Seen over any window that starts with the run, records of one bucket differ by at most one.
    window = Counter(draw(order, range(period * 3 // 5)))
    for bucket, size in enumerate(bucket_sizes):
        seen = [window[bucket, record] for record in range(size)]
        assert max(seen) - min(seen) <= 1


@settings(max_examples=30, deadline=None)
@given(sizes, seeds, groups)
def test_each_bucket_goes_epoch_by_epoch(bucket_sizes: list[int], seed: int, group_size: int) -> None:
    stream = defaultdict(list)
    for bucket, record in draw(SampleOrder(bucket_sizes, seed, group_size), range(150)):
        stream[bucket].append(record)
    for bucket, records in stream.items():
        size = bucket_sizes[bucket]
        for start in range(0, len(records) - size + 1, size):
            assert sorted(records[start:start + size]) == list(range(size))


@settings(max_examples=30, deadline=None)
@given(sizes, seeds, groups, st.integers(0, 2**40))
def test_groups_share_a_bucket_and_nothing_is_remembered(bucket_sizes: list[int], seed: int, group_size: int,
                                                         first: int) -> None:
    first = first // group_size * group_size
    indices = list(range(first, first + 4 * group_size))
    order = SampleOrder(bucket_sizes, seed, group_size)
    straight = {index: (order.bucket(index), order.record(index)) for index in indices}
    for start in range(first, first + 4 * group_size, group_size):
        assert len({straight[index][0] for index in range(start, start + group_size)}) == 1
    shuffled = indices * 2
    random.Random(0).shuffle(shuffled)
    other = SampleOrder(bucket_sizes, seed, group_size)
    for index in shuffled:
        assert (other.record(index), other.bucket(index)) == straight[index][::-1]


def test_every_layout_and_every_resumption_consumes_the_same_samples() -> None:
    bucket_sizes, global_batch = [7, 3, 12], 8
    reference = draw(SampleOrder(bucket_sizes, 3, global_batch), range(20 * global_batch))
    for data_parallel, micro_batch, resumed_at in ((1, 1, 0), (2, 4, 5), (4, 1, 13), (8, 1, 19), (2, 1, 1)):
        consumed = []
        for first_step, last_step in ((0, resumed_at), (resumed_at, 20)):
            ranks = [SampleOrder(bucket_sizes, 3, global_batch) for _ in range(data_parallel)]
            for step in range(first_step, last_step):
                for micro in range(global_batch // (data_parallel * micro_batch)):
                    shapes = set()
                    for rank, order in enumerate(ranks):
                        start = step * global_batch + (micro * data_parallel + rank) * micro_batch
                        consumed += draw(order, range(start, start + micro_batch))
                        shapes |= {bucket for bucket, _ in consumed[-micro_batch:]}
                    assert len(shapes) == 1
        assert consumed == reference


@settings(max_examples=60, deadline=None)
@given(st.integers(0, 60), st.integers(1, 40), st.integers(0, 90), st.integers(0, 90))
def test_floor_sum_is_the_sum_of_floors(count: int, modulus: int, step: int, start: int) -> None:
    expected = sum((step * i + start) // modulus for i in range(count))
    assert sample_order._floor_sum(count, modulus, step, start) == expected


def test_far_positions_are_exact() -> None:
    """Counts near the end of the range agree with counting on from there, one group at a time."""
    order = SampleOrder([100_003, 17, 5_000_011], 11, 64)
    group = 2**41
    counts = [order._groups_before(group, bucket) for bucket in range(3)]
    assert sum(counts) == group
    for step in range(200):
        assert [order._groups_before(group + step, bucket) for bucket in range(3)] == counts
        counts[order.bucket((group + step) * 64)] += 1


@pytest.mark.parametrize("size", [1, 2, 3, 5, 16, 17, 64, 65, 100, 1000])
def test_permuted_is_a_permutation(size: int) -> None:
    for key in (0, 1, 2**64 - 1):
        assert sorted(permuted(place, size, key) for place in range(size)) == list(range(size))


def test_all_orders_of_a_small_bucket_are_about_as_likely() -> None:
    orders = Counter(tuple(permuted(place, 4, key * 0x9E3779B97F4A7C15 % 2**64) for place in range(4))
                     for key in range(24 * 40))
    chi_squared = sum((orders[order] - 40) ** 2 / 40 for order in permutations(range(4)))
    assert chi_squared < 49.7  # 0.999 quantile for 23 degrees of freedom


def test_seeds_and_epochs_differ_and_one_bucket_ignores_the_group_size() -> None:
    first = draw(SampleOrder([50], 1, 4), range(100))
    assert first == draw(SampleOrder([50], 1, 16), range(100))
    assert first != draw(SampleOrder([50], 2, 4), range(100))
    assert first[:50] != first[50:]
    assert SampleOrder([50, 50], 1, 4).bucket(0) in (0, 1)


def test_known_order_on_every_machine() -> None:
    known = [(1, 2), (1, 1), (0, 3), (0, 0), (0, 2), (0, 1), (1, 0), (1, 2), (0, 4), (0, 3), (1, 1), (1, 0)]
    assert draw(SampleOrder([5, 3], 1234, 2), range(12)) == known


def test_misuse_is_named() -> None:
    with pytest.raises(ValueError, match=r"bucket_sizes must be at least one number, each at least 1, got \[3, 0\]"):
        SampleOrder([3, 0], 0, 1)
    with pytest.raises(ValueError, match="group_size must be at least 1, got 0"):
        SampleOrder([3], 0, 0)
    with pytest.raises(IndexError, match=r"must be in 0\.\.2\*\*48-1, got -1"):
        SampleOrder([3], 0, 1).record(-1)
    with pytest.raises(IndexError, match="got 281474976710656"):
        SampleOrder([3], 0, 1).bucket(2**48)
