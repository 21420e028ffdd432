"""Library backends of dense and sparse attention on a Hopper GPU: bf16 against an fp64 budget; auto under compile."""

from dataclasses import replace

import pytest
import torch

from megatron_dsv.kernels.dense_attention import api as dense
from megatron_dsv.kernels.library import hopper_limit
from megatron_dsv.kernels.selection import KVSelection, from_block_mask
from megatron_dsv.kernels.sparse_attention import api, cudnn, head_chunks
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

CASE = AttentionCase(s=512, sk=610, b=2, h=4, heads_kv=4, d=128, q_block=128, kv_block=128, kv_padding=37)


def _exact(inputs, mask, d):
    q, k, v, dout = inputs
    leaves = [x.double().requires_grad_() for x in (q, k, v)]
    out, lse = oracle(*leaves, mask, d ** -0.5)
    return lse.detach(), (out.detach(), *torch.autograd.grad(out, leaves, dout.double()))


def _require(x, *backends):
    """Skips where the package or the chip is missing, and only there: what a backend refuses here is a failure."""
    for backend in backends:
        if reason := hopper_limit(backend, x):
            pytest.skip(reason)


def _inputs(case, dtype=torch.bfloat16, seed=0):
    selection, blocks = random_selection(case, seed=seed, device="cuda")
    inputs = random_qkv(case, dtype=dtype, seed=seed, device="cuda")
    return selection, token_mask(blocks, selection), inputs


@pytest.mark.parametrize(("backend", "changes"), [
    ("flash4", {}), ("flash4", {"s": 500, "heads_kv": 2}), ("flash4", {"d": 64}), ("flash4", {"d": 96}),
    ("flash4", {"d": 256}), ("flash4", {"s": 40, "sk": 90, "kv_padding": 50}), ("flash4", {"sk": 640, "kv_padding": 0}),
    ("cudnn", {}), ("cudnn", {"s": 500, "sk": 640, "kv_padding": 0}), ("cudnn", {"q_block": 64, "kv_block": 64}),
    ("cudnn", {"q_block": 64, "kv_block": 64, "sk": 90, "kv_padding": 50})], ids=str)
def test_sparse_backends_stay_within_the_budget(backend, changes):
    case = replace(CASE, **changes)
    selection, mask, (q, k, v, dout) = _inputs(case)
    _require(q, backend)
    lse, exact = _exact((q, k, v, dout), mask, case.d)
    rounded = rounded_reference(dout, q, k, v, mask, case.d ** -0.5)
    out, got_lse = api.forward(q, k, v, selection, backend=backend)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    grads = torch.autograd.grad(api.sparse_attention(*leaves, selection, backend=backend), leaves, dout)
    for name, got, low, true in zip(("out", "dq", "dk", "dv"), (out, *grads), rounded, exact):
        assert_within_budget(got, low, true, name)
    empty = ~mask.any(-1)
    assert torch.equal(torch.isneginf(got_lse), empty)
    torch.testing.assert_close(got_lse[~empty].double(), lse[~empty], rtol=1e-5, atol=1e-4)
    assert not out.permute(1, 2, 0, 3)[empty].any()
    assert not grads[0].permute(1, 2, 0, 3)[empty].any()


@pytest.mark.parametrize(("backend", "module", "bound"), [
    ("flash4", head_chunks, "RECTANGLE_ENTRIES"), ("cudnn", head_chunks, "RECTANGLE_ENTRIES"),
    ("cudnn", cudnn, "_SMALL_WORKSPACE")])
