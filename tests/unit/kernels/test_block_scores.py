"""Pooled queries and block scores against token-by-token loops in fp64."""

import pytest
import torch

from megatron_dsv.kernels.block_scores import reference
from megatron_dsv.kernels.block_scores.api import block_scores, chunked_block_scores, pool_queries


def _naive_pool(q, group, proxies, lengths):
    s, b, h, r = q.shape
    chunk = group // proxies
    out = torch.zeros(-(-s // group) * proxies, b, h, r, dtype=q.dtype)
    for row in range(out.shape[0]):
        for item in range(b):
            tokens = range(row * chunk, min((row + 1) * chunk, lengths[item], s))
            if len(tokens):
                out[row, item] = q[tokens.start:tokens.stop, item].mean(0)
    return out


@pytest.mark.parametrize(("s", "group", "proxies"), [(64, 16, 1), (70, 16, 4), (33, 32, 8), (10, 64, 2)])
def test_pooling_is_the_mean_of_valid_tokens(s, group, proxies):
    q = torch.randn(s, 2, 3, 4, dtype=torch.float64)
    lengths = [s, s - 7]
    expected = _naive_pool(q, group, proxies, lengths)
    q[lengths[1]:, 1] = torch.nan
    got = pool_queries(q, q_block_size=group, proxies=proxies,
                       query_length=torch.tensor(lengths, dtype=torch.int32))
    torch.testing.assert_close(got, expected, rtol=1e-13, atol=1e-13)
    whole = pool_queries(q[:, :1], q_block_size=group, proxies=proxies)
    torch.testing.assert_close(whole, expected[:, :1], rtol=1e-13, atol=1e-13)


def _naive_scores(q, k, lengths, block, proxies, reduction, scale):
    rows, b, h, _ = q.shape
    sk, _, heads_kv, _ = k.shape
    out = torch.zeros(b, h, rows // proxies, -(-sk // block), dtype=torch.float64)
    for item, head, group in torch.cartesian_prod(torch.arange(b), torch.arange(h), torch.arange(rows // proxies)):
        kv_head = head // (h // heads_kv)
        n = int(lengths[item, kv_head])
        queries, keys = q[group * proxies:(group + 1) * proxies, item, head], k[:n, item, kv_head]
        logits = queries.double() @ keys.double().t() * scale
        for j in range(out.shape[-1]):
            part = slice(j * block, min((j + 1) * block, n))
            if reduction == "mass":
                value = torch.softmax(logits, -1)[:, part].sum() if part.start < n else 0.0
            elif part.start >= n:
                value = -torch.inf
            elif reduction == "lse":
                value = torch.log(torch.exp(logits[:, part]).sum())
            else:
                value = logits[:, part].max()
            out[item, head, group, j] = value
    return out


@pytest.mark.parametrize("reduction", ["mass", "lse", "max"])
@pytest.mark.parametrize(("block", "proxies", "heads_kv"), [(8, 1, 2), (16, 4, 1), (1, 2, 2), (7, 2, 1)])
def test_scores_match_the_formula_and_ignore_padding(block, proxies, heads_kv, reduction, monkeypatch):
    sk, b, h, r = 41, 2, 2, 4
    q = torch.randn(3 * proxies, b, h, r)
    k = torch.randn(sk, b, heads_kv, r)
    lengths = torch.randint(1, sk, (b, heads_kv), dtype=torch.int32)
    lengths[0, 0] = sk - 16
    expected = _naive_scores(q, k, lengths, block, proxies, reduction, r ** -0.5)
    for item in range(b):
        for head in range(heads_kv):
            k[lengths[item, head]:, item, head] = torch.nan
    for limit in (reference._TEMPORARY_BYTES, 1):
        monkeypatch.setattr(reference, "_TEMPORARY_BYTES", limit)
        got = block_scores(q, k, kv_block_size=block, proxies=proxies, reduction=reduction, kv_length=lengths)
        assert got.dtype == torch.float32
        torch.testing.assert_close(got, expected.float(), rtol=2e-5, atol=2e-6)
    if reduction == "mass":
        torch.testing.assert_close(got.sum(-1), torch.full((b, h, 3), float(proxies)))


def test_eager_chunks_are_parts_of_the_scores(monkeypatch):
    q, k = torch.randn(5 * 2, 2, 4, 8), torch.randn(30, 2, 2, 8)
    options = {"kv_block_size": 4, "proxies": 2, "kv_length": torch.tensor([30, 17]), "backend": "reference"}
    whole = block_scores(q, k, **options)
    # Two groups' logits, exponentials and copies.
    monkeypatch.setattr(reference, "_TEMPORARY_BYTES", 2 * 3 * 4 * 2 * 4 * 2 * 30)
    scores = chunked_block_scores(q, k, **options)
    assert [(part.first_pair, part.first_group, tuple(part.scores.shape)) for part in scores] == [
        (0, 0, (8, 2, 8)), (0, 2, (8, 2, 8)), (0, 4, (8, 1, 8))]
    torch.testing.assert_close(scores.whole(), whole, rtol=1e-6, atol=1e-7)


def test_no_valid_key_scores_nothing():
    q, k = torch.randn(2, 1, 1, 4), torch.full((8, 1, 1, 4), torch.nan)
    assert torch.equal(block_scores(q, k, kv_block_size=4, kv_length=0), torch.zeros(1, 1, 2, 2))
    assert torch.isneginf(block_scores(q, k, kv_block_size=4, kv_length=0, reduction="lse")).all()


def test_low_precision_inputs_keep_fp32_scores():
    q, k = torch.randn(4, 1, 2, 16).bfloat16(), torch.randn(64, 1, 2, 16).bfloat16()
    exact = block_scores(q.float(), k.float(), kv_block_size=16, reduction="max")
    assert torch.equal(block_scores(q, k, kv_block_size=16, reduction="max"), exact)


def test_mass_is_differentiable():
    q, k = torch.randn(2, 1, 1, 3, dtype=torch.float64), torch.randn(5, 1, 1, 3, dtype=torch.float64)
    weights = torch.randn(1, 1, 1, 2, dtype=torch.float64)

    def loss(q, k):
        return (block_scores(q, k, kv_block_size=3, proxies=2, kv_length=4) * weights).sum()

    def naive(q, k):
        probs = torch.softmax(q[:, 0, 0] @ k[:4, 0, 0].t() * 3 ** -0.5, -1).sum(0)
        return probs[:3].sum() * weights[..., 0].sum() + probs[3] * weights[..., 1].sum()

    leaves = [q.requires_grad_(), k.requires_grad_()]
    for mine, exact in zip(torch.autograd.grad(loss(*leaves), leaves), torch.autograd.grad(naive(*leaves), leaves)):
        torch.testing.assert_close(mine, exact, rtol=1e-6, atol=1e-7)


def test_nothing_to_pool_or_to_score():
    q, k = torch.randn(4, 1, 2, 8), torch.randn(16, 1, 2, 8)
    assert pool_queries(q[:0], q_block_size=16).shape == (0, 1, 2, 8)
    assert block_scores(q[:, :0], k[:, :0], kv_block_size=4).shape == (0, 2, 4, 4)
    assert block_scores(q, k[:0], kv_block_size=4).shape == (1, 2, 4, 0)


def test_misuse_says_what_is_allowed():
    q, k = torch.randn(4, 1, 2, 8), torch.randn(16, 1, 2, 8)
    with pytest.raises(ValueError, match="reduction must be one of mass, lse, max, got 'sum'"):
        block_scores(q, k, kv_block_size=4, reduction="sum")
    with pytest.raises(ValueError, match="backend of block_scores must be one of auto, reference, triton, got 'cuda'"):
        block_scores(q, k, kv_block_size=4, backend="cuda")
    with pytest.raises(NotImplementedError, match=r"needs CUDA tensors .*, got cpu; use backend='reference'"):
        block_scores(q, k, kv_block_size=4, backend="triton")
    with pytest.raises(ValueError, match="multiple of proxies=3 rows, got 4"):
        block_scores(q, k, kv_block_size=4, proxies=3)
    with pytest.raises(ValueError, match=r"kv_length must be an integer tensor of shape \(1,\) or \(1, 2\)"):
        block_scores(q, k, kv_block_size=4, kv_length=torch.ones(3, dtype=torch.int32))
    with pytest.raises(ValueError, match="proxies must divide q_block_size, got proxies=3, q_block_size=16"):
        pool_queries(q, q_block_size=16, proxies=3)
    with pytest.raises(ValueError, match=r"query_length must lie in \[0, 4\], got 9"):
        pool_queries(q, q_block_size=4, query_length=9)
