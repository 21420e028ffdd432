"""What one launch shares between Megatron's callbacks: arguments, data, controller. It replaces globals."""

from __future__ import annotations

import argparse
import functools
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path

import torch

from megatron_dsv.config import DSVConfig
from megatron_dsv.config_fields import from_args
from megatron_dsv.data.latent_dataset import LatentDataset
from megatron_dsv.metrics import Recorder
from megatron_dsv.models.config import VideoDiTConfig
from megatron_dsv.models.layouts import latent_layout
from megatron_dsv.platform import cpu
from megatron_dsv.sparsity.token_layout import TokenLayout
from megatron_dsv.sparsity.windows import kept_share
from megatron_dsv.training.arguments import HostError
from megatron_dsv.training.cp_planning import CPPlanning
from megatron_dsv.training.cp_runtime import CPRuntime, redraw_plan
from megatron_dsv.training.dsv_controller import DSVController
from megatron_dsv.training.finite_steps import FiniteSteps
from megatron_dsv.training.loss_bins import LossBins
from megatron_dsv.training.profile_steps import ProfileSteps
from megatron_dsv.training.sparsity_trace import SparsityTrace

_PADDING_WORTH_A_LINE = 0.5
"""Videos of two query groups or more stay below it."""

_MAX_GROUP_SHARE = 8
"""A query group of a few times the video serves tests of tiny ones; seven eighths of padding serve nobody."""


@dataclass(frozen=True)
class Misfit:
    """A width of a model that its data set does not have.

    Attributes:
        flag: that sets it.
        wanted: of the model.
        found: of the data set, in words.
        made_by: what makes this width of a data set.
    """

    flag: str
    wanted: int
    found: str
    made_by: str


def misfit(latents: LatentDataset, dit: VideoDiTConfig) -> Misfit | None:
    """The first width that a data set and a model do not share, None for a pair that fits."""
    for flag, by, wanted, got in (
            ("--dit-latent-channels", "codec", dit.dit_latent_channels,
             sorted({shape[0] for shape in latents.buckets})),
            ("--dit-text-dim", "text encoder", dit.dit_text_dim, [latents.text_dim])):
        if got != [wanted]:
            return Misfit(flag, wanted, " or ".join(map(str, got)), by)
    return None


