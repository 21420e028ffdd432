"""Cases of the Triton predictor loss for the CPU interpreter; test_predictor_loss_triton.py runs them apart.

TRITON_INTERPRET must be set before triton is imported. bf16 is absent: the dot of the interpreter is wrong there.
"""

import pytest
import torch

from megatron_dsv.kernels.predictor_loss.triton import launch
from megatron_dsv.sparsity.predictor_loss import predictor_loss, predictor_loss_and_grads


@pytest.fixture(autouse=True)
def _unwritten_output_is_nan():
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _inputs(rows, s, b, h, g_kv, d, r, dtype, key_mean=0.0):
    shapes = (rows, b, h, r), (s, b, g_kv, r), (rows, b, h, d), (s, b, g_kv, d)
    tensors = [torch.randn(shape) for shape in shapes]
    tensors[1] += key_mean
    tensors[3] += key_mean
    return [x.to(dtype) for x in tensors]


def _check(tensors, *, lengths=None, row_mask=None, rtol=2e-5, **options):
    """Against fp64; padding, rows and keys alike, is NaN for the kernels and arbitrary for the reference."""
    q_lr, k_lr, q, k = tensors
    options |= {"softmax_scale": 0.3, "kv_length": lengths, "row_mask": row_mask}
    exact = predictor_loss_and_grads(*(x.double() for x in tensors), **options)
    if lengths is not None:
        for item in range(k.shape[1]):
            for head in range(k.shape[2]):
                for x in (k, k_lr):
                    x[int(lengths[item, head]):, item, head] = torch.nan
    if row_mask is not None:
        for x in (q, q_lr):
            x[~row_mask] = torch.nan
    got = predictor_loss_and_grads(*tensors, **options, backend="triton")
    assert exact[1].any()
    assert exact[2].any()
    # fp16 gradients below its smallest normal number are rounded to multiples of 2^-24.
    rounding = {"rtol": 2**-10, "atol": 2**-24} if k_lr.dtype == torch.float16 else {"rtol": rtol, "atol": 0}
    torch.testing.assert_close(got[0].double(), exact[0], rtol=rtol, atol=0)
    for mine, right in zip(got[1:], exact[1:], strict=True):
        scale = float(right.abs().max())
        torch.testing.assert_close(mine.double(), right, rtol=rounding["rtol"],
                                   atol=rtol * scale + rounding["atol"])


@pytest.mark.parametrize(("shape", "dtype"), [
    ((70, 140, 1, 1, 1, 16, 16), torch.float16), ((9, 140, 2, 6, 2, 24, 4), torch.float16),
    ((1, 33, 1, 1, 1, 7, 20), torch.float32), ((15, 40, 1, 4, 1, 8, 3), torch.float32)])
def test_loss_and_gradients_match_fp64(shape, dtype):
    _check(_inputs(*shape, dtype))


def test_padding_and_masked_rows_are_not_read():
    _check(_inputs(21, 150, 2, 4, 2, 16, 8, torch.float16), lengths=torch.tensor([[150, 129], [0, 64]]).int(),
           row_mask=torch.arange(42).reshape(21, 2) % 5 != 2)


def test_spans_of_keys_add_up_and_may_lie_past_the_length(monkeypatch):
    monkeypatch.setattr(launch, "_SPAN_TOKENS", 64)
    _check(_inputs(10, 90, 1, 2, 2, 8, 8, torch.float32), lengths=torch.tensor([[90, 65]]).int())


def test_a_mean_far_above_the_variation_costs_no_more_than_its_own_rounding():
    _check(_inputs(12, 80, 1, 2, 2, 16, 8, torch.float32, key_mean=30.0), rtol=3e-4)


def test_weights_and_strided_inputs():
    tensors = _inputs(10, 90, 2, 2, 1, 8, 4, torch.float32)
    strided = [x.transpose(0, 1).contiguous().transpose(0, 1) for x in tensors]
    strided[1] = torch.stack((strided[1], strided[1]), -1)[..., 0]
    _check(strided, cosine_weight=0.0, norm_weight=1.5)


def test_keys_split_over_ranks_give_the_same_loss_and_gradients():
    q_lr, k_lr, q, k = _inputs(10, 60, 1, 2, 1, 8, 8, torch.float32)
    options = {"softmax_scale": 0.3, "backend": "triton"}
    whole = predictor_loss_and_grads(q_lr, k_lr, q, k, **options)
    sums = []
    parts = (slice(0, 25), slice(25, 60))
    for part in parts:
        predictor_loss_and_grads(q_lr, k_lr[part], q, k[part], **options,
                                 reduce_rows=lambda mine: (sums.append(mine), mine)[1])
    shares = [predictor_loss_and_grads(q_lr, k_lr[part], q, k[part], **options, reduce_rows=lambda _: sum(sums))
              for part in parts]
    for loss, _, _ in shares:
        torch.testing.assert_close(loss, whole[0], rtol=1e-5, atol=0)
    torch.testing.assert_close(shares[0][1] + shares[1][1], whole[1], rtol=1e-4, atol=1e-7)
    torch.testing.assert_close(torch.cat([share[2] for share in shares]), whole[2], rtol=1e-4, atol=1e-7)
    assert whole[1].abs().max() > 1e-4
    assert whole[2].abs().max() > 1e-4


