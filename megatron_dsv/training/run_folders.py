"""The folders that a launch loads from and saves to, looked at on every host before anything is built.

A folder to load from must hold a checkpoint, or the run would start from scratch unasked. The exception is a job that
resumes itself: `--load` is its own `--save`, where its first launch finds nothing. A folder to save to must hold no
other run's checkpoint, which would be lost.
"""

from __future__ import annotations

import argparse
from pathlib import Path

TRACKER = "latest_checkpointed_iteration.txt"
"""Megatron's file with the number of the last iteration that was saved whole."""


def check_flags(args: argparse.Namespace) -> None:
    """Raises ValueError for an iteration of no checkpoint."""
    if args.ckpt_step is not None and args.load is None and args.pretrained_checkpoint is None:
        raise ValueError(f"--ckpt-step needs --load, the folder that holds the iteration, got --ckpt-step "
                         f"{args.ckpt_step} alone")


def check(args: argparse.Namespace) -> None:
    """Raises ValueError, which concerns this host, for a folder to load with no checkpoint, or one to save to with one.

    So it does for one that this host cannot look into. Prints a line on rank 0 if a run that resumes itself finds
    nothing yet.
    """
    try:
        _check(args)
    except OSError as error:
        folders = {"--save": args.save, "--load": args.load, "--pretrained-checkpoint": args.pretrained_checkpoint}
        flag = next((flag for flag, folder in folders.items()
                     if folder is not None and str(error.filename).startswith(str(Path(folder)))), "--load")
        raise ValueError(f"{flag} must be a folder that this host can read, got {error.filename}: {error.strerror}; "
                         "mend that, or give another folder") from None


def _check(args: argparse.Namespace) -> None:
    resumes_itself = None not in (args.save, args.load) and Path(args.save).resolve() == Path(args.load).resolve()
    if args.save is not None and not resumes_itself and holds_checkpoint(Path(args.save)):
        newest = (Path(args.save) / TRACKER).read_text(errors="replace").strip()
        other = f"--load is {args.load}" if args.load else "--load is not given"
        raise ValueError(f"--save {args.save} holds iteration {newest} and {other}, so a second run would begin inside "
                         f"it; add --load {args.save} to go on from there, or give another folder")
    if args.pretrained_checkpoint is not None and not holds_checkpoint(Path(args.pretrained_checkpoint)):
        raise ValueError(f"--pretrained-checkpoint {_why_nothing_to_load(Path(args.pretrained_checkpoint))}")
    if args.load is None or holds_checkpoint(Path(args.load)) or args.ckpt_step is not None:
        if args.load is not None and not Path(args.load).is_dir():
            raise ValueError(f"--load {_why_nothing_to_load(Path(args.load))}")
        return
    if not resumes_itself and args.pretrained_checkpoint is None:
        raise ValueError(f"--load {_why_nothing_to_load(Path(args.load))}, or leave it out to start from scratch")
    complete = sorted(Path(args.load).glob("iter_[0-9]*/metadata.json"))
    if complete:
        raise ValueError(f"--load {args.load} holds {complete[-1].parent.name} but no {TRACKER}; use --ckpt-step "
                         f"{int(complete[-1].parent.name[5:])}, or move the folder away to start from scratch")
    if args.rank == 0:
        print(f" --load {args.load} holds no checkpoint yet: the run starts from "
              f"{args.pretrained_checkpoint or 'scratch'}", flush=True)


def holds_checkpoint(folder: Path) -> bool:
    """Whether a run has saved to ``folder``."""
    return (folder / TRACKER).is_file()


def _why_nothing_to_load(folder: Path) -> str:
    """What is wrong with a folder without a tracker file, and the way out."""
    if folder.name.startswith("iter_") and folder.name[5:].isdecimal():
        return (f"must be the folder that a run saved to, got {folder}, one iteration of it; use {folder.parent} with "
                f"--ckpt-step {int(folder.name[5:])}")
    if not folder.is_dir():
        state = "is not a folder" if folder.exists() else "does not exist"
        return f"must be the folder that a run saved to, got {folder}, which {state}; correct it"
    return f"must be the folder that a run saved to, got {folder}, which has no {TRACKER}; correct it"
