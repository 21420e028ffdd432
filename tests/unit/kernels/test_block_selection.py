"""The Triton selection without a GPU: its results in the interpreter, and its compilation for Hopper."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_dsv.kernels.block_selection.api import BACKENDS
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
    monkeypatch.setattr(launch, "_check_limits", lambda *_: None)
    monkeypatch.setattr(torch, "_assert_async", lambda *_: None)
    selection = select(torch.empty(1, 12, 512, 512, device="meta"), rule=rule, num_kv_heads=12, num_queries=32768,
                       num_keys=32768, q_block_size=64, kv_block_size=64, head_budgets=[51] * 12,
                       kv_length=torch.empty(1, 12, dtype=torch.int32, device="meta"), backend="triton")
    twin = launch.transpose(selection)
    assert twin.kv_indices.shape == selection.kv_indices.shape == (12 * 512 * (51 if rule == "topk" else 512),)
    for each in launched:
        assert compile_for_hopper(each).metadata.shared <= SHARED_MEMORY_LIMIT, each.kernel
    assert len(launched) == 3


def test_misuse_is_named():
    arguments = {"rule": "all", "num_kv_heads": 1, "num_queries": 4, "num_keys": 8, "q_block_size": 4,
                 "kv_block_size": 4}
    with pytest.raises(ValueError, match=f"backend of select_rows must be one of {', '.join(BACKENDS)}, got 'best'"):
        select(torch.rand(1, 1, 1, 2), **arguments, backend="best")
    with pytest.raises(NotImplementedError, match=r"needs CUDA tensors \(or TRITON_INTERPRET=1\), got cpu; use"):
        select(torch.rand(1, 1, 1, 2), **arguments, backend="triton")
