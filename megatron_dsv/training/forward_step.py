"""One micro-batch through the model, and its loss.

Dims: b samples, C latent channels, T, Y, X latent frames, rows, columns; L text tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from megatron_dsv.diffusion.flow_matching import interpolate, velocity
from megatron_dsv.training.run import TrainingRun

LossFunction = Callable[[Tensor], tuple[Tensor, Tensor, dict[str, Tensor]]]


def forward_step(run: TrainingRun, data_iterator: Iterator[dict[str, Tensor]],
                 model: nn.Module) -> tuple[Tensor, LossFunction]:
    """Megatron's ``forward_step_func``, once ``run`` is bound: the model's output and the function of its loss."""
    batch = {name: value.to(run.device, non_blocking=True) for name, value in next(data_iterator).items()}
    latents, noise, timesteps = batch["latents"], batch["noise"], batch["timestep"]
    frames, rows, columns = latents.shape[2:]
    num_tokens = run.num_tokens((frames, rows, columns))
    if model.training:
        run.begin_micro_batch((frames, rows, columns))
    output = model(latents=interpolate(latents, noise, timesteps), timesteps=timesteps, text=batch["text"])
    target = velocity(latents, noise)
    return output, partial(loss_function, run=run, target=target, timesteps=timesteps, num_tokens=num_tokens,
                           training=model.training)


def loss_function(output: Tensor, *, run: TrainingRun, target: Tensor, timesteps: Tensor, num_tokens: int,
                  training: bool) -> tuple[Tensor, Tensor, dict[str, Tensor]]:
    """Squared error of each sample, weighted by its tokens.

    A sample's error is the mean over its real latent cells, so padding never counts; the sum over samples of error x
    tokens is divided by the global number of tokens when gradients are finalised. Under context parallelism every rank
    takes the whole loss, for the gradients of its own tokens, and one of them counts it.

    Returns:
        loss sum fp32 [], token count int [], and what is reported: (sum, count) pairs by name.
    """
    error = (output.float() - target).square().mean(dim=(1, 2, 3, 4))
    weighted = error * torch.full_like(error, num_tokens)
    counted = weighted.detach() * run.counts_samples
    tokens = torch.full_like(error, num_tokens * run.counts_samples)
    total = torch.stack((counted.sum(), tokens.sum()))
    bins = run.loss_bins.sums(counted, tokens, timesteps)
    reported: dict[str, Any] = {"loss": total}
    if training:
        run.finite_steps.see(weighted.detach().sum())
        run.loss_bins.add(bins)
    else:
        reported |= {run.loss_bins.name(number): pair for number, pair in enumerate(bins)}
    return weighted.sum(), tokens.sum().int(), reported
