"""The profile against an explicit softmax matrix and plain Python sorting."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dsv.kernels.attention_profile.api import block_mass, smallest_set
from megatron_dsv.kernels.selection import from_block_mask
from megatron_dsv.sparsity.profile import (
    FIELDS,
    GroupProfile,
    profile_gathered_groups,
    update_running,
)
from megatron_dsv.sparsity.selection_rules import select
from megatron_dsv.testing.profiles import profile_query_groups


def smallest(values: list[float], target: float) -> int:
    running, goal = 0.0, target * math.fsum(values)
    for count, value in enumerate(sorted(values, reverse=True), 1):
        running += value
        if running >= goal:
            return count
    return len(values)


def oracle(q, k, groups, qb, kvb, lengths, reals, scale, theta, budget_mass, mask):
    """Per head lists of sparsity, block fraction and recall."""
    s_q, b, h, _ = q.shape
    g_kv = k.shape[2]
    out = [[[], [], []] for _ in range(h)]
    for i in range(b):
        for j in range(h):
            length = lengths[i][j // (h // g_kv)]
            p = (q[:, i, j] @ k[:length, i, j // (h // g_kv)].T * scale).softmax(-1)
            for group in groups:
                rows = [r for r in range(group * qb, min((group + 1) * qb, s_q)) if r < reals[i]]
                if not rows:
                    continue
                out[j][0] += [1 - smallest(p[r].tolist(), theta) / length for r in rows]
                mass = p[rows].sum(0)
                blocks = [float(mass[x : x + kvb].sum()) for x in range(0, length, kvb)]
                out[j][1].append(smallest(blocks, budget_mass) / len(blocks))
                if mask is not None:
                    kept = [m for x, m in enumerate(blocks) if mask[i, j, group, x]]
                    out[j][2].append(math.fsum(kept) / len(rows))
    return out


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), kvb=st.sampled_from([1, 4, 8]), heads=st.sampled_from([(2, 2), (4, 2), (3, 1)]),
       s_q=st.integers(1, 30), s=st.integers(1, 30), with_selection=st.booleans(),
       theta=st.sampled_from([0.5, 0.9]), budget_mass=st.sampled_from([0.6, 0.95]), tile=st.sampled_from([1, 2**24]))
def test_profile_is_that_of_the_softmax_matrix(seed, kvb, heads, s_q, s, with_selection, theta, budget_mass, tile):
    (h, g_kv), qb, b, d = heads, 8, 2, 5
    rng = torch.Generator().manual_seed(seed)
    q = torch.randn(s_q, b, h, d, generator=rng, dtype=torch.float64) * 2
    k = torch.randn(s, b, g_kv, d, generator=rng, dtype=torch.float64)
    lengths = torch.randint(1, s + 1, (b, g_kv), generator=rng)
    reals = torch.randint(0, s_q + 1, (b,), generator=rng)
    nq, nk = -(-s_q // qb), -(-s // kvb)
    groups = torch.randperm(nq, generator=rng)[:2]
    selection = mask = None
    if with_selection:
        mask = torch.rand(b, h, nq, nk, generator=rng) < 0.4
        selection = from_block_mask(mask, lengths.int(), num_queries=s_q, num_keys=s, q_block_size=qb,
                                    kv_block_size=kvb)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_dsv.kernels.attention_profile.reference._TILE_ELEMENTS", tile)
        patch.setattr("megatron_dsv.sparsity.profile._ROW_ELEMENTS", tile)
        profile = profile_query_groups(q, k, group_ids=groups, q_block_size=qb, kv_block_size=kvb, softmax_scale=0.7,
                                       theta=theta, budget_mass=budget_mass, kv_length=lengths, query_length=reals,
                                       selection=selection)
    expected = oracle(q, k, groups.tolist(), qb, kvb, lengths.tolist(), reals.tolist(), 0.7, theta, budget_mass, mask)
    sums = torch.tensor([[math.fsum(x[f]) for x in expected] for f in range(3)], dtype=torch.float64)
    counts = torch.tensor([[len(x[f]) for x in expected] for f in range(3)], dtype=torch.float64)
    assert profile.sums.dtype == torch.float64
    assert torch.equal(profile.counts, counts)
    assert torch.allclose(profile.sums, sums, rtol=1e-10, atol=1e-10)


def inputs(s=32, b=1, h=2, d=4, dtype=torch.float32):
    rng = torch.Generator().manual_seed(0)
    return (torch.randn(s, b, h, d, generator=rng).to(dtype), torch.randn(s, b, h, d, generator=rng).to(dtype))


COMMON = {"q_block_size": 8, "kv_block_size": 4, "softmax_scale": 0.5, "theta": 0.9, "budget_mass": 0.95}


def test_padding_with_nan_changes_nothing():
    q, k = inputs()
    clean = profile_query_groups(q[:20], k[:18], group_ids=torch.arange(3), **COMMON)
    q[20:], k[18:] = torch.nan, torch.nan
    padded = profile_query_groups(q, k, group_ids=torch.arange(4), kv_length=18, query_length=20, **COMMON)
    assert torch.equal(clean.counts, padded.counts)
    assert torch.allclose(clean.sums, padded.sums, rtol=1e-5)
    assert padded.means()[FIELDS.index("recall")].isnan().all()


def test_nan_among_real_queries_is_not_hidden():
    q, k = inputs()
    q[3, 0, 1] = torch.nan
    selection = select(torch.rand(1, 2, 4, 8), rule="all", num_kv_heads=2, num_queries=32, num_keys=32,
                       q_block_size=8, kv_block_size=4)
    means = profile_query_groups(q, k, group_ids=torch.arange(4), selection=selection, **COMMON).means()
    assert means[:, 1].isnan().all()
    assert means[2, 0] == pytest.approx(1.0)
    assert not means[:, 0].isnan().any()


def test_uniform_and_one_hot_attention():
    q = torch.zeros(16, 1, 1, 4)
    k = torch.randn(40, 1, 1, 4)
    uniform = profile_query_groups(q, k, group_ids=torch.arange(2), **COMMON).means()
    assert uniform[0, 0] == pytest.approx(0.1, abs=0.03)
    assert uniform[1, 0] == pytest.approx(1.0)
    k = torch.eye(4).repeat(10, 1).reshape(40, 1, 1, 4) * torch.tensor([1.0] + [0.0] * 39).reshape(40, 1, 1, 1)
    one_hot = profile_query_groups(q + 1000, k, group_ids=torch.arange(2), **COMMON).means()
    assert one_hot[0, 0] == pytest.approx(39 / 40)
    assert one_hot[1, 0] == pytest.approx(1 / 10)


def test_a_target_met_exactly_needs_no_further_key():
    q, k = torch.zeros(8, 1, 1, 4), torch.zeros(16, 1, 1, 4)
    exact = COMMON | {"theta": 0.5, "budget_mass": 0.75}
    means = profile_query_groups(q, k, group_ids=torch.arange(1), **exact).means()
    assert means[:2, 0].tolist() == [0.5, 0.75]


def test_a_head_without_keys_is_not_counted():
    q, k = inputs(b=2)
    lengths = torch.tensor([[32, 0], [32, 32]])
    profile = profile_query_groups(q, k, group_ids=torch.arange(4), kv_length=lengths, **COMMON)
    assert profile.counts[:2].tolist() == [[64, 32], [8, 4]]
    second = profile_query_groups(q[:, 1:], k[:, 1:], group_ids=torch.arange(4), **COMMON)
    assert torch.allclose(profile.sums[:2, 1], second.sums[:2, 1])


def test_micro_batches_and_gathered_groups_add_up():
    q, k = inputs(b=3)
    whole = profile_query_groups(q, k, group_ids=torch.arange(4), **COMMON)
    parts = [profile_query_groups(q[:, i : i + 1], k[:, i : i + 1], group_ids=ids, **COMMON)
             for i in range(3) for ids in (torch.tensor([3, 1]), torch.tensor([0, 2]))]
    summed = parts[0]
    for part in parts[1:]:
        summed = summed + part
    assert torch.allclose(summed.means(), whole.means(), equal_nan=True, rtol=1e-5)
    again = GroupProfile.from_stacked(whole.stacked())
    assert torch.equal(again.sums, whole.sums)
    assert torch.equal(again.counts, whole.counts)


def test_sparsity_stride_samples_queries_only():
    q, k = inputs()
    full = profile_query_groups(q, k, group_ids=torch.arange(4), **COMMON)
    every = profile_query_groups(q, k, group_ids=torch.arange(4), sparsity_stride=4, **COMMON)
    assert every.counts[0].eq(8).all()
    assert torch.equal(every.sums[1:], full.sums[1:])
    rows = torch.arange(0, 32, 4)
    single = profile_query_groups(q[rows], k, group_ids=torch.arange(8), **(COMMON | {"q_block_size": 1}))
    assert torch.allclose(every.means()[0], single.means()[0])


def test_running_profile_starts_with_the_first_observation_and_skips_nan():
    running = torch.full((len(FIELDS), 2), torch.nan)
    first = torch.tensor([[0.5, torch.nan]] * 3)
    running = update_running(running, first)
    assert torch.equal(running[:, 0], torch.full((3,), 0.5))
    assert running[:, 1].isnan().all()
    running = update_running(running, torch.tensor([[1.0, 0.2]] * 3), momentum=0.9)
    assert torch.allclose(running, torch.tensor([[0.55, 0.2]] * 3))
    assert torch.equal(update_running(running, torch.full((3, 2), torch.nan)), running)


@pytest.mark.parametrize(("changes", "message"), [
    ({"theta": 0.0}, r"--dsv-theta must be in \(0, 1\], got 0.0"),
    ({"budget_mass": 1.1}, r"--dsv-budget-mass must be in \(0, 1\], got 1.1"),
    ({"q_block_size": 5}, r"q_groups must be \[n \* 5, b, h, d\]"),
    ({"sparsity_stride": 0}, r"sparsity_stride must be at least 1"),
    ({"valid_rows": torch.ones(32, 1)}, r"valid_rows must be bool \(32, 1\)"),
    ({"kept_blocks": torch.ones(1, 2, 4, 9).bool()}, r"kept_blocks must be .*\[1, 2, 4, 8\], got \[1, 2, 4, 9\]"),
    ({"k": torch.zeros(32, 1, 3, 4)}, r"k must be \[s, b, G, d\]"),
])
def test_misuse_is_named(changes, message):
    q, k = inputs()
    arguments = COMMON | {"q_groups": q, "k": k, "valid_rows": torch.ones(32, 1, dtype=torch.bool)} | changes
    with pytest.raises(ValueError, match=message):
        profile_gathered_groups(**arguments)
    with pytest.raises(ValueError, match=r"--dsv-profile-momentum must be in \[0, 1\), got 1.0"):
        update_running(q, q, 1.0)


@pytest.mark.parametrize("op", ["block_mass", "smallest_set"])
def test_a_backend_that_cannot_serve_is_named(op):
    def call(backend):
        if op == "smallest_set":
            return smallest_set(torch.ones(2, 3), 0.9, backend=backend)
        q, k = inputs()
        return profile_query_groups(q, k, group_ids=torch.arange(1), backend=backend, **COMMON)

    with pytest.raises(ValueError, match=f"{op} must be one of auto, reference, triton, got 'cuda'"):
        call("cuda")
    with pytest.raises(NotImplementedError, match=rf"{op} needs CUDA tensors .*, got cpu; use backend='reference'"):
        call("triton")


def test_a_row_without_entries_has_no_smallest_set():
    with pytest.raises(ValueError, match=r"with a width of at least 1, got \[2, 0\]"):
        smallest_set(torch.ones(2, 0), 0.9)


@pytest.mark.parametrize("target", [0.0, -1.0, 1.5, math.nan])
def test_a_target_that_no_set_has_is_refused(target):
    with pytest.raises(ValueError, match=rf"target must be in \(0, 1\], got {target}"):
        smallest_set(torch.ones(2, 3), target)


def test_block_mass_of_no_keys_is_empty_and_of_no_block_size_refused():
    q, k = torch.ones(4, 1, 2, 8), torch.ones(0, 1, 2, 8)
    arguments = {"valid_rows": torch.ones(4, 1, dtype=torch.bool), "kv_length": torch.zeros(1, 2, dtype=torch.int32),
                 "softmax_scale": 1.0}
    assert block_mass(q, k, q_block_size=2, kv_block_size=16, **arguments).shape == (1, 2, 2, 0)
    for sizes in ((0, 16), (2, 0)):
        with pytest.raises(ValueError, match=f"q_block_size and kv_block_size must be at least 1, got {sizes[0]} and"):
            block_mass(q, k, q_block_size=sizes[0], kv_block_size=sizes[1], **arguments)
