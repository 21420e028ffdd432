"""The Triton predictor loss without a GPU: its results in the interpreter, and its compilation for Hopper."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_dsv.testing.hopper import SHARED_MEMORY_LIMIT, compile_for_hopper


def test_kernels_in_the_interpreter():
    cases = Path(__file__).with_name("predictor_loss_interpreter_cases.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", str(cases)],
                            env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout


def _launches(dim, rank, heads_kv, dtype, tokens=32768, heads=12):
    from megatron_dsv.kernels.predictor_loss.triton import launch

    rows = 128
    q_lr, q = (torch.empty(rows, 1, heads, width, dtype=dtype, device="meta") for width in (rank, dim))
    k_lr, k = (torch.empty(tokens, 1, heads_kv, width, dtype=dtype, device="meta") for width in (rank, dim))
    length = torch.empty(1, heads_kv, dtype=torch.int32, device="meta")
    spans = launch.num_spans(tokens)
    yield launch.plan_sums(q_lr, k_lr, q, k, length,
                           torch.empty(6, spans, 1, heads, rows, dtype=torch.float64, device="meta"))
    coefficients = torch.empty(4, 1, heads, rows, device="meta")
    yield launch.plan_dq(q_lr, k_lr, q, k, length, coefficients, torch.empty(spans, *q_lr.shape, device="meta"))
    yield launch.plan_dk(q_lr, k_lr, q, k, length, coefficients, torch.empty_like(k_lr))


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing compiles under the interpreter")
@pytest.mark.parametrize(("dim", "rank", "heads_kv", "dtype"), [
    (128, 16, 12, torch.bfloat16), (96, 16, 4, torch.bfloat16), (256, 16, 12, torch.bfloat16),
    (128, 128, 12, torch.bfloat16), (64, 16, 12, torch.float16), (128, 16, 12, torch.float32)])
def test_kernels_compile_for_hopper_within_shared_memory(dim, rank, heads_kv, dtype):
    for launched in _launches(dim, rank, heads_kv, dtype):
        compiled = compile_for_hopper(launched)
        assert compiled.metadata.shared <= SHARED_MEMORY_LIMIT, (launched.kernel, launched.tile)
        if dtype == torch.bfloat16:
            assert "wgmma.mma_async" in compiled.asm["ptx"], "the tensor cores of this generation are not in use"


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing compiles under the interpreter")
def test_sizes_of_one_compile():
    """Arguments that are 1 become constants of the kernel, which have no methods."""
    for launched in _launches(64, 16, 1, torch.bfloat16, tokens=96, heads=1):
        assert launched.arguments.get("spans", 1) == launched.arguments["kv_heads"] == 1
        compile_for_hopper(launched)
