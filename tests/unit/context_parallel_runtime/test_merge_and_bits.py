"""Merging partial attention, packing masks, and attention over parts where nothing is attended."""

import pytest
import torch

from megatron_dsv.context_parallel.merge import RunningMerge
from megatron_dsv.context_parallel.partial_attention import Kernels
from megatron_dsv.context_parallel.selective_exchange import pack_bits, unpack_bits
from megatron_dsv.kernels.dense_attention.api import dense_attention


def softmax_part(scores: torch.Tensor, values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """out [s, 1, 1, d] and lse [1, 1, s] of scores [s, keys]; -inf where no key is finite."""
    lse = scores.logsumexp(-1)
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0)[:, None]).exp()
    return (weights @ values)[:, None, None], lse[None, None]


def test_merge_is_the_softmax_over_all_keys_in_any_grouping():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randn(6, 9, generator=generator, dtype=torch.float64) * 30
    values = torch.randn(9, 4, generator=generator, dtype=torch.float64)
    scores[0], scores[1, :3], scores[2, 3:] = -torch.inf, -torch.inf, -torch.inf
    out, lse = softmax_part(scores, values)
    for parts in ([3, 3, 3], [1, 8], [9], [2, 2, 2, 3]):
        merged = RunningMerge()
        for part_scores, part_values in zip(scores.split(parts, 1), values.split(parts)):
            merged.add(*softmax_part(part_scores, part_values))
        got, got_lse = merged.result(out)
        torch.testing.assert_close(got, out, rtol=0, atol=1e-14)
        torch.testing.assert_close(got_lse, lse, rtol=1e-15, atol=0)
        assert torch.equal(got[0], torch.zeros_like(got[0]))


def test_nothing_added_is_nothing_attended():
    out, lse = RunningMerge().result(torch.ones(3, 2, 4, 5, dtype=torch.bfloat16))
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, torch.full((2, 4, 3), -torch.inf))


@pytest.mark.parametrize("m", [1, 7, 8, 9, 64, 65])
def test_bits_survive_packing(m):
    mask = torch.rand(3, 2, m, generator=torch.Generator().manual_seed(m)) < 0.5
    packed = pack_bits(mask)
    assert packed.dtype == torch.uint8
    assert packed.shape == (3, 2, -(-m // 8))
    assert torch.equal(unpack_bits(packed, m), mask)
    assert pack_bits(torch.tensor([[True] + [False] * 8 + [True]])).tolist() == [[1, 2]]


def test_bits_of_no_head():
    empty = torch.zeros(2, 3, 0, 5, dtype=torch.bool)
    assert unpack_bits(pack_bits(empty), 5).shape == (2, 3, 0, 5)


def test_dense_parts_with_and_without_keys():
    generator = torch.Generator().manual_seed(1)
    q, k, v, dout = (torch.randn(5, 3, 2, 4, generator=generator, dtype=torch.float64) for _ in range(4))
    kernels = Kernels(dense_backend="sdpa")
    assert kernels.forward(q, k, v, torch.zeros(3, dtype=torch.int32), 0.5) is None
    assert kernels.forward(q[:, :, :0], k[:, :, :0], v[:, :, :0], torch.ones(3, dtype=torch.int32), 0.5) is None
    lengths = torch.tensor([3, 0, 5], dtype=torch.int32)
    out, lse = kernels.forward(q, k, v, lengths, 0.5)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    expected = dense_attention(*leaves, kv_length=lengths, softmax_scale=0.5, backend="reference")
    torch.testing.assert_close(out, expected, rtol=0, atol=1e-14)
    assert bool((lse[1] == -torch.inf).all())
    grads = kernels.backward(dout, q, k, v, out, lse, lengths, 0.5)
    for got, exact in zip(grads, torch.autograd.grad(expected, leaves, dout)):
        torch.testing.assert_close(got, exact, rtol=0, atol=1e-13)
