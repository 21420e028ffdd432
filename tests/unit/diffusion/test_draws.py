import math
import subprocess
import sys
from itertools import pairwise

import numpy as np
import pytest
import torch

from megatron_dsv.diffusion.config import FlowConfig
from megatron_dsv.diffusion.draws import draw, validation_draw
from megatron_dsv.diffusion.timestep_sampling import sample_timestep, shift_timestep

SHAPE = (2, 3, 4, 5)
MANY = 20_000


def normal_cdf(x):
    return 0.5 * (1 + math.erf(x / math.sqrt(2)))


def expected_cdf(t, config):
    """Analytic distribution of a timestep: undo the shift, then logit-normal mixed with uniform."""
    s = config.flow_shift
    t = t / (s - (s - 1) * t)
    if config.flow_timestep_sampling == "uniform":
        return t
    logit = math.log(t / (1 - t))
    body = normal_cdf((logit - config.flow_logit_mean) / config.flow_logit_std)
    return config.flow_uniform_mix * t + (1 - config.flow_uniform_mix) * body


@pytest.mark.parametrize("config", [
    FlowConfig(), FlowConfig(flow_logit_std=1.5, flow_shift=2.5, flow_uniform_mix=0.2),
    FlowConfig(flow_logit_mean=-0.5),
    FlowConfig(flow_timestep_sampling="uniform"), FlowConfig(flow_timestep_sampling="uniform", flow_shift=3.0),
], ids=str)
def test_timesteps_follow_the_analytic_distribution(config):
    random = np.random.Generator(np.random.Philox(key=7))
    drawn = np.sort([sample_timestep(random, config) for _ in range(MANY)])
    assert drawn[0] >= 0
    assert drawn[-1] <= 1
    expected = np.array([expected_cdf(min(max(t, 1e-9), 1 - 1e-9), config) for t in drawn])
    statistic = np.abs(expected - (np.arange(MANY) + 0.5) / MANY).max()
    # Kolmogorov-Smirnov at a significance of 1e-4.
    assert statistic < math.sqrt(-math.log(1e-4 / 2) / 2 / MANY)


def test_the_shift_keeps_its_ends_and_inverts():
    assert shift_timestep(0.0, 5.0) == 0.0
    assert shift_timestep(1.0, 5.0) == 1.0
    assert shift_timestep(0.5, 3.0) == pytest.approx(0.75)
    assert shift_timestep(shift_timestep(0.3, 4.0), 0.25) == pytest.approx(0.3)


def test_timesteps_are_fp32_values():
    t = draw(1, 2, SHAPE, FlowConfig()).timestep
    assert float(np.float32(t)) == t


def test_a_draw_depends_on_seed_and_index_alone():
    first = draw(1234, 99, SHAPE, FlowConfig())
    torch.manual_seed(0)
    np.random.seed(0)
    for index in range(50):
        draw(1234, index, SHAPE, FlowConfig())
    again = draw(1234, 99, SHAPE, FlowConfig())
    assert torch.equal(first.noise, again.noise)
    assert (first.timestep, first.drop_text) == (again.timestep, again.drop_text)
    assert first.noise.dtype == torch.float32
    assert first.noise.shape == SHAPE


def test_another_process_draws_the_same():
    code = ("from megatron_dsv.diffusion.draws import draw; from megatron_dsv.diffusion.config import FlowConfig; "
            "d = draw(1234, 99, (2, 3, 4, 5), FlowConfig()); "
            "print(repr(d.noise.sum().item()), d.timestep, d.drop_text)")
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    here = draw(1234, 99, SHAPE, FlowConfig())
    assert printed.split() == [repr(here.noise.sum().item()), str(here.timestep), str(here.drop_text)]


def test_settings_of_one_part_leave_the_others_alone():
    plain = draw(5, 6, SHAPE, FlowConfig())
    changed = draw(5, 6, SHAPE, FlowConfig(flow_shift=3.0, flow_timestep_sampling="uniform", flow_text_drop=1.0))
    assert torch.equal(plain.noise, changed.noise)
    assert plain.timestep != changed.timestep
    assert changed.drop_text


def test_noise_is_standard_normal_and_independent_across_indices_and_seeds():
    shape = (4096,)
    rows = torch.stack([draw(3, index, shape, FlowConfig()).noise for index in range(64)] +
                       [draw(4, index, shape, FlowConfig()).noise for index in range(64)])
    assert abs(rows.mean().item()) < 5 / math.sqrt(rows.numel())
    assert abs(rows.var().item() - 1) < 5 * math.sqrt(2 / rows.numel())
    ordered = rows.flatten().sort().values[::64].double()
    expected = torch.special.ndtr(ordered)
    grid = (torch.arange(len(ordered), dtype=torch.float64) * 64 + 0.5) / rows.numel()
    assert (expected - grid).abs().max() < math.sqrt(-math.log(1e-4 / 2) / 2 / rows.numel()) + 1e-6
    correlation = torch.corrcoef(rows) - torch.eye(128)
    # 8,128 pairs: six standard deviations.
    assert correlation.abs().max() < 6 / math.sqrt(4096)


def test_indices_that_agree_in_their_low_32_bits_differ():
    base = draw(1, 5, SHAPE, FlowConfig()).noise
    for seed, index in ((1, 5 + 2**32), (1, 5 + 2**40), (1 + 2**32, 5)):
        assert not torch.equal(draw(seed, index, SHAPE, FlowConfig()).noise, base)


def test_text_drop_has_its_rate_and_is_independent_of_the_timestep():
    drawn = [draw(11, index, (1,), FlowConfig(flow_text_drop=0.1)) for index in range(MANY // 4)]
    dropped = np.array([entry.drop_text for entry in drawn])
    assert abs(dropped.mean() - 0.1) < 5 * math.sqrt(0.09 / len(drawn))
    times = np.array([entry.timestep for entry in drawn])
    assert abs(np.corrcoef(dropped, times)[0, 1]) < 5 / math.sqrt(len(drawn))
    assert not any(draw(11, index, (1,), FlowConfig(flow_text_drop=0.0)).drop_text for index in range(50))


@pytest.mark.parametrize("pass_size", [1, 2, 7, 16, 24, 100])
def test_validation_uses_each_stratum_once_and_the_same_every_time(pass_size):
    drawn = [validation_draw(0, index, pass_size, SHAPE) for index in range(pass_size)]
    assert sorted(int(entry.timestep * pass_size) for entry in drawn) == list(range(pass_size))
    assert torch.equal(drawn[0].noise, validation_draw(0, 0, pass_size, SHAPE).noise)
    assert not any(entry.drop_text for entry in drawn)
    assert not torch.equal(drawn[0].noise, draw(0, 0, SHAPE, FlowConfig()).noise)


def test_neighbours_in_validation_are_far_apart_in_time():
    times = [validation_draw(0, index, 64, (1,)).timestep for index in range(64)]
    assert min(abs(a - b) for a, b in pairwise(times)) > 0.25


def test_misuse():
    with pytest.raises(ValueError, match=r"index must be in \[0, pass_size 4\), got 4"):
        validation_draw(0, 4, 4, SHAPE)
    for seed, index in ((-1, 0), (0, -1), (0, 2**56)):
        with pytest.raises(ValueError, match="seed must be at least 0 and index in"):
            draw(seed, index, SHAPE, FlowConfig())
