"""The Triton kernels without a GPU: their results in the interpreter, and their compilation for Hopper."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_dsv.kernels.selection import KVSelection
from megatron_dsv.testing.hopper import SHARED_MEMORY_LIMIT, compile_for_hopper

# (head dim, q_block_size, kv_block_size): the largest users of shared memory and registers of each kind of tile.
CONFIGURATIONS = [(64, 128, 128), (128, 64, 64), (128, 128, 128), (256, 64, 64), (256, 128, 128)]


def test_kernels_in_the_interpreter():
    cases = Path(__file__).with_name("triton_interpreter_cases.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", str(cases)],
                            env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout


def _selection(rows: int, twin: KVSelection | None, *, tokens: int, heads: int, q_block: int, kv_block: int):
    def meta(shape, dtype):
        return torch.empty(shape, dtype=dtype, device="meta")

    return KVSelection(
        kv_indices=meta(64, torch.int32), row_start=meta((1, heads, rows), torch.int64),
        row_count=meta((1, heads, rows), torch.int32), kv_length=meta((1, heads), torch.int32), num_queries=tokens,
        num_keys=tokens, q_block_size=q_block, kv_block_size=kv_block, max_row_count=64, transposed=twin)


def _launches(head_dim: int, q_block: int, kv_block: int, *, hopper: bool = False, heads: int = 8, tokens: int = 4096):
    """Every launch of a forward and backward over bf16 meta tensors."""
    from megatron_dsv.kernels.sparse_attention.triton import launch

    sizes = {"tokens": tokens, "heads": heads, "q_block": q_block, "kv_block": kv_block}
    selection = _selection(tokens // q_block, _selection(tokens // kv_block, None, **sizes), **sizes)
    x = torch.empty(tokens, 1, heads, head_dim, dtype=torch.bfloat16, device="meta")
    lse, stats = torch.empty(1, heads, tokens, device="meta"), launch.new_stats(x)
    yield launch.plan_forward(x, x, x, x, lse, selection, 0.1, hopper=hopper)
    yield launch.plan_dq(x, x, x, x, x, lse, stats, x, selection, 0.1, hopper=hopper)
    yield launch.plan_dkv(x, x, x, x, stats, x, x, selection, 0.1, hopper=hopper)


def test_tokens_too_far_apart_are_refused():
    from megatron_dsv.kernels.sparse_attention.triton import launch

    sizes = {"tokens": 4096, "heads": 1, "q_block": 64, "kv_block": 64}
    near, far = (torch.empty_strided((4096, 1, 1, 64), (stride, 64, 64, 1), dtype=torch.bfloat16, device="meta")
                 for stride in (64, 2**24))
    for tensors in ((far, near, near, near), (near, near, far, near)):
        with pytest.raises(NotImplementedError, match="got a stride of 16777216; copy the tensor"):
            launch.plan_forward(*tensors, torch.empty(1, 1, 4096, device="meta"), _selection(64, None, **sizes), 0.1)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing compiles under the interpreter")
@pytest.mark.parametrize(("head_dim", "q_block", "kv_block"), CONFIGURATIONS)
def test_kernels_compile_for_hopper_within_shared_memory(head_dim, q_block, kv_block):
    for launched in _launches(head_dim, q_block, kv_block):
        compiled = compile_for_hopper(launched)
        assert compiled.metadata.shared <= SHARED_MEMORY_LIMIT, (launched.kernel, launched.tile)
        ptx = compiled.asm["ptx"]
        assert "wgmma.mma_async" in ptx or launched.tile.block_m < 64, "the tensor cores of this generation are idle"
        assert "cp.async.bulk.tensor" in ptx, "whole blocks are loaded by TMA"


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing compiles under the interpreter")
@pytest.mark.parametrize(("head_dim", "q_block", "kv_block"), [(64, 64, 64), (128, 64, 64), (96, 128, 128),
                                                               (256, 128, 64)])
def test_the_hopper_kernels_compile_and_overlap_their_products(head_dim, q_block, kv_block):
    written_for_hopper = [x for x in _launches(head_dim, q_block, kv_block, hopper=True) if x.kernel.is_gluon()]
    assert "hopper_bwd_dkv" in written_for_hopper[-1].kernel.__name__
    for launched in written_for_hopper:
        compiled = compile_for_hopper(launched)
        assert compiled.metadata.shared <= SHARED_MEMORY_LIMIT, (launched.kernel, launched.tile)
        ptx = compiled.asm["ptx"]
        assert "wgmma.mma_async" in ptx
        assert "cp.async.bulk.tensor" in ptx
        # A backward that drains its products before it goes on would hide nothing behind them.
        assert "fwd" in launched.kernel.__name__ or re.search(r"wgmma\.wait_group\.sync\.aligned\s+1", ptx)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing compiles under the interpreter")
@pytest.mark.parametrize("hopper", [False, True])
def test_kernels_compile_where_sizes_are_one(hopper):
    # A size of one reaches a kernel as a constant: one head, one group and one block must still compile.
    for launched in _launches(128, 64, 64, hopper=hopper, heads=1, tokens=64):
        assert compile_for_hopper(launched).metadata.shared <= SHARED_MEMORY_LIMIT
