"""Token selection: the reference against block scores with a full selection, its limits, and the Triton kernels without
a GPU: their results in the interpreter, and their compilation for Hopper."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_dsv.kernels.block_scores.api import block_scores
from megatron_dsv.kernels.token_topk.api import token_topk
from megatron_dsv.sparsity.selection_rules import select
from megatron_dsv.testing.hopper import SHARED_MEMORY_LIMIT, compile_for_hopper


def _inputs(groups=7, proxies=4, keys=200, b=2, h=4, heads_kv=2, rank=8, seed=0):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(groups * proxies, b, h, rank, generator=generator, dtype=torch.float64)
    return q, torch.randn(keys, b, heads_kv, rank, generator=generator, dtype=torch.float64)


@pytest.mark.parametrize("reduction", ["mass", "lse", "max"])
def test_the_reference_selects_what_block_scores_of_single_tokens_select(reduction):
    q, k = (x.float() for x in _inputs())
    lengths = torch.tensor([200, 150])
    k[150:, 1] = torch.nan
    common = {"num_queries": 7 * 32 - 5, "q_block_size": 32, "kv_length": lengths, "query_length": lengths}
    budgets = [50, 1, 120, 200]
    got = token_topk(q, k, head_budgets=budgets, proxies=4, reduction=reduction, prefix_tokens=3, **common)
    scores = block_scores(q, k, kv_block_size=1, proxies=4, reduction=reduction, kv_length=lengths)
    exact = select(scores, rule="topk", num_kv_heads=2, num_keys=200, kv_block_size=1, head_budgets=budgets,
                   score_kind=reduction, prefix_blocks=3, **common)
    assert torch.equal(got.row_count[got.row_start >= 0], exact.row_count[exact.row_start >= 0])
    assert torch.equal(got.row_start < 0, exact.row_start < 0)
    assert torch.equal(got.block_mask(), exact.block_mask())
    assert got.max_row_count == exact.max_row_count


def test_the_lists_of_all_rows_are_bounded_by_their_own_budgets():
    """One wide head or a dense one must not size what is made of all rows by itself."""
    q, k = (x.float() for x in _inputs())
    lengths = torch.tensor([200, 150])
    got = token_topk(q, k, head_budgets=[1, 190, 40, 200], proxies=4, num_queries=7 * 32, q_block_size=32,
                     kv_length=lengths)
    assert got.row_start[:, 3].eq(-1).all()
    assert got.entries_bound == 2 * 7 * (32 + 190 + 40 + 200) < got.row_start.numel() * got.max_row_count
    assert got.kv_indices.numel() == 2 * 7 * (32 + 190 + 40)
    assert int(got.entries().sum()) == 7 * (32 + 190 + 40 + 200) + 7 * (32 + 150 + 40 + 150)


def test_equal_scores_go_to_lower_tokens_and_odd_ones_come_last():
    q = torch.ones(2, 1, 1, 1)
    k = torch.tensor([1.0, torch.nan, 2, 1, torch.inf, -torch.inf, 1, 0])[:, None, None, None]
    for budget, kept in ((1, [4]), (3, [0, 2, 4]), (4, [0, 2, 3, 4]), (6, [0, 2, 3, 4, 6, 7]),
                         (7, [0, 1, 2, 3, 4, 6, 7])):
        selection = token_topk(q, k, head_budgets=[budget], num_queries=8, q_block_size=4, keep_own_tokens=False)
        assert selection.block_mask()[0, 0, 0].nonzero()[:, 0].tolist() == kept


def test_forced_tokens_raise_the_budget_and_group_numbers_move_them():
    q, k = _inputs(groups=2, proxies=1, b=1, h=1, heads_kv=1, keys=64)
    selection = token_topk(q, k, head_budgets=[1], num_queries=16, q_block_size=8, prefix_tokens=2, query_length=64,
                           query_group_ids=torch.tensor([5, 2]))
    mask = selection.block_mask()[0, 0]
    assert mask.sum(-1).tolist() == [10, 10]
    assert mask[0].nonzero()[:, 0].tolist() == [0, 1, *range(40, 48)]
    assert mask[1].nonzero()[:, 0].tolist() == [0, 1, *range(16, 24)]


@pytest.mark.parametrize(("changes", "message"), [
    ({"head_budgets": [1]}, "head_budgets must be 4 ints of at least 1"),
    ({"head_budgets": [1, 1, 0, 1]}, "head_budgets must be 4 ints of at least 1"),
    ({"head_budgets": [1, 1, 2.5, 1]}, "head_budgets must be 4 ints of at least 1"),
    ({"reduction": "sum"}, "reduction must be one of mass, lse, max, got 'sum'"),
    ({"backend": "cuda"}, "backend of token_topk must be one of auto, reference, triton, got 'cuda'"),
    ({"proxies": 3}, "proxies must divide q_block_size"),
    ({"num_queries": 300}, "q_pooled must hold 4 rows for each of the 10 groups"),
    ({"kv_length": 201}, "kv_length must lie in .0, 200., got 201"),
    ({"kv_length": torch.tensor([1, 2, 3])}, "kv_length must be an integer tensor of shape"),
    ({"kv_length": torch.tensor([201, 3])}, "kv_length must lie in .0, 200., got 201"),
    ({"kv_length": torch.tensor([200, -3])}, "kv_length must lie in .0, 200., got -3"),
    ({"query_length": -1}, "query_length must be at least 0, got -1"),
    ({"prefix_tokens": -1}, "prefix_tokens must be at least 0, got -1"),
    ({"softmax_scale": -1.0}, "softmax_scale must be positive and finite, got -1.0"),
    ({"query_group_ids": torch.zeros(7), "query_length": 9}, r"query_group_ids must be \[7\] integers, got"),
    ({"query_group_ids": torch.arange(7)}, "query_length must be given along with query_group_ids"),
])
def test_misuse_is_named(changes, message):
    q, k = _inputs()
    arguments = {"head_budgets": [5] * 4, "num_queries": 7 * 32, "q_block_size": 32, "proxies": 4, **changes}
    with pytest.raises(ValueError, match=message):
        token_topk(q, k, **arguments)


def test_triton_without_a_gpu_names_the_way_out():
    if torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET") == "1":
        pytest.skip("the kernels run here")
    q, k = (x.float() for x in _inputs())
    with pytest.raises(NotImplementedError, match=r"needs CUDA tensors .*use backend='reference'"):
        token_topk(q, k, head_budgets=[5] * 4, num_queries=7 * 32, q_block_size=32, proxies=4, backend="triton")


def test_kernels_in_the_interpreter():
    cases = Path(__file__).with_name("token_topk_interpreter_cases.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", str(cases)],
                            env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing compiles under the interpreter")
def test_kernels_compile_for_hopper(monkeypatch):
    from megatron_dsv.kernels.token_topk.triton import launch

    def meta(shape, dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    compiled = {}

    def run(launched):
        kernel = compile_for_hopper(launched)
        compiled[launched.kernel.__name__, launched.constants.get("EXACT")] = kernel
        assert kernel.metadata.shared <= SHARED_MEMORY_LIMIT

    monkeypatch.setattr(launch.Launch, "run", run)
    monkeypatch.setattr(launch, "check_triton", lambda *_: None)
    launch.token_topk(
        meta((512 * 2, 1, 8, 16), torch.bfloat16), meta((65536, 1, 8, 16), torch.bfloat16),
        meta((1, 8, 512), torch.int64), meta((1000,), torch.int32), budgets=meta((8,), torch.int32),
        kv_length=meta((1, 8), torch.int32), query_length=meta((1,), torch.int32), group_ids=meta((512,), torch.int64),
        proxies=2, reduction="mass", keep_own=True, prefix=0, q_block_size=128, softmax_scale=0.25, longest=6554)
    assert len(compiled) == 8
    scoring = [kernel.asm["ptx"] for (name, _), kernel in compiled.items() if "lists" not in name]
    assert all("mma.sync" in ptx for ptx in scoring)
