"""Plans without statistics: one split everywhere, or another one for every block at every step."""

import pytest

from megatron_dsv.context_parallel.geometry import splits
from megatron_dsv.context_parallel.plan import CPPlan, Topology
from megatron_dsv.context_parallel.plan_modes import MODES, buckets_of, random_plan, uniform_plan

BUCKETS = buckets_of([128, 96, 128])


def uniform(mode, cp=6, units=4, sparse=True):
    return uniform_plan(mode, Topology(cp, tp=2), layers=3, units=units, buckets=BUCKETS, sparse=sparse, kv_block=16)


def test_buckets_hold_every_length_up_to_the_longest():
    assert BUCKETS == ((1, 96), (97, 128))


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("sparse", [False, True])
@pytest.mark.parametrize(("cp", "units"), [(2, 1), (6, 4), (8, 8), (12, 3)])
def test_uniform_plans_fit_their_job(mode, sparse, cp, units):
    plan = uniform(mode, cp, units, sparse)
    plan.check_job(topo=Topology(cp, tp=2), layers=3, units=units)
    split, = plan.splits()
    largest = max(g for g in range(1, units + 1) if cp % g == 0)
    assert split.g_h == (largest if mode == "heads" else 1)


def test_an_unknown_mode_is_refused():
    with pytest.raises(ValueError, match="mode must be one of sequence, heads, random, got 'even'"):
        uniform("even")


def test_random_plans_reach_every_split_head_order_and_exchange():
    plan, seen = uniform("random"), []
    for step in range(100):
        following = random_plan(plan, seed=5, step=step)
        assert following == random_plan(plan, seed=5, step=step) != random_plan(plan, seed=6, step=step)
        assert CPPlan.from_json(following.to_json()) == following
        assert (following.version, following.effective_step) == (plan.version + 1, step)
        plan = following
        seen += [block for row in plan.blocks for block in row]
    assert {block.split for block in seen} == set(splits(6, 6))
    assert {block.kv_exchange for block in seen} == {"none", "selective", "gather"}
    assert {block.stages for block in seen} == {1, 2, 3, 4, 5}
    assert any(0 in sizes for block in seen for sizes in block.unit_splits), "a head rank without heads"
    assert any(block.unit_order[0] != block.unit_order[1] for block in seen), "tensor-parallel ranks differ"
    assert len({block.unit_order for block in seen}) > 100
