"""The two kinds of partitions serve both layouts of every split, with few communicators."""

import pytest

from megatron_dsv.context_parallel.geometry import splits
from megatron_dsv.context_parallel.groups import Family, families


@pytest.mark.parametrize("ranks", [2, 3, 4, 6, 8, 12, 16, 30])
def test_families_are_the_groups_of_every_split(ranks):
    proper = set()
    for split in splits(ranks, ranks):
        heads, sequence = families(split)
        proper |= {family for family in (heads, sequence) if 1 < family.size < ranks}
        for rank in range(ranks):
            assert heads.members(rank, ranks) == split.h_group(rank)
            assert sequence.members(rank, ranks) == split.s_group(rank)
    divisors = sum(ranks % size == 0 for size in range(1, ranks + 1))
    assert len(proper) == 2 * (divisors - 2)


def test_a_group_of_all_ranks_has_one_name():
    whole = {family for split in splits(6, 6) for family in families(split) if family.size == 6}
    assert whole == {Family(False, 6)}
