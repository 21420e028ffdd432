"""Cases of the Triton kernels for the CPU interpreter; test_sparse_attention_triton.py runs them in their own process.

TRITON_INTERPRET must be set before triton is imported. bf16 is absent: the dot of the interpreter is wrong there.
"""

from dataclasses import replace

import pytest
import torch

from megatron_dsv.kernels.selection import KVSelection
from megatron_dsv.kernels.sparse_attention import api
from megatron_dsv.kernels.sparse_attention.triton import order
from megatron_dsv.testing.attention_oracle import (
    AttentionCase,
    assert_within_budget,
    oracle,
    random_qkv,
    random_selection,
    rounded_reference,
    token_mask,
)

CASES = [
    AttentionCase(s=100, sk=130, b=1, h=2, heads_kv=1, d=16, q_block=64, kv_block=64, kv_padding=9),
    AttentionCase(s=140, sk=150, b=1, h=1, heads_kv=1, d=32, q_block=128, kv_block=128, kv_padding=5),
    AttentionCase(s=140, sk=100, b=1, h=2, heads_kv=2, d=96, q_block=128, kv_block=64),
    AttentionCase(s=70, sk=60, b=2, h=2, heads_kv=1, d=16, q_block=32, kv_block=16, kv_padding=6),
    AttentionCase(s=60, sk=50, b=1, h=2, heads_kv=1, d=16, q_block=24, kv_block=40),
    AttentionCase(s=40, sk=40, b=1, h=2, heads_kv=2, d=64, q_block=16, kv_block=8, kv_padding=3),
]


def _run(case, dtype, *, seed=0):
    selection, blocks = random_selection(case, seed=seed)
    selection = selection.with_transposed()
    mask = token_mask(blocks, selection)
    q, k, v, dout = random_qkv(case, seed=seed, dtype=dtype)
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
        grads = api.backward(dout, q, k, v, got_out, got_lse, selection, backend="triton")
    finally:
        torch.use_deterministic_algorithms(False)
    for name, got, low, true in zip(("out", "dq", "dk", "dv"), (got_out, *grads), rounded, exact):
        assert_within_budget(got, low, true, name)
    empty = ~mask.any(-1)
    assert torch.equal(torch.isneginf(got_lse), empty)
    torch.testing.assert_close(got_lse[~empty].double(), lse.detach()[~empty], rtol=1e-5, atol=1e-5)
    assert not got_out.permute(1, 2, 0, 3)[empty].any()
    assert not grads[0].permute(1, 2, 0, 3)[empty].any()


@pytest.mark.parametrize(
    ("case", "dtype"), [(case, torch.float16) for case in CASES] + [(CASES[i], torch.float32) for i in (0, 3)],
    ids=str)
def test_kernels_match_the_oracle_with_poisoned_outputs_and_padding(case, dtype):
    _run(case, dtype)


@pytest.mark.parametrize("case", [CASES[3], CASES[2]], ids=str)
def test_the_order_of_programs_changes_nothing(case, monkeypatch):
    monkeypatch.setattr(order, "_FEWEST_ROWS", 0)
    _run(case, torch.float16)


def test_long_rows_come_first_and_the_rest_stay_in_place(monkeypatch):
    monkeypatch.setattr(order, "_BLOCK", 64)
    generator = torch.Generator().manual_seed(0)
    b, h, kv_heads, rows = 2, 4, 2, 600
    count = torch.randint(0, 20, (b, h, rows), dtype=torch.int32, generator=generator)
    start = torch.where(torch.rand(b, h, rows, generator=generator) < 0.02, -1, 7)
    count[1, 3, 5] = 900
    got = order.heavy_first(start, count, kv_heads=kv_heads, dense_count=100)
    work = torch.where(start < 0, 100, count).view(b, kv_heads, -1, rows).sum(2).flatten().long()
    heavy = work * work.numel() > 2 * work.sum()
    assert 10 < heavy.sum() < work.numel() // 4
    assert torch.equal(got.long(), torch.cat([heavy.nonzero()[:, 0], (~heavy).nonzero()[:, 0]]))


