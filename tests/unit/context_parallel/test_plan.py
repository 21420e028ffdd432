import dataclasses
import json
import subprocess
import sys

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dsv.context_parallel.geometry import LAYOUTS, Split, splits
from megatron_dsv.context_parallel.plan import BlockPlan, CPPlan, Topology, attending, even_block, even_plan

SIZES = (1, 2, 4, 6, 8, 12, 16, 64)


@pytest.mark.parametrize("size", SIZES)
def test_groups_partition_the_ranks_and_meet_in_one_rank(size):
    for split in splits(size, size):
        h_groups = {split.h_group(rank) for rank in range(size)}
        s_groups = {split.s_group(rank) for rank in range(size)}
        assert sorted(rank for group in h_groups for rank in group) == list(range(size))
        assert sorted(rank for group in s_groups for rank in group) == list(range(size))
        assert {len(set(a) & set(b)) for a in h_groups for b in s_groups} == {1}
        for rank in range(size):
            assert split.h_group(rank)[split.h_rank(rank)] == rank
            assert split.s_group(rank)[split.s_rank(rank)] == rank
            assert split.rank(split.h_rank(rank), split.s_rank(rank)) == rank


def test_layouts_are_as_documented():
    assert Split(2, 3, "h_inner").h_group(3) == (2, 3)
    assert Split(2, 3, "h_inner").s_group(3) == (1, 3, 5)
    assert Split(2, 3, "s_inner").s_group(3) == (3, 4, 5)
    assert Split(2, 3, "s_inner").h_group(3) == (0, 3)


