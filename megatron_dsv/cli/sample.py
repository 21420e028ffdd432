"""`dsv sample`: a video from a trained checkpoint."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path


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
                        "keys within each layer's measured budget.")
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

        sample_video(args)
    except (ValueError, NotImplementedError) as error:
        print(f"dsv sample: error: {error}", file=sys.stderr)
        return 2
    print(f"wrote {args.output}")
    return 0


def check(args: argparse.Namespace) -> None:
    """Raises ValueError for what can be seen before anything is built."""
    if not Path(args.checkpoint).is_dir():
        raise ValueError(f"CHECKPOINT must be a folder that a run saved to, got {args.checkpoint}, which is none")
    for name, least in (("steps", 1), ("guidance", 0), ("fps", 0)):
        if getattr(args, name) < least or (least == 0 and name == "fps" and args.fps == 0):
            raise ValueError(f"--{name} must be {'at least 1' if least else 'above 0'}, got {getattr(args, name)}")
    if args.shift is not None and not args.shift > 0:
        raise ValueError(f"--shift must be above 0, got {args.shift}")
    sizes = [args.frames, args.height, args.width]
    if any(size is not None for size in sizes) and None in sizes:
        raise ValueError("--frames, --height and --width must be given together, got only some of them")
    if args.keep_ratio is not None and args.attention != "sparse":
        raise ValueError(f"--keep-ratio needs --attention sparse, got --attention {args.attention}")
    if Path(args.output).suffix.lower() != ".mp4":
        raise ValueError(f"--output must end in .mp4, got {args.output}")
    if not os.access(Path(args.output).resolve().parent, os.W_OK):
        raise ValueError(f"--output must lie in a folder that can be written, got {args.output}")