def test_chunks_of_heads_change_nothing(backend, module, bound, monkeypatch):
    selection, _, (q, k, v, dout) = _inputs(replace(CASE, heads_kv=4 if backend == "cudnn" else 2))
    _require(q, backend)
    results = []
    for limit in (1 << 40, 1):
        monkeypatch.setattr(module, bound, limit)
        out, lse = api.forward(q, k, v, selection, backend=backend)
        results.append((out, lse, *api.backward(dout, q, k, v, out, lse, selection, backend=backend)))
    for whole, chunked in zip(*results):
        torch.testing.assert_close(chunked, whole, rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("backend", ["flash4", "cudnn"])
def test_backward_takes_merged_results(backend):
    """Keys in two halves, merged as staged context parallelism does, give the gradients of the whole."""
    case = replace(CASE, sk=512, kv_padding=0)
    _, mask, (q, k, v, dout) = _inputs(case)
    _require(q, backend)
    blocks = mask[:, :, ::128, ::128]
    halves = []
    for cols in (slice(0, 2), slice(2, 4)):
        length = torch.full((case.b, case.heads_kv), 256, dtype=torch.int32, device="cuda")
        part = from_block_mask(blocks[..., cols].contiguous(), length, num_queries=case.s, num_keys=256,
                               q_block_size=128, kv_block_size=128)
        halves.append((slice(cols.start * 128, cols.stop * 128), part))
    parts = [api.forward(q, k[rows], v[rows], part, backend=backend) for rows, part in halves]
    lse = torch.logaddexp(parts[0][1], parts[1][1])
    weights = [torch.exp(part_lse - lse).nan_to_num(0.0).permute(2, 0, 1)[..., None] for _, part_lse in parts]
    out = sum(weight * part_out.float() for weight, (part_out, _) in zip(weights, parts)).to(q.dtype)
    grads = [api.backward(dout, q, k[rows], v[rows], out, lse, part, backend=backend) for rows, part in halves]
    _, exact = _exact((q, k, v, dout), mask, case.d)
    rounded = rounded_reference(dout, q, k, v, mask, case.d ** -0.5)
    merged = (out, grads[0][0].float() + grads[1][0].float(), *(torch.cat([g[i] for g in grads]) for i in (1, 2)))
    for name, got, low, true in zip(("out", "dq", "dk", "dv"), merged, rounded, exact):
        assert_within_budget(got.to(q.dtype), low, true, name)


@pytest.mark.parametrize(("heads_kv", "d", "length"), [(4, 128, None), (2, 128, 333), (4, 64, 0), (4, 96, 100),
                                                       (4, 256, None)])
def test_dense_flash4_stays_within_the_budget(heads_kv, d, length):
    case = replace(CASE, heads_kv=heads_kv, d=d)
    q, k, v, dout = random_qkv(case, dtype=torch.bfloat16, device="cuda")
    _require(q, "flash4")
    valid = torch.arange(case.sk, device="cuda") < (case.sk if length is None else length)
    mask = valid.expand(case.b, case.h, case.s, case.sk)
    _, exact = _exact((q, k, v, dout), mask, d)
    rounded = rounded_reference(dout, q, k, v, mask, d ** -0.5)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    got = dense.dense_attention(*leaves, kv_length=length, backend="flash4")
    plain, lse = dense.forward(q, k, v, kv_length=length, backend="flash4")
    results = [(got, *torch.autograd.grad(got, leaves, dout)),
               (plain, *dense.backward(dout, q, k, v, plain, lse, kv_length=length, backend="flash4"))]
    for result in results:
        for name, mine, low, true in zip(("out", "dq", "dk", "dv"), result, rounded, exact):
            assert_within_budget(mine, low, true, name)


def test_dense_flash4_repeats_bitwise_when_asked():
    case = replace(CASE, s=2048, sk=2048, kv_padding=0)
    q, k, v, dout = random_qkv(case, dtype=torch.bfloat16, device="cuda")
    _require(q, "flash4")
    out, lse = dense.forward(q, k, v, backend="flash4")
    runs = [dense.backward(dout, q, k, v, out, lse, backend="flash4", deterministic=True) for _ in range(4)]
    for run in runs[1:]:
        assert all(torch.equal(mine, first) for mine, first in zip(run, runs[0]))


def test_auto_compiles_into_one_graph_and_waits_for_nothing():
    compiled = torch.compile(lambda *x: (dense.dense_attention(*x[:3]), api.sparse_attention(*x)), fullgraph=True,
                             backend="aot_eager")
    torch._dynamo.reset()
    for tokens in (512, 768, 1024):
        selection, _, (q, k, v, dout) = _inputs(replace(CASE, b=1, s=tokens, sk=tokens))
        selection = selection.with_transposed()
        leaves = [x.requires_grad_() for x in (q, k, v)]
        eager = (dense.dense_attention(*leaves), api.sparse_attention(*leaves, selection))
        for mine, other in zip(compiled(*leaves, selection), eager):
            torch.testing.assert_close(mine, other, rtol=0, atol=0)
        torch.autograd.grad(eager, leaves, (dout, dout))
        torch.cuda.set_sync_debug_mode("error")
        try:
            torch.autograd.grad((dense.dense_attention(*leaves), api.sparse_attention(*leaves, selection)), leaves,
                                (dout, dout))
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("backend", ["flash4", "cudnn"])
def test_addresses_beyond_2_to_the_31_elements(backend):
    """Every group attends to its own block alone, so the last one can be checked by itself."""
    s, h, d, block = 262144 + 128, 64, 128, 128
    q, k, v, dout = (torch.randn(s, 1, h, d, device="cuda", dtype=torch.bfloat16) for _ in range(4))
    assert q.numel() > 2**31
    blocks = s // block
    own = torch.arange(blocks, dtype=torch.int32, device="cuda")
    start = own.long().expand(1, h, blocks).contiguous()
    selection = KVSelection(own, start, torch.ones_like(start, dtype=torch.int32),
                            torch.full((1, h), s, dtype=torch.int32, device="cuda"), s, s, block, block, 1)
    selection = replace(selection, transposed=selection)
    _require(q, backend)
    out, lse = api.forward(q, k, v, selection, backend=backend)
    grads = api.backward(dout, q, k, v, out, lse, selection, backend=backend)
    rows = slice(s - block, s)
    part = [x[rows, :, -1:] for x in (q, k, v, dout)]
    mask = torch.ones(1, 1, block, block, dtype=torch.bool, device="cuda")
    _, exact = _exact(part, mask, d)
    rounded = rounded_reference(part[3], *part[:3], mask, d ** -0.5)
    for name, got, low, true in zip(("out", "dq", "dk", "dv"), (out, *grads), rounded, exact):
        assert_within_budget(got[rows, :, -1:], low, true, name)


def test_a_side_stream_is_the_one_that_is_used():
    selection, _, (q, k, v, dout) = _inputs(CASE)
    _require(q, "flash4", "cudnn")
    for backend in ("flash4", "cudnn"):
        out, lse = api.forward(q, k, v, selection, backend=backend)
        exact = api.backward(dout, q, k, v, out, lse, selection, backend=backend)
        stream, late = torch.cuda.Stream(), torch.empty_like(q)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(50_000_000)
            late.copy_(q)
            got, got_lse = api.forward(late, k, v, selection, backend=backend)
            grads = api.backward(dout, late, k, v, got, got_lse, selection, backend=backend)
        stream.synchronize()
        for mine, other in zip((got, *grads), (out, *exact)):
            torch.testing.assert_close(mine, other, rtol=2**-6, atol=1e-3)
