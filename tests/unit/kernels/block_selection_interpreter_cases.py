"""Cases of the Triton selection for the CPU interpreter; test_block_selection.py runs them in their own process.

TRITON_INTERPRET must be set before triton is imported.
"""

from dataclasses import replace

import pytest
import torch

from megatron_dsv.kernels.block_scores.api import ChunkedScores, block_scores, chunked_block_scores
from megatron_dsv.kernels.block_scores.triton import launch as scores_launch
from megatron_dsv.kernels.block_selection.limits import RowRule
from megatron_dsv.kernels.block_selection.triton import launch
from megatron_dsv.kernels.selection import DENSE_ROW, KVSelection
from megatron_dsv.sparsity.selection_rules import RULES, select

LARGEST = torch.finfo(torch.float32).max


def assert_equal(got, expected):
    assert torch.equal(got.row_start, expected.row_start)
    assert torch.equal(got.row_count, expected.row_count)
    assert torch.equal(got.block_mask(), expected.block_mask())
    assert (got.max_row_count, got.max_entries) == (expected.max_row_count, expected.max_entries)
    for row in zip(got.row_start.flatten().tolist(), got.row_count.flatten().tolist(), strict=True):
        assert torch.equal(got.kv_indices[row[0]:row[0] + row[1]], expected.kv_indices[row[0]:row[0] + row[1]])


