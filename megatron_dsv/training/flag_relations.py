"""Rules between Megatron's own flags, which Megatron checks once ranks have begun to build, or not at all."""

from __future__ import annotations

import argparse
import importlib.util

from megatron_dsv.config import PLANNING
from megatron_dsv.config_fields import flag_of

_END_STAGES = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
_NOT_ON_A_SKIPPED_STEP = {
    # argument: what is due on its multiples
    "save_interval": "a checkpoint",
    "exit_interval": "the end of the launch",
}


def check_relations(args: argparse.Namespace) -> None:
    """Check pipeline stages, recomputation, precision, the learning-rate schedule, skipped steps, evaluation and
    logging.

    Raises:
        ValueError: one line with the flag, what is allowed, what it got and the way out.
    """
    layers_per_stage(args)
    _check_recompute(args)
    if args.bf16 and args.fp16:
        raise ValueError("--bf16 and --fp16 exclude each other, got both; drop one of them")
    _check_schedule(args)
    _check_skipped_steps(args)
    _check_evaluation(args)
    _check_logging(args)
    _check_planning(args)


def layers_per_stage(args: argparse.Namespace) -> list[int]:
    """Layers of each pipeline stage.

    Raises:
        ValueError: a stage would have none, or the layers cannot be dealt out.
    """
    layers, stages = args.num_layers, args.pipeline_model_parallel_size
    given = {name: getattr(args, name) for name in _END_STAGES if getattr(args, name) is not None}
    if not given:
        if layers % stages:
            raise ValueError(f"--pipeline-model-parallel-size must divide --num-layers {layers}, got {stages}; or set "
                             f"{' or '.join(map(flag_of, _END_STAGES))}")
        return [layers // stages] * stages
    shown = " and ".join(f"{flag_of(name)} {value}" for name, value in given.items())
    if stages == 1:
        raise ValueError(f"{flag_of(next(iter(given)))} needs --pipeline-model-parallel-size above 1, got 1; drop it")
    rest, between = layers - sum(given.values()), stages - len(given)
    if between == 0 and rest != 0:
        raise ValueError(f"{shown} must add up to --num-layers {layers}, as there is no stage between, got "
                         f"{sum(given.values())}; give only one of them")
    if between and (rest < between or rest % between):
        raise ValueError(f"{shown} must leave each of the other {between} pipeline stages the same number of layers, "
                         f"at least 1, got {rest} left of --num-layers {layers}")
    first, last = (given.get(name) for name in _END_STAGES)
    return [*([] if first is None else [first]), *[rest // max(between, 1)] * between,
            *([] if last is None else [last])]


def _check_recompute(args: argparse.Namespace) -> None:
    method, count, granularity = args.recompute_method, args.recompute_num_layers, args.recompute_granularity
    if granularity == "full":
        if method is None:
            raise ValueError("--recompute-granularity full needs --recompute-method, uniform or block, got none")
        longest = max(layers_per_stage(args))
        if count is None or count > longest:
            raise ValueError(f"--recompute-num-layers must be at most the {longest} layers of a pipeline stage for "
                             f"--recompute-granularity full, got {'none' if count is None else count}; 1 saves most")
        return
    for name in ("recompute_method", "recompute_num_layers"):
        if getattr(args, name) is not None:
            raise ValueError(f"{flag_of(name)} needs --recompute-granularity full, got "
                             f"{granularity or 'no granularity'}; drop it, or recompute whole layers")


def _check_schedule(args: argparse.Namespace) -> None:
    """The rules of Megatron's learning-rate schedule, which it asserts once the model is built."""
    if args.train_iters is not None and args.train_samples is not None:
        raise ValueError(f"--train-samples must be left out beside --train-iters {args.train_iters}, got "
                         f"{args.train_samples}; give one of them")
    if args.skip_train:
        return
    unit, other = ("iters", "samples") if args.train_samples is None else ("samples", "iters")
    for name in (f"lr_decay_{other}", f"lr_warmup_{other}", f"lr_wsd_decay_{other}"):
        if getattr(args, name):
            raise ValueError(f"{flag_of(name)} must be left out beside --train-{unit}, got {getattr(args, name)}; use "
                             f"{flag_of(name.replace(other, unit))}")
    decay_name = f"lr_decay_{unit}" if getattr(args, f"lr_decay_{unit}") is not None else f"train_{unit}"
    decay, warmup = getattr(args, decay_name), getattr(args, f"lr_warmup_{unit}")
    if args.lr_warmup_fraction is not None and warmup:
        raise ValueError(f"--lr-warmup-fraction must be left out beside --lr-warmup-{unit} {warmup}, got "
                         f"{args.lr_warmup_fraction}; give one of them")
    if warmup >= decay:
        raise ValueError(f"--lr-warmup-{unit} must be below {flag_of(decay_name)} {decay}, got {warmup}; 0 starts at "
                         "the full learning rate")
    if args.lr_warmup_init > args.lr:
        raise ValueError(f"--lr-warmup-init must be at most --lr {args.lr}, got {args.lr_warmup_init}")
    if args.lr_decay_style == "WSD":
        annealing = getattr(args, f"lr_wsd_decay_{unit}")
        if annealing is None or annealing > decay:
            raise ValueError(f"--lr-decay-style WSD needs --lr-wsd-decay-{unit} of at most {flag_of(decay_name)} "
                             f"{decay}, got {'none' if annealing is None else annealing}")
    start, end = args.start_weight_decay, args.end_weight_decay
    if args.weight_decay_incr_style == "constant" and (start is not None or end is not None):
        name = "start_weight_decay" if start is not None else "end_weight_decay"
        raise ValueError(f"{flag_of(name)} needs --weight-decay-incr-style linear or cosine, got constant; use "
                         "--weight-decay")
    if args.weight_decay_incr_style != "constant" and (start is None or end is None or end < start):
        raise ValueError(f"--weight-decay-incr-style {args.weight_decay_incr_style} needs --start-weight-decay and a "
                         f"--end-weight-decay that is not below it, got {start} and {end}")


def lost_evaluations(args: argparse.Namespace) -> str | None:
    """A warning of evaluations that are due on skipped steps, which Megatron leaves before it evaluates; or None."""
    lost = [step for step in args.iterations_to_skip if args.eval_iters > 0 and args.eval_interval
            and step >= (args.start_eval_at_iter or 0) and step % args.eval_interval == 0]
    if not lost:
        return None
    return (f"warning: no evaluation after step {', '.join(map(str, lost))}: --iterations-to-skip leaves the step out, "
            "and what is due on it")


def _check_skipped_steps(args: argparse.Namespace) -> None:
    """Megatron leaves a skipped step before it saves or exits; a run's last save is left to the interval."""
    happens = {"save_interval": args.save is not None, "exit_interval": True}
    for name, due in _NOT_ON_A_SKIPPED_STEP.items():
        interval = getattr(args, name)
        lost = [step for step in args.iterations_to_skip if interval and step % interval == 0]
        if lost and happens[name]:
            raise ValueError(f"--iterations-to-skip must name no multiple of {flag_of(name)} {interval}, as {due} due "
                             f"on a skipped step is left out, got {lost[0]}; set {flag_of(name)} to a number that "
                             f"does not divide {lost[0]}")


def _check_evaluation(args: argparse.Namespace) -> None:
    if args.eval_iters > 0 and args.latent_valid_samples == 0:
        raise ValueError(f"--latent-valid-samples must be at least 1 to evaluate (--eval-iters {args.eval_iters}), "
                         "got 0; switch evaluation off with --eval-iters 0")


def _check_logging(args: argparse.Namespace) -> None:
    if args.profile and args.profile_step_start >= args.profile_step_end:
        raise ValueError(f"--profile-step-end must be above --profile-step-start {args.profile_step_start}, got "
                         f"{args.profile_step_end}")
    if args.use_pytorch_profiler and not args.profile:
        raise ValueError("--use-pytorch-profiler needs --profile, got none")
    if args.wandb_project is None:
        for name in ("wandb_exp_name", "wandb_entity", "wandb_save_dir"):
            if getattr(args, name):
                raise ValueError(f"{flag_of(name)} needs --wandb-project, got none")
        return
    if not args.wandb_exp_name:
        raise ValueError("--wandb-project needs --wandb-exp-name, the run's name, got none")
    if args.wandb_save_dir is None and args.save is None:
        raise ValueError("--wandb-project needs --wandb-save-dir or --save, a folder to write to, got neither")
    if importlib.util.find_spec("wandb") is None:
        raise ValueError("--wandb-project needs wandb, which is not installed; install it, or use --tensorboard-dir")


def _check_planning(args: argparse.Namespace) -> None:
    for name in PLANNING:
        if getattr(args, name) is not None and args.context_parallel_size == 1:
            raise ValueError(f"{flag_of(name)} needs --context-parallel-size above 1, got 1; drop it; a "
                             "later --config file unsets it with null")
