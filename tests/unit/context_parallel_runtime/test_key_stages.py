"""A selection cut into stages holds every (query group, key block) pair exactly once, in the sequence's order."""

import pytest
import torch

from megatron_dsv.context_parallel import key_stages
from megatron_dsv.context_parallel.geometry import Split, splits
from megatron_dsv.context_parallel.key_stages import KeyStages, cut, true_places
from megatron_dsv.testing.attention_oracle import AttentionCase, random_selection


def cases():
    for ranks in (2, 4, 6):
        for split in splits(ranks, ranks):
            for stages in range(1, split.g_s):
                yield split, stages


def held_blocks(stages: KeyStages, staged, stage: int) -> torch.Tensor:
    """[b, n, Nk] numbers in the sequence of the blocks in a stage's buffer, sorted, Nk where nothing is held."""
    numbers = torch.arange(stages.num_blocks).expand_as(staged.position)
    here = (staged.position >= 0) & (stages.stage_of_block(torch.device("cpu")) == stage)
    return numbers.masked_fill(~here, stages.num_blocks).sort(-1).values


@pytest.mark.parametrize(("split", "count"), list(cases()), ids=str)
@pytest.mark.parametrize("chunk_elements", [2**25, 16])
def test_every_pair_is_processed_exactly_once(split, count, chunk_elements, monkeypatch):
    monkeypatch.setattr(key_stages, "_CHUNK_ELEMENTS", chunk_elements)
    chunk, block = 6, 2
    for me in range(split.g_s):
        case = AttentionCase(s=split.g_h * 8, sk=split.size * chunk, b=2, h=4, heads_kv=2, d=4, q_block=4,
                             kv_block=block, kv_padding=7)
        selection, mask = random_selection(case, seed=me + 10 * count)
        length = selection.kv_length.repeat_interleave(2, 1)
        valid = torch.arange(0, case.sk, block) < length[..., None]
        stages = KeyStages(split, me, count, chunk // block, block)
        staged = cut(selection, stages)
        seen = torch.zeros_like(mask, dtype=torch.int64)
        for stage in range(stages.count + 1):
            part = staged.parts[stage]
            held = held_blocks(stages, staged, stage).repeat_interleave(2, 1)
            indices, counts = part.padded(fill=part.num_kv_blocks)
            lanes = torch.arange(indices.shape[-1])
            listed = lanes < counts[..., None]
            # Entries are ascending, and name blocks that the buffer holds.
            assert bool(((indices.diff(dim=-1) > 0) | ~listed[..., 1:]).all())
            blocks = torch.nn.functional.pad(held, (0, 1), value=stages.num_blocks)[:, :, None]
            blocks = blocks.expand(*indices.shape[:3], -1).gather(-1, indices.long().clamp_max(blocks.shape[-1] - 1))
            assert bool((blocks[listed] < stages.num_blocks).all())
            counted = torch.zeros(*mask.shape[:-1], stages.num_blocks + 1, dtype=torch.int64)
            counted.scatter_add_(-1, blocks, listed.long())
            seen += counted[..., :-1]
            tokens = (selection.kv_length[..., None] - torch.arange(0, case.sk, block)).clamp(0, block)
            here = (staged.position >= 0) & (stages.stage_of_block(torch.device("cpu")) == stage)
            assert torch.equal(part.kv_length, (tokens * here).sum(-1, dtype=torch.int32))
        assert torch.equal(seen * valid[:, :, None], (mask & valid[:, :, None]).long())
        foreign = stages.stage_of_block(torch.device("cpu")) > 0
        wanted = (mask & valid[:, :, None]).any(2).unflatten(1, (2, 2)).any(2) & foreign
        assert torch.equal(staged.need, wanted)


def test_both_ends_of_a_stage_agree():
    for split, count in cases():
        everyone = [KeyStages(split, me, count, 3, 2) for me in range(split.g_s)]
        for stage in range(1, everyone[0].count + 1):
            for one in everyone:
                assert one.me not in one.sources(stage)
                assert one.sources(stage) == tuple(other.me for other in everyone if one.me in other.targets(stage))
        for one in everyone:
            sources = [place for stage in range(1, one.count + 1) for place in one.sources(stage)]
            assert sorted([*sources, one.me]) == list(range(split.g_s))


def test_by_place_is_the_order_that_a_place_holds():
    split = Split(2, 3, "s_inner")
    stages = KeyStages(split, 0, 1, 2, 4)
    numbers = torch.arange(12).expand(1, 1, 12)
    assert stages.by_place(numbers)[:, 0, 0].tolist() == [[0, 1, 6, 7], [2, 3, 8, 9], [4, 5, 10, 11]]


def test_true_places():
    mask = torch.tensor([[False, True, True], [False, False, True]])
    assert true_places(mask, 3).tolist() == [1, 2, 5]
    assert true_places(torch.zeros(4, dtype=torch.bool), 0).tolist() == []
    assert true_places(torch.ones(0, dtype=torch.bool), 0).tolist() == []
