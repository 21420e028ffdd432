"""The Triton predictor loss and attention profile on a GPU: against fp64, repeatable, and without waiting."""

import logging

import pytest
import torch

from megatron_dsv.kernels import launching
from megatron_dsv.kernels.attention_profile.api import block_mass, smallest_set
from megatron_dsv.sparsity.predictor_loss import predictor_loss_and_grads
from megatron_dsv.testing.profiles import profile_query_groups

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


def _inputs(rows, s, b, h, g_kv, d, r, dtype=torch.bfloat16, key_mean=0.0):
    """A student that knows something of its teacher."""
    torch.manual_seed(0)
    shapes = (rows, b, h, r), (s, b, g_kv, r), (rows, b, h, d), (s, b, g_kv, d)
    q_lr, k_lr, q, k = (torch.randn(shape, device="cuda") for shape in shapes)
    shared = min(r, d)
    q_lr[..., :shared] += 0.7 * q[..., :shared]
    k_lr[..., :shared] += 0.7 * k[..., :shared]
    return [x.to(dtype) for x in (q_lr, k_lr + key_mean, q, k + key_mean)]


def _error(got, right):
    return float((got.double() - right).abs().max() / right.abs().max())


@pytest.mark.parametrize(("shape", "dtype", "key_mean"), [
    ((70, 1300, 1, 2, 2, 128, 16), torch.bfloat16, 0.0), ((37, 700, 2, 6, 2, 96, 16), torch.bfloat16, 0.0),
    ((50, 3000, 1, 2, 1, 128, 16), torch.bfloat16, 8.0), ((50, 900, 1, 2, 1, 256, 64), torch.bfloat16, 0.0),
    ((50, 900, 1, 2, 1, 128, 128), torch.bfloat16, 0.0), ((50, 900, 1, 2, 1, 64, 8), torch.float16, 0.0),
    ((20, 500, 1, 2, 1, 128, 16), torch.float32, 0.0), ((128, 32760, 1, 1, 1, 128, 16), torch.bfloat16, 0.0)])
def test_loss_and_gradients_match_fp64(shape, dtype, key_mean):
    tensors = _inputs(*shape, dtype, key_mean)
    lengths = torch.randint(1, shape[1] + 1, (shape[2], shape[4]), dtype=torch.int32, device="cuda")
    lengths[0, 0] = shape[1]
    mask = torch.rand(shape[0], shape[2], device="cuda") < 0.9
    options = {"softmax_scale": shape[5]**-0.5, "kv_length": lengths, "row_mask": mask}
    # Compiling the reference for each shape would take most of the time.
    with torch.compiler.set_stance("force_eager"):
        exact = predictor_loss_and_grads(*(x.double() for x in tensors), **options)
        eager = predictor_loss_and_grads(*tensors, **options, backend="reference")
    for item in range(shape[2]):
        for head in range(shape[4]):
            for keys in (tensors[1], tensors[3]):
                keys[int(lengths[item, head]):, item, head] = torch.nan
    tensors[0][~mask], tensors[2][~mask] = torch.nan, torch.nan
    got = predictor_loss_and_grads(*tensors, **options, backend="triton")
    for mine, theirs, right, rounding in zip(got, eager, exact, (2**-23, *[torch.finfo(dtype).eps] * 2), strict=True):
        assert _error(mine, right) <= 2 * (_error(theirs, right) + rounding)


def test_repeats_agree_bitwise_nothing_waits_and_auto_takes_the_kernels(caplog):
    tensors = _inputs(128, 5000, 1, 4, 2, 128, 16)
    length = torch.tensor([4700], dtype=torch.int32, device="cuda")
    launching._log_choice.cache_clear()
    with caplog.at_level(logging.INFO, logger=launching.__name__):
        first = predictor_loss_and_grads(*tensors, softmax_scale=0.1, kv_length=length)
    assert [record.args[1] for record in caplog.records] == ["triton"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        second = predictor_loss_and_grads(*tensors, softmax_scale=0.1, kv_length=length)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@pytest.mark.parametrize(("q_block", "kv_block", "s", "d", "dtype"), [
    (64, 64, 4000, 128, torch.bfloat16), (128, 1, 1000, 128, torch.bfloat16), (24, 10, 700, 64, torch.float16),
    (1, 1, 5000, 96, torch.bfloat16), (128, 128, 1000, 256, torch.bfloat16), (16, 64, 300, 64, torch.float32)])
def test_mass_and_smallest_sets_match_fp64(q_block, kv_block, s, d, dtype):
    torch.manual_seed(1)
    q = (torch.randn(4 * q_block, 2, 2, d, device="cuda") * 2).to(dtype)
    k = torch.randn(s, 2, 1, d, device="cuda").to(dtype)
    valid = torch.rand(4 * q_block, 2, device="cuda") < 0.9
    options = {"valid_rows": valid, "kv_length": torch.tensor([[s], [s // 2]], dtype=torch.int32, device="cuda"),
               "q_block_size": q_block, "kv_block_size": kv_block, "softmax_scale": d**-0.5}
    exact = block_mass(q.double(), k.double(), **options)
    q[~valid], k[s // 2:, 1] = torch.nan, torch.nan
    got = block_mass(q, k, **options, backend="triton")
    torch.testing.assert_close(got.double(), exact, rtol=5e-5, atol=1e-7)
    counts = smallest_set(got, 0.9, backend="triton").long()[..., None]
    running = torch.nn.functional.pad(got.double().sort(-1, descending=True).values.cumsum(-1), (1, 0))
    total = running[..., -1]
    assert (running.gather(-1, counts)[..., 0] >= (0.9 - 2**-20) * total).all()
    assert ((running.gather(-1, counts - 1)[..., 0] < (0.9 + 2**-20) * total) | (total == 0)).all()


def test_a_profile_is_that_of_the_reference_and_does_not_wait():
    torch.manual_seed(2)
    q, k = (torch.randn(5000, 1, heads, 128, device="cuda").to(torch.bfloat16) for heads in (4, 2))
    options = {"group_ids": torch.tensor([3, 40, 77], device="cuda"), "q_block_size": 64, "kv_block_size": 64,
               "softmax_scale": 0.09, "theta": 0.9, "budget_mass": 0.95, "sparsity_stride": 16,
               "kv_length": torch.tensor([4900], dtype=torch.int32, device="cuda"), "query_length": 4950}
    exact = profile_query_groups(q.double(), k.double(), **options)
    profile_query_groups(q, k, **options)
    torch.cuda.set_sync_debug_mode("error")
    try:
        got = profile_query_groups(q, k, **options)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(got.counts.double(), exact.counts)
    # A query's count may differ by one key of 4,900 where a sum is rounded.
    torch.testing.assert_close(got.sums.double(), exact.sums, rtol=1e-4, atol=12 / 4900)