@dataclass
class TrainingRun:
    """State of a launch.

    Attributes:
        args: parsed arguments; Megatron keeps ``curr_iteration`` in them.
        latents: the prepared data set.
        controller: drives DSV; None until the model is built.
        cp: context parallelism; None until the model is built, and without it.
        planning: solves context-parallel plans; None unless the flags ask for it.
        trace: what profiles found, in the run's folder; None without a folder or predictors.
        loss_bins: loss by timestep since the last log line.
        finite_steps: ends the run at a loss or a gradient that is not finite.
        recorder: DSV's numbers since the last log line.
        step_layout: token layout of the last training micro-batch; None before the first.
    """

    args: argparse.Namespace
    latents: LatentDataset
    controller: DSVController | None = None
    cp: CPRuntime | None = None
    planning: CPPlanning | None = None
    trace: SparsityTrace | None = None
    loss_bins: LossBins = field(init=False)
    finite_steps: FiniteSteps = field(init=False)
    recorder: Recorder = field(default_factory=Recorder)
    step_layout: TokenLayout | None = None

    def __post_init__(self) -> None:
        self.loss_bins = LossBins(self.args.flow_loss_bins)
        self.finite_steps = FiniteSteps.of(self.args)
        self.dsv = from_args(DSVConfig, self.args)
        self.dit = from_args(VideoDiTConfig, self.args)
        self.layout = functools.lru_cache(maxsize=256)(self._layout)

    @property
    def device(self) -> torch.device:
        """Where batches go."""
        return cpu.current_device()

    @functools.cached_property
    def profile_steps(self) -> ProfileSteps | None:
        """Which steps may be profiled; None without predictors."""
        if not self.dsv.has_predictor:
            return None
        return ProfileSteps(self.args, self.latents, lambda shape: self.num_tokens(shape[1:]))

    @property
    def counts_samples(self) -> bool:
        """Whether this rank counts its samples' losses and tokens: one of each context-parallel group does."""
        return self.cp is None or self.cp.manager.rank == 0

    @property
    def folder(self) -> Path | None:
        """Where the run writes what people read later; None for a run that writes nothing."""
        folder = self.args.save or self.args.tensorboard_dir
        return None if folder is None else Path(folder)

    def begin_micro_batch(self, latent_shape: tuple[int, int, int]) -> None:
        """To be called before each training micro-batch's forward, with its latent video's (T, Y, X)."""
        if self.controller is None:
            return
        layout = self.step_layout = self.layout(latent_shape)
        self.controller.begin_micro_batch(self.args.curr_iteration, layout.num_tokens)
        if self.planning is not None:
            self.planning.begin_micro_batch(profiles=self.controller.profiles_now, tokens=layout.padded_length)

    def plan_next_step(self, step: int) -> None:
        """To be called by every rank between two steps: may change the context-parallel plan.

        Args:
            step: finished steps of the run.
        """
        if self.cp is not None:
            redraw_plan(self.cp, self.dsv, seed=self.args.seed, step=step)
        if self.planning is not None:
            self.planning.end_step(step)
        if self.trace is not None and self.controller is not None and self.controller.profiled_at == step - 1:
            coverage = {} if self.planning is None else self.planning.record.coverage
            self.trace.add(step, self.controller.num_tokens, coverage)

    def num_tokens(self, latent_shape: tuple[int, int, int]) -> int:
        """Real tokens of a latent video (T, Y, X)."""
        return self.layout(latent_shape).num_tokens

    def window_share(self, layout: TokenLayout) -> float | None:
        """Share of key blocks that the window baseline keeps in a video of this layout; None without windows."""
        fraction = self.dsv.window_fraction
        if fraction is None:
            return None
        return kept_share(layout, fraction, q_block_size=self.dsv.dsv_q_block_size,
                          kv_block_size=self.dsv.dsv_kv_block_size)

    def window_share_of_data(self, low: int, high: int) -> float | None:
        """Mean of ``window_share`` over the data set's samples of ``low`` to ``high`` slots; None without windows."""
        if self.dsv.window_fraction is None:
            return None
        layouts = [(self.layout(shape[1:]), len(records)) for shape, records in self.latents.buckets.items()]
        shares = [(self.window_share(layout), count) for layout, count in layouts
                  if low <= layout.padded_length <= high]
        return sum(share * count for share, count in shares if share) / sum(count for _, count in shares)

    def check_data(self) -> None:
        """Checks the data set against the model and the layout, and its files on the first rank of each host.

        Raises:
            HostError: a sample file is missing or of another size.
            ValueError: the data set's channels or text width are not the model's, too many validation samples, or
                query groups far longer than the videos.
        """
        other = misfit(self.latents, self.dit)
        if other is not None:
            raise ValueError(f"{other.flag} must be the data set's {other.found}, got {other.wanted}; prepare "
                             f"{self.latents.root} anew with a {other.made_by} of {other.wanted}, or set the flag, "
                             "which makes it another model")
        if self.args.latent_valid_samples >= len(self.latents):
            raise ValueError(f"--latent-valid-samples must be below the {len(self.latents)} samples of --latent-data, "
                             f"got {self.args.latent_valid_samples}")
        self._check_padding()
        if os.environ.get("LOCAL_RANK", "0") == "0":
            try:
                self.latents.check_files()
            except ValueError as error:
                raise HostError(str(error)) from error

    def _check_padding(self) -> None:
        """Padding of the sequence's tail goes through every layer but attention; say what it costs, or refuse it."""
        layouts = [(self.layout(shape[1:]), len(records)) for shape, records in self.latents.buckets.items()]
        longest = max((layout for layout, _ in layouts), key=lambda layout: layout.num_tokens)
        group, ranks = self.dsv.dsv_q_block_size, self.args.context_parallel_size
        if ranks > 1 and longest.pad_multiple > _MAX_GROUP_SHARE * longest.num_tokens:
            raise ValueError(f"--context-parallel-size must deal out the {longest.num_tokens} tokens of the longest "
                             f"video in --latent-data in whole query groups and key blocks, got {ranks}, which pads it "
                             f"to {longest.padded_length}; take fewer ranks, or smaller powers of two for "
                             "--dsv-q-block-size and --dsv-kv-block-size")
        if group > _MAX_GROUP_SHARE * longest.num_tokens:
            raise ValueError(f"--dsv-q-block-size must be at most {_MAX_GROUP_SHARE} times the {longest.num_tokens} "
                             f"tokens of the longest video in --latent-data, got {group}, which pads it to "
                             f"{longest.padded_length}; use a smaller power of two")
        tokens = sum(layout.num_tokens * count for layout, count in layouts)
        slots = sum(layout.padded_length * count for layout, count in layouts)
        if slots > (1 + _PADDING_WORTH_A_LINE) * tokens and self.args.rank == 0:
            cause, cure = f"--dsv-q-block-size {group} pads", "smaller query groups"
            if ranks > 1:
                cause = (f"--dsv-q-block-size {group}, --dsv-kv-block-size {self.dsv.dsv_kv_block_size} and "
                         f"--context-parallel-size {ranks} pad")
                cure = "smaller ones"
            print(f"warning: {cause} the videos of --latent-data by {slots / tokens - 1:.0%} on average; {cure} pad "
                  "less", file=sys.stderr, flush=True)

    def set_sequence_length(self) -> None:
        """Tells Megatron the longest padded sequence of the data set; pipeline stages size their buffers by it."""
        shapes = sorted(self.latents.buckets)
        self.args.latent_shapes = [list(shape) for shape in shapes]
        longest = max(self.layout(shape[1:]).padded_length for shape in shapes)
        self.args.seq_length = self.args.max_position_embeddings = longest

    def _layout(self, latent_shape: tuple[int, int, int]) -> TokenLayout:
        return latent_layout(latent_shape, self.dit, self.dsv, self.args.tensor_model_parallel_size,
                             self.args.context_parallel_size)
