"""The Triton block scores on a GPU: against fp64, long sequences, no waiting, and what ``auto`` takes."""

import logging

import pytest
import torch

from megatron_dsv.kernels import launching
from megatron_dsv.kernels.block_scores.api import REDUCTIONS, block_scores, chunked_block_scores

launch = pytest.importorskip("megatron_dsv.kernels.block_scores.triton.launch")
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def _inputs(sk, groups, proxies, *, b=1, h=2, heads_kv=2, rank=16, dtype=torch.bfloat16):
    torch.manual_seed(0)
    q = torch.randn(groups * proxies, b, h, rank, device="cuda", dtype=dtype)
    return q, torch.randn(sk, b, heads_kv, rank, device="cuda", dtype=dtype)


def _poison(k, lengths):
    for item in range(lengths.shape[0]):
        for head in range(lengths.shape[1]):
            k[int(lengths[item, head]):, item, head] = torch.nan


@pytest.mark.parametrize("reduction", REDUCTIONS)
@pytest.mark.parametrize(("block", "proxies", "rank", "dtype"), [
    (64, 4, 16, torch.bfloat16), (128, 4, 16, torch.bfloat16), (1, 4, 16, torch.bfloat16), (8, 64, 4, torch.bfloat16),
    (256, 1, 64, torch.bfloat16), (24, 3, 20, torch.bfloat16), (64, 2, 256, torch.bfloat16),
    (64, 4, 16, torch.float16), (64, 4, 16, torch.float32), (40, 3, 128, torch.float32)])
def test_scores_match_fp64(block, proxies, rank, dtype, reduction):
    q, k = _inputs(610, 70, proxies, b=2, h=4, rank=rank, dtype=dtype)
    lengths = torch.tensor([[610, 333], [64, 0]], dtype=torch.int32, device="cuda")
    options = {"kv_block_size": block, "proxies": proxies, "reduction": reduction, "kv_length": lengths}
    exact = block_scores(q.double(), k.double(), **options)
    _poison(k, lengths)
    got = block_scores(q, k, backend="triton", **options)
    # The cubic of three lanes in eight is 7.5e-5 off.
    torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-5 if reduction == "mass" else 1e-4)


@pytest.mark.parametrize("block", [64, 128, 1])
def test_a_long_sequence_matches_fp64(block):
    q, k = _inputs(32760, 512 if block > 1 else 70, 4)
    lengths = torch.tensor([[32760, 20001]], dtype=torch.int32, device="cuda")
    options = {"kv_block_size": block, "proxies": 4, "kv_length": lengths}
    exact = block_scores(q.double(), k.double(), **options)
    _poison(k, lengths)
    got = block_scores(q, k, backend="triton", **options)
    torch.testing.assert_close(got, exact, rtol=1e-4, atol=1e-7)


def test_chunks_are_the_whole_scores_bit_for_bit_and_bounded(monkeypatch):
    q, k = _inputs(20000, 60, 4, b=2, h=4)
    options = {"kv_block_size": 64, "proxies": 4, "kv_length": torch.tensor([20000, 1234])}
    whole = block_scores(q, k, **options)
    for scratch in (2**16, 2**20):
        monkeypatch.setattr(launch, "_SCRATCH_BYTES", scratch)
        assert torch.equal(chunked_block_scores(q, k, **options).whole(), whole)


def test_large_logits_take_the_careful_way():
    q, k = _inputs(5000, 20, 4)
    for scale in (1.0, 30.0):
        options = {"kv_block_size": 64, "proxies": 4, "softmax_scale": scale}
        exact = block_scores(q.double(), k.double(), **options)
        torch.testing.assert_close(block_scores(q, k, **options), exact, rtol=5e-4, atol=2e-5)


def test_repeats_agree_bitwise_and_nothing_waits():
    q, k = _inputs(4000, 60, 4)
    length = torch.tensor([3700], dtype=torch.int32, device="cuda")
    first = block_scores(q, k, kv_block_size=64, proxies=4, kv_length=length)
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = block_scores(q, k, kv_block_size=64, proxies=4, kv_length=length)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(first, second)


def test_auto_takes_the_kernels_unless_autograd_records(caplog):
    q, k = _inputs(300, 4, 4)
    launching._log_choice.cache_clear()
    with caplog.at_level(logging.INFO, logger=launching.__name__):
        for _ in range(2):
            mine = block_scores(q, k, kv_block_size=64, proxies=4)
        assert torch.equal(mine, block_scores(q, k, kv_block_size=64, proxies=4, backend="triton"))
        recorded = block_scores(q.requires_grad_(), k, kv_block_size=64, proxies=4)
    assert recorded.requires_grad
    assert [record.args[1] for record in caplog.records] == ["triton", "reference"]
    assert "triton has no backward" in caplog.text
