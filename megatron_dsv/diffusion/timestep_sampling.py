"""Which timestep a sample is trained at, and the shift that moves timesteps towards noise.

The logit-normal density and the shift t' = s t / (1 + (s - 1) t) are those of Esser et al., arXiv 2403.03206.
"""

from __future__ import annotations

import math

import numpy as np

from megatron_dsv.diffusion.config import FlowConfig


def shift_timestep(timestep: float, shift: float) -> float:
    """s t / (1 + (s - 1) t): keeps 0 and 1, monotone; ``shift`` above 1 moves t towards noise."""
    return shift * timestep / (1 + (shift - 1) * timestep)


def sample_timestep(random: np.random.Generator, config: FlowConfig) -> float:
    """One timestep in [0, 1], rounded to fp32.

    With probability ``flow_uniform_mix`` it is uniform, otherwise as ``flow_timestep_sampling`` says; the shift comes
    last. The generator is used alike in every case, so that a changed setting changes nothing else.
    """
    mix, uniform = random.random(2)
    normal = random.standard_normal()
    if config.flow_timestep_sampling == "uniform" or mix < config.flow_uniform_mix:
        timestep = uniform
    else:
        timestep = 1 / (1 + math.exp(-(config.flow_logit_mean + config.flow_logit_std * normal)))
    return float(np.float32(shift_timestep(timestep, config.flow_shift)))
