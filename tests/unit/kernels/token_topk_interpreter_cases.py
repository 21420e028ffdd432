"""Cases of the token selection kernels for the CPU interpreter; test_token_topk.py runs them in their own process.

Inputs are small integers: every product and sum is exact, ties abound, and the selected sets must equal a full sort's.
"""

import pytest
import torch

from megatron_dsv.kernels.token_topk.api import token_topk
from megatron_dsv.kernels.token_topk.triton import launch


def _agree(*, spread, dtype=torch.float16, keys=150, groups=3, b=1, h=2, heads_kv=1, rank=16, proxies=1, odd=False,
           **arguments):
    generator = torch.Generator().manual_seed(0)
    q = torch.randint(-spread, spread + 1, (groups * proxies, b, h, rank), generator=generator).to(dtype)
    k = torch.randint(-spread, spread + 1, (keys, b, heads_kv, rank), generator=generator).to(dtype)
    if odd:
        k[3], k[5], k[40], k[41] = torch.nan, torch.inf, 0.0, -0.0
    arguments = {"num_queries": groups * 32, "q_block_size": 32, "proxies": proxies, **arguments}
    exact = token_topk(q, k, backend="reference", **arguments)
    got = token_topk(q, k, backend="triton", **arguments)
    assert torch.equal(got.row_start, exact.row_start)
    assert torch.equal(got.row_count, exact.row_count)
    for start, count in zip(exact.row_start.flatten().tolist(), exact.row_count.flatten().tolist()):
        if start >= 0:
            assert got.kv_indices[start:start + count].tolist() == exact.kv_indices[start:start + count].tolist()


@pytest.mark.parametrize("spread", [1, 9])
def test_few_and_many_ties(spread):
    _agree(spread=spread, h=1, head_budgets=[40])


def test_all_scores_equal():
    _agree(spread=0, h=1, head_budgets=[40], kv_length=140)


def test_padding_dense_heads_batch_prefix_and_raised_budgets():
    _agree(spread=2, b=2, head_budgets=[1, 150], kv_length=torch.tensor([140, 20]), query_length=torch.tensor([96, 40]),
           prefix_tokens=5)


def test_more_candidates_than_places(monkeypatch):
    monkeypatch.setattr(launch, "_places", lambda *_: 16)
    _agree(spread=1, h=1, head_budgets=[50], keep_own_tokens=False)


def test_candidates_come_a_run_of_heads_at_a_time(monkeypatch):
    monkeypatch.setattr(launch, "_SCRATCH_BYTES", 1)
    _agree(spread=9, h=2, groups=2, head_budgets=[50, 20])


@pytest.mark.parametrize(("reduction", "dtype", "spread"), [("max", torch.float16, 2), ("mass", torch.float32, 1),
                                                            ("lse", torch.float32, 1)])
def test_proxies(reduction, dtype, spread):
    _agree(spread=spread, dtype=dtype, proxies=2, h=1, keys=90, rank=4, groups=2, reduction=reduction,
           head_budgets=[35])


@pytest.mark.filterwarnings("ignore:invalid value encountered in matmul")
def test_odd_scores():
    _agree(spread=2, h=1, head_budgets=[140], keep_own_tokens=False, odd=True)


def test_a_sample_serves_every_row_of_spread_scores(monkeypatch):
    missed, run = [], launch.Launch.run

    def watch(launched):
        run(launched)
        if launched.constants.get("EXACT") is False and "CANDIDATES" in launched.constants:
            missed.append(int(launched.arguments["flag_ptr"].sum()))

    monkeypatch.setattr(launch.Launch, "run", watch)
    generator = torch.Generator().manual_seed(0)
    q, k = (torch.randn(n, 1, 1, 16, generator=generator).half() for n in (2, 1500))
    arguments = {"head_budgets": [200], "num_queries": 64, "q_block_size": 32}
    got = token_topk(q, k, backend="triton", **arguments)
    # The interpreter multiplies in fp32, where the order of a sum depends on the tile: sets may differ by a rounding.
    logits = q[:, 0, 0].double() @ k[:, 0, 0].double().T
    for row, kept in enumerate(got.kv_indices.view(2, 200).tolist()):
        own = torch.arange(1500) // 32 == row
        best = logits[row].masked_fill(own, torch.inf)
        stays = torch.zeros(1500, dtype=torch.bool)
        stays[kept] = True
        assert kept == sorted(set(kept))
        assert best[~stays].max() <= best[stays].min() + 1e-5
    assert missed == [0]


def test_limits_name_the_way_out():
    q, k = torch.zeros(1, 1, 1, 300), torch.zeros(8, 1, 1, 300)
    for dtype, message in ((torch.float32, "ranks up to 256, got 300"), (torch.float64, "got torch.float64")):
        with pytest.raises(NotImplementedError, match=f"{message}; use backend='reference'"):
            token_topk(q.to(dtype), k.to(dtype), head_budgets=[1], num_queries=4, q_block_size=4, backend="triton")
    wide = torch.zeros(1, 65536, 1, 16)
    with pytest.raises(NotImplementedError, match="batch x heads up to 65535, got a grid of"):
        token_topk(wide, torch.zeros(8, 65536, 1, 16), head_budgets=[1], num_queries=4, q_block_size=4,
                   backend="triton")
    many = torch.zeros(1, 1, 1, 16).expand(65535 * 32 + 1, 1, 1, 16)
    with pytest.raises(NotImplementedError, match=r"to 2097120 keys of torch.float32 and rank 16, got 2097121; us"):
        token_topk(torch.zeros(1, 1, 1, 16), many, head_budgets=[1], num_queries=4, q_block_size=4, backend="triton")


@pytest.mark.parametrize(("given", "means"), [(90, 40), (-7, 0)])
def test_a_length_that_no_host_checked_reads_no_key_outside(given, means):
    # Behind the keys lie better ones.
    buffer = torch.full((128, 1, 1, 16), 9.0, dtype=torch.float16)
    buffer[:40] = torch.randint(-9, 9, (40, 1, 1, 16), generator=torch.Generator().manual_seed(0))
    results = []
    for number in (given, means):
        indices = torch.full((12,), -1, dtype=torch.int32)
        count = launch.token_topk(
            torch.ones(2, 1, 1, 16).half(), buffer[:40], torch.zeros(1, 1, 1, dtype=torch.int64), indices,
            budgets=torch.tensor([12], dtype=torch.int32), kv_length=torch.full((1, 1), number, dtype=torch.int32),
            query_length=torch.tensor([16]), group_ids=torch.tensor([0]), proxies=2, reduction="mass", keep_own=False,
            prefix=0, q_block_size=16, softmax_scale=0.3, longest=12)
        results.append((count, indices))
    assert int(results[1][0]) == min(12, means)
    assert all(torch.equal(got, exact) for got, exact in zip(*results))
