"""Cases of the Triton attention profile for the CPU interpreter; test_attention_profile_triton.py runs them apart.

TRITON_INTERPRET must be set before triton is imported. bf16 is absent: the dot of the interpreter is wrong there.
"""

import pytest
import torch

from megatron_dsv.kernels.attention_profile.api import block_mass, smallest_set
from megatron_dsv.kernels.attention_profile.triton import launch
from megatron_dsv.sparsity.profile import profile_gathered_groups


@pytest.fixture(autouse=True)
def _unwritten_output_is_nan():
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def _check_mass(groups, q_block, kv_block, s, dtype, *, b=2, h=2, heads_kv=1, d=8, lengths=None):
    q, k = torch.randn(groups * q_block, b, h, d).to(dtype), torch.randn(s, b, heads_kv, d).to(dtype)
    lengths = torch.tensor([[s], [s // 2 + 1]]).expand(b, heads_kv).int() if lengths is None else lengths
    valid = torch.rand(groups * q_block, b) < 0.8
    arguments = {"valid_rows": valid, "kv_length": lengths, "q_block_size": q_block, "kv_block_size": kv_block,
                 "softmax_scale": 0.6}
    exact = block_mass(q.double(), k.double(), **arguments)
    q[~valid] = torch.nan
    for item in range(b):
        for head in range(heads_kv):
            k[int(lengths[item, head]):, item, head] = torch.nan
    got = block_mass(q, k, **arguments, backend="triton")
    torch.testing.assert_close(got.double(), exact, rtol=2e-5, atol=1e-6)
    expected = valid.reshape(groups, q_block, b).sum(1).T[:, None] * (lengths > 0).repeat_interleave(h // heads_kv, 1)[
        ..., None]
    torch.testing.assert_close(got.sum(-1), expected.float(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("groups", "q_block", "kv_block", "s", "dtype"), [
    (2, 64, 64, 130, torch.float16), (1, 128, 1, 70, torch.float16), (5, 24, 10, 75, torch.float16),
    (9, 1, 1, 67, torch.float16), (3, 8, 128, 150, torch.float32)])
def test_block_mass_matches_fp64_and_ignores_padding(groups, q_block, kv_block, s, dtype):
    _check_mass(groups, q_block, kv_block, s, dtype)


def test_spans_of_keys_add_up_and_may_lie_past_the_length(monkeypatch):
    monkeypatch.setattr(launch, "_SPAN_TOKENS", 64)
    _check_mass(2, 16, 16, 200, torch.float16, heads_kv=2, lengths=torch.tensor([[200, 65], [0, 129]]).int())


def _is_smallest(mass, target, counts):
    """Within the tolerance of ``smallest_set``: the entries reach the target, and one fewer do not."""
    running = torch.nn.functional.pad(mass.double().sort(-1, descending=True).values.cumsum(-1), (1, 0))
    total, counts = running[..., -1], counts.long()[..., None]
    reached, before = (running.gather(-1, counts - fewer)[..., 0] for fewer in (0, 1))
    assert (reached >= (target - 2**-20) * total).all()
    assert (before < (target + 2**-20) * total).all()


@pytest.mark.parametrize("target", [0.3, 0.95, 1.0])
def test_smallest_sets_are_exact_up_to_rounding(target):
    mass = torch.stack((torch.rand(300) ** 40, (torch.rand(300) * 8).floor() / 8, torch.randn(300).mul(8).softmax(-1)))
    counts = smallest_set(mass, target, backend="triton")
    _is_smallest(mass, target, counts)
    if target < 0.99:
        assert (counts - smallest_set(mass.double(), target)).abs().max() <= 1


def test_smallest_sets_of_equal_short_empty_and_nan_rows(monkeypatch):
    monkeypatch.setattr(launch, "_ROW_ELEMENTS", 16)
    equal = torch.full((1, 40), 0.1)
    assert smallest_set(equal, 0.5, backend="triton").tolist() == [20]
    assert smallest_set(equal, 1.0, backend="triton").tolist() == [40]
    assert smallest_set(torch.tensor([[7.0]]), 0.9, backend="triton").tolist() == [1]
    assert smallest_set(torch.zeros(2, 5), 0.9, backend="triton").tolist() == [1, 1]
    assert smallest_set(torch.zeros(0, 5), 0.9, backend="triton").shape == (0,)
    wide = torch.zeros(1, 50)
    wide[0, 33:36] = torch.tensor([0.25, 0.5, 0.25])
    assert smallest_set(wide, 0.5, backend="triton").tolist() == [1]
    assert smallest_set(wide, 0.6, backend="triton").tolist() == [2]
    wide[0, 3] = torch.nan
    assert smallest_set(wide, 0.5, backend="triton").isnan().all()


def test_the_profile_is_that_of_the_reference():
    q, k = torch.randn(32, 2, 2, 8).half() * 2, torch.randn(70, 2, 1, 8).half()
    valid = torch.arange(32)[:, None] < torch.tensor([32, 21])
    arguments = {"valid_rows": valid, "q_block_size": 16, "kv_block_size": 8, "softmax_scale": 0.7, "theta": 0.9,
                 "budget_mass": 0.95, "kv_length": torch.tensor([70, 41]), "sparsity_stride": 16,
                 "kept_blocks": torch.rand(2, 2, 2, 9) < 0.4}
    exact = profile_gathered_groups(q.double(), k.double(), **arguments)
    got = profile_gathered_groups(q, k, **arguments, backend="triton")
    assert torch.equal(got.counts.double(), exact.counts)
    torch.testing.assert_close(got.sums.double(), exact.sums, rtol=1e-5, atol=1e-5)


def test_limits_name_the_way_out():
    q, k = torch.randn(2, 1, 1, 4), torch.randn(8, 1, 1, 4)
    arguments = {"valid_rows": torch.ones(2, 1, dtype=torch.bool), "kv_length": torch.tensor([[8]]).int(),
                 "q_block_size": 1, "kv_block_size": 4, "softmax_scale": 1.0, "backend": "triton"}
    with pytest.raises(NotImplementedError, match=r"got torch.float64; use backend='reference'"):
        block_mass(q.double(), k.double(), **arguments)
    with pytest.raises(NotImplementedError, match="head dims up to 256, got 300; use backend='reference'"):
        block_mass(torch.zeros(2, 1, 1, 300), torch.zeros(8, 1, 1, 300), **arguments)
    for tokens, block, stride in ((q, 4, 2**24), (k, 1024, 2**21)):
        far = torch.empty_strided(tokens.shape, (stride, 4, 4, 1), device="meta")
        with pytest.raises(NotImplementedError, match=f"is below 2.31 elements, got a stride of {stride}; copy the"):
            block_mass(far if tokens is q else q, far if tokens is k else k,
                       **arguments | {"kv_block_size": block})
    with pytest.raises(NotImplementedError, match=r"takes torch.float32, got torch.float64; use backend='reference'"):
        smallest_set(torch.ones(1, 3).double(), 0.5, backend="triton")


@pytest.mark.parametrize(("given", "means"), [(90, 40), (-7, 0)])
def test_a_length_that_no_host_checked_reads_no_key_outside(given, means):
    buffer = torch.full((128, 1, 1, 16), torch.nan, dtype=torch.float16)
    buffer[:40] = torch.randn(40, 1, 1, 16)
    got, exact = (block_mass(torch.ones(8, 1, 1, 16).half(), buffer[:40], valid_rows=torch.ones(8, 1, dtype=torch.bool),
                             kv_length=torch.full((1, 1), number, dtype=torch.int32), q_block_size=8, kv_block_size=16,
                             softmax_scale=0.3, backend="triton") for number in (given, means))
    assert exact.isfinite().all()
    assert torch.equal(got, exact)
