"""The random part of a sample as a pure function of (seed, sample index): noise, timestep, caption drop.

Nothing else enters, so ranks that share a sample agree without talking, ranks with other samples differ, and a resumed
run draws what the straight run would have drawn. The generator is Philox, keyed by 128 bits: torch's CPU generator
keeps 32 bits of its seed, and two samples of a long run would meet.

Dims: latents are [C, T, Y, X] here, one sample.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from megatron_dsv.diffusion.config import FlowConfig
from megatron_dsv.diffusion.timestep_sampling import sample_timestep

_NOISE, _TIMESTEP, _TEXT, _HELD_OUT_NOISE, _HELD_OUT_TIMESTEP = range(5)
_INDEX_BITS = 56


@dataclass(frozen=True)
class Draw:
    """What is drawn for one sample.

    Attributes:
        noise: fp32, the latents' shape, standard normal; in raster order, before any permutation of tokens.
        timestep: in [0, 1], an fp32 value.
        drop_text: whether the sample is trained without its caption.
    """

    noise: Tensor
    timestep: float
    drop_text: bool


def draw(seed: int, index: int, shape: tuple[int, ...], config: FlowConfig) -> Draw:
    """The draw of training sample ``index`` (a global counter) of a run.

    Raises:
        ValueError: a negative seed or index, or an index of 2**56 or more.
    """
    return Draw(noise=_noise(seed, index, _NOISE, shape),
                timestep=sample_timestep(_generator(seed, index, _TIMESTEP), config),
                drop_text=bool(_generator(seed, index, _TEXT).random() < config.flow_text_drop))


def validation_draw(seed: int, index: int, pass_size: int, shape: tuple[int, ...]) -> Draw:
    """The draw of held-out sample ``index`` of an evaluation of ``pass_size`` samples; its text is never dropped.

    Timesteps are stratified: each of the ``pass_size`` equal strata of [0, 1] is used once, in an order that gives
    neighbouring samples distant timesteps. Training draws of the same seed and index are independent of these.

    Raises:
        ValueError: an index outside [0, pass_size).
    """
    if not 0 <= index < pass_size:
        raise ValueError(f"index must be in [0, pass_size {pass_size}), got {index}")
    stratum = index * _coprime_step(pass_size) % pass_size
    jitter = _generator(seed, index, _HELD_OUT_TIMESTEP).random()
    return Draw(noise=_noise(seed, index, _HELD_OUT_NOISE, shape), timestep=float(np.float32((stratum + jitter) /
                pass_size)), drop_text=False)


def sampling_noise(seed: int, index: int, shape: tuple[int, ...]) -> Tensor:
    """Noise fp32 of ``shape`` to start the generation of clip ``index`` from."""
    return _noise(seed, index, _NOISE, shape)


def _generator(seed: int, index: int, purpose: int) -> np.random.Generator:
    if seed < 0 or not 0 <= index < 1 << _INDEX_BITS:
        raise ValueError(f"seed must be at least 0 and index in [0, 2**{_INDEX_BITS}), got {seed} and {index}")
    key = np.array([seed & 0xFFFFFFFFFFFFFFFF, index << 8 | purpose], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=key))


def _noise(seed: int, index: int, purpose: int, shape: tuple[int, ...]) -> Tensor:
    return torch.from_numpy(_generator(seed, index, purpose).standard_normal(shape, dtype=np.float32))


def _coprime_step(count: int) -> int:
    """The step nearest above 0.618 count that visits every residue."""
    step = max(1, round(0.618 * count))
    while np.gcd(step, count) != 1:
        step += 1
    return step
