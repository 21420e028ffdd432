"""The Triton block scores without a GPU: their results in the interpreter, and their compilation for Hopper."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_dsv.testing.hopper import SHARED_MEMORY_LIMIT, compile_for_hopper


def test_kernels_in_the_interpreter():
    cases = Path(__file__).with_name("block_scores_interpreter_cases.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", str(cases)],
                            env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout


def _launches(rank, kv_block, reduction, dtype, monkeypatch):
    from megatron_dsv.kernels.block_scores.triton import launch

    tokens, heads, proxies = 32768, 12, 4
    rows = tokens // 64 * proxies
    q, k = (torch.empty(n, 1, heads, rank, dtype=dtype, device="meta") for n in (rows, tokens))
    length = torch.empty(1, heads, dtype=torch.int32, device="meta")
    launched = []
    with monkeypatch.context() as patch:
        patch.setattr(launch.Launch, "run", lambda self: launched.append(self))
        patch.setattr(launch, "check_triton", lambda *_: None)
        launch.block_scores(q, k, length, kv_block_size=kv_block, proxies=proxies, reduction=reduction,
                            softmax_scale=0.25)
        launch.pool_queries(torch.empty(tokens, 1, heads, rank, dtype=dtype, device="meta"),
                            torch.empty(1, dtype=torch.int32, device="meta"), q_block_size=64, proxies=proxies)
    return {each.kernel.__name__: each for each in launched}


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing compiles under the interpreter")
@pytest.mark.parametrize(("rank", "kv_block", "reduction", "dtype"), [
    (16, 64, "mass", torch.bfloat16), (16, 1, "mass", torch.bfloat16), (256, 256, "lse", torch.bfloat16),
    (64, 64, "max", torch.float32)])
def test_kernels_compile_for_hopper_within_shared_memory(rank, kv_block, reduction, dtype, monkeypatch):
    launches = _launches(rank, kv_block, reduction, dtype, monkeypatch)
    assert len(launches) == (3 if reduction == "max" else 4)
    for name, launched in launches.items():
        compiled = compile_for_hopper(launched)
        assert compiled.metadata.shared <= SHARED_MEMORY_LIMIT, (name, launched.tile)
        if dtype == torch.bfloat16 and name == "_block_partial_kernel":
            assert "wgmma.mma_async" in compiled.asm["ptx"], "the tensor cores of this generation are not in use"
