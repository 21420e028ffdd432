"""KVSelection against lists of Python ints: rectangles, masks, packing and the key-major twin."""

import random
from dataclasses import replace

import pytest
import torch

from megatron_dsv.kernels import selection as selection_module
from megatron_dsv.kernels.selection import DENSE_ROW, KVSelection, from_block_mask

CASES = {
    "blocks": {"b": 2, "h": 4, "kv_heads": 4, "num_queries": 40, "num_keys": 40, "q_block": 8, "kv_block": 8},
    "gqa, ragged tails": {"b": 2, "h": 6, "kv_heads": 2, "num_queries": 43, "num_keys": 29, "q_block": 8,
                          "kv_block": 4},
    "tokens": {"b": 1, "h": 4, "kv_heads": 2, "num_queries": 24, "num_keys": 19, "q_block": 8, "kv_block": 1},
    "one block": {"b": 1, "h": 2, "kv_heads": 1, "num_queries": 5, "num_keys": 3, "q_block": 8, "kv_block": 4},
}


@pytest.fixture(params=CASES, ids=str)
def made(request):
    """(selection, rows): rows[batch][head][group] is the ascending list of what that row attends to."""
    return make_selection(**CASES[request.param])


def make_selection(*, b, h, kv_heads, num_queries, num_keys, q_block, kv_block, seed=0):
    """Listed, empty and dense rows, stored in a shuffled order with gaps between them."""
    rng = random.Random(seed)
    nq, nk = -(-num_queries // q_block), -(-num_keys // kv_block)
    lengths = [[rng.randint(max(1, num_keys // 2), num_keys) for _ in range(kv_heads)] for _ in range(b)]
    rows = [[[None] * nq for _ in range(h)] for _ in range(b)]
    start, count = torch.zeros(b, h, nq, dtype=torch.int64), torch.zeros(b, h, nq, dtype=torch.int32)
    places = [(i, j, g) for i in range(b) for j in range(h) for g in range(nq)]
    rng.shuffle(places)
    stored = [nk + 5] * 3
    for number, (i, j, g) in enumerate(places):
        valid = -(-lengths[i][j // (h // kv_heads)] // kv_block)
        kind = ("dense", "empty", "listed", "listed")[number % 4]
        if kind == "dense":
            row = list(range(valid))
            start[i, j, g], count[i, j, g] = DENSE_ROW, 12345
        else:
            row = [] if kind == "empty" else sorted(rng.sample(range(valid), rng.randint(1, valid)))
            start[i, j, g], count[i, j, g] = len(stored), len(row)
            stored += [*row, nk + 5]
        rows[i][j][g] = row
    selection = KVSelection(
        kv_indices=torch.tensor(stored, dtype=torch.int32), row_start=start, row_count=count,
        kv_length=torch.tensor(lengths, dtype=torch.int32), num_queries=num_queries, num_keys=num_keys,
        q_block_size=q_block, kv_block_size=kv_block, max_row_count=nk)
    return selection, rows


def lists_of(selection):
    indices, counts = selection.padded()
    assert indices.dtype == counts.dtype == torch.int32
    return [[[row[:n] for row, n in zip(*pair, strict=True)] for pair in zip(*head, strict=True)]
            for head in zip(indices.tolist(), counts.tolist(), strict=True)]


def test_padded_lists_every_row_then_the_fill(made):
    selection, rows = made
    indices, counts = selection.padded(fill=-7)
    assert lists_of(selection) == rows
    lane = torch.arange(indices.shape[-1])
    assert (indices[lane >= counts[..., None]] == -7).all()
    assert indices.shape[-1] == selection.num_kv_blocks


def test_block_mask_marks_exactly_the_listed_blocks(made):
    selection, rows = made
    expected = [[[[block in row for block in range(selection.num_kv_blocks)] for row in head] for head in batch]
                for batch in rows]
    assert selection.block_mask().tolist() == expected


def test_a_mask_comes_back_from_its_selection(made):
    selection, rows = made
    mask = selection.block_mask()
    packed = from_block_mask(
        mask, selection.kv_length, num_queries=selection.num_queries, num_keys=selection.num_keys,
        q_block_size=selection.q_block_size, kv_block_size=selection.kv_block_size)
    assert lists_of(packed) == rows
    assert torch.equal(packed.block_mask(), mask)
    tight = replace(packed, max_row_count=int(mask.sum(-1).max()))
    assert lists_of(tight) == rows
    assert tight.padded()[0].shape[-1] == max(1, int(mask.sum(-1).max()))


@pytest.mark.parametrize("chunk", [1, 2**25], ids=["a head at a time", "all heads at once"])
def test_the_twin_lists_the_groups_of_every_block(made, chunk, monkeypatch):
    monkeypatch.setattr(selection_module, "_CHUNK_ELEMENTS", chunk)
    selection, rows = made
    twin = selection.with_transposed().transposed
    starts, counts, stored = twin.row_start.tolist(), twin.row_count.tolist(), twin.kv_indices.tolist()
    assert (twin.row_start >= 0).all(), "dense rows are ordinary entries of the twin"
    for i, batch in enumerate(rows):
        for j, head in enumerate(batch):
            for block in range(selection.num_kv_blocks):
                first = starts[i][j][block]
                groups = [g for g, row in enumerate(head) if block in row]
                assert stored[first : first + counts[i][j][block]] == groups
    assert twin.max_row_count == selection.num_query_groups
    assert (twin.num_queries, twin.num_keys) == (selection.num_queries, selection.num_keys)


def test_an_attached_twin_is_kept(made):
    attached = made[0].with_transposed()
    assert attached.with_transposed() is attached
    assert attached.transposed.transposed is None


def test_rows_that_share_storage_are_transposed_each_for_itself():
    """Window attention stores one list for all heads."""
    selection, _ = make_selection(**CASES["blocks"])
    shared = replace(selection, row_start=selection.row_start[:, :1].expand_as(selection.row_start),
                     row_count=selection.row_count[:, :1].expand_as(selection.row_count),
                     kv_length=torch.full_like(selection.kv_length, selection.num_keys))
    mask = shared.block_mask()
    twin = shared.with_transposed().transposed
    as_mask = torch.zeros(mask.shape[0], mask.shape[1], mask.shape[3], mask.shape[2], dtype=torch.bool)
    lane = torch.arange(twin.kv_indices.numel())
    for row in torch.cartesian_prod(*(torch.arange(n) for n in as_mask.shape[:3])).tolist():
        first, count = int(twin.row_start[tuple(row)]), int(twin.row_count[tuple(row)])
        as_mask[tuple(row)][twin.kv_indices[(lane >= first) & (lane < first + count)].long()] = True
    assert torch.equal(as_mask.transpose(2, 3), mask)


def test_nothing_stored_and_all_rows_dense_or_empty():
    selection, _ = make_selection(**CASES["gqa, ragged tails"])
    start = torch.full_like(selection.row_start, DENSE_ROW)
    start[..., 0] = 0
    bare = replace(selection, kv_indices=torch.empty(0, dtype=torch.int32), row_start=start,
                   row_count=torch.zeros_like(selection.row_count))
    mask = bare.block_mask()
    assert not mask[:, :, 0].any()
    blocks = torch.arange(selection.num_kv_blocks) * selection.kv_block_size
    valid = (blocks < selection.kv_length[..., None]).repeat_interleave(3, dim=1)
    assert torch.equal(mask[:, :, 1:], valid[:, :, None].expand_as(mask[:, :, 1:]))
    assert torch.equal(bare.with_transposed().transposed.row_count, valid.int() * (selection.num_query_groups - 1))


def narrow_dense(selection):
    return replace(selection, max_row_count=1)


def narrow_listed(selection):
    listed = torch.where(selection.row_start == DENSE_ROW, 0, selection.row_start)
    counts = torch.full_like(selection.row_count, 3)
    return replace(selection, row_start=listed, row_count=counts, max_row_count=2)


@pytest.mark.parametrize("narrow", [narrow_dense, narrow_listed])
@pytest.mark.parametrize("use", [KVSelection.padded, KVSelection.block_mask, KVSelection.with_transposed])
def test_a_bound_that_would_drop_keys_is_refused(narrow, use):
    selection, _ = make_selection(**CASES["blocks"])
    with pytest.raises(RuntimeError, match="max_row_count must bound the entries of every row; a dense row has one"):
        use(narrow(selection))


@pytest.mark.parametrize(("field", "value", "words"), [
    ("kv_indices", torch.zeros(4, dtype=torch.int64), r"KVSelection.kv_indices must be torch.int32, got torch.int64"),
    ("row_start", torch.zeros(2, 4, 5, dtype=torch.int32), r"KVSelection.row_start must be torch.int64"),
    ("row_count", torch.zeros(2, 4, 6, dtype=torch.int32), r"row_start and row_count must both be \[b, h, Nq\], got"),
    ("kv_block_size", 0, r"block sizes must be at least 1, got q_block_size=8, kv_block_size=0"),
])
def test_misuse_is_named(field, value, words):
    selection, _ = make_selection(**CASES["blocks"])
    with pytest.raises(ValueError, match=words):
        replace(selection, **{field: value})
