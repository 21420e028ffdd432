"""Cases of rectangular block lists for the CPU interpreter; test_block_rectangles.py runs them in their own process.

TRITON_INTERPRET must be set before triton is imported.
"""

from dataclasses import replace

import pytest
import torch

from megatron_dsv.kernels.sparse_attention.triton import rectangle
from megatron_dsv.testing.attention_oracle import AttentionCase, random_selection

CASES = [
    AttentionCase(s=150, sk=170, b=2, h=4, heads_kv=2, d=1, q_block=64, kv_block=32, kv_padding=21),
    AttentionCase(s=64, sk=256, b=1, h=2, heads_kv=2, d=1, q_block=32, kv_block=64),
    AttentionCase(s=30, sk=70, b=1, h=2, heads_kv=1, d=1, q_block=64, kv_block=8, kv_padding=45),
    AttentionCase(s=20, sk=1100, b=1, h=1, heads_kv=1, d=1, q_block=16, kv_block=8, kv_padding=3, keep=0.9),
]


def _allowed(case, selection, blocks, split):
    """bool [b, h, Nq, Nk * split] of list blocks with a valid key, bool of those wholly valid, from the block mask."""
    size = case.kv_block // split
    fine = blocks.repeat_interleave(split, -1)
    length = selection.kv_length.repeat_interleave(case.h // case.heads_kv, 1)[..., None, None]
    begins = torch.arange(fine.shape[-1]) * size
    return fine & (begins < length), (begins + size <= length).expand(fine.shape)


def _entries(indices, counts, place):
    return indices[place][: int(counts[place])].tolist()


@pytest.mark.parametrize("split", [1, 2])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_lists_hold_the_valid_blocks_in_order_and_set_the_cut_one_apart(case, split):
    selection, blocks = random_selection(case, seed=case.h)
    selection = selection.with_transposed()
    allowed, uncut = _allowed(case, selection, blocks, split)
    ratio = case.h // case.heads_kv
    for heads in (slice(0, case.h), *([slice(ratio, 2 * ratio)] if case.heads_kv > 1 and split == 1 else [])):
        mine, kept = allowed[:, heads], uncut[:, heads]
        lists = rectangle.by_query(selection, heads, split=split, multiple=8)
        assert lists.indices.shape[-1] % 8 == 0
        for place in torch.cartesian_prod(*map(torch.arange, mine.shape[:3])).tolist():
            row = tuple(place)
            # The cut block is the last valid one, so it stands in the main list, too, behind the counted ones.
            assert _entries(lists.indices, lists.whole + lists.cut, row) == mine[row].nonzero()[:, 0].tolist()
            assert _entries(lists.indices, lists.whole, row) == (mine & kept)[row].nonzero()[:, 0].tolist()
            assert _entries(lists.cut_indices, lists.cut, row) == (mine & ~kept)[row].nonzero()[:, 0].tolist()
        lists = rectangle.by_key(selection, heads, split=split)
        for item, head, block in torch.cartesian_prod(*map(torch.arange, lists.whole.shape)).tolist():
            groups = mine[item, head, :, block].nonzero()[:, 0].tolist()
            whole = bool(kept[item, head, 0, block])
            assert _entries(lists.indices, lists.whole, (item, head, block)) == (groups if whole else [])
            assert _entries(lists.cut_indices, lists.cut, (item, head, block)) == ([] if whole else groups)


@pytest.mark.parametrize(("length", "counts_as"), [(-70, 0), (500, 70)])
def test_a_length_outside_the_keys_counts_as_the_nearest_inside(length, counts_as):
    selection, _ = random_selection(CASES[2])
    selection = selection.with_transposed()
    lengths = (torch.full((1, 1), x, dtype=torch.int32) for x in (length, counts_as))
    got, expected = (replace(selection, kv_length=x) for x in lengths)
    for make in (rectangle.by_query, rectangle.by_key):
        mine, theirs = make(got, slice(0, 2)), make(expected, slice(0, 2))
        assert torch.equal(mine.whole, theirs.whole)
        assert torch.equal(mine.cut, theirs.cut)
        assert mine.cut.any() == (counts_as == 70)
        for row in torch.cartesian_prod(*map(torch.arange, mine.whole.shape)).tolist():
            place = tuple(row)
            assert _entries(mine.indices, mine.whole, place) == _entries(theirs.indices, theirs.whole, place)


def test_a_row_that_overflows_the_bound_is_refused():
    selection, blocks = random_selection(CASES[1], special_rows=False)
    bound = int(blocks.sum(-1).max())
    rectangle.by_query(replace(selection, max_row_count=bound), slice(0, 2))
    with pytest.raises(RuntimeError, match="max_row_count must bound the entries of every row"):
        rectangle.by_query(replace(selection, max_row_count=bound - 1), slice(0, 2))
