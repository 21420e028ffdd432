"""Token selection on a GPU: the sets of a full sort, long sequences, no wait for the device."""

import pytest
import torch

from megatron_dsv.kernels.block_scores.api import pool_queries
from megatron_dsv.kernels.sparse_attention import api as attention
from megatron_dsv.kernels.token_topk.api import token_topk

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def _lists(selection):
    starts, counts, stored = (x.cpu() for x in (selection.row_start, selection.row_count, selection.kv_indices))
    return [None if start < 0 else stored[start:start + count].tolist()
            for start, count in zip(starts.flatten().tolist(), counts.flatten().tolist(), strict=True)]


@pytest.mark.parametrize(("spread", "dtype", "proxies", "reduction", "rank"), [
    (7, torch.bfloat16, 1, "mass", 16), (1, torch.bfloat16, 1, "mass", 16), (0, torch.bfloat16, 1, "mass", 16),
    (7, torch.bfloat16, 4, "max", 16), (3, torch.float16, 2, "max", 40), (3, torch.float32, 1, "lse", 8),
    (1, torch.bfloat16, 1, "mass", 160)])
def test_sets_equal_a_full_sort(spread, dtype, proxies, reduction, rank):
    # Small integers: every product and sum is exact, and ties abound.
    generator = torch.Generator("cuda").manual_seed(0)
    q = torch.randint(-spread, spread + 1, (33 * proxies, 2, 4, rank), generator=generator, device="cuda").to(dtype)
    k = torch.randint(-spread, spread + 1, (9000, 2, 2, rank), generator=generator, device="cuda").to(dtype)
    k[8900:], k[17, 0, 0] = torch.nan, torch.nan
    arguments = {"head_budgets": [2000, 1, 300, 8999], "num_queries": 33 * 128 - 5, "q_block_size": 128,
                 "proxies": proxies, "reduction": reduction, "prefix_tokens": 7,
                 "kv_length": torch.tensor([[8900, 800], [5, 8900]], device="cuda", dtype=torch.int32),
                 "query_length": torch.tensor([4219, 1000], device="cuda")}
    exact, got = (token_topk(q, k, backend=backend, **arguments) for backend in ("reference", "triton"))
    assert torch.equal(got.row_start, exact.row_start)
    assert torch.equal(got.row_count, exact.row_count)
    assert _lists(got) == _lists(exact)


@pytest.mark.parametrize(("proxies", "reduction"), [(1, "mass"), (4, "mass"), (4, "lse")])
def test_a_long_sequence_keeps_the_best(proxies, reduction):
    s, h, r, keep, group = 65536, 4, 16, 6554, 128
    q, k = (torch.randn(n, 1, h, r, device="cuda", dtype=torch.bfloat16) for n in (s // group * proxies, s))
    got = token_topk(q, k, head_budgets=[keep] * h, num_queries=s, q_block_size=group, proxies=proxies,
                     reduction=reduction)
    lists = got.kv_indices.view(h, s // group, keep)
    assert (lists[..., 1:] > lists[..., :-1]).all()
    assert (got.row_count == keep).all()
    for head, row in ((0, 0), (1, 77), (3, 511)):
        logits = q[row * proxies:(row + 1) * proxies, 0, head].double() @ k[:, 0, head].double().T * r ** -0.5
        score = torch.softmax(logits, -1).sum(0) if reduction == "mass" else torch.logsumexp(logits, 0)
        kept = torch.zeros(s, dtype=torch.bool, device="cuda").scatter_(0, lists[head, row].long(), True)
        own = torch.arange(s, device="cuda") // group == row
        assert kept[own].all()
        worst, best = score[kept & ~own].min(), score[~kept].max()
        # The op's own scores are fp32: what it ranks the other way must differ by their rounding alone.
        assert best - worst <= 1e-5 * worst.abs().clamp_min(1e-6 if reduction == "mass" else 1)


def test_selection_and_attention_wait_for_nothing():
    q_lr, k_lr = (torch.randn(2048, 1, 2, 16, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    q, k, v = (torch.randn(2048, 1, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))

    def step(deterministic):
        pooled = pool_queries(q_lr, q_block_size=128, proxies=2)
        selection = token_topk(pooled, k_lr, head_budgets=[300, 2048], num_queries=2048, q_block_size=128, proxies=2)
        out = attention.sparse_attention(q, k, v, selection, deterministic=deterministic)
        return torch.autograd.grad(out, (q, k, v), torch.ones_like(out))

    first = step(True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = step(True)
        step(False)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(mine, other) for mine, other in zip(first, second))