def test_gradients_of_the_loss_are_finite_differences_of_it():
    q_lr, k_lr, q, k = (x.double() for x in _inputs(3, 20, 1, 2, 1, 4, 2, torch.float32))
    got = predictor_loss_and_grads(*(x.float() for x in (q_lr, k_lr, q, k)), softmax_scale=0.3, backend="triton")
    for position, gradient in ((0, got[1]), (1, got[2])):
        for index in ((0, 0, 0, 0), (2, 0, gradient.shape[2] - 1, 1)):
            losses = []
            for step in (1e-4, -1e-4):
                moved = [q_lr.clone(), k_lr.clone()]
                moved[position][index] += step
                losses.append(predictor_loss_and_grads(*moved, q, k, softmax_scale=0.3)[0])
            assert float(gradient[index]) == pytest.approx(float(losses[0] - losses[1]) / 2e-4, rel=1e-3, abs=1e-7)


def test_rows_without_variation_and_nan_behave_as_in_the_reference():
    tensors = _inputs(6, 40, 1, 2, 2, 8, 4, torch.float32)
    tensors[0][0], tensors[2][1] = 0.0, 0.0
    tensors[3][:, 0, 1] = 3.3
    _check(tensors)
    tensors[1][2, 0, 1, 0] = torch.nan
    tensors[3][:, 0, 1] = torch.randn(40, 8)
    got, right = (predictor_loss_and_grads(*tensors, softmax_scale=0.3, backend=backend)
                  for backend in ("triton", "reference"))
    assert got[0].isnan()
    for mine, theirs in zip(got[1:], right[1:], strict=True):
        assert theirs.isnan().any((0, 1, 3)).tolist() == [False, True]
        assert mine.isnan().any((0, 1, 3)).tolist() == [False, True]


def test_nothing_to_learn_from_is_zero():
    for rows, s in ((0, 9), (4, 0)):
        loss, dq, dk = predictor_loss_and_grads(*_inputs(rows, s, 1, 2, 1, 8, 4, torch.float32), softmax_scale=1.0,
                                                backend="triton")
        assert loss == 0
        assert not dq.any()
        assert not dk.any()
        assert dk.shape == (s, 1, 1, 4)


def test_repeats_agree_bitwise_and_autograd_takes_them():
    tensors = _inputs(30, 100, 1, 2, 1, 8, 4, torch.float32)
    leaves = [x.requires_grad_() for x in tensors[:2]]
    first, second = (torch.autograd.grad(predictor_loss(*tensors, softmax_scale=0.3, backend="triton"), leaves)
                     for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_limits_name_the_way_out():
    for dtype in (torch.float64, torch.bfloat16):
        with pytest.raises(NotImplementedError, match=rf"got {dtype}; use backend='reference'"):
            predictor_loss_and_grads(*_inputs(2, 4, 1, 1, 1, 4, 4, dtype), softmax_scale=1.0, backend="triton")
    with pytest.raises(NotImplementedError, match="ranks up to 256, got 300; use backend='reference'"):
        predictor_loss_and_grads(*_inputs(2, 4, 1, 1, 1, 300, 4, torch.float32), softmax_scale=1.0, backend="triton")


@pytest.mark.parametrize(("given", "means"), [(90, 40), (-7, 0)])
def test_a_length_that_no_host_checked_reads_no_key_outside(given, means):
    q_lr, _, q, _ = _inputs(3, 1, 1, 1, 1, 16, 8, torch.float16)
    buffers = [torch.full((128, 1, 1, width), torch.nan, dtype=torch.float16) for width in (8, 16)]
    for buffer in buffers:
        buffer[:40] = torch.randn(40, 1, 1, buffer.shape[3])
    k_lr, k = (buffer[:40] for buffer in buffers)
    results = []
    for number in (given, means):
        length = torch.full((1, 1), number, dtype=torch.int32)
        results.append((launch.row_sums(q_lr, k_lr, q, k, length),
                        *launch.gradients(q_lr, k_lr, q, k, length, torch.ones(4, 1, 1, 3))))
    for got, exact in zip(*results, strict=True):
        assert exact.isfinite().all()
        assert torch.equal(got, exact)
