"""The Triton selection without a GPU: its results in the interpreter, and its compilation for Hopper."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_dsv.kernels.block_scores.api import ChunkedScores, ScoreChunk
from megatron_dsv.kernels.block_selection import reference
from megatron_dsv.kernels.block_selection.api import BACKENDS, select_rows
from megatron_dsv.kernels.block_selection.limits import RowRule
from megatron_dsv.sparsity.selection_rules import select
from megatron_dsv.testing.hopper import SHARED_MEMORY_LIMIT, compile_for_hopper


def test_kernels_in_the_interpreter():
    cases = Path(__file__).with_name("block_selection_interpreter_cases.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", str(cases)],
                            env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing compiles under the interpreter")
@pytest.mark.parametrize("rule", ["topk", "mass"])
def test_kernels_compile_for_hopper(rule, monkeypatch):
    from megatron_dsv.kernels.block_selection.triton import launch

    launched = []
    monkeypatch.setattr(launch.Launch, "run", lambda self: launched.append(self))
    monkeypatch.setattr(launch, "check_triton", lambda *_: None)
    monkeypatch.setattr(torch, "_assert_async", lambda *_: None)
    selection = select(torch.empty(1, 12, 512, 512, device="meta"), rule=rule, num_kv_heads=12, num_queries=32768,
                       num_keys=32768, q_block_size=64, kv_block_size=64, head_budgets=[51] * 12,
                       kv_length=torch.empty(1, 12, dtype=torch.int32, device="meta"), backend="triton")
    twin = launch.transpose(selection)
    assert twin.kv_indices.shape == selection.kv_indices.shape == (12 * 512 * (51 if rule == "topk" else 512),)
    for each in launched:
        assert compile_for_hopper(each).metadata.shared <= SHARED_MEMORY_LIMIT, each.kernel
    assert len(launched) == 3


@pytest.mark.parametrize("elements", [1, 50, 2**25])
@pytest.mark.parametrize("rule", ["topk", "topk-mass"])
def test_the_eager_form_takes_chunks_as_they_come(rule, elements, monkeypatch):
    """Chunks that end within a batch item and reuse one buffer give the rows of the whole scores, which never exist."""
    b, h, groups, blocks = 2, 3, 7, 11
    scores = torch.rand(b, h, groups, blocks, generator=torch.Generator().manual_seed(0))
    buffer = torch.empty(4 * 3 * blocks)

    def chunks():
        for pair, group in ((0, 0), (0, 3), (0, 6), (4, 0), (4, 3), (4, 6)):
            part = scores.flatten(0, 1)[pair:pair + 4, group:group + 3]
            yield ScoreChunk(pair, group, buffer[:part.numel()].view(part.shape).copy_(part))
            buffer.fill_(torch.nan)

    arguments = {"rule": rule, "num_kv_heads": 1, "num_queries": 28, "num_keys": 44, "q_block_size": 4,
                 "kv_block_size": 4, "head_budgets": [2, 11, 5], "theta": 0.4, "kv_length": torch.tensor([44, 30]),
                 "query_length": torch.tensor([28, 9]), "backend": "reference"}
    expected = select(scores, **arguments)
    monkeypatch.setattr(reference, "_CHUNK_ELEMENTS", elements)
    monkeypatch.setattr(ChunkedScores, "whole", lambda self: pytest.fail("all scores at once"))
    got = select(ChunkedScores(tuple(scores.shape), scores.device, chunks), **arguments)
    assert torch.equal(got.block_mask(), expected.block_mask())
    assert torch.equal(got.row_start, expected.row_start)
    assert torch.equal(got.kv_indices, expected.kv_indices)
    assert torch.equal(got.block_mask(), select(scores, **arguments).block_mask())


def test_dense_rows_ask_for_no_score():
    scores = ChunkedScores((1, 2, 3, 5), torch.device("cpu"), lambda: pytest.fail("a score was asked for"))
    selection = select(scores, rule="all", num_kv_heads=1, num_queries=12, num_keys=20, q_block_size=4,
                       kv_block_size=4, kv_length=17, query_length=8)
    assert selection.row_start[0].tolist() == [[-1, -1, 0]] * 2
    assert selection.entries()[0].tolist() == [[5, 5, 0]] * 2


def test_misuse_is_named():
    arguments = {"rule": "all", "num_kv_heads": 1, "num_queries": 4, "num_keys": 8, "q_block_size": 4,
                 "kv_block_size": 4}
    with pytest.raises(ValueError, match=f"backend of select_rows must be one of {', '.join(BACKENDS)}, got 'best'"):
        select(torch.rand(1, 1, 1, 2), **arguments, backend="best")
    with pytest.raises(NotImplementedError, match=r"needs CUDA tensors \(or TRITON_INTERPRET=1\), got cpu; use"):
        select(torch.rand(1, 1, 1, 2), **arguments, backend="triton")


def _row_rule(**changes):
    return RowRule(**({"widths": (2, 0), "caps": (2, 9), "floors": (1, 1), "by_mass": False, "score_kind": "mass",
                       "theta": 1.0, "keep_own_block": False, "prefix_blocks": 0, "q_block_size": 4,
                       "kv_block_size": 4} | changes))


@pytest.mark.parametrize(("changes", "message"), [
    ({"caps": (2,)}, "one width, cap and floor for each head, got 2, 1, 2"),
    ({"caps": (2, 0)}, "caps and floors of at least 1, and widths of .* got width 0, cap 0, floor 1"),
    ({"caps": (3, 9)}, "widths of 0 or at least the cap, got width 2, cap 3, floor 1"),
    ({"floors": (0, 1)}, "got width 2, cap 2, floor 0")])
def test_limits_that_would_write_over_a_neighbour_are_refused(changes, message):
    _row_rule()
    with pytest.raises(ValueError, match=message):
        _row_rule(**changes)


def test_a_rule_fits_its_scores():
    lengths = {"kv_length": torch.full((1, 2), 12, dtype=torch.int32), "query_length": torch.tensor([4]),
               "query_group_ids": None, "num_queries": 4, "num_keys": 12, "max_row_count": 3}
    assert select_rows(torch.rand(1, 2, 1, 3), _row_rule(), **lengths).row_count.tolist() == [[[2], [0]]]
    for heads, widths in ((3, (2, 0)), (2, (4, 0))):
        with pytest.raises(ValueError, match=rf"rule must have {heads} widths.* of at most the 3 blocks of a row, got"):
            select_rows(torch.rand(1, heads, 1, 3), _row_rule(widths=widths), **lengths)
