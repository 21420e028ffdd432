import pytest
import torch

from megatron_dsv.diffusion.flow_matching import interpolate, velocity


def test_velocity_is_the_derivative_of_the_path():
    latents, noise = torch.randn(2, 3, 4, 5, 6, dtype=torch.float64)
    t = torch.tensor([0.1, 0.5, 0.9])
    step = 1e-3
    slope = (interpolate(latents, noise, t + step) - interpolate(latents, noise, t - step)) / (2 * step)
    torch.testing.assert_close(slope, velocity(latents, noise), atol=2e-3, rtol=2e-3)


def test_the_path_runs_from_data_to_noise_sample_by_sample():
    latents, noise = torch.randn(2, 2, 3, 4)
    assert torch.equal(interpolate(latents, noise, torch.zeros(2)), latents)
    assert torch.equal(interpolate(latents, noise, torch.ones(2)), noise)
    mixed = interpolate(latents, noise, torch.tensor([0.0, 1.0]))
    assert torch.equal(mixed[0], latents[0])
    assert torch.equal(mixed[1], noise[1])


def test_bf16_latents_are_not_mixed_in_bf16():
    latents, noise = torch.randn(2, 1, 1000).bfloat16(), torch.randn(2, 1, 1000)[:1]
    latents = latents[:1]
    t = torch.tensor([0.123456])
    exact = (1 - t.double()) * latents.double() + t.double() * noise.double()
    assert (interpolate(latents, noise, t).double() - exact).abs().max() < 1e-6


def test_shapes_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match=r"timesteps \[b\], got \(2, 3\), \(2, 3\) and \(3,\)"):
        interpolate(torch.zeros(2, 3), torch.zeros(2, 3), torch.zeros(3))
