"""The reference backend of sparse attention, and the op around it, against a naive fp64 softmax under autograd."""

from dataclasses import replace

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from megatron_dsv.kernels import eager_attention
from megatron_dsv.kernels.dense_attention import api as dense
from megatron_dsv.kernels.selection import from_block_mask
from megatron_dsv.kernels.sparse_attention import api, choice, op
from megatron_dsv.testing.attention_oracle import AttentionCase, oracle, random_qkv, random_selection, token_mask

GRANULARITIES = [(64, 64), (128, 128), (128, 64), (32, 16), (64, 1), (16, 8), (24, 40)]


@pytest.fixture
def poisoned_empty():
    """torch.empty filled with NaN, so that an element that nothing wrote shows."""
    torch.use_deterministic_algorithms(True)
    assert torch.isnan(torch.empty(3)).all()
    yield
    torch.use_deterministic_algorithms(False)


def _exact(case, inputs, mask):
    q, k, v, dout = inputs
    leaves = [x.double().detach().requires_grad_() for x in (q, k, v)]
    out, lse = oracle(*leaves, mask, case.d ** -0.5)
    return out.detach(), lse.detach(), torch.autograd.grad(out, leaves, dout.double())


def _poison_padding(k, v, kv_length):
    for (item, head), length in zip(torch.cartesian_prod(*map(torch.arange, kv_length.shape)), kv_length.flatten()):
        k[length:, item, head] = torch.nan
        v[length:, item, head] = torch.nan


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("q_block", "kv_block"), GRANULARITIES)
def test_random_selections_match_the_oracle(q_block, kv_block, seed, poisoned_empty):
    generator = torch.Generator().manual_seed(seed)

    def pick(*options):
        return options[int(torch.randint(len(options), (), generator=generator))]

    h, heads_kv = pick((2, 2), (4, 2), (3, 1))
    case = AttentionCase(s=pick(128, 150, 77), sk=pick(128, 141, 90), b=pick(1, 2), h=h, heads_kv=heads_kv,
                         d=pick(16, 32, 96), q_block=q_block, kv_block=kv_block, kv_padding=pick(0, 13))
    selection, blocks = random_selection(case, seed=seed)
    mask = token_mask(blocks, selection)
    q, k, v, dout = random_qkv(case, seed=seed)
    out, lse, grads = _exact(case, (q, k, v, dout), mask)
    _poison_padding(k, v, selection.kv_length)

    leaves = [x.requires_grad_() for x in (q, k, v)]
    got = api.sparse_attention(*leaves, selection, backend="reference")
    torch.testing.assert_close(got, out, rtol=1e-12, atol=1e-12)
    for name, mine, exact in zip("qkv", torch.autograd.grad(got, leaves, dout), grads):
        torch.testing.assert_close(mine, exact, rtol=1e-11, atol=1e-11, msg=lambda m, name=name: f"d{name}: {m}")
    plain_out, plain_lse = api.forward(q, k, v, selection, backend="reference")
    assert torch.equal(plain_out, got)
    torch.testing.assert_close(plain_lse, lse, rtol=1e-12, atol=1e-12)
    assert torch.equal(torch.isneginf(plain_lse), ~mask.any(-1))


def test_special_rows_are_really_in_the_random_selections():
    case = AttentionCase(s=512, sk=256, b=2, h=4, heads_kv=2, d=16, q_block=16, kv_block=16, kv_padding=20)
    selection, blocks = random_selection(case)
    empty = ~token_mask(blocks, selection).any(-1)
    assert 0.02 < empty.double().mean() < 0.3
    assert 0.02 < (selection.row_start == -1).double().mean() < 0.3
    assert (selection.kv_length != selection.kv_length[0, 0]).any()