def arguments_of(seed):
    """One request drawn at random: shapes, lengths, budgets, what is forced, and scores full of ties and oddities."""
    rng = torch.Generator().manual_seed(seed)

    def pick(*choices):
        return choices[int(torch.randint(len(choices), (), generator=rng))]

    (qb, kvb), (b, h, g_kv) = pick((4, 4), (8, 4), (4, 8), (6, 4), (8, 1)), pick((1, 2, 1), (2, 2, 2), (1, 4, 2))
    queries, keys = (int(torch.randint(1, most, (), generator=rng)) for most in (30, 200))
    nq, nk = -(-queries // qb), -(-keys // kvb)
    kind = pick("mass", "lse", "max")
    rule = pick(*(name for name, rule in RULES.items() if kind != "max" or not rule.by_mass))
    scores = torch.randn(b, h, nq, nk, generator=rng)
    scores = pick(scores, (scores * 2).round() / 4, torch.zeros_like(scores))
    if kind == "mass":
        scores = pick(scores.abs(), scores.abs() * 1e-38, scores)
    for value in (torch.nan, torch.inf, -torch.inf, LARGEST, -LARGEST, -0.0):
        scores[torch.rand(scores.shape, generator=rng) < 0.03] = value
    ids = pick(None, torch.randperm(nq + 3, generator=rng)[:nq].sort().values)
    lengths = pick(None, torch.randint(0, keys + 1, (b, g_kv), generator=rng))
    query_length = torch.randint(0, queries + 1, (b,), generator=rng)
    limits = {name: torch.randint(1, nk + 3, (h,), generator=rng).tolist()
              for name in ("head_budgets", "head_floors", "head_caps")}
    return {"scores": scores, "rule": rule, "num_kv_heads": g_kv, "num_queries": queries, "num_keys": keys,
            "q_block_size": qb, "kv_block_size": kvb, "theta": pick(0.5, 0.9, 1.0), "score_kind": kind,
            "kv_length": lengths, "query_length": query_length if ids is not None else pick(None, query_length),
            "query_group_ids": ids, "keep_own_block": pick(True, False), "prefix_blocks": pick(0, 2), **limits}


@pytest.mark.parametrize("seed", range(20))
def test_rows_equal_the_sorted_ones(seed):
    arguments = arguments_of(seed)
    assert_equal(select(**arguments, backend="triton"), select(**arguments, backend="reference"))


def test_selecting_chunks_equals_sorting_the_whole_scores(monkeypatch):
    torch.manual_seed(0)
    q, k = torch.randn(3 * 2, 2, 2, 8).half(), torch.randn(100, 2, 1, 8).half()
    scoring = {"kv_block_size": 16, "proxies": 2, "kv_length": torch.tensor([[90], [100]])}
    rule = {"rule": "topk", "num_kv_heads": 1, "num_queries": 24, "num_keys": 100, "q_block_size": 8,
            "kv_block_size": 16, "head_budgets": [3, 5], "kv_length": scoring["kv_length"]}
    whole = block_scores(q, k, **scoring, backend="triton")
    expected = select(whole, **rule, backend="reference")
    for scratch in (1, 4 * 2 * 7 * 3, 2**20):
        monkeypatch.setattr(scores_launch, "_SCRATCH_BYTES", scratch)
        scores = chunked_block_scores(q, k, **scoring, backend="triton")
        assert torch.equal(scores.whole(), whole)
        assert_equal(select(scores, **rule, backend="triton"), expected)


def test_dense_rows_ask_for_no_score():
    scores = ChunkedScores((1, 2, 3, 5), torch.device("cpu"), lambda: pytest.fail("a score was asked for"))
    arguments = {"rule": "all", "num_kv_heads": 1, "num_queries": 12, "num_keys": 20, "q_block_size": 4,
                 "kv_block_size": 4, "kv_length": 17, "query_length": 8}
    assert_equal(select(scores, **arguments, backend="triton"), select(scores, **arguments, backend="reference"))


def reference_twin(selection):
    """Groups of every key block, from the mask."""
    return [[[row.nonzero().flatten().tolist() for row in head.T] for head in item] for item in selection.block_mask()]


def twin_lists(twin):
    b, h, nk = twin.row_start.shape
    return [[[twin.kv_indices[twin.row_start[i, j, n]:][:twin.row_count[i, j, n]].tolist() for n in range(nk)]
             for j in range(h)] for i in range(b)]


MANY_GROUPS = {"b": 1, "h": 2, "g_kv": 1, "queries": 260, "keys": 75, "qb": 2, "kvb": 8}
LONG_ROWS = {"b": 2, "h": 2, "g_kv": 2, "queries": 7, "keys": 300, "qb": 2, "kvb": 1}


def selection_at_random(seed, *, b, h, g_kv, queries, keys, qb, kvb):
    """Listed, dense and empty rows."""
    rng = torch.Generator().manual_seed(seed)
    nq, nk = -(-queries // qb), -(-keys // kvb)
    lengths = torch.randint(0, keys + 1, (b, g_kv), generator=rng, dtype=torch.int32)
    lengths[0, 0] = keys
    valid = torch.arange(nk) * kvb < lengths.repeat_interleave(h // g_kv, 1)[..., None, None]
    mask = (torch.rand(b, h, nq, nk, generator=rng) < torch.rand(b, h, 1, 1, generator=rng)) & valid
    count = mask.sum(-1, dtype=torch.int32)
    start = torch.arange(count.numel()).view(count.shape) * nk
    order = mask.int().argsort(dim=-1, descending=True, stable=True).int()
    start[torch.rand(start.shape, generator=rng) < 0.1] = DENSE_ROW
    return KVSelection(order.flatten(), start, count, lengths, queries, keys, qb, kvb, nk)


@pytest.mark.parametrize(("shape", "words"), [(MANY_GROUPS, 2**24), (LONG_ROWS, 2**24), (LONG_ROWS, 1)],
                         ids=["many groups", "long rows", "a head at a time"])
def test_the_twin_lists_the_groups_of_every_block(shape, words, monkeypatch):
    monkeypatch.setattr(launch, "_MASK_WORDS", words)
    selection = selection_at_random(0, **shape)
    twin = launch.transpose(selection)
    assert twin_lists(twin) == reference_twin(selection)
    assert twin.kv_indices.numel() == selection.entries_bound
    assert twin.max_row_count == selection.num_query_groups
    # Packed: the lists follow each other without a gap.
    ends = twin.row_start + twin.row_count
    assert torch.equal(twin.row_start.flatten()[1:], ends.flatten()[:-1])


@pytest.mark.parametrize(("length", "counts_as"), [(-5, 0), (10**6, 300)])
def test_the_twin_of_a_length_outside_the_keys_is_that_of_the_nearest_inside(length, counts_as):
    selection = selection_at_random(0, **LONG_ROWS)
    selection.row_start[:, :, 1] = DENSE_ROW
    lengths = (torch.full_like(selection.kv_length, x) for x in (length, counts_as))
    got, expected = (replace(selection, kv_length=x) for x in lengths)
    assert twin_lists(launch.transpose(got)) == reference_twin(expected)
    assert reference_twin(got) == reference_twin(expected)


def test_the_twin_of_selected_rows_fits_their_places():
    torch.manual_seed(0)
    selection = select(torch.rand(2, 3, 9, 40), rule="topk", num_kv_heads=3, num_queries=36, num_keys=160,
                       q_block_size=4, kv_block_size=4, head_budgets=[3, 40, 11], query_length=33)
    twin = launch.transpose(selection)
    assert twin.kv_indices.numel() == selection.max_entries == 2 * 9 * (3 + 40 + 11)
    assert twin_lists(twin) == reference_twin(selection)


@pytest.mark.parametrize("bound", [{"max_row_count": 2}, {"max_entries": 50}])
def test_a_bound_that_would_drop_entries_is_refused(bound):
    with pytest.raises(RuntimeError, match=r"max_row_count must bound the entries of every row.*max_entries must"):
        launch.transpose(replace(selection_at_random(1, **LONG_ROWS), **bound))


def test_nothing_to_transpose_or_to_select():
    empty = torch.empty(1, 2, 0, 5)
    arguments = {"rule": "topk", "num_kv_heads": 2, "num_queries": 0, "num_keys": 20, "q_block_size": 4,
                 "kv_block_size": 4, "head_budgets": [1, 2]}
    selection = select(empty, **arguments, backend="triton")
    assert_equal(selection, select(empty, **arguments, backend="reference"))
    assert launch.transpose(selection).row_count.tolist() == [[[0] * 5] * 2]


def test_rows_longer_than_the_registers_name_the_way_out(monkeypatch):
    monkeypatch.setattr(launch, "MAX_BLOCKS", 4)
    with pytest.raises(NotImplementedError, match="rows of up to 4 blocks, got 5; use backend='reference' or longer"):
        select(torch.empty(1, 1, 1, 5), rule="all", num_kv_heads=1, num_queries=4, num_keys=20, q_block_size=4,
               kv_block_size=4, backend="triton")


@pytest.mark.parametrize(("given", "means"), [(90, 40), (-7, 0)])
def test_a_length_that_no_host_checked_lists_no_block_outside(given, means):
    rule = RowRule(widths=(3, 0), caps=(3, 3), floors=(1, 1), by_mass=False, score_kind="max", theta=1.0,
                   keep_own_block=False, prefix_blocks=0, q_block_size=16, kv_block_size=16)
    results = []
    for number in (given, means):
        length = torch.full((1, 2), number, dtype=torch.int32)
        indices, start, count = launch.select_rows(torch.ones(1, 2, 1, 3), rule, length, torch.tensor([16]), None)
        rows = KVSelection(kv_indices=indices, row_start=start, row_count=count, kv_length=length, num_queries=16,
                           num_keys=40, q_block_size=16, kv_block_size=16, max_row_count=3)
        twin = launch.transpose(rows)
        results.append((start, count, indices[:int(count.sum())], twin.row_count,
                        twin.kv_indices[:int(twin.row_count.sum())]))
    assert results[1][1].flatten().tolist() == [-(-means // 16), 0]
    assert all(torch.equal(got, exact) for got, exact in zip(*results))
