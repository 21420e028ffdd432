"""Selection and predictor loss on CUDA: the CPU's answer, and no wait for the device."""

from __future__ import annotations

import contextlib

import pytest
import torch

from megatron_dsv.kernels.block_scores.api import block_scores, chunked_block_scores
from megatron_dsv.kernels.block_scores.triton import launch as scores_launch
from megatron_dsv.kernels.block_selection import reference
from megatron_dsv.kernels.block_selection.triton.launch import MAX_BLOCKS
from megatron_dsv.sparsity.predictor_loss import predictor_loss_and_grads
from megatron_dsv.sparsity.selection_rules import RULES, select
from megatron_dsv.testing.profiles import profile_query_groups

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]


@contextlib.contextmanager
def no_sync():
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def lists_of(twin):
    """The entries of all rows of a twin, one after the other."""
    starts, counts, stored = (x.cpu() for x in (twin.row_start, twin.row_count, twin.kv_indices))
    return torch.cat([stored[start:start + count] for start, count in
                      zip(starts.flatten().tolist(), counts.flatten().tolist(), strict=True)])


@pytest.mark.parametrize("rule", sorted(RULES))
@pytest.mark.parametrize("blocks", [(64, 64), (128, 1)])
def test_selection_equals_the_cpu_and_never_waits(rule, blocks):
    (qb, kvb), keys = blocks, 2048
    nq, nk = keys // qb, keys // kvb
    generator = torch.Generator().manual_seed(0)
    # few levels, so that ties abound; multiples of 1/64, so that sums are exact in any order
    scores = torch.randint(0, 16, (2, 4, nq, nk), generator=generator).float() / 64
    arguments = {"rule": rule, "num_kv_heads": 2, "num_queries": keys, "num_keys": keys, "q_block_size": qb,
                 "kv_block_size": kvb, "theta": 0.75,
                 "head_budgets": [max(1, nk // 10), nk, nk // 3, max(1, nk // 10)]}
    lengths = torch.tensor([[keys, keys - 5], [keys - 777, keys]], dtype=torch.int32)
    on_cpu = select(scores, kv_length=lengths, query_length=keys - 300, **arguments)
    on_device, device_lengths = scores.cuda(), lengths.cuda()
    with no_sync():
        on_gpu = select(on_device, kv_length=device_lengths, query_length=keys - 300, **arguments)
        twin = on_gpu.with_transposed().transposed
    assert torch.equal(on_gpu.block_mask().cpu(), on_cpu.block_mask())
    expected = on_cpu.with_transposed().transposed
    assert torch.equal(twin.row_count.cpu(), expected.row_count)
    assert torch.equal(lists_of(twin), lists_of(expected))
    assert torch.equal(on_gpu.kv_length.cpu(), lengths)


def test_rows_too_long_for_registers_are_chosen_chunk_by_chunk(monkeypatch):
    keys, groups, heads, proxies = 2 * (MAX_BLOCKS + 8), 48, 8, 2
    generator = torch.Generator("cuda").manual_seed(0)
    q, k = (torch.randn(rows, 1, heads, 16, device="cuda", dtype=torch.bfloat16, generator=generator)
            for rows in (groups * proxies, keys))
    arguments = {"rule": "topk", "num_kv_heads": heads, "num_queries": groups * 64, "num_keys": keys,
                 "q_block_size": 64, "kv_block_size": 2, "head_budgets": [50, MAX_BLOCKS + 8, *[900] * 6],
                 "keep_own_block": False}
    exact = select(block_scores(q, k, kv_block_size=2, proxies=proxies), **arguments)
    monkeypatch.setattr(scores_launch, "_SCRATCH_BYTES", 2**20)
    monkeypatch.setattr(reference, "_CHUNK_ELEMENTS", 2**17)
    scores = chunked_block_scores(q, k, kv_block_size=2, proxies=proxies)
    select(scores, **arguments)
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with no_sync():
        got = select(scores, **arguments)
    # All scores would be 24 MiB.
    assert torch.cuda.max_memory_allocated() - before < groups * heads * (MAX_BLOCKS + 8) * 4
    assert torch.equal(got.row_start, exact.row_start)
    assert torch.equal(got.row_count, exact.row_count)
    assert torch.equal(got.kv_indices, exact.kv_indices)


def test_loss_and_profile_equal_the_cpu_and_never_wait():
    generator = torch.Generator().manual_seed(1)
    q, k = (torch.randn(512, 1, heads, 64, generator=generator, dtype=torch.float64) for heads in (4, 2))
    q_lr, k_lr, rows = q[..., :16].contiguous(), k[..., :16].contiguous(), torch.arange(0, 512, 16)
    groups = torch.tensor([1, 5])
    common = {"q_block_size": 64, "kv_block_size": 64, "softmax_scale": 0.125, "theta": 0.9, "budget_mass": 0.95,
              "kv_length": 500}
    expected = predictor_loss_and_grads(q_lr[rows], k_lr, q[rows], k, softmax_scale=0.125, kv_length=500)
    expected_profile = profile_query_groups(q, k, group_ids=groups, **common)
    values = [x.cuda() for x in (q_lr[rows], k_lr, q[rows], k)]
    device_q, device_groups = q.cuda(), groups.cuda()
    # The first call compiles the pointwise passes, and compiling waits for the device.
    predictor_loss_and_grads(*values, softmax_scale=0.125, kv_length=500)
    with no_sync():
        got = predictor_loss_and_grads(*values, softmax_scale=0.125, kv_length=500)
        profile = profile_query_groups(device_q, values[3], group_ids=device_groups, **common)
    for ours, theirs in zip(got, expected, strict=True):
        assert torch.allclose(ours.cpu(), theirs, rtol=1e-10, atol=1e-12)
    assert torch.allclose(profile.sums.cpu(), expected_profile.sums, rtol=1e-10)