def _all_selected(case, kind):
    nq, nk = -(-case.s // case.q_block), -(-case.sk // case.kv_block)
    selection, _ = random_selection(replace(case, keep=1.0), special_rows=False)
    mask = torch.ones(case.b, case.h, nq, nk, dtype=torch.bool)
    if kind == "listed":
        return from_block_mask(mask, selection.kv_length, num_queries=case.s, num_keys=case.sk,
                               q_block_size=case.q_block, kv_block_size=case.kv_block)
    return replace(selection, kv_indices=torch.zeros(0, dtype=torch.int32),
                   row_start=torch.full_like(selection.row_start, -1), row_count=torch.zeros_like(selection.row_count))


@pytest.mark.parametrize("kind", ["listed", "dense rows"])
@pytest.mark.parametrize(("q_block", "kv_block"), [(64, 64), (32, 16), (64, 1)])
def test_everything_selected_is_dense_attention(q_block, kv_block, kind):
    case = AttentionCase(s=100, sk=90, b=2, h=4, heads_kv=2, d=32, q_block=q_block, kv_block=kv_block, kv_padding=7)
    selection = _all_selected(case, kind)
    q, k, v, dout = random_qkv(case)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    sparse_out = api.sparse_attention(*leaves, selection, backend="reference")
    dense_out = dense.dense_attention(*leaves, kv_length=case.sk - 7, backend="sdpa")
    torch.testing.assert_close(sparse_out, dense_out, rtol=1e-13, atol=1e-13)
    for mine, exact in zip(torch.autograd.grad(sparse_out, leaves, dout), torch.autograd.grad(dense_out, leaves, dout)):
        torch.testing.assert_close(mine, exact, rtol=1e-12, atol=1e-12)


def test_batch_items_and_heads_are_independent():
    case = AttentionCase(s=64, sk=64, b=2, h=2, heads_kv=2, d=16, q_block=16, kv_block=16)
    selection, _ = random_selection(case)
    q, k, v, dout = random_qkv(case)
    out, lse = api.forward(q, k, v, selection)
    grads = api.backward(dout, q, k, v, out, lse, selection)
    for x in (q, k, v, dout):
        x[:, 1, 0] = torch.randn_like(x[:, 1, 0]) * 5
    new_out, new_lse = api.forward(q, k, v, selection)
    new_grads = api.backward(dout, q, k, v, new_out, new_lse, selection)
    for old, new in zip((out, *grads), (new_out, *new_grads)):
        changed = (old != new).any(-1).any(0)
        assert changed.tolist() == [[False, False], [True, False]]


def test_backward_of_merged_parts_is_the_backward_of_the_whole():
    case = AttentionCase(s=96, sk=96, b=1, h=2, heads_kv=1, d=16, q_block=32, kv_block=16)
    selection, blocks = random_selection(case)
    q, k, v, dout = random_qkv(case)
    out, _, exact_grads = _exact(case, (q, k, v, dout), token_mask(blocks, selection))
    parts = []
    for first, last in ((0, 2), (2, 6)):
        length = torch.full_like(selection.kv_length, (last - first) * 16)
        part = from_block_mask(blocks[..., first:last], length, num_queries=96, num_keys=(last - first) * 16,
                               q_block_size=32, kv_block_size=16)
        parts.append((k[first * 16:last * 16], v[first * 16:last * 16], part))
    partial = [api.forward(q, *part) for part in parts]
    merged_lse = torch.logaddexp(partial[0][1], partial[1][1])
    finite = merged_lse.masked_fill(merged_lse == -torch.inf, 0)
    merged = sum(o * torch.exp(part_lse - finite).permute(2, 0, 1)[..., None] for o, part_lse in partial)
    torch.testing.assert_close(merged, out, rtol=1e-12, atol=1e-12)
    grads = [api.backward(dout, q, part[0], part[1], merged, merged_lse, part[2]) for part in parts]
    torch.testing.assert_close(grads[0][0] + grads[1][0], exact_grads[0], rtol=1e-11, atol=1e-11)
    for i in (1, 2):
        torch.testing.assert_close(torch.cat([g[i] for g in grads]), exact_grads[i], rtol=1e-11, atol=1e-11)


def test_gradients_pass_gradcheck():
    case = AttentionCase(s=5, sk=6, b=1, h=2, heads_kv=1, d=2, q_block=2, kv_block=2, kv_padding=1)
    selection, _ = random_selection(case, seed=3)
    q, k, v, _ = random_qkv(case)
    assert torch.autograd.gradcheck(lambda *x: api.sparse_attention(*x, selection, softmax_scale=0.7),
                                    [x.requires_grad_() for x in (q, k, v)])


def test_chunks_do_not_change_the_result(monkeypatch):
    case = AttentionCase(s=100, sk=80, b=2, h=4, heads_kv=2, d=16, q_block=16, kv_block=16, kv_padding=3)
    selection, _ = random_selection(case)
    q, k, v, dout = random_qkv(case)
    out, lse = api.forward(q, k, v, selection)
    grads = api.backward(dout, q, k, v, out, lse, selection)
    monkeypatch.setattr(eager_attention, "_CHUNK_SCORES", 1)
    small_out, small_lse = api.forward(q, k, v, selection)
    for mine, exact in zip((small_out, small_lse, *api.backward(dout, q, k, v, out, lse, selection)),
                           (out, lse, *grads)):
        torch.testing.assert_close(mine, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("twin", [False, True])
def test_the_ops_pass_opcheck(twin):
    case = AttentionCase(s=20, sk=24, b=1, h=2, heads_kv=1, d=8, q_block=8, kv_block=8)
    selection, _ = random_selection(case)
    selection = selection.with_transposed() if twin else selection
    q, k, v, dout = random_qkv(case, dtype=torch.float32)
    options = (*op.flatten(selection), case.d ** -0.5, "reference", False)
    out, lse = api.forward(q, k, v, selection)
    torch.library.opcheck(op.sparse_attention_forward, tuple(x.clone().requires_grad_() for x in (q, k, v)) + options)
    torch.library.opcheck(op.sparse_attention_backward, (dout, q, k, v, out, lse, *options))


def test_plain_calls_leave_the_ops_out_and_whoever_watches_sees_them(monkeypatch):
    case = AttentionCase(s=20, sk=24, b=1, h=2, heads_kv=1, d=8, q_block=8, kv_block=8)
    selection, _ = random_selection(case)
    q, k, v, dout = random_qkv(case, dtype=torch.float32)
    leaves, seen = [x.requires_grad_() for x in (q, k, v)], []

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            seen.append(func.name().removeprefix("megatron_dsv::sparse_attention_"))
            return func(*args, **(kwargs or {}))

    def results():
        out = api.sparse_attention(*leaves, selection)
        plain = api.forward(q, k, v, selection)
        return (out, *torch.autograd.grad(out, leaves, dout), *plain,
                *api.backward(dout, q, k, v, *plain, selection))

    with Watch():
        watched = results()
    assert [name for name in seen if name in ("forward", "backward")] == ["forward", "forward", "backward", "backward"]
    for name in ("sparse_attention_forward", "sparse_attention_backward"):
        monkeypatch.setattr(op, name, pytest.fail)
    assert all(torch.equal(mine, exact) for mine, exact in zip(results(), watched))


def test_compiles_into_one_graph_with_the_same_gradients():
    case = AttentionCase(s=20, sk=24, b=1, h=2, heads_kv=1, d=8, q_block=8, kv_block=8)
    selection, _ = random_selection(case)
    q, k, v, dout = random_qkv(case, dtype=torch.float32)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    eager = api.sparse_attention(*leaves, selection)
    compiled = torch.compile(lambda *x: api.sparse_attention(*x, selection), fullgraph=True, backend="aot_eager")(
        *leaves)
    assert torch.equal(compiled, eager)
    for mine, exact in zip(torch.autograd.grad(compiled, leaves, dout), torch.autograd.grad(eager, leaves, dout)):
        assert torch.equal(mine, exact)


def test_misuse_says_what_is_allowed():
    case = AttentionCase(s=32, sk=32, b=1, h=2, heads_kv=2, d=16, q_block=16, kv_block=16)
    selection, _ = random_selection(case)
    q, k, v, _ = random_qkv(case, dtype=torch.float32)
    with pytest.raises(ValueError, match="must be one of auto, reference, triton, flash4, cudnn, got 'cuda'"):
        api.sparse_attention(q, k, v, selection, backend="cuda")
    with pytest.raises(ValueError, match="for the 31 queries and 32 keys passed, got num_queries=32, num_keys=32"):
        api.sparse_attention(q[:31], k, v, selection)
    with pytest.raises(ValueError, match=r"kv_length must be \[b, G\] = \(1, 2\), got \(1, 1\)"):
        api.sparse_attention(q, k, v, replace(selection, kv_length=selection.kv_length[:, :1]))
    with pytest.raises(ValueError, match=r"row_start must be \[b, h, Nq\] = \(1, 2, 2\)"):
        api.sparse_attention(q, k, v, replace(selection, row_count=selection.row_count[..., :1],
                                              row_start=selection.row_start[..., :1]))
    for name in ("kv_indices", "row_start", "row_count", "kv_length"):
        with pytest.raises(ValueError, match="selection must lie on the device of q, cpu, got meta"):
            api.sparse_attention(q, k, v, replace(selection, **{name: getattr(selection, name).to("meta")}))
    with pytest.raises(NotImplementedError, match=r"backend='triton' of sparse_attention needs CUDA tensors .*use ba"):
        api.sparse_attention(q, k, v, selection, backend="triton")


def test_auto_logs_once_what_it_took(caplog):
    case = AttentionCase(s=32, sk=32, b=1, h=2, heads_kv=2, d=16, q_block=16, kv_block=16)
    selection, _ = random_selection(case)
    q, k, v, _ = random_qkv(case)
    choice._logged.clear()
    with caplog.at_level("INFO", logger=choice.__name__):
        api.sparse_attention(q, k, v, selection)
        api.sparse_attention(q, k, v, selection)
    assert [r.message for r in caplog.records] == [
        "sparse_attention: backend='auto' took 'reference' for the forward because the tensors lie on a cpu device"]