def test_padding_does_not_overflow_below_very_negative_logits():
    case = AttentionCase(s=16, sk=24, b=1, h=1, heads_kv=1, d=16, q_block=16, kv_block=16, kv_padding=3)
    selection, _ = random_selection(replace(case, keep=1.0), special_rows=False)
    q, k, v, dout = random_qkv(case, dtype=torch.float32)
    q, k = q.abs() + 5, -k.abs() - 20
    out, lse = api.forward(q, k, v, selection, backend="triton")
    assert lse.max() < -200
    grads = api.backward(dout, q, k, v, out, lse, selection, backend="triton")
    for mine, exact in zip(grads, api.backward(dout, q, k, v, out, lse, selection, backend="reference")):
        torch.testing.assert_close(mine, exact, rtol=1e-3, atol=1e-3)


def _one_group(length, *, block, dtype=torch.float16):
    """64 queries and keys, the keys inside a buffer of NaN, and a listed and a dense row of their blocks."""
    blocks = 64 // block
    selection = KVSelection(
        kv_indices=torch.arange(blocks, dtype=torch.int32), row_start=torch.tensor([[[0], [-1]]]),
        row_count=torch.full((1, 2, 1), blocks, dtype=torch.int32),
        kv_length=torch.full((1, 2), length, dtype=torch.int32), num_queries=64, num_keys=64, q_block_size=64,
        kv_block_size=block, max_row_count=blocks)
    generator = torch.Generator().manual_seed(0)
    q, dout = (torch.randn(64, 1, 2, 16, generator=generator).to(dtype) for _ in range(2))
    buffers = [torch.full((256, 1, 2, 16), torch.nan, dtype=dtype) for _ in range(2)]
    for buffer in buffers:
        buffer[:64] = torch.randn(64, 1, 2, 16, generator=generator).to(dtype)
    return selection, q, *(buffer[:64] for buffer in buffers), dout


@pytest.mark.parametrize(("length", "block"), [(-64, 64), (-1000, 64), (-64, 8), (-64, 1)])
def test_a_length_of_no_keys_ends_and_attends_nothing(length, block):
    selection, q, k, v, dout = _one_group(length, block=block)
    out, lse = api.forward(q, k, v, selection, backend="triton")
    assert not out.any()
    assert torch.isneginf(lse).all()
    assert not any(x.any() for x in api.backward(dout, q, k, v, out, lse, selection, backend="triton"))


@pytest.mark.parametrize(("length", "block"), [(65, 64), (200, 64), (200, 8), (200, 1)])
def test_a_length_beyond_the_keys_reads_none_of_what_lies_there(length, block):
    results = []
    for given in (64, length):
        selection, q, k, v, dout = _one_group(given, block=block)
        out, lse = api.forward(q, k, v, selection, backend="triton")
        results.append((out, lse, *api.backward(dout, q, k, v, out, lse, selection, backend="triton")))
    for exact, got in zip(*results):
        assert torch.equal(got, exact)
        assert exact.isfinite().all()


def test_autograd_reaches_the_kernels():
    case = AttentionCase(s=64, sk=64, b=1, h=2, heads_kv=1, d=16, q_block=64, kv_block=64)
    selection, _ = random_selection(case, special_rows=False)
    q, k, v, _ = random_qkv(case, dtype=torch.float32)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    out = api.sparse_attention(*leaves, selection, backend="triton")
    reference = api.sparse_attention(*leaves, selection, backend="reference")
    torch.testing.assert_close(out, reference)
    # An expanded gradient, as a sum hands over.
    for mine, exact in zip(torch.autograd.grad(out.sum(), leaves), torch.autograd.grad(reference.sum(), leaves)):
        torch.testing.assert_close(mine, exact)


def test_limits_name_the_way_out():
    case = AttentionCase(s=16, sk=16, b=1, h=1, heads_kv=1, d=16, q_block=16, kv_block=16)
    selection, _ = random_selection(case)
    for dtype in (torch.float64, torch.bfloat16):
        q, k, v, _ = random_qkv(case, dtype=dtype)
        with pytest.raises(NotImplementedError, match=f"TRITON_INTERPRET=1, got {dtype}; use backend='reference'"):
            api.forward(q, k, v, selection, backend="triton")
    wide = torch.zeros(16, 1, 1, 320)
    with pytest.raises(NotImplementedError, match="head dims up to 256, got 320; use backend='reference'"):
        api.forward(wide, wide, wide, selection, backend="triton")
