"""Map-style data sets for Megatron's samplers: latent records joined with a sample's noise, timestep and text drop.

Everything is a pure function of the seed and the global sample index, so tensor- and pipeline-parallel ranks agree,
data-parallel ranks differ, and a resumed run draws what the straight run would have drawn.

Dims: C latent channels, T, Y, X latent frames, rows, columns; L text tokens, D text width.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from megatron.core.datasets.utils import Split
from torch import Tensor

from megatron_dsv.config_fields import from_args
from megatron_dsv.data.holdout import split_buckets
from megatron_dsv.data.latent_dataset import LatentDataset
from megatron_dsv.data.sample_order import SampleOrder
from megatron_dsv.diffusion.config import FlowConfig
from megatron_dsv.diffusion.draws import draw, validation_draw

Shape = tuple[int, int, int, int]


class DiffusionDataset(torch.utils.data.Dataset):
    """Training samples in the order of ``SampleOrder``.

    Args:
        latents: the prepared data set.
        buckets: record numbers by latent shape (C, T, Y, X).
        length: samples that the run may ask for.
        seed: of the run.
        group_size: the global batch size; samples of one global batch share a shape.
        flow: the objective's configuration.
    """

    split = Split.train

    def __init__(self, latents: LatentDataset, buckets: dict[Shape, list[int]], *, length: int, seed: int,
                 group_size: int, flow: FlowConfig) -> None:
        self._latents = latents
        self._records = [buckets[shape] for shape in sorted(buckets)]
        self._order = SampleOrder([len(records) for records in self._records], seed, group_size)
        self._length = length
        self._seed = seed
        self._flow = flow

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        """Sample ``index``: latents and noise fp32 [C, T, Y, X], timestep fp32 [], text fp32 [L, D], index."""
        sample = self._latents[self._records[self._order.bucket(index)][self._order.record(index)]]
        drawn = draw(self._seed, index, tuple(sample["latents"].shape), self._flow)
        text = self._latents.null_text if drawn.drop_text else sample["text"]
        return _item(sample["latents"], text, drawn.noise, drawn.timestep, index)


class ValidationDataset(torch.utils.data.Dataset):
    """The same held-out samples, with the same noise and timesteps, in every evaluation.

    Args:
        latents: the prepared data set.
        buckets: held-out record numbers by latent shape.
        pass_size: samples of one evaluation; the next one starts over.
        length: samples that the run may ask for, over all evaluations.
        group_size: the global batch size of evaluation.
        seed: fixed, not the run's, so that runs can be compared.
    """

    split = Split.valid

    def __init__(self, latents: LatentDataset, buckets: dict[Shape, list[int]], *, pass_size: int, length: int,
                 group_size: int, seed: int = 0) -> None:
        self._latents = latents
        self._records = [buckets[shape] for shape in sorted(buckets)]
        self._order = SampleOrder([len(records) for records in self._records], seed, group_size)
        self._pass_size = pass_size
        self._length = length
        self._seed = seed

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> dict[str, Any]:
        """As ``DiffusionDataset``, text never dropped, timesteps spread evenly over a pass."""
        index %= self._pass_size
        sample = self._latents[self._records[self._order.bucket(index)][self._order.record(index)]]
        drawn = validation_draw(self._seed, index, self._pass_size, tuple(sample["latents"].shape))
        return _item(sample["latents"], sample["text"], drawn.noise, drawn.timestep, index)


class SampleOrderError(ValueError):
    """A resume that would tear a group of samples of one shape, in one line."""


def check_order(args: argparse.Namespace, shapes: int, consumed: int) -> None:
    """Whether a run may go on after ``consumed`` samples of a training set of so many shapes.

    Raises:
        SampleOrderError: a group of samples of one shape would be torn.
    """
    if shapes > 1 and not args.skip_train and consumed % args.global_batch_size:
        raise SampleOrderError(
            f"--global-batch-size must divide the {consumed} samples consumed so far, got "
            f"{args.global_batch_size}: with several shapes, the samples of a global batch share one")


class DatasetProvider:
    """Megatron's data set provider.

    Args:
        args: parsed arguments.
        latents: the prepared data set.
    """

    is_distributed = True
    """Every rank builds the data sets: all of them need the batch, and none has to be told it."""

    def __init__(self, args: argparse.Namespace, latents: LatentDataset) -> None:
        self._args = args
        self._latents = latents

    def __call__(self, num_samples: tuple[int, int, int],
                 vp_stage: int | None = None) -> tuple[DiffusionDataset, ValidationDataset | None, None]:
        """Training and validation sets for (train, valid, test) sample numbers; there is no test set."""
        args = self._args
        train, valid = split_buckets(self._latents.buckets, self._latents.checksums, args.latent_valid_samples)
        check_order(args, len(train), args.consumed_train_samples)
        # Megatron's sampler refuses a start at or beyond the end, also where a finished run is launched once more.
        samples = args.consumed_train_samples + num_samples[0] + args.global_batch_size
        training = DiffusionDataset(self._latents, train, length=samples, seed=args.seed,
                                    group_size=args.global_batch_size, flow=from_args(FlowConfig, args))
        if not valid or not args.eval_iters:
            return training, None, None
        batch = getattr(args, "eval_global_batch_size", None) or args.global_batch_size
        # Every evaluation is one whole pass. Megatron would start where the evaluations so far, by their number times
        # the present batch size, should have ended: amid a pass, after a change of that size.
        args.consumed_valid_samples = 0
        return training, ValidationDataset(self._latents, valid, pass_size=args.eval_iters * batch,
                                           length=num_samples[1] + batch, group_size=batch), None


def _item(latents: Tensor, text: Tensor, noise: Tensor, timestep: float, index: int) -> dict[str, Any]:
    return {"latents": latents, "text": text, "noise": noise,
            "timestep": torch.tensor(timestep, dtype=torch.float32), "index": index}
