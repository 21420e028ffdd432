"""Selection rules against plain Python sets, row by row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_dsv.kernels.lengths import key_lengths
from megatron_dsv.kernels.selection import DENSE_ROW
from megatron_dsv.sparsity.selection_rules import RULES, select


def kept_sets(selection) -> list[list[list[list[int] | None]]]:
    """[b][h][Nq] lists of block numbers as stored, None for a dense row."""
    b, h, nq = selection.row_start.shape
    stored = selection.kv_indices.tolist()
    start, count = selection.row_start.tolist(), selection.row_count.tolist()
    return [[[None if start[i][j][g] == DENSE_ROW else stored[start[i][j][g] : start[i][j][g] + count[i][j][g]]
              for g in range(nq)] for j in range(h)] for i in range(b)]


def oracle_forced(group, nk, qb, kvb, own, prefix, valid) -> set[int]:
    forced = set(range(prefix))
    if own:
        forced |= {token // kvb for token in range(group * qb, (group + 1) * qb)}
    return {block for block in forced if block < valid}


def oracle_row(rule, scores, valid, forced, budget, floor, cap, theta) -> set[int]:
    """The rule as the docstrings state it, on one row."""
    score = {j: -math.inf if math.isnan(scores[j]) else scores[j] for j in range(valid)}
    order = sorted(score, key=lambda j: (j not in forced, -score[j], j))
    if rule == "all":
        return set(order)
    if rule == "topk":
        return set(order[:budget])
    mass = {j: max(score[j], 0.0) for j in order}
    total = math.fsum(mass.values())
    count, running = 0, 0.0
    for j in order:
        count, running = count + 1, running + mass[j]
        if running >= theta * total:
            break
    cap = min(cap, budget) if rule == "topk-mass" else cap
    count = min(max(count, len(forced), floor), cap)
    return set(order[:count])


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 2**31), rule=st.sampled_from(sorted(RULES)),
       blocks=st.sampled_from([(4, 4), (8, 4), (4, 8), (8, 1), (6, 4)]), b=st.integers(1, 2),
       heads=st.sampled_from([(1, 1), (4, 2), (3, 3)]), queries=st.integers(1, 40), keys=st.integers(1, 40),
       own=st.booleans(), prefix=st.integers(0, 2), levels=st.sampled_from([3, 1024]),
       theta=st.sampled_from([0.5, 0.875, 1.0]), ragged=st.booleans(), on_host=st.booleans())
def test_every_rule_matches_sets(seed, rule, blocks, b, heads, queries, keys, own, prefix, levels, theta, ragged,
                                 on_host):
    (qb, kvb), (h, g_kv) = blocks, heads
    nq, nk = -(-queries // qb), -(-keys // kvb)
    rng = torch.Generator().manual_seed(seed)
    # multiples of 1/1024, so that fp32 sums are exact and a share of exactly theta is met exactly
    scores = torch.randint(0, levels, (b, h, nq, nk), generator=rng).float() / 1024
    scores[torch.rand(scores.shape, generator=rng) < 0.05] = float("nan")
    budgets = torch.randint(1, nk + 3, (h,), generator=rng).tolist()
    floors = torch.randint(1, nk + 1, (h,), generator=rng).tolist()
    caps = torch.randint(1, nk + 1, (h,), generator=rng).tolist()
    lengths = torch.full((b, g_kv), keys)
    query_length = queries
    if ragged:
        lengths = torch.randint(1, keys + 1, (b, g_kv), generator=rng)
        query_length = torch.randint(0, queries + 1, (b,), generator=rng)
    selection = select(scores, rule=rule, num_kv_heads=g_kv, num_queries=queries, num_keys=keys, q_block_size=qb,
                       kv_block_size=kvb, head_budgets=budgets, head_floors=floors, head_caps=caps, theta=theta,
                       kv_length=lengths if on_host or ragged else keys, query_length=query_length,
                       keep_own_block=own, prefix_blocks=prefix)

    most = -(-int(lengths.max()) // kvb)
    widest_own = 0
    if own:
        widest_own = max(1, qb // kvb) if qb % kvb == 0 or kvb % qb == 0 else (qb + kvb - 2) // kvb + 1
    least = max(1, min(prefix + widest_own, most))
    kept = kept_sets(selection)
    for i in range(b):
        real = queries if not ragged else int(query_length[i])
        for j in range(h):
            valid = -(-int(lengths[i, j // (h // g_kv)]) // kvb)
            for group in range(nq):
                row = kept[i][j][group]
                if group * qb >= real:
                    assert row == []
                    continue
                forced = oracle_forced(group, nk, qb, kvb, own, prefix, valid)
                expected = oracle_row(rule, scores[i, j, group].tolist(), valid, forced, max(budgets[j], least),
                                      floors[j], max(caps[j], least), theta)
                if row is None:
                    assert not RULES[rule].by_mass
                    assert expected == set(range(valid)), "a dense row where the rule leaves blocks out"
                else:
                    assert row == sorted(expected)
                    assert forced <= set(row)
                    assert len(row) <= selection.max_row_count
    listed, counts = selection.padded()
    assert int(counts.max()) <= selection.max_row_count
    assert listed.shape[-1] == max(1, selection.max_row_count)


def basic(scores, **changes):
    _, h, nq, nk = scores.shape
    arguments = {"rule": "topk", "num_kv_heads": h, "num_queries": nq * 8, "num_keys": nk * 8, "q_block_size": 8,
                 "kv_block_size": 8, "head_budgets": [2] * h, "keep_own_block": False}
    return select(scores, **(arguments | changes))


def test_ties_go_to_the_lower_index():
    selection = basic(torch.ones(1, 1, 2, 9), head_budgets=[4])
    assert kept_sets(selection) == [[[[0, 1, 2, 3]] * 2]]
    selection = basic(torch.tensor([[[[0.0, 2, 1, 1, 2, 1]]]]), head_budgets=[3])
    assert kept_sets(selection) == [[[[1, 2, 4]]]]
    selection = basic(torch.ones(1, 1, 2, 8), rule="mass", theta=0.5)
    assert kept_sets(selection) == [[[[0, 1, 2, 3]] * 2]]


def test_capacity_follows_from_the_budgets_and_full_heads_are_dense():
    torch.manual_seed(0)
    selection = basic(torch.rand(2, 4, 3, 10), head_budgets=[2, 10, 5, 400], num_kv_heads=2)
    assert selection.kv_indices.numel() == 2 * 3 * (2 + 5)
    assert selection.row_start[:, 1].eq(DENSE_ROW).all()
    assert selection.row_start[:, 3].eq(DENSE_ROW).all()
    assert selection.row_count[:, 0].eq(2).all()
    assert selection.row_count[:, 2].eq(5).all()
    assert selection.max_row_count == 10
    assert selection.block_mask()[:, 1].all()
    starts = sorted(selection.row_start[selection.row_start >= 0].tolist())
    assert len(set(starts)) == len(starts)


def test_a_head_is_dense_once_its_budget_covers_the_real_blocks():
    scores = torch.rand(1, 2, 4, 10)
    selection = basic(scores, head_budgets=[5, 6], kv_length=46)
    assert selection.row_start[0, 0].ge(0).all()
    assert selection.row_start[0, 1].eq(DENSE_ROW).all()
    assert selection.block_mask()[0, 1].sum(-1).eq(6).all()


def test_forced_blocks_stay_even_with_the_worst_scores_and_count_towards_the_budget():
    scores = torch.rand(1, 1, 4, 8) + 1
    scores[..., 0] = -math.inf
    for group in range(4):
        scores[0, 0, group, 2 * group : 2 * group + 2] = -1e30
    rows = kept_sets(basic(scores, head_budgets=[4], q_block_size=16, keep_own_block=True, prefix_blocks=1,
                           num_queries=64))[0][0]
    for group, row in enumerate(rows):
        assert {0, 2 * group, 2 * group + 1} <= set(row)
        assert len(row) == 4
    raised = basic(scores, head_budgets=[1], q_block_size=16, keep_own_block=True, prefix_blocks=1, num_queries=64)
    assert raised.row_count.eq(3).all()


def test_mass_keeps_every_forced_block_though_the_first_one_holds_the_mass():
    scores = torch.tensor([[[[0.9, 0.0, 0.05, 0.05]]]])
    rows = kept_sets(basic(scores, rule="mass", theta=0.5, prefix_blocks=2))
    assert rows == [[[[0, 1]]]]


def test_rows_of_a_part_of_the_sequence_know_their_own_block():
    torch.manual_seed(1)
    scores = torch.rand(1, 2, 6, 6)
    whole = basic(scores, keep_own_block=True, query_length=37)
    part = basic(scores[:, :, [1, 4, 5]], keep_own_block=True, query_group_ids=torch.tensor([1, 4, 5]),
                 query_length=37)
    expected = [[row[g] for g in (1, 4, 5)] for row in kept_sets(whole)[0]]
    assert kept_sets(part)[0] == expected
    assert part.row_count[0, :, 2].eq(0).all()


def test_lse_scores_keep_the_same_share_as_their_masses():
    torch.manual_seed(2)
    logits = torch.randn(2, 3, 5, 7) * 3
    by_mass = basic(logits.softmax(-1), rule="mass", theta=0.8)
    by_lse = basic(logits + 11.0, rule="mass", theta=0.8, score_kind="lse")
    assert kept_sets(by_mass) == kept_sets(by_lse)


def test_chunks_of_heads_change_nothing(monkeypatch):
    torch.manual_seed(3)
    scores = torch.rand(2, 6, 4, 16)
    budgets = [3, 16, 1, 5, 16, 7]
    whole = kept_sets(basic(scores, head_budgets=budgets))
    monkeypatch.setattr("megatron_dsv.kernels.block_selection.reference._CHUNK_ELEMENTS", 1)
    assert kept_sets(basic(scores, head_budgets=budgets)) == whole


def test_infinite_scores_stay_scores():
    scores = torch.tensor([[[[-math.inf, 1.0, math.inf, -math.inf, 0.0]]]])
    assert kept_sets(basic(scores, head_budgets=[4], kv_length=32)) == [[[None]]]
    assert kept_sets(basic(scores, head_budgets=[3], kv_length=40)) == [[[[1, 2, 4]]]]
    assert kept_sets(basic(scores, head_budgets=[4])) == [[[[0, 1, 2, 4]]]]


def test_the_mass_of_very_long_rows_is_not_cut_off():
    """2^18 equal scores: their fixed-point sum times theta has more than 64 bits."""
    keys = 2**18
    selection = select(torch.full((1, 1, 1, keys), 1.9), rule="mass", num_kv_heads=1, num_queries=1, num_keys=keys,
                       q_block_size=1, kv_block_size=1, theta=0.75, keep_own_block=False)
    assert selection.row_count.item() == keys * 3 // 4


def test_lengths_on_the_device_are_clamped_to_the_keys():
    """Kernels read as far as a length says; only the host's can be refused. The meta device stands for any other."""
    seen = []

    class Recorder(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append((func, args[1:]))
            return func(*args, **(kwargs or {}))

    with Recorder():
        key_lengths(torch.empty(2, dtype=torch.int32, device="meta"), batch=2, num_kv_heads=1, num_keys=40,
                    device=torch.device("meta"))
    assert (torch.ops.aten.clamp.default, (0, 40)) in seen


@pytest.mark.parametrize(("changes", "message"), [
    ({"rule": "best"}, r"rule of a selection must be one of all, mass, topk, topk-mass, got 'best'"),
    ({"rule": "mass", "score_kind": "max"}, r"mass sums scores.*use rule topk"),
    ({"score_kind": "sum"}, r"--dsv-score-reduction must be one of"),
    ({"theta": 0.0}, r"theta of a selection must be in \(0, 1\], got 0.0"),
    ({"head_budgets": [1]}, r"head_budgets must be 2 ints"),
    ({"head_budgets": [1, 0]}, r"head_budgets must be 2 ints of at least 1"),
    ({"head_budgets": [1, 1.5]}, r"head_budgets must be 2 ints of at least 1"),
    ({"head_budgets": None}, r"rule 'topk' needs head_budgets"),
    ({"num_keys": 30}, r"scores must be float32 \[b, h, 3, 4\]"),
    ({"num_kv_heads": 3}, r"num_kv_heads must divide the 2 query heads, got 3"),
    ({"kv_length": 41}, r"kv_length must lie in \[0, 40\], got 41"),
    ({"kv_length": torch.tensor([1.0])}, r"kv_length must be an integer tensor of shape"),
    ({"kv_length": torch.zeros(3, dtype=torch.int32)}, r"kv_length must be an integer tensor of shape \(1,\) or \("),
    ({"prefix_blocks": -1}, r"prefix_blocks must be at least 0, got -1"),
    ({"kv_block_size": 0}, r"q_block_size and kv_block_size must be at least 1, got 8 and 0"),
    ({"query_group_ids": torch.zeros(3), "query_length": 9}, r"query_group_ids must be \[3\] integers, got"),
    ({"query_length": -1}, r"query_length must be at least 0"),
    ({"query_group_ids": torch.arange(3)}, r"query_length must be given along with query_group_ids"),
    ({"query_group_ids": torch.arange(4), "query_length": 9}, r"query_group_ids must be \[3\]"),
])
def test_misuse_is_named(changes, message):
    with pytest.raises(ValueError, match=message):
        basic(torch.rand(1, 2, 3, 5), **changes)
