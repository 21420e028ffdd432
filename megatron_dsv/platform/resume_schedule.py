"""Compare a checkpoint's learning-rate schedule with the current flags before anything is loaded.

A schedule is a dict as from `OptimizerParamScheduler.state_dict()`; its lengths are in samples.
"""

import math
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


class ScheduleError(ValueError):
    """A resume whose learning-rate schedule differs from the checkpoint's, in one line."""


def changed_lengths(current: dict[str, Any], saved: dict[str, Any]) -> set[str]:
    """The entries that differ because the run is longer or shorter (`--train-iters`, `--lr-decay-iters`, samples).

    A warm-up that is the same fraction of either run is among them.
    """
    changed = {key for key in _LENGTHS if key in saved and saved[key] != current[key]}
    if "lr_decay_steps" in changed and saved.get("lr_warmup_steps") != current["lr_warmup_steps"]:
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
