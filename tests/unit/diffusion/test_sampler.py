import math

import pytest
import torch

from megatron_dsv.diffusion.flow_matching import interpolate, velocity
from megatron_dsv.diffusion.sampler import sample, timestep_grid


@pytest.mark.parametrize(("steps", "shift"), [(1, 1.0), (4, 1.0), (7, 3.0), (50, 5.0)])
def test_straight_paths_end_at_their_data_whatever_the_grid(steps, shift):
    data = torch.randn(2, 3, 4)

    def model(x, t, with_text):
        # The exact field of a single data point: every path is a straight line to it.
        return (x - data) / t.reshape(-1, 1, 1)

    out = sample(model, torch.randn(2, 3, 4), steps=steps, shift=shift)
    torch.testing.assert_close(out, data, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("shift", [1.0, 3.0])
def test_a_linear_field_gives_the_closed_form_of_euler(shift):
    rate, steps, noise = 1.5, 12, torch.randn(3, 5, dtype=torch.float64)
    factor = math.prod(1 + rate * (b - a) for a, b in zip(timestep_grid(steps, shift), timestep_grid(steps, shift)[1:]))
    out = sample(lambda x, t, with_text: rate * x, noise, steps=steps, shift=shift)
    torch.testing.assert_close(out.double(), factor * noise, atol=1e-6, rtol=1e-5)


def test_convergence_is_first_order():
    noise = torch.ones(1, 1)

    def error(steps):
        return abs(sample(lambda x, t, with_text: x * t.reshape(-1, 1), noise, steps=steps).item() - math.exp(-0.5))

    assert error(64) / error(128) == pytest.approx(2, rel=0.1)
    assert error(128) < 1e-2


def test_the_model_sees_the_states_that_training_made():
    data, noise = torch.randn(2, 1, 6)
    seen = []

    def model(x, t, with_text):
        seen.append((x.clone(), t.clone()))
        return velocity(data, noise)

    sample(model, noise, steps=5, shift=2.0)
    assert [t.item() for _, t in seen] == pytest.approx(timestep_grid(5, 2.0)[:-1])
    for x, t in seen:
        assert t.dtype == torch.float32
        torch.testing.assert_close(x, interpolate(data, noise, t), atol=1e-5, rtol=1e-5)


def test_guidance_extrapolates_and_costs_nothing_at_one():
    calls = []

    def model(x, t, with_text):
        calls.append(with_text)
        return torch.full_like(x, 1.0 if with_text else 0.25)

    noise = torch.zeros(1, 4)
    assert torch.equal(sample(model, noise, steps=4), torch.full((1, 4), -1.0))
    assert calls == [True] * 4
    assert torch.equal(sample(model, noise, steps=4, guidance_scale=5.0), torch.full((1, 4), -(0.25 + 5 * 0.75)))
    assert torch.equal(sample(model, noise, steps=4, guidance_scale=0.0), torch.full((1, 4), -0.25))


def test_bf16_models_are_integrated_in_fp32():
    out = sample(lambda x, t, with_text: torch.full_like(x, 1e-3).bfloat16(), torch.ones(1, 1), steps=100)
    assert out.dtype == torch.float32
    assert out.item() == pytest.approx(1 - torch.tensor(1e-3).bfloat16().item(), abs=1e-5)


def test_misuse():
    with pytest.raises(ValueError, match="steps must be at least 1, got 0"):
        timestep_grid(0)
    with pytest.raises(ValueError, match="shift must be above 0, got 0"):
        timestep_grid(3, 0.0)
