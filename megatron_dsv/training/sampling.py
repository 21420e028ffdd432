"""Builds a trained model on one device and draws a video from it.

Dims: b samples, C latent channels, T, Y, X latent frames, rows, columns; L text tokens, D text width.
"""

from __future__ import annotations

import argparse
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor

from megatron_dsv.config import PLANNING, WINDOWS
from megatron_dsv.config_fields import from_args
from megatron_dsv.config_files import read_mapping
from megatron_dsv.platform import compat, cpu

_OF_TRAINING = (
    # One device refuses them, and no flag can unset them.
    *PLANNING, "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers", "distribute_saved_activations",
    "overlap_p2p_comm_warmup_flush", "defer_embedding_wgrad_compute",
    # Another host may lack what they need, and a sample has no gradients, nor a log.
    "dsv_sparse_backend", "dsv_dense_backend", "dsv_deterministic", "deterministic_mode",
    "use_precision_aware_optimizer", "te_rng_tracker", "wandb_project", "wandb_exp_name", "wandb_entity",
    "wandb_save_dir",
)
"""Settings of a run that say nothing of its model; a sample leaves them at their defaults."""


def sample_video(options: argparse.Namespace) -> None:
    """Does what `dsv sample` says; ``options`` are its flags.

    Raises:
        ValueError: a checkpoint, data set or shape that does not fit, in one line.
    """
    cpu.enable()
    compat.apply()
    from megatron_dsv.data.codecs import codec_from_description
    from megatron_dsv.data.latent_dataset import LatentDataset
    from megatron_dsv.data.text import text_encoder_from_description
    from megatron_dsv.data.video_io import write_mp4
    from megatron_dsv.diffusion.draws import sampling_noise
    from megatron_dsv.diffusion.sampler import sample
    from megatron_dsv.models.config import VideoDiTConfig
    from megatron_dsv.training.run import misfit

    folder, weights = checkpoint_folders(Path(options.checkpoint))
    args = run_arguments(folder, options)
    latents = LatentDataset(args.latent_data, text_length=args.dit_text_length)
    other = misfit(latents, from_args(VideoDiTConfig, args))
    if other is not None:
        raise ValueError(f"--latent-data must be a data set for the run's {other.flag} {other.wanted}, got "
                         f"{latents.root} with {other.found}; name one that fits, or leave the flag out to take the "
                         "run's own")
    args.latent_shapes = [list(shape) for shape in latents.buckets]
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    codec = codec_from_description(latents.codec_description, folder=options.codec_folder, device=device)
    encoder = text_encoder_from_description(latents.text_description, folder=options.text_folder, device=device)
    shape = max(latents.buckets) if options.frames is None else \
        codec.latent_shape(options.frames, options.height, options.width)
    with tempfile.TemporaryDirectory() as rendezvous:
        torch.distributed.init_process_group("nccl" if device.type == "cuda" else "gloo", rank=0, world_size=1,
                                             init_method=f"file://{rendezvous}/store")
        try:
            model = load_model(args, weights, options.weights, device)
            null = latents.null_text if options.negative_prompt is None else \
                latents.pad_text(encoder.encode([options.negative_prompt])[0])
            text = torch.stack([latents.pad_text(encoder.encode([options.prompt])[0]), null]).to(device)
            noise = sampling_noise(options.seed, 0, shape)[None].to(device)
            video = sample(_velocity(model, *text[:, None]), noise, steps=options.steps,
                           shift=args.flow_shift if options.shift is None else options.shift,
                           guidance_scale=options.guidance, progress=True)
        finally:
            torch.distributed.destroy_process_group()
    write_mp4(Path(options.output), codec.decode(video[0]).cpu(), options.fps)


def checkpoint_folders(given: Path) -> tuple[Path, Path]:
    """(run folder, iter_* folder) of a run folder or one of its iter_* folders.

    Raises:
        ValueError: neither.
    """
    if given.name.startswith("iter_"):
        run, weights = given.parent, given
    else:
        tracker = given / "latest_checkpointed_iteration.txt"
        if not tracker.is_file():
            raise ValueError(f"CHECKPOINT must be a folder that a run saved to, got {given}, which has no "
                             "latest_checkpointed_iteration.txt")
        last = tracker.read_text(encoding="utf-8", errors="replace").strip()
        if not (last.isascii() and last.isdecimal()):
            raise ValueError(f"CHECKPOINT must be a folder that a run saved to, got {given}, whose {tracker.name} must "
                             f"hold a step, got {last[:40]!r}; name one of its iter_* folders")
        run, weights = given, given / f"iter_{int(last):07d}"
    for needed in (run / "config.yaml", weights / ".metadata"):
        if not needed.is_file():
            raise ValueError(f"CHECKPOINT must be a folder that a run saved to, got {given}: {needed} is missing")
    return run, weights