@pytest.mark.parametrize("size", SIZES)
def test_both_layouts_use_two_families_of_groups_only(size):
    """Groups are contiguous or strided sets of a divisor's size: a second layout needs no further communicator."""
    for split in splits(size, size):
        for groups, g in (({split.h_group(r) for r in range(size)}, split.g_h),
                          ({split.s_group(r) for r in range(size)}, split.g_s)):
            contiguous = {tuple(range(k * g, (k + 1) * g)) for k in range(size // g)}
            strided = {tuple(k + t * (size // g) for t in range(g)) for k in range(size // g)}
            assert groups in (contiguous, strided)


def test_every_divisor_is_listed_once():
    assert [tuple(split) for split in splits(6, 3)] == [
        (1, 6, "h_inner"), (2, 3, "h_inner"), (2, 3, "s_inner"), (3, 2, "h_inner"), (3, 2, "s_inner")]
    assert splits(1, 16) == (Split(1, 1),)


@st.composite
def block_plans(draw, layer=0, cp=None, tp=2, units=5):
    cp = cp or draw(st.sampled_from((1, 2, 4, 6, 8)))
    split = draw(st.sampled_from(splits(cp, cp)))
    orders, sizes = [], []
    for _ in range(tp):
        orders.append(tuple(draw(st.permutations(range(units)))))
        cuts = sorted(draw(st.lists(st.integers(0, units), min_size=split.g_h - 1, max_size=split.g_h - 1)))
        sizes.append(tuple(b - a for a, b in zip([0, *cuts], [*cuts, units])))
    sparse = draw(st.booleans())
    exchange = "none" if split.g_s == 1 else draw(st.sampled_from(("selective", "gather"))) if sparse else "gather"
    return BlockPlan(layer, *split, tuple(orders), tuple(sizes), exchange,
                     draw(st.integers(1, max(1, split.g_s - 1))), draw(st.sampled_from((1, 16, 64))), sparse)


@st.composite
def plans(draw):
    cp = draw(st.sampled_from((1, 2, 4, 6, 8)))
    rows = tuple(tuple(draw(block_plans(layer=layer, cp=cp)) for layer in range(3)) for _ in range(2))
    return CPPlan(draw(st.integers(0, 9)), draw(st.integers(0, 10**6)), Topology(cp, 2), ((1, 4096), (4097, 65536)),
                  rows, "s", "c", (draw(st.integers(0, 10**12)), 7))


@settings(max_examples=60, deadline=None)
@given(plans())
def test_a_plan_survives_json_and_its_units_are_all_held_once(plan):
    again = CPPlan.from_json(plan.to_json().encode())
    assert again == plan
    assert again.digest == plan.digest
    assert hash(again) == hash(plan)
    for block in plan.blocks[1]:
        for tp_rank in range(2):
            held = [unit for load in block.loads(tp_rank) for unit in load]
            assert held == list(block.unit_order[tp_rank])
            assert tuple(map(len, block.loads(tp_rank))) == block.unit_splits[tp_rank]
    assert set(plan.splits()) == {block.split for row in plan.blocks for block in row}


def test_any_change_of_a_field_changes_the_digest():
    plan = even_plan(Topology(4), layers=2, units=4, longest=1024)
    changed = [dataclasses.replace(plan, version=1), dataclasses.replace(plan, effective_step=3),
               dataclasses.replace(plan, topo=Topology(4, domain=4)), dataclasses.replace(plan, buckets=((1, 1025),)),
               dataclasses.replace(plan, stats_digest="x"), dataclasses.replace(plan, calibration_digest="x"),
               dataclasses.replace(plan, predicted_ns=(5,))]
    block = plan.blocks[0][1]
    for change in ({"unit_order": ((1, 0, 2, 3),)}, {"unit_splits": ((2, 0, 1, 1),)}, {"kv_block": 64},
                   {"sparse": True}, {"layout": "s_inner"}):
        changed.append(dataclasses.replace(
            plan, blocks=((plan.blocks[0][0], dataclasses.replace(block, **change)),)))
    digests = {other.digest for other in changed} | {plan.digest}
    assert len(digests) == len(changed) + 1
    assert len({other.digest_bits for other in (*changed, plan)}) == len(digests)
    assert 0 <= plan.digest_bits < 2**63


def test_the_digest_is_the_same_in_another_process():
    code = ("from megatron_dsv.context_parallel.plan import even_plan, Topology;"
            "print(even_plan(Topology(4), layers=2, units=4, longest=1024).digest)")
    other = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
    assert other == even_plan(Topology(4), layers=2, units=4, longest=1024).digest


def test_even_plans():
    plan = even_plan(Topology(6, tp=2), layers=3, units=4, longest=4096, sparse=True, kv_block=64)
    block = plan.block(4096, 2)
    assert (block.split, block.kv_exchange, block.kv_block) == (Split(3, 2), "selective", 64)
    assert block.unit_splits == ((2, 1, 1),) * 2
    assert even_plan(Topology(4), layers=1, units=8, longest=8).block(1, 0).kv_exchange == "none"
    with pytest.raises(ValueError, match=r"plan 0 has no bucket for 4097 tokens, only 1\.\.4096"):
        plan.block(4097, 0)


BLOCK = even_block(7, Split(2, 2), tp=1, units=4, sparse=True, kv_block=64)


@pytest.mark.parametrize(("change", "message"), [
    ({"g_h": 0}, "plan of block 7: g_h must be a whole number of at least 1, got 0"),
    ({"stages": True}, "plan of block 7: stages must be a whole number of at least 1, got True"),
    ({"kv_block": 0}, "kv_block must be a whole number of at least 1, got 0"),
    ({"layout": "outer"}, "plan of block 7: layout must be one of h_inner, s_inner, got 'outer'"),
    ({"unit_order": ((0, 1, 1, 3),)}, r"unit_order must be a permutation of 0\.\.3, .*got \[0, 1, 1, 3\]"),
    ({"unit_order": ((0, 1, 2, 3), (0, 1, 2, 3))}, "must have one row per tensor-parallel rank, got 2 and 1"),
    ({"unit_splits": ((3, 2),)}, r"unit_splits must be g_h = 2 counts that sum to 4, got \[3, 2\]"),
    ({"unit_splits": ((5, -1),)}, r"counts that sum to 4, got \[5, -1\]"),
    ({"unit_splits": ((4,),)}, "must be g_h = 2 counts"),
    ({"kv_exchange": "none"}, "of a sparse block with g_s 2 must be one of selective, gather, got 'none'"),
    ({"sparse": False}, "of a dense block with g_s 2 must be one of gather, got 'selective'"),
    ({"sparse": 1}, "sparse must be true or false, got 1"),
    ({"stages": 2}, "stages must be at most the peers of a sequence group, 1, got 2"),
])
def test_a_block_says_what_is_wrong_in_one_line(change, message):
    with pytest.raises(ValueError, match=message) as caught:
        dataclasses.replace(BLOCK, **change)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("change", "message"), [
    ({"version": -1}, "plan: version must be a whole number of at least 0, got -1"),
    ({"topo": Topology(8)}, "plan of block 0: g_h x g_s must be the context-parallel size, 8, got 4 x 1"),
    ({"topo": Topology(4, tp=2)}, "one row per tensor-parallel rank, 2, got 1"),
    ({"topo": Topology(4, tp=0)}, "topo must be whole numbers of at least 1"),
    ({"buckets": ((1, 8), (8, 9))}, "one entry per bucket, got 2, 1 and 1"),
    ({"buckets": ((9, 8),)}, "buckets must be ascending ranges of tokens"),
    ({"predicted_ns": (1, 2)}, "one entry per bucket, got 1, 1 and 2"),
])
def test_a_plan_says_what_is_wrong_in_one_line(change, message):
    plan = even_plan(Topology(4), layers=2, units=4, longest=1024)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(plan, **change)


def test_blocks_out_of_order_or_of_other_widths_are_refused():
    plan = even_plan(Topology(4), layers=2, units=4, longest=1024)
    with pytest.raises(ValueError, match=r"must hold blocks 0\.\.1 in order, got \[1, 0\]"):
        dataclasses.replace(plan, blocks=(plan.blocks[0][::-1],))
    wide = even_block(1, Split(4, 1), tp=1, units=5, sparse=False)
    with pytest.raises(ValueError, match="plan of block 1: every block must have 4 units, got 5"):
        dataclasses.replace(plan, blocks=((plan.blocks[0][0], wide),))


def test_a_plan_is_checked_against_the_job():
    plan = even_plan(Topology(4), layers=2, units=4, longest=1024)
    plan.check_job(topo=Topology(4), layers=2, units=4)
    with pytest.raises(ValueError, match="made for cp 4, tp 1, pp 1, 8 GPUs a node, the job runs cp 2"):
        plan.check_job(topo=Topology(2), layers=2, units=4)
    with pytest.raises(ValueError, match="2 blocks of 4 units a tensor-parallel rank, the model has 3 of 4"):
        plan.check_job(topo=Topology(4), layers=3, units=4)


@pytest.mark.parametrize(("edit", "message"), [
    (lambda data: data.update(schema=0), "plan must be of schema 1"),
    (lambda data: data.update(extra=0), "plan has fields that schema 1 does not"),
    (lambda data: data.pop("blocks"), "plan has fields that schema 1 does not"),
    (lambda data: data["blocks"][0][0].update(g_h=3), "plan of block 0: unit_splits must be g_h = 3 counts"),
    (lambda data: data["blocks"][0][0].pop("g_h"), "plan has fields that schema 1 does not"),
])
def test_json_of_another_kind_is_refused(edit, message):
    data = json.loads(even_plan(Topology(4), layers=2, units=4, longest=1024).to_json())
    edit(data)
    with pytest.raises(ValueError, match=message):
        CPPlan.from_json(json.dumps(data))


def test_text_that_is_not_json_is_refused():
    with pytest.raises(ValueError, match="plan is not JSON"):
        CPPlan.from_json(b"\x00\x01")


def test_layouts_agree_where_one_factor_is_one():
    for g_h, g_s in ((1, 6), (6, 1)):
        first, second = (Split(g_h, g_s, layout) for layout in LAYOUTS)
        assert [first.h_group(r) for r in range(6)] == [second.h_group(r) for r in range(6)]
        assert [first.s_group(r) for r in range(6)] == [second.s_group(r) for r in range(6)]


@pytest.mark.parametrize("split", [Split(1, 4), Split(2, 2, "s_inner"), Split(4, 1)])
def test_a_layer_that_attends_otherwise_than_planned_keeps_its_split_and_heads(split):
    planned = even_block(3, split, tp=2, units=4, sparse=False)
    sparse = attending(planned, sparse=True, kv_block=16)
    exchange = "none" if split.g_s == 1 else "selective"
    assert sparse == dataclasses.replace(planned, sparse=True, kv_block=16, kv_exchange=exchange)
    assert attending(sparse, sparse=False, kv_block=16) == planned
    assert attending(planned, sparse=False, kv_block=16) is planned
