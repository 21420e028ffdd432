"""The predictor loss against an explicit score matrix and torch autograd."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from megatron_dsv.kernels.predictor_loss.api import row_gradients
from megatron_dsv.sparsity.predictor_loss import predictor_loss, predictor_loss_and_grads


def oracle(q_lr, k_lr, q, k, lengths, mask, scale, cosine_weight, norm_weight):
    """One row at a time with torch's own cosine similarity, differentiable."""
    rows, b, h, r = q_lr.shape
    ratio = h // k.shape[2]
    losses = []
    for i in range(b):
        for j in range(h):
            n = int(lengths[i, j // ratio])
            for row in range(rows):
                if mask is not None and not mask[row, i]:
                    continue
                a = k_lr[:n, i, j // ratio] @ q_lr[row, i, j] / r**0.5
                t = k[:n, i, j // ratio] @ q[row, i, j] * scale
                a, t = a - a.mean(), t - t.mean()
                if n == 1:
                    continue
                cosine = torch.nn.functional.cosine_similarity(a, t, dim=0)
                losses.append(cosine_weight * (1 - cosine) + norm_weight * (1 - a.norm() / t.norm()).abs())
    return torch.stack(losses).mean() if losses else (q_lr * 0).sum() + (k_lr * 0).sum()


def rounding(q_lr, k_lr, q, k, lengths):
    """(of the loss, of the gradients): fp64 sums of squares lose the square of a row's mean over its variation."""
    worst, steepest, ratio = 1.0, 0.0, q.shape[2] // k.shape[2]
    for i in range(q.shape[1]):
        for j in range(q.shape[2]):
            n = int(lengths[i, j // ratio])
            scores = [keys[:n, i, j // ratio] @ rows[:, i, j].T for keys, rows in ((k_lr, q_lr), (k, q))]
            for x, steep in zip(scores, (True, False), strict=True):
                variation = (x - x.mean(0)).norm(dim=0)
                if n > 1:
                    worst = max(worst, float((x.norm(dim=0) / variation).max()) ** 2)
                    steepest = max(steepest, float(1 / variation.min()) if steep else 0.0)
    lost = 16 * torch.finfo(torch.float64).eps * worst
    return lost, lost * steepest * float(max(q_lr.abs().max(), k_lr.abs().max()))


def make(seed, rows, s, b, h, g_kv, d=6, r=4, dtype=torch.float64):
    rng = torch.Generator().manual_seed(seed)
    shapes = (rows, b, h, r), (s, b, g_kv, r), (rows, b, h, d), (s, b, g_kv, d)
    return [torch.randn(shape, generator=rng, dtype=torch.float64).to(dtype) for shape in shapes]


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 2**31), rows=st.integers(1, 5), s=st.integers(1, 17), b=st.integers(1, 2),
       heads=st.sampled_from([(1, 1), (4, 2), (2, 2)]), ragged=st.booleans(), masked=st.booleans(),
       weights=st.sampled_from([(0.95, 0.05), (1.0, 0.0), (0.3, 2.0)]), tile=st.sampled_from([1, 40, 2**24]))
def test_value_and_gradients_are_those_of_autograd(seed, rows, s, b, heads, ragged, masked, weights, tile):
    (h, g_kv), rng = heads, torch.Generator().manual_seed(seed + 1)
    q_lr, k_lr, q, k = make(seed, rows, s, b, h, g_kv)
    lengths = torch.randint(1, s + 1, (b, g_kv), generator=rng) if ragged else torch.full((b, g_kv), s)
    mask = torch.rand(rows, b, generator=rng) < 0.7 if masked else None
    leaves = [q_lr.clone().requires_grad_(), k_lr.clone().requires_grad_()]
    expected = oracle(*leaves, q, k, lengths, mask, 0.4, *weights)
    expected_grads = torch.autograd.grad(expected, leaves)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron_dsv.kernels.predictor_loss.reference._TILE_ELEMENTS", tile)
        loss, *grads = predictor_loss_and_grads(q_lr, k_lr, q, k, softmax_scale=0.4, kv_length=lengths,
                                                row_mask=mask, cosine_weight=weights[0], norm_weight=weights[1])
    lost, lost_of_gradients = rounding(q_lr, k_lr, q, k, lengths)
    assert torch.allclose(loss, expected, rtol=1e-10 + lost, atol=1e-12 + lost)
    for got, want in zip(grads, expected_grads, strict=True):
        assert torch.allclose(got, want, rtol=1e-8 + lost, atol=1e-11 + lost_of_gradients)


def test_gradcheck_in_fp64():
    q_lr, k_lr, q, k = make(0, 2, 5, 1, 2, 1, d=3, r=2)
    q_lr.requires_grad_()
    k_lr.requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, y: predictor_loss(x, y, q, k, softmax_scale=0.4, kv_length=4), (q_lr, k_lr))


def test_autograd_form_scales_with_the_incoming_gradient_and_spares_the_teacher():
    leaves = [x.requires_grad_() for x in make(1, 4, 9, 1, 2, 2, dtype=torch.float32)]
    loss, grad_q, grad_k = predictor_loss_and_grads(*leaves, softmax_scale=0.4)
    (3 * predictor_loss(*leaves, softmax_scale=0.4)).backward()
    assert torch.allclose(leaves[0].grad, 3 * grad_q)
    assert torch.allclose(leaves[1].grad, 3 * grad_k)
    assert leaves[2].grad is None
    assert leaves[3].grad is None
    assert loss.dtype == torch.float32


def test_a_student_equal_to_the_teacher_up_to_a_shift_has_no_loss():
    """Shifting every key of the student by one vector adds a constant to a row: no ranking changes, nor the loss."""
    q_lr, k_lr, _, _ = make(2, 4, 9, 1, 2, 2)
    teacher = (q_lr * 2, k_lr / 2)
    loss, grad_q, grad_k = predictor_loss_and_grads(q_lr, k_lr + 5.0, *teacher, softmax_scale=0.5, norm_weight=0.0)
    assert loss == pytest.approx(0.0, abs=1e-12)
    assert grad_q.abs().max() < 1e-12
    assert grad_k.abs().max() < 1e-12
    scaled, *_ = predictor_loss_and_grads(3 * q_lr, k_lr, *teacher, softmax_scale=0.5, cosine_weight=0.9,
                                          norm_weight=0.1)
    assert scaled == pytest.approx(0.1 * 2)


def test_gradient_descent_learns_the_ranking():
    """A rank-4 student recovers the top keys of a rank-4 teacher it never sees directly."""
    q_lr, k_lr, _, _ = make(3, 32, 24, 1, 1, 1)
    teacher = make(4, 32, 24, 1, 1, 1)[:2]
    true_top = torch.einsum("qbhr,kbgr->qk", *teacher).topk(6).indices

    def overlap():
        top = torch.einsum("qbhr,kbgr->qk", q_lr.detach(), k_lr.detach()).topk(6).indices
        return (top[:, :, None] == true_top[:, None]).any(-1).double().mean()

    before = overlap()
    optimizer = torch.optim.Adam([q_lr.requires_grad_(), k_lr.requires_grad_()], lr=0.1)
    for _ in range(80):
        optimizer.zero_grad()
        predictor_loss(q_lr, k_lr, *teacher, softmax_scale=0.5).backward()
        optimizer.step()
    assert before < 0.5
    assert overlap() > 0.95


def test_padding_changes_nothing_even_if_it_is_nan():
    q_lr, k_lr, q, k = make(5, 6, 10, 1, 2, 1)
    clean = predictor_loss_and_grads(q_lr[:4], k_lr[:7], q[:4], k[:7], softmax_scale=0.4)
    for x, start in ((q_lr, 4), (q, 4), (k_lr, 7), (k, 7)):
        x[start:] = torch.nan
    mask = torch.tensor([True] * 4 + [False] * 2)[:, None]
    loss, grad_q, grad_k = predictor_loss_and_grads(q_lr, k_lr, q, k, softmax_scale=0.4, kv_length=7, row_mask=mask)
    assert torch.allclose(loss, clean[0])
    assert torch.allclose(grad_q[:4], clean[1])
    assert torch.allclose(grad_k[:7], clean[2])
    assert not grad_q[4:].any()
    assert not grad_k[7:].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rows_without_variation_give_finite_gradients(dtype):
    q_lr, k_lr, q, k = make(6, 3, 8, 1, 1, 1, dtype=dtype)
    q_lr[0], q[1] = 0.0, 0.0
    loss, grad_q, grad_k = predictor_loss_and_grads(q_lr, k_lr, q, k, softmax_scale=0.4)
    alone, alone_q, _ = predictor_loss_and_grads(q_lr[2:], k_lr, q[2:], k, softmax_scale=0.4)
    assert grad_q.isfinite().all()
    assert grad_k.isfinite().all()
    assert not grad_q[:2].any()
    assert torch.allclose(loss, (alone + 1.0) / 2)
    assert torch.allclose(grad_q[2:], alone_q / 2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_noise_of_equal_scores_is_no_ranking(dtype):
    q_lr, k_lr, q, k = make(6, 20, 11, 1, 1, 1, dtype=dtype)
    scores = (q[:, 0, 0] @ torch.full((6, 11), 3.3, dtype=dtype))
    assert (scores - scores.mean(-1, keepdim=True)).any(), "the case must round"
    loss, grad_q, grad_k = predictor_loss_and_grads(q_lr, k_lr, q, torch.full_like(k, 3.3), softmax_scale=1.0)
    assert loss == 0
    assert not grad_q.any()
    assert not grad_k.any()


def test_nan_is_not_hidden():
    q_lr, k_lr, q, k = make(7, 3, 8, 1, 2, 2)
    k_lr[2, 0, 1, 0] = torch.nan
    loss, grad_q, grad_k = predictor_loss_and_grads(q_lr, k_lr, q, k, softmax_scale=0.4)
    assert loss.isnan()
    assert grad_q[:, :, 1].isnan().any()
    assert grad_k[:, :, 1].isnan().any()


def test_bf16_inputs_are_computed_in_fp32_and_return_their_dtype():
    values = make(8, 5, 12, 1, 2, 2, dtype=torch.bfloat16)
    loss, grad_q, grad_k = predictor_loss_and_grads(*values, softmax_scale=0.4)
    exact = predictor_loss_and_grads(*(x.double() for x in values), softmax_scale=0.4)
    assert loss.dtype == torch.float32
    assert loss == pytest.approx(float(exact[0]), rel=1e-5)
    assert grad_q.dtype == grad_k.dtype == torch.bfloat16
    assert torch.allclose(grad_q.double(), exact[1], rtol=2**-8, atol=1e-6)
    assert torch.allclose(grad_k.double(), exact[2], rtol=2**-8, atol=1e-6)


def test_keys_split_over_ranks_give_the_same_loss_and_gradients():
    q_lr, k_lr, q, k = make(10, 6, 23, 2, 4, 2)
    k_lr += 4.0
    lengths, mask = torch.tensor([[23, 11], [16, 20]]), torch.tensor([[True, False]] + [[True, True]] * 5)
    options = {"softmax_scale": 0.4, "row_mask": mask}
    whole = predictor_loss_and_grads(q_lr, k_lr, q, k, kv_length=lengths, **options)
    bounds = ((0, 9), (9, 14), (14, 23))
    parts = [(slice(first, last), (lengths - first).clamp(0, last - first)) for first, last in bounds]
    sums = []
    for part, length in parts:
        predictor_loss_and_grads(q_lr, k_lr[part], q, k[part], kv_length=length, **options,
                                 reduce_rows=lambda mine: (sums.append(mine), mine)[1])
    shares = [predictor_loss_and_grads(q_lr, k_lr[part], q, k[part], kv_length=length, **options,
                                       reduce_rows=lambda _: sum(sums)) for part, length in parts]
    assert all(torch.allclose(loss, whole[0], rtol=1e-12) for loss, _, _ in shares)
    assert torch.allclose(sum(dq for _, dq, _ in shares), whole[1], rtol=1e-9, atol=1e-14)
    assert torch.allclose(torch.cat([dk for _, _, dk in shares]), whole[2], rtol=1e-9, atol=1e-14)


def test_a_backend_that_cannot_serve_is_named():
    with pytest.raises(ValueError, match="predictor_loss must be one of auto, reference, triton, got 'cuda'"):
        predictor_loss(*make(9, 3, 9, 1, 2, 2), softmax_scale=0.4, backend="cuda")
    with pytest.raises(NotImplementedError, match=r"needs CUDA tensors .*, got cpu; use backend='reference'"):
        predictor_loss(*make(9, 3, 9, 1, 2, 2), softmax_scale=0.4, backend="triton")


@pytest.mark.parametrize(("index", "shape", "message"), [
    (0, (4, 1, 2, 4), r"q_lr_rows and q_rows must be"),
    (1, (8, 1, 2, 4), r"k_lr and k must be"),
    (1, (9, 1, 2, 3), r"must agree in b, d and r"),
    (2, (3, 1, 2, 5), r"must agree in b, d and r"),
])
def test_misuse_is_named(index, shape, message):
    values = make(9, 3, 9, 1, 2, 2)
    values[index] = torch.zeros(shape)
    with pytest.raises(ValueError, match=message):
        predictor_loss(*values, softmax_scale=0.4)
    with pytest.raises(ValueError, match=r"coefficients must be \[4, b, h, R\] = \[4, 1, 2, 3\], got \[4, 1, 2, 9\]"):
        row_gradients(*make(9, 3, 9, 1, 2, 2), torch.full((1, 2), 9, dtype=torch.int32), torch.zeros(4, 1, 2, 9))
    with pytest.raises(ValueError, match=r"row_mask must be bool \[3, 1\]"):
        predictor_loss(*make(9, 3, 9, 1, 2, 2), softmax_scale=0.4, row_mask=torch.ones(3, 1))
