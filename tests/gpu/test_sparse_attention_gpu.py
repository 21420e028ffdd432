"""The Triton kernels on a GPU: bf16 against an fp64 budget, determinism, long sequences, 64-bit addresses."""

from dataclasses import replace

import pytest
import torch

from megatron_dsv.kernels.block_scores.api import block_scores, pool_queries
from megatron_dsv.kernels.dense_attention import api as dense
from megatron_dsv.kernels.selection import from_block_mask
from megatron_dsv.kernels.sparse_attention import api
from megatron_dsv.kernels.sparse_attention.triton import launch, order
from megatron_dsv.testing.attention_oracle import (
    AttentionCase,
    assert_within_budget,
    oracle,
    random_qkv,
    random_selection,
    rounded_reference,
    token_mask,
)

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]

SHAPES = [(64, 64, 64), (96, 64, 64), (128, 64, 64), (256, 64, 64), (64, 128, 128), (128, 128, 128), (256, 128, 128),
          (128, 128, 64), (128, 256, 64), (128, 32, 16), (128, 16, 8), (128, 24, 40), (96, 128, 1), (128, 64, 1),
          (256, 64, 1)]


def _case(d, q_block, kv_block, **changes):
    return replace(AttentionCase(s=500, sk=610, b=2, h=4, heads_kv=2, d=d, q_block=q_block, kv_block=kv_block,
                                 kv_padding=37), **changes)


def _check(case, dtype, *, deterministic=False):
    selection, blocks = random_selection(case, device="cuda")
    mask = token_mask(blocks, selection)
    q, k, v, dout = random_qkv(case, dtype=dtype, device="cuda")
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = oracle(*leaves, mask, case.d ** -0.5)
    exact = (out.detach(), *torch.autograd.grad(out, leaves, dout.double()))
    rounded = rounded_reference(dout, q, k, v, mask, case.d ** -0.5)
    for item in range(case.b):
        for head, length in enumerate(selection.kv_length[item].tolist()):
            k[length:, item, head], v[length:, item, head] = torch.nan, torch.nan

    got_out, got_lse = api.forward(q, k, v, selection, backend="triton")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    grads = torch.autograd.grad(
        api.sparse_attention(*leaves, selection, backend="triton", deterministic=deterministic), leaves, dout)
    for name, got, low, true in zip(("out", "dq", "dk", "dv"), (got_out, *grads), rounded, exact):
        assert_within_budget(got, low, true, name)
    empty = ~mask.any(-1)
    assert torch.equal(torch.isneginf(got_lse), empty)
    torch.testing.assert_close(got_lse[~empty].double(), lse.detach()[~empty], rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("d", "q_block", "kv_block"), SHAPES)
def test_bf16_stays_within_the_budget(d, q_block, kv_block):
    _check(_case(d, q_block, kv_block), torch.bfloat16)


@pytest.mark.parametrize(("d", "q_block", "kv_block"), [(64, 64, 64), (128, 64, 64), (128, 128, 128), (96, 128, 64)])
def test_the_kernels_that_serve_any_device_stay_within_the_budget(d, q_block, kv_block, monkeypatch):
    monkeypatch.setattr(launch, "_fits_hopper", lambda *_: False)
    _check(_case(d, q_block, kv_block), torch.bfloat16)


@pytest.mark.parametrize("block", [64, 128])
def test_strides_that_tma_cannot_read_and_a_forced_order(block, monkeypatch):
    monkeypatch.setattr(order, "_FEWEST_ROWS", 0)
    case = _case(100, block, block)
    _check(case, torch.bfloat16)


