"""Dense attention against a naive fp64 softmax under autograd."""

import pytest
import torch

from megatron_dsv.kernels import eager_attention
from megatron_dsv.kernels.dense_attention import api
from megatron_dsv.testing.attention_oracle import AttentionCase, oracle, random_qkv

BACKENDS = ("reference", "sdpa")
CASES = [
    AttentionCase(s=19, sk=19, b=1, h=2, heads_kv=2, d=16, q_block=1, kv_block=1),
    AttentionCase(s=11, sk=37, b=2, h=4, heads_kv=2, d=96, q_block=1, kv_block=1),
    AttentionCase(s=40, sk=9, b=3, h=3, heads_kv=1, d=32, q_block=1, kv_block=1),
]


def _lengths(kind, case):
    if kind == "none":
        return None, [case.sk] * case.b
    if kind == "int":
        return case.sk - 3, [case.sk - 3] * case.b
    lengths = {"uniform": [case.sk - 2] * case.b, "ragged": [case.sk - i for i in range(case.b)],
               "some_empty": [0 if i == 0 else case.sk - i for i in range(case.b)]}[kind]
    return torch.tensor(lengths, dtype=torch.int32), lengths


def _exact(case, inputs, lengths):
    q, k, v, dout = inputs
    mask = torch.arange(case.sk)[None, :] < torch.tensor(lengths)[:, None]
    leaves = [x.double().detach().requires_grad_() for x in (q, k, v)]
    out, lse = oracle(*leaves, mask[:, None, None, :].expand(case.b, case.h, case.s, case.sk), case.d ** -0.5)
    return out.detach(), lse.detach(), torch.autograd.grad(out, leaves, dout.double())


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["none", "int", "uniform", "ragged", "some_empty"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_output_and_gradients_match_the_oracle_and_ignore_padding(case, kind, backend):
    q, k, v, dout = random_qkv(case)
    kv_length, lengths = _lengths(kind, case)
    out, _, grads = _exact(case, (q, k, v, dout), lengths)
    for item, length in enumerate(lengths):
        k[length:, item] = torch.nan
        v[length:, item] = torch.nan
    leaves = [x.requires_grad_() for x in (q, k, v)]
    got = api.dense_attention(*leaves, kv_length=kv_length, backend=backend)
    torch.testing.assert_close(got, out, rtol=1e-12, atol=1e-12)
    for name, mine, exact in zip("qkv", torch.autograd.grad(got, leaves, dout), grads):
        torch.testing.assert_close(mine, exact, rtol=1e-11, atol=1e-11, msg=lambda m, name=name: f"d{name}: {m}")


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", ["none", "int", "ragged"])
def test_plain_pair_matches_the_oracle(kind, backend):
    case = CASES[1]
    q, k, v, dout = random_qkv(case)
    kv_length, lengths = _lengths(kind, case)
    exact_out, exact_lse, exact_grads = _exact(case, (q, k, v, dout), lengths)
    out, lse = api.forward(q, k, v, kv_length=kv_length, backend=backend)
    torch.testing.assert_close(out, exact_out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(lse, exact_lse, rtol=1e-12, atol=1e-12)
    grads = api.backward(dout, q, k, v, out, lse, kv_length=kv_length, backend=backend)
    for mine, exact in zip(grads, exact_grads):
        torch.testing.assert_close(mine, exact, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("backend", BACKENDS)
def test_backward_of_merged_parts_is_the_backward_of_the_whole(backend):
    case = CASES[1]
    q, k, v, dout = random_qkv(case)
    out, lse, exact_grads = _exact(case, (q, k, v, dout), [case.sk] * case.b)
    cut = 15
    parts = [(k[:cut], v[:cut]), (k[cut:], v[cut:])]
    partial = [api.forward(q, *kv, backend=backend) for kv in parts]
    merged_lse = torch.logaddexp(partial[0][1], partial[1][1])
    merged = sum(o * torch.exp(part_lse - merged_lse).permute(2, 0, 1)[..., None] for o, part_lse in partial)
    torch.testing.assert_close(merged, out, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(merged_lse, lse, rtol=1e-12, atol=1e-12)
    grads = [api.backward(dout, q, *kv, merged, merged_lse, backend=backend) for kv in parts]
    torch.testing.assert_close(grads[0][0] + grads[1][0], exact_grads[0], rtol=1e-11, atol=1e-11)
    for i in (1, 2):
        torch.testing.assert_close(torch.cat([g[i] for g in grads]), exact_grads[i], rtol=1e-11, atol=1e-11)


def test_no_valid_key_gives_zero_minus_infinity_and_zero_gradients():
    q, k, v, dout = random_qkv(CASES[0])
    out, lse = api.forward(q, k, v, kv_length=0, backend="reference")
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.isneginf(lse).all()
    for backend in BACKENDS:
        leaves = [x.detach().requires_grad_() for x in (q, k, v)]
        got = api.dense_attention(*leaves, kv_length=0, backend=backend)
        assert torch.equal(got, torch.zeros_like(got))
        for grad in torch.autograd.grad(got, leaves, dout):
            assert torch.equal(grad, torch.zeros_like(grad))


def test_reference_gradients_pass_gradcheck():
    case = AttentionCase(s=3, sk=4, b=1, h=2, heads_kv=1, d=2, q_block=1, kv_block=1)
    q, k, v, _ = random_qkv(case)
    assert torch.autograd.gradcheck(
        lambda *x: api.dense_attention(*x, kv_length=3, softmax_scale=0.7, backend="reference"),
        [x.requires_grad_() for x in (q, k, v)])


def test_a_second_derivative_is_refused_rather_than_wrong():
    q = torch.randn(3, 1, 1, 2, dtype=torch.float64, requires_grad=True)
    out = api.dense_attention(q, q, q, backend="reference")
    grad, = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()


def test_an_empty_batch_and_no_queries_end_in_nothing_or_in_a_way_out():
    q, k, v, _ = random_qkv(CASES[0], dtype=torch.float32)
    nothing = torch.zeros(0, dtype=torch.int32)
    assert api.dense_attention(q[:, :0], k[:, :0], v[:, :0], kv_length=nothing).shape == (19, 0, 2, 16)
    assert api.forward(q[:0], k, v, backend="reference")[0].shape == (0, 1, 2, 16)
    with pytest.raises(NotImplementedError, match=r"at least one query, got q .*; use backend='reference'"):
        api.forward(q[:0], k, v, backend="sdpa")


def test_chunks_do_not_change_the_result(monkeypatch):
    case = CASES[1]
    q, k, v, dout = random_qkv(case)
    out, lse = api.forward(q, k, v, backend="reference")
    grads = api.backward(dout, q, k, v, out, lse, backend="reference")
    monkeypatch.setattr(eager_attention, "_CHUNK_SCORES", 1)
    small_out, small_lse = api.forward(q, k, v, backend="reference")
    small = api.backward(dout, q, k, v, out, lse, backend="reference")
    for mine, exact in zip((small_out, small_lse, *small), (out, lse, *grads)):
        torch.testing.assert_close(mine, exact, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("kwargs", "error", "message"), [
    ({"backend": "flash9"}, ValueError, "must be one of auto, reference, sdpa, flash4, got 'flash9'"),
    ({"kv_length": 99}, ValueError, r"kv_length must lie in \[0, 19\] for 19 keys, got 99"),
    ({"kv_length": torch.tensor([20], dtype=torch.int32)}, ValueError, r"kv_length must lie in \[0, 19\].*got \[20\]"),
    ({"kv_length": torch.tensor([1, 2])}, ValueError, r"kv_length must be an int32 tensor of shape \(1,\)"),
    ({"kv_length": 3.0}, ValueError, r"kv_length must be None, an int or an int32 tensor \[b\], got float"),
    ({"softmax_scale": float("inf")}, ValueError, "softmax_scale must be positive and finite, got inf"),
    ({"softmax_scale": 0.0}, ValueError, "softmax_scale must be positive and finite, got 0.0"),
])
def test_misuse_says_what_is_allowed(kwargs, error, message):
    q, k, v, _ = random_qkv(CASES[0])
    with pytest.raises(error, match=message):
        api.dense_attention(q, k, v, **kwargs)


def test_layout_errors_name_the_argument():
    q, k, v, _ = random_qkv(CASES[0])
    with pytest.raises(ValueError, match="v must have a last stride of 1"):
        api.dense_attention(q, k, v.transpose(0, 3).contiguous().transpose(0, 3))
    out, lse = api.forward(q, k, v)
    spread = out[..., :1].expand_as(q)
    for name, dout, given in (("dout", spread, out), ("out", q, spread)):
        with pytest.raises(ValueError, match=rf"{name} must have a last stride of 1, .*; pass {name}.contiguous\(\)"):
            api.backward(dout, q, k, v, given, lse)
    with pytest.raises(ValueError, match="lse must lie on the device of q, cpu, got meta"):
        api.backward(q, q, k, v, out, lse.to("meta"))
    with pytest.raises(ValueError, match="query heads must be a multiple of key/value heads, got 3 and 2"):
        api.dense_attention(q[:, :, [0, 1, 1]], k, v)
    with pytest.raises(NotImplementedError, match="use backend='reference'"):
        api.forward(q, k, v, kv_length=0, backend="sdpa")
