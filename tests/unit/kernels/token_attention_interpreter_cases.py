"""Cases of the token kernels of sparse attention for the CPU interpreter; test_token_attention_triton.py runs them in
their own process.

TRITON_INTERPRET must be set before triton is imported. bf16 is absent: the dot of the interpreter is wrong there.
"""

from dataclasses import replace

import pytest
import torch

from megatron_dsv.kernels.sparse_attention import api
from megatron_dsv.kernels.sparse_attention.triton.tokens import launch
from megatron_dsv.testing.attention_oracle import (
    AttentionCase,
    assert_within_budget,
    oracle,
    random_qkv,
    random_selection,
    rounded_reference,
    token_mask,
)

# A group of one tile (dq in the same pass), of several tiles (two passes), and rows as short as the smallest tile.
ONE_TILE = AttentionCase(s=140, sk=90, b=2, h=2, heads_kv=1, d=24, q_block=128, kv_block=1, kv_padding=8)
TILES = AttentionCase(s=300, sk=70, b=1, h=1, heads_kv=1, d=16, q_block=256, kv_block=1, kv_padding=2)
SHORT = AttentionCase(s=40, sk=40, b=1, h=2, heads_kv=2, d=32, q_block=8, kv_block=1)


def _run(case, dtype, *, deterministic):
    selection, blocks = random_selection(case)
    mask = token_mask(blocks, selection)
    q, k, v, dout = random_qkv(case, dtype=dtype)
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = oracle(*leaves, mask, case.d ** -0.5)
    exact = (out.detach(), *torch.autograd.grad(out, leaves, dout.double()))
    rounded = rounded_reference(dout, q, k, v, mask, case.d ** -0.5)
    for item in range(case.b):
        for head, length in enumerate(selection.kv_length[item].tolist()):
            k[length:, item, head], v[length:, item, head] = torch.nan, torch.nan
    torch.use_deterministic_algorithms(True)
    try:
        got_out, got_lse = api.forward(q, k, v, selection, backend="triton")
        grads = api.backward(dout, q, k, v, got_out, got_lse, selection, backend="triton", deterministic=deterministic)
    finally:
        torch.use_deterministic_algorithms(False)
    for name, got, low, true in zip(("out", "dq", "dk", "dv"), (got_out, *grads), rounded, exact):
        assert_within_budget(got, low, true, name)
    empty = ~mask.any(-1)
    assert torch.equal(torch.isneginf(got_lse), empty)
    torch.testing.assert_close(got_lse[~empty].double(), lse.detach()[~empty], rtol=1e-5, atol=1e-5)
    assert not got_out.permute(1, 2, 0, 3)[empty].any()
    assert not grads[0].permute(1, 2, 0, 3)[empty].any()


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize(("case", "dtype"), [(ONE_TILE, torch.float16), (TILES, torch.float16), (SHORT, torch.float16),
                                             (SHORT, torch.float32)], ids=str)
def test_kernels_match_the_oracle_with_poisoned_outputs_and_padding(case, dtype, deterministic):
    _run(case, dtype, deterministic=deterministic)


def test_a_bound_that_the_ordered_sum_would_write_past_is_refused():
    selection, _ = random_selection(SHORT)
    q, k, v, dout = random_qkv(SHORT, dtype=torch.float16)
    narrow = replace(selection, max_row_count=1)
    out, lse = api.forward(q, k, v, narrow, backend="triton")
    with pytest.raises(RuntimeError, match="max_row_count must bound the entries of every row"):
        api.backward(dout, q, k, v, out, lse, narrow, backend="triton", deterministic=True)


@pytest.mark.parametrize("rows", [1, 3])
def test_the_ordered_sum_goes_a_few_rows_at_a_time(rows, monkeypatch):
    monkeypatch.setattr(launch, "_SCRATCH_BYTES", rows * 2 * SHORT.sk * SHORT.d * 2)
    _run(SHORT, torch.float16, deterministic=True)
