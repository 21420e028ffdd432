"""Compare a checkpoint's learning-rate schedule with the current flags before anything is loaded.

A schedule is a dict as from `OptimizerParamScheduler.state_dict()`; its lengths are in samples: with `--train-iters`,
iterations times the global batch size, which may change between launches.
"""

import argparse
import contextlib
import io
import logging
import math
from types import SimpleNamespace
from typing import Any

# Entry -> flags. Megatron finds the optimizer's param groups in a checkpoint by the first two.
_GROUP_FLAGS = {"max_lr": "--lr", "min_lr": "--min-lr"}
_SCHEDULE_FLAGS = {
    "lr_warmup_steps": "--lr-warmup-iters, --lr-warmup-samples or --lr-warmup-fraction",
    "lr_decay_style": "--lr-decay-style",
    "start_wd": "--weight-decay or --start-weight-decay",
    "end_wd": "--weight-decay or --end-weight-decay",
    "wd_incr_style": "--weight-decay-incr-style",
}
_LENGTHS = ("lr_decay_steps", "wd_incr_steps")
_COUNTS = (*_LENGTHS, "lr_warmup_steps", "num_steps")


class ScheduleError(ValueError):
    """A resume whose learning-rate schedule differs from the checkpoint's, in one line."""


def of_flags(args: argparse.Namespace) -> dict[str, Any]:
    """The schedule that Megatron makes of validated arguments, without an optimizer; changes none of them."""
    from megatron.training import training

    copy = argparse.Namespace(**vars(args))
    get_args, logger = training.get_args, logging.getLogger("megatron.core.optimizer_param_scheduler")
    training.get_args = lambda: copy
    disabled, logger.disabled = logger.disabled, True
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return training.get_optimizer_param_scheduler(SimpleNamespace(param_groups=[])).state_dict()
    finally:
        training.get_args, logger.disabled = get_args, disabled


def continued(args: argparse.Namespace, current: dict[str, Any], common: dict[str, Any]) -> dict[str, Any] | None:
    """The checkpoint's schedule as this launch goes on with it, its counts in samples of the current batch size.

    Args:
        args: of this launch.
        current: the schedule of its flags.
        common: the checkpoint's common state.

    Returns:
        None if the checkpoint has no schedule.

    Raises:
        ScheduleError: it cannot go on; names the flag, both values and the ways out.
    """
    if "opt_param_scheduler" not in common:
        return None
    saved = in_current_batches(args, common)
    check(current, saved,
          one_side_wins=args.override_opt_param_scheduler or args.use_checkpoint_opt_param_scheduler)
    return saved


def in_current_batches(args: argparse.Namespace, common: dict[str, Any]) -> dict[str, Any]:
    """The checkpoint's schedule, its counts rescaled with the batch size where `--train-iters` gives the length.

    So the run stands at the same share of its iterations. With `--train-samples` samples are counted, whatever the
    batch.

    Raises:
        ScheduleError: the run changed its batch size before, and now between `--train-iters` and `--train-samples`.
    """
    saved, before = common["opt_param_scheduler"], common.get("args")
    old, new = getattr(before, "global_batch_size", None), args.global_batch_size
    if old is None:
        return saved
    was, now = (getattr(each, "train_samples", None) is not None for each in (before, args))
    if was != now:
        consumed, iteration = getattr(before, "consumed_train_samples", None), common.get("iteration")
        if consumed is not None and iteration is not None and consumed != iteration * old:
            given, other = ("--train-samples", "--train-iters") if now else ("--train-iters", "--train-samples")
            raise ScheduleError(
                f"{given} cannot go on from a run that was given {other} and has changed --global-batch-size: its "
                f"{iteration} iterations of {old} are not the {consumed} samples that it consumed; give {other}, or "
                "--no-load-optim to start the optimizer and its schedule anew")
    if now or old == new:
        return saved
    return saved | {key: _scaled(saved[key], new, old) for key in _COUNTS if key in saved}


def last_iteration(args: argparse.Namespace, iteration: int) -> int:
    """The iteration at which `--train-samples` have been consumed, for a run that stands at `iteration`."""
    return iteration + max(0, args.train_samples - args.consumed_train_samples) // args.global_batch_size


def _scaled(count: float, new: int, old: int) -> float:
    """`count * new / old`, an integer for an integer."""
    return count * new // old if isinstance(count, int) else count * new / old


def changed_lengths(current: dict[str, Any], saved: dict[str, Any]) -> set[str]:
    """The entries that differ because the run is longer or shorter (`--train-iters`, `--lr-decay-iters`, samples).

    A warm-up that is the same fraction of either run is among them.
    """
    changed = {key for key in _LENGTHS if key in saved and saved[key] != current[key]}
    if "lr_decay_steps" in saved and saved.get("lr_warmup_steps") != current["lr_warmup_steps"]:
        # Equal fractions, cross-multiplied; a warm-up given as a fraction is itself rounded.
        ours = current["lr_warmup_steps"] * saved["lr_decay_steps"]
        theirs = saved.get("lr_warmup_steps", math.nan) * current["lr_decay_steps"]
        if math.isclose(ours, theirs, rel_tol=1e-12):
            changed.add("lr_warmup_steps")
    return changed


def check(current: dict[str, Any], saved: dict[str, Any], *, one_side_wins: bool) -> None:
    """Refuse a resume whose schedule differs in more than its length.

    Args:
        current: the schedule of the current flags.
        saved: the checkpoint's.
        one_side_wins: `--override-opt_param-scheduler` or `--use-checkpoint-opt_param-scheduler` was given.

    Raises:
        ScheduleError: an entry differs; names its flag, both values and the ways out.
    """
    for key, flag in _GROUP_FLAGS.items():
        if key in saved and saved[key] != current[key]:
            raise ScheduleError(
                f"{flag} is {current[key]!r}, but the checkpoint was saved with {saved[key]!r}, by which Megatron "
                "finds its optimizer state: give the saved value, or --no-load-optim to start the optimizer anew"
            )
    if one_side_wins:
        return
    allowed = changed_lengths(current, saved)
    for key, flags in _SCHEDULE_FLAGS.items():
        if key in saved and key not in allowed and saved[key] != current[key]:
            raise ScheduleError(
                f"{flags} gives {key} = {current[key]!r}, but the checkpoint was saved with {saved[key]!r}: give the "
                "saved value, or --override-opt_param-scheduler to take the current flags for the whole schedule, or "
                "--use-checkpoint-opt_param-scheduler to take the checkpoint's"
            )
