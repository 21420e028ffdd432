"""The Triton attention profile without a GPU: its results in the interpreter, and its compilation for Hopper."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_dsv.testing.hopper import SHARED_MEMORY_LIMIT, compile_for_hopper


def test_kernels_in_the_interpreter():
    cases = Path(__file__).with_name("attention_profile_interpreter_cases.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", str(cases)],
                            env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout


def _launches(dim, q_block, kv_block, dtype, tokens=32768, heads=12, groups=8):
    from megatron_dsv.kernels.attention_profile.triton import launch

    q, k = (torch.empty(n, 1, heads, dim, dtype=dtype, device="meta") for n in (groups * q_block, tokens))
    length = torch.empty(1, heads, dtype=torch.int32, device="meta")
    lse = torch.empty(1, heads, q.shape[0], launch.num_spans(tokens), device="meta")
    yield launch.plan_lse(q, k, length, lse, 0.1)
    out = torch.empty(1, heads, groups, tokens // kv_block, device="meta")
    valid = torch.empty(q.shape[0], 1, dtype=torch.bool, device="meta")
    yield launch.plan_mass(q, k, valid, length, lse[..., 0], out, q_block_size=q_block, kv_block_size=kv_block,
                           softmax_scale=0.1)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing compiles under the interpreter")
@pytest.mark.parametrize(("dim", "q_block", "kv_block", "dtype"), [
    (128, 64, 64, torch.bfloat16), (128, 1, 1, torch.bfloat16), (256, 128, 128, torch.bfloat16),
    (96, 128, 1, torch.bfloat16), (64, 64, 64, torch.float32)])
def test_kernels_compile_for_hopper_within_shared_memory(dim, q_block, kv_block, dtype):
    for launched in _launches(dim, q_block, kv_block, dtype):
        compiled = compile_for_hopper(launched)
        assert compiled.metadata.shared <= SHARED_MEMORY_LIMIT, (launched.kernel, launched.tile)
        if dtype == torch.bfloat16:
            assert "wgmma.mma_async" in compiled.asm["ptx"], "the tensor cores of this generation are not in use"


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing compiles under the interpreter")
def test_sizes_of_one_compile():
    """Arguments that are 1 become constants of the kernel, which have no methods."""
    for launched in _launches(64, 64, 128, torch.bfloat16, tokens=128, heads=1, groups=1):
        assert launched.arguments["spans"] == launched.arguments["heads"] == 1
        compile_for_hopper(launched)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing compiles under the interpreter")
def test_the_smallest_set_compiles_for_hopper():
    from megatron_dsv.kernels.attention_profile.triton import launch

    launched = launch.plan_smallest_set(torch.empty(384, 32760, device="meta"), torch.empty(384, device="meta"), 0.9)
    assert compile_for_hopper(launched).metadata.shared <= SHARED_MEMORY_LIMIT
