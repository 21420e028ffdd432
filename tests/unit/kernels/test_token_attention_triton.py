"""The token kernels of sparse attention without a GPU: their results in the interpreter, and their compilation."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from megatron_dsv.kernels.selection import KVSelection
from megatron_dsv.testing.hopper import SHARED_MEMORY_LIMIT, compile_for_hopper


def test_kernels_in_the_interpreter():
    cases = Path(__file__).with_name("token_attention_interpreter_cases.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", str(cases)],
                            env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout


def _launches(head_dim: int, q_block: int):
    """Every launch of a forward and both backwards over bf16 meta tensors."""
    from megatron_dsv.kernels.sparse_attention.triton.tokens import launch

    def meta(shape, dtype=torch.bfloat16):
        return torch.empty(shape, dtype=dtype, device="meta")

    tokens, heads, places = 4096, 8, 64
    groups = tokens // q_block
    selection = KVSelection(
        kv_indices=meta(64, torch.int32), row_start=meta((1, heads, groups), torch.int64),
        row_count=meta((1, heads, groups), torch.int32), kv_length=meta((1, heads), torch.int32), num_queries=tokens,
        num_keys=tokens, q_block_size=q_block, kv_block_size=1, max_row_count=places)
    x, row = meta((tokens, 1, heads, head_dim)), meta((1, heads, tokens), torch.float32)
    total = meta((tokens, 1, heads, head_dim), torch.float32)
    part, bounds = meta((groups, places, head_dim)), meta((groups, tokens // 64 + 1), torch.int32)
    yield launch.plan_forward(x, x, x, x, row, selection, 0.1)
    yield launch.plan_dq(x, x, x, x, x, row, row, x, selection, 0.1)
    for dk, apart in ((total, False), (part.transpose(0, 1)[:, :, None], True)):
        yield launch.plan_dkv(x, x, x, x, x, row, row, x, dk, dk, selection, 0.1, first_row=0, rows=groups,
                              apart=apart)
    yield launch.plan_sum(part, total, bounds, selection, 0, groups)


@pytest.mark.skipif(os.environ.get("TRITON_INTERPRET") == "1", reason="nothing compiles under the interpreter")
@pytest.mark.parametrize(("head_dim", "q_block"), [(128, 128), (256, 128), (128, 256)])
def test_kernels_compile_for_hopper_within_shared_memory(head_dim, q_block):
    for launched in _launches(head_dim, q_block):
        compiled = compile_for_hopper(launched)
        assert compiled.metadata.shared <= SHARED_MEMORY_LIMIT, (launched.kernel, launched.tile)
        assert "wgmma.mma_async" in compiled.asm["ptx"], "the tensor cores of this generation are not in use"
