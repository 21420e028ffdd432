"""Which steps of a run may be profiled, where its videos have several lengths: a function of the sample counter."""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable

from megatron_dsv.data.holdout import Shape, split_buckets
from megatron_dsv.data.latent_dataset import LatentDataset
from megatron_dsv.data.sample_order import SampleOrder
from megatron_dsv.sparsity.schedule import profiled_lengths


class ProfileSteps:
    """What the controller asks about steps; every rank answers alike.

    Args:
        args: parsed arguments, in which Megatron keeps ``curr_iteration`` and ``consumed_train_samples``.
        latents: the prepared data set.
        tokens_of: real tokens of a sample by its latent shape.

    Attributes:
        lengths: tokens of the samples that may be profiled (``profiled_lengths`` of the training set).
        several: whether the samples of the training set have several lengths.
        words: a line about those that may be profiled; None where every sample may be.
    """

    def __init__(self, args: argparse.Namespace, latents: LatentDataset, tokens_of: Callable[[Shape], int]) -> None:
        self._args = args
        self._order: SampleOrder | None = None
        self._tokens = [tokens_of(shape) for shape in sorted(latents.buckets)]
        self.lengths = frozenset(self._tokens)
        self.several = False
        self.words: str | None = None
        if len(self.lengths) == 1:
            return
        train, _ = split_buckets(latents.buckets, latents.checksums, args.latent_valid_samples)
        shapes = sorted(train)
        sizes = [len(train[shape]) for shape in shapes]
        self._tokens = [tokens_of(shape) for shape in shapes]
        samples: Counter[int] = Counter()
        for tokens, size in zip(self._tokens, sizes):
            samples[tokens] += size
        self.several = len(samples) > 1
        self.lengths = profiled_lengths(samples)
        if self.lengths == samples.keys():
            return
        self._order = SampleOrder(sizes, args.seed, args.global_batch_size)
        low, high = min(self.lengths), max(self.lengths)
        share = sum(samples[tokens] for tokens in self.lengths) / samples.total()
        lengths = f"{high}" if low == high else f"{low} to {high}"
        self.words = (f"profiles, and with them budgets and the gate, are of videos of {lengths} tokens, {share:.1%} "
                      "of the training samples")

    @property
    def longest(self) -> int:
        """Tokens of the longest samples that may be profiled."""
        return max(self.lengths)

    def may_profile(self, step: int) -> bool:
        """Whether the samples of a step have a length that is profiled.

        Args:
            step: finished steps of the run; the step under way, or one before it.
        """
        if self._order is None:
            return True
        args = self._args
        first = args.consumed_train_samples - (args.curr_iteration - step) * args.global_batch_size
        return first >= 0 and self._tokens[self._order.bucket(first)] in self.lengths