@pytest.mark.parametrize("block", [64, 128])
def test_hub_blocks_and_dense_heads_over_thousands_of_rows(block):
    s, h, d = 16384, 24, 64
    mask, _ = _topk_selection(s, h, block, 0.05)
    mask[..., 3] = True
    mask[:, -2:] = True
    length = torch.full((1, h), s, dtype=torch.int32, device="cuda")
    selection = from_block_mask(mask, length, num_queries=s, num_keys=s, q_block_size=block, kv_block_size=block)
    q, k, v, dout = (torch.randn(s, 1, h, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    out, lse = api.forward(q, k, v, selection, backend="triton")
    grads = api.backward(dout, q, k, v, out, lse, selection, backend="triton")
    for head in (0, h - 1):
        rows, cols = slice(7 * block, 8 * block), slice(3 * block, 4 * block)
        keys = mask[0, head, 7].repeat_interleave(block)
        logits = q[rows, 0, head].double() @ k[keys, 0, head].double().t() * d ** -0.5
        probs = torch.softmax(logits, -1)
        torch.testing.assert_close(out[rows, 0, head].double(), probs @ v[keys, 0, head].double(), rtol=2e-2, atol=2e-3)
        # Every query attends to the hub block: its gradient follows from lse and out alone.
        logits = q[:, 0, head].double() @ k[cols, 0, head].double().t() * d ** -0.5
        probs = torch.exp(logits - lse[0, head].double()[:, None])
        delta = (out[:, 0, head].double() * dout[:, 0, head].double()).sum(-1, keepdim=True)
        dscores = probs * (dout[:, 0, head].double() @ v[cols, 0, head].double().t() - delta)
        torch.testing.assert_close(grads[2][cols, 0, head].double(), probs.t() @ dout[:, 0, head].double(), rtol=2e-2,
                                   atol=4e-3)
        torch.testing.assert_close(grads[1][cols, 0, head].double(), dscores.t() @ q[:, 0, head].double() * d ** -0.5,
                                   rtol=2e-2, atol=4e-3)


@pytest.mark.parametrize(("dtype", "d", "kv_block"), [(torch.float16, 128, 64), (torch.float32, 64, 64)])
def test_other_dtypes_stay_within_the_budget(dtype, d, kv_block):
    _check(_case(d, 64, kv_block, heads_kv=4), dtype)


def test_token_lists_added_in_order_stay_within_the_budget():
    _check(_case(128, 64, 1, s=256, sk=200, kv_padding=0), torch.bfloat16, deterministic=True)


@pytest.mark.parametrize(("d", "q_block", "kv_block"), [(128, 64, 64), (128, 128, 128), (128, 128, 1)])
def test_repeats_agree_bitwise(d, q_block, kv_block):
    case = _case(d, q_block, kv_block, s=1024, sk=512, kv_padding=0)
    selection, _ = random_selection(case, device="cuda")
    selection = selection.with_transposed()
    q, k, v, dout = random_qkv(case, dtype=torch.bfloat16, device="cuda")

    def run():
        out, lse = api.forward(q, k, v, selection, backend="triton")
        return out, lse, *api.backward(dout, q, k, v, out, lse, selection, backend="triton", deterministic=True)

    first = run()
    for _ in range(5):
        assert all(torch.equal(mine, old) for mine, old in zip(run(), first))


def _topk_selection(s, h, block, keep, *, b=1):
    blocks = -(-s // block)
    mask = torch.rand(b, h, blocks, blocks, device="cuda") < keep
    length = torch.full((b, h), s, dtype=torch.int32, device="cuda")
    return mask, from_block_mask(mask, length, num_queries=s, num_keys=s, q_block_size=block, kv_block_size=block)


@pytest.mark.parametrize("block", [64, 128])
def test_a_long_sequence_matches_on_sampled_groups(block):
    s, h, d = 32768 - 40, 4, 128
    mask, selection = _topk_selection(s, h, block, 0.1)
    q, k, v = (torch.randn(s, 1, h, d, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    out = api.sparse_attention(q, k, v, selection, backend="triton")
    grads = torch.autograd.grad(out, (q, k, v), torch.randn_like(out))
    assert all(torch.isfinite(x).all() for x in (out, *grads))
    for head, group in ((0, 0), (1, 77), (h - 1, mask.shape[2] - 1)):
        rows = slice(group * block, min(s, (group + 1) * block))
        keys = mask[0, head, group].repeat_interleave(block)[:s]
        logits = q[rows, 0, head].double() @ k[keys, 0, head].double().t() * d ** -0.5
        exact = torch.softmax(logits, -1) @ v[keys, 0, head].double()
        torch.testing.assert_close(out[rows, 0, head].double(), exact, rtol=2e-2, atol=2e-3)


def test_addresses_beyond_2_to_the_31_elements():
    s, h, d, block = 262144 + 64, 64, 128, 64
    q, k, v, dout = (torch.randn(s, 1, h, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    assert q.numel() > 2**31
    blocks = s // block
    own = torch.arange(blocks, dtype=torch.int32, device="cuda")
    start = own.long().expand(1, h, blocks).contiguous()
    _, small = _topk_selection(64, h, block, 1.0)
    selection = replace(small, kv_indices=own, row_start=start, row_count=torch.ones_like(start, dtype=torch.int32),
                        kv_length=torch.full((1, h), s, dtype=torch.int32, device="cuda"), num_queries=s, num_keys=s,
                        max_row_count=1)
    selection = replace(selection, transposed=selection)
    out, lse = api.forward(q, k, v, selection, backend="triton")
    dq, dk, dv = api.backward(dout, q, k, v, out, lse, selection, backend="triton")
    rows = slice(s - block, s)
    leaves = [x[rows, :, -1:].double().requires_grad_() for x in (q, k, v)]
    exact_out, _ = oracle(*leaves, torch.ones(1, 1, block, block, dtype=torch.bool, device="cuda"), d ** -0.5)
    exact = torch.autograd.grad(exact_out, leaves, dout[rows, :, -1:].double())
    for got, true in zip((out, dq, dk, dv), (exact_out, *exact)):
        torch.testing.assert_close(got[rows, :, -1:].double(), true, rtol=2e-2, atol=2e-2)


def test_everything_selected_agrees_with_dense():
    s, h, d = 2048, 8, 128
    _, selection = _topk_selection(s, h, 64, 1.1)
    q, k, v = (torch.randn(s, 1, h, d, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    dout = torch.randn_like(q)
    sparse_out = api.sparse_attention(q, k, v, selection)
    dense_out = dense.dense_attention(q, k, v)
    torch.testing.assert_close(sparse_out, dense_out, rtol=1e-2, atol=2e-3)
    for mine, other in zip(torch.autograd.grad(sparse_out, (q, k, v), dout),
                           torch.autograd.grad(dense_out, (q, k, v), dout)):
        torch.testing.assert_close(mine, other, rtol=2e-2, atol=4e-3)


@pytest.mark.parametrize(("heads_kv", "d"), [(4, 128), (2, 128), (4, 96)])
@pytest.mark.parametrize("kind", ["none", "host", "device"])
def test_dense_sdpa_stays_within_the_budget(heads_kv, d, kind):
    case = _case(d, 1, 1, heads_kv=heads_kv, kv_padding=0)
    q, k, v, dout = random_qkv(case, dtype=torch.bfloat16, device="cuda")
    length = torch.tensor([case.sk, case.sk if kind == "none" else 333], dtype=torch.int32)
    mask = (torch.arange(case.sk) < length[:, None])[:, None, None].expand(2, 4, case.s, case.sk).cuda()
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = oracle(*leaves, mask, d ** -0.5)
    exact = (out.detach(), *torch.autograd.grad(out, leaves, dout.double()))
    rounded = rounded_reference(dout, q, k, v, mask, d ** -0.5)
    kv_length = {"none": None, "host": length, "device": length.cuda()}[kind]
    leaves = [x.requires_grad_() for x in (q, k, v)]
    got = dense.dense_attention(*leaves, kv_length=kv_length)
    results = [(got, *torch.autograd.grad(got, leaves, dout))]
    if kind != "device":
        plain_out, plain_lse = dense.forward(q, k, v, kv_length=kv_length)
        torch.testing.assert_close(plain_lse.double(), lse.detach(), rtol=1e-5, atol=1e-3)
        results.append((plain_out, *dense.backward(dout, q, k, v, plain_out, plain_lse, kv_length=kv_length)))
    for result in results:
        for name, mine, low, true in zip(("out", "dq", "dk", "dv"), result, rounded, exact):
            assert_within_budget(mine, low, true, name)


def test_block_scores_match_the_cpu():
    q, k = torch.randn(500, 1, 4, 16).bfloat16(), torch.randn(610, 1, 2, 16).bfloat16()
    for reduction in ("mass", "lse", "max"):
        scores = []
        for device in ("cpu", "cuda"):
            pooled = pool_queries(q.to(device), q_block_size=64, proxies=4)
            scores.append(block_scores(pooled, k.to(device), kv_block_size=64, proxies=4, reduction=reduction))
        torch.testing.assert_close(scores[1].cpu(), scores[0], rtol=1e-3, atol=1e-4)


def test_the_step_waits_for_nothing():
    _, selection = _topk_selection(2048, 2, 64, 0.3)
    q, k, v = (torch.randn(2048, 1, 2, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
    dout = torch.randn_like(q)
    torch.autograd.grad(api.sparse_attention(q, k, v, selection), (q, k, v), dout)
    torch.cuda.set_sync_debug_mode("error")
    try:
        torch.autograd.grad(api.sparse_attention(q, k, v, selection), (q, k, v), dout)
    finally:
        torch.cuda.set_sync_debug_mode("default")
