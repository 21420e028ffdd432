"""`dsv sample`: a video from a trained checkpoint."""

from __future__ import annotations

import argparse
import contextlib
import logging
import sys
from collections.abc import Iterator
from pathlib import Path

from megatron_dsv.cli.output_file import check_output_file

_LIMITS = (
    *((name, "an integer of at least 1", lambda value: value >= 1) for name in ("frames", "height", "width", "steps")),
    ("seed", "an integer of at least 0 and below 2**63", lambda value: 0 <= value < 2**63),
    # Comparisons with NaN are false, and infinity is below no bound.
    ("guidance", "a number of at least 0", lambda value: 0 <= value < float("inf")),
    ("shift", "a number above 0", lambda value: 0 < value < float("inf")),
    ("keep_ratio", "a number above 0 and at most 1", lambda value: 0 < value <= 1),
    ("fps", "a number of at least 0.01 and at most 1000", lambda value: 0.01 <= value <= 1000),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the flags of `dsv sample`."""
    parser.add_argument("checkpoint", metavar="CHECKPOINT", help="folder that a run saved to (--save), or one of its "
                        "iter_* folders.")
    parser.add_argument("--prompt", required=True, help="what the video shows.")
    parser.add_argument("--negative-prompt", default=None, help="what guidance leads away from; unset is the caption "
                        "that training dropped to.")
    parser.add_argument("--output", default="sample.mp4", metavar="MP4", help="video to write (default: sample.mp4).")
    parser.add_argument("--frames", type=int, default=None, help="frames; unset takes the data set's largest shape.")
    parser.add_argument("--height", type=int, default=None, help="pixels.")
    parser.add_argument("--width", type=int, default=None, help="pixels.")
    parser.add_argument("--fps", type=float, default=16.0, help="of the written video (default: 16).")
    parser.add_argument("--steps", type=int, default=30, help="Euler steps (default: 30).")
    parser.add_argument("--guidance", type=float, default=5.0, help="classifier-free guidance; 1 switches it off "
                        "(default: 5).")
    parser.add_argument("--shift", type=float, default=None, help="timestep shift; unset is the run's --flow-shift.")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--weights", choices=("auto", "ema", "raw"), default="auto", help="moving average of the "
                        "weights, or the last ones; auto takes the average if the checkpoint has one.")
    parser.add_argument("--attention", choices=("dense", "sparse"), default="dense", help="sparse attends to predicted "
                        "keys within each layer's measured budget; a run of windows (--dsv-attention) keeps them with "
                        "dense, and refuses sparse.")
    parser.add_argument("--keep-ratio", type=float, default=None, help="with --attention sparse: force this share.")
    parser.add_argument("--latent-data", default=None, metavar="DIR", help="prepared data set that says how to encode "
                        "text and decode latents; unset is the run's.")
    parser.add_argument("--codec-folder", default=None, metavar="DIR", help="where the VAE lies, if it has moved.")
    parser.add_argument("--text-folder", default=None, metavar="DIR", help="where the text encoder lies, if it has "
                        "moved.")


def run(args: argparse.Namespace) -> int:
    """Samples; returns the exit status. Mistakes end in one line."""
    try:
        check(args)
        from megatron_dsv.training.sampling import sample_video

        with _quiet_kernels():
            sample_video(args)
    except (ValueError, NotImplementedError) as error:
        print(f"dsv sample: error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.output}")
    return 0


@contextlib.contextmanager
def _quiet_kernels() -> Iterator[None]:
    """Which backend `auto` takes is news for a training log; here it would bury the one line of the result."""
    logger = logging.getLogger("megatron_dsv.kernels")
    level = logger.level
    logger.setLevel(logging.WARNING)
    try:
        yield
    finally:
        logger.setLevel(level)


def check(args: argparse.Namespace) -> None:
    """Raises ValueError for what can be seen before anything is built."""
    if not Path(args.checkpoint).is_dir():
        raise ValueError(f"CHECKPOINT must be a folder that a run saved to, got {args.checkpoint}, which is none")
    for name, allowed, holds in _LIMITS:
        value = getattr(args, name)
        if value is not None and not holds(value):
            raise ValueError(f"--{name.replace('_', '-')} must be {allowed}, got {value}")
    sizes = [args.frames, args.height, args.width]
    if any(size is not None for size in sizes) and None in sizes:
        raise ValueError("--frames, --height and --width must be given together, got only some of them")
    if args.keep_ratio is not None and args.attention != "sparse":
        raise ValueError(f"--keep-ratio needs --attention sparse, got --attention {args.attention}")
    for name in ("codec_folder", "text_folder"):
        folder = getattr(args, name)
        if folder is not None and not Path(folder).is_dir():
            raise ValueError(f"--{name.replace('_', '-')} must be a folder, got {folder}, which is none")
    if Path(args.output).suffix.lower() != ".mp4":
        raise ValueError(f"--output must end in .mp4, got {args.output}")
    check_output_file("--output", args.output)