def run_arguments(folder: Path, options: argparse.Namespace) -> argparse.Namespace:
    """The run's own arguments, for one device, with the attention that was asked for.

    Raises:
        ValueError: what the run's settings do not allow, in one line.
    """
    from megatron_dsv.training.arguments import dry_parse

    config = ["--config", str(folder / "config.yaml")]
    stage = "dense"
    if options.attention == "sparse":
        # Under auto the gate has decided layer by layer, and a layer that did not pass stays dense here too;
        # a forced share overrules it.
        settings = read_mapping(folder / "config.yaml")
        if settings.get("dsv-attention") in WINDOWS:
            raise ValueError("--attention sparse needs a run with predictors, got --dsv-attention "
                             f"{settings['dsv-attention']}: the run attends to windows; --attention dense keeps them")
        rule = settings.get("dsv-selection-rule")
        if options.keep_ratio is not None and rule == "mass":
            raise ValueError("--keep-ratio needs a run with --dsv-selection-rule topk or topk-mass, got mass, whose "
                             "share of the keys differs from row to row; leave it out")
        gated = settings.get("dsv-sparse-stage") == "auto" and options.keep_ratio is None
        stage = "auto" if gated else "sparse"
    argv = [*config, "--tensor-model-parallel-size", "1", "--pipeline-model-parallel-size", "1",
            "--context-parallel-size", "1", "--dsv-cp-plan", "planned", "--no-sequence-parallel", "--dsv-sparse-stage",
            stage]
    if options.keep_ratio is not None:
        # The floor is of measured shares.
        argv += ["--dsv-keep-ratio", str(options.keep_ratio), "--dsv-min-keep-ratio", "0"]
    if options.latent_data is not None:
        argv += ["--latent-data", options.latent_data]
    return dry_parse(argv, 1, check_files=True, without=_OF_TRAINING)


def load_model(args: argparse.Namespace, weights: Path, which: str, device: torch.device) -> torch.nn.Module:
    """The model of ``args`` with the weights of a checkpoint folder, in evaluation mode on ``device``.

    Args:
        which: ``ema``, ``raw``, or ``auto`` for the moving average if there is one.
    """
    from megatron.core import dist_checkpointing
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    from megatron_dsv.training.builders import build_model, make_process_groups
    from megatron_dsv.training.checkpoint_files import CheckpointError, verify_checksums
    from megatron_dsv.training.checkpoint_guard import inspect_checkpoint
    from megatron_dsv.training.ema import STATE_PREFIX, has_ema, load_ema_state

    make_process_groups()
    model_parallel_cuda_manual_seed(args.seed)
    model = build_model(args).to(device)
    if args.bf16 or args.fp16:
        model = model.bfloat16() if args.bf16 else model.half()
    try:
        with_dsv = inspect_checkpoint(weights, [model])
        verify_checksums(weights, lambda key: not key.startswith("optimizer.") or key.startswith(f"{STATE_PREFIX}."))
    except CheckpointError as error:
        raise ValueError(f"CHECKPOINT {error}") from error
    if not with_dsv:
        raise ValueError(f"--attention sparse needs a checkpoint with predictors, got {weights}; use --attention dense")
    with warnings.catch_warnings(action="ignore"):  # torch's, about what Megatron calls in it
        averaged = has_ema(str(weights))
        if which == "ema" and not averaged:
            raise ValueError(f"--weights ema needs a run with --ema-decay, got {weights}, which holds no EMA of the "
                             "weights; use --weights raw")
        loaded = dist_checkpointing.load({"model": model.sharded_state_dict()}, str(weights))
        model.load_state_dict(loaded["model"])
        if averaged and which != "raw":
            load_ema_state(str(weights), model)
    return model.eval()


def _velocity(model: torch.nn.Module, text: Tensor, null_text: Tensor) -> Callable[[Tensor, Tensor, bool], Tensor]:
    """The sampler's model: velocity of latents [b, C, T, Y, X] at timesteps [b], with text [1, L, D] or without."""

    def velocity(latents: Tensor, timesteps: Tensor, conditional: bool) -> Tensor:
        given = (text if conditional else null_text).expand(latents.shape[0], -1, -1)
        return model(latents=latents, timesteps=timesteps, text=given)

    return velocity
