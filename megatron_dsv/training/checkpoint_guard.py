"""Looks at a checkpoint before Megatron loads it: a broken or foreign one gives one error and touches nothing.

A dense checkpoint of the same model starts DSV: only the predictors' and statistics' keys may be missing, all or none.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.module import MegatronModule
from torch.distributed.checkpoint.api import CheckpointException

from megatron_dsv.training import model_identity
from megatron_dsv.training.checkpoint_files import (
    CheckpointError,
    common_state,
    host_trouble,
    stored_shapes,
    verify_checksums,
)
from megatron_dsv.transformer.fp32 import KeepsPrecision

DSV_PARTS = (".self_attention.predictor.", ".self_attention.statistics.")
LAYERS = "decoder.layers."


def found(args: argparse.Namespace) -> tuple[str, Path | None]:
    """The flag by which a launch finds its checkpoint, and the folder of the iteration; None if it finds none.

    Raises:
        CheckpointError: as ``checkpoint_folder``.
    """
    flag, root = _source(args, "load")
    return flag, checkpoint_folder(root, args.ckpt_step)


def begins_run(args: argparse.Namespace, flag: str) -> bool:
    """Whether the checkpoint of ``flag`` gives weights alone, to a run of their own that it is not compared with.

    Megatron takes a pretrained checkpoint as it takes any under --finetune.
    """
    return args.finetune or flag != "--load"


def check_before_build(args: argparse.Namespace) -> Any:
    """Looks at what this launch would load, on every rank for itself, before anything is built.

    Returns:
        The arguments of the run that this launch resumes; None if it begins a run of its own, or the checkpoint does
        not hold them.

    Raises:
        CheckpointError: truncated files, another model, an optimizer's state of another kind, or a folder out of
            this host's reach.
    """
    flag, root = _source(args, "load")
    try:
        folder = checkpoint_folder(root, args.ckpt_step)
        if folder is None:
            return None
        stored_shapes(folder)
        saved = common_state(folder).get("args")
        if saved is None:
            return None
        model_identity.check_sizes(saved, args, str(folder))
        if begins_run(args, flag):
            return None
        model_identity.check_model(saved, args, str(folder))
        if not (args.no_load_optim or getattr(saved, "no_save_optim", False)):
            model_identity.check_optimizer(saved, args, str(folder))
        return saved
    except CheckpointError as error:
        raise CheckpointError(f"{flag} {error}") from error
    except OSError as error:
        raise CheckpointError(f"{flag} {root} {host_trouble(error) or f'cannot be read: {error}'}") from error


def loaded_arguments(args: argparse.Namespace) -> Any:
    """Arguments of the run whose checkpoint this launch loads, to resume it or for its weights; None without one.

    Raises:
        CheckpointError: they cannot be read.
    """
    _, folder = found(args)
    return None if folder is None else common_state(folder).get("args")


def guard(load_checkpoint: Callable[..., Any], args: argparse.Namespace) -> Callable[..., Any]:
    """Megatron's ``load_checkpoint`` with a look at the checkpoint before it.

    Every rank reads its share of what will be loaded once more, and compares checksums: Megatron's readers do not.
    """

    def guarded_load_checkpoint(ddp_model: Any, *rest: Any, **kwargs: Any) -> Any:
        from megatron.core.utils import unwrap_model

        models = unwrap_model(ddp_model)
        flag, root = _source(args, kwargs.get("load_arg", "load"))

        def inspect() -> bool:
            folder = checkpoint_folder(root, args.ckpt_step)
            if folder is None:
                if flag == "--load":
                    return True  # Megatron starts from scratch
                raise CheckpointError(f"{root} holds no checkpoint; give the folder that a run saved to")
            with_dsv = inspect_checkpoint(folder, models)
            weights_alone = args.no_load_optim or begins_run(args, flag)
            verify_checksums(folder, lambda key: not (weights_alone and key.startswith("optimizer.")),
                             part=torch.distributed.get_rank(), parts=torch.distributed.get_world_size())
            return with_dsv

        def load() -> Any:
            try:
                return load_checkpoint(ddp_model, *rest, **kwargs)
            except CheckpointException as error:  # torch raises it on every rank
                first = next(iter(error.failures.values()), (error,))[0]
                raise CheckpointError(f"{flag} {root} cannot be loaded: {type(first).__name__}: "
                                      f"{' '.join(str(first).split())}") from error

        if root is None or _agree(flag, inspect):
            return load()
        if args.dsv_sparse_stage == "sparse":
            raise CheckpointError(f"{flag} {root} holds no predictors, and --dsv-sparse-stage sparse needs trained "
                                  "ones; start with predictor or auto")
        with _without_dsv_state(models) as left_out:
            if left_out and torch.distributed.get_rank() == 0:
                print(f" {root} holds no predictors: they start from their initial state", flush=True)
            return load()

    return guarded_load_checkpoint


def inspect_checkpoint(folder: Path, models: Iterable[MegatronModule]) -> bool:
    """Whether the checkpoint in ``folder`` holds what ``models`` need of DSV's state.

    Raises:
        CheckpointError: truncated files, another model's weights, or only a part of the predictors.
    """
    stored = stored_shapes(folder)
    missing_dsv, present_dsv = [], []
    used = set()
    for model in models:
        for value in nested_values(model.sharded_state_dict()):
            if not isinstance(value, ShardedTensor | ShardedTensorFactory):
                continue
            for tensor in nested_values(value.build()) if isinstance(value, ShardedTensorFactory) else [value]:
                belongs_to_dsv = _belongs_to_dsv(tensor.key)
                used.add(tensor.key)
                if tensor.key not in stored:
                    if not belongs_to_dsv:
                        raise CheckpointError(f"{folder} is a checkpoint of another model: it has no {tensor.key}; "
                                              "use the flags it was trained with")
                    missing_dsv.append(tensor.key)
                    continue
                if tuple(stored[tensor.key]) != tuple(tensor.global_shape):
                    raise CheckpointError(
                        f"{folder} is a checkpoint of another model: {tensor.key} has shape "
                        f"{tuple(stored[tensor.key])} there and {tuple(tensor.global_shape)} here; use the flags it "
                        "was trained with")
                if belongs_to_dsv:
                    present_dsv.append(tensor.key)
    if missing_dsv and present_dsv:
        raise CheckpointError(f"{folder} holds only a part of the predictors: {missing_dsv[0]} is missing; use the "
                              "--dsv-predictor-* flags it was trained with")
    # Every pipeline stage has whole layers, so a stage can tell what no layer has.
    unused = sorted(key for key in stored if key.startswith(LAYERS) and not _belongs_to_dsv(key) and key not in used)
    if unused:
        raise CheckpointError(f"{folder} is a checkpoint of another model: it has {unused[0]}, which this model has "
                              "not; use the flags it was trained with")
    return not missing_dsv


def _belongs_to_dsv(key: str) -> bool:
    return any(part in key for part in DSV_PARTS)


def _source(args: argparse.Namespace, load_arg: str) -> tuple[str, str | None]:
    """The flag by which Megatron will find a checkpoint, and the folder it gives."""
    from megatron.training.checkpointing import checkpoint_exists

    load = getattr(args, load_arg)
    if args.pretrained_checkpoint is not None and not checkpoint_exists(load):
        return "--pretrained-checkpoint", args.pretrained_checkpoint
    return "--load", load


def checkpoint_folder(root: str | Path | None, step: int | None) -> Path | None:
    """The iteration's folder that will be loaded from ``root``; None if nothing was ever saved there.

    Args:
        root: folder that a run saved to.
        step: iteration; None takes the one that the run's tracker file names.

    Raises:
        CheckpointError: the tracker file holds no number, or the iteration is not there.
    """
    from megatron.training.checkpointing import get_checkpoint_name, get_checkpoint_tracker_filename

    if root is None:
        return None
    tracker = Path(get_checkpoint_tracker_filename(str(root)))
    text = tracker.read_text(errors="replace").strip() if tracker.is_file() else ""
    if tracker.is_file() and text != "release" and not text.isdecimal():
        raise CheckpointError(f"{root} has a {tracker.name} without an iteration in it, got {text[:20]!r}; write the "
                              "number of a saved iteration into it")
    if not step and not text:
        return None
    folder = Path(get_checkpoint_name(str(root), step or (0 if text == "release" else int(text)),
                                      text == "release" and not step, return_base_dir=True))
    if not folder.is_dir():
        saved = ", ".join(str(int(path.name[5:])) for path in sorted(Path(root).glob("iter_[0-9]*"))) or "none"
        raise CheckpointError(f"{folder} does not exist, though {'--ckpt-step' if step else tracker.name} names it; "
                              f"use --ckpt-step with a saved iteration: {saved}")
    return folder


def _agree(flag: str, check: Callable[[], bool]) -> bool:
    """Runs ``check`` on every rank; if it fails on any of them, all raise the first error, about ``flag``."""
    try:
        mine: tuple[bool, str | None] = (check(), None)
    except CheckpointError as error:
        mine = (False, str(error))
    except Exception as error:  # on one rank alone it would leave the others waiting
        mine = (False, f"cannot be read: {type(error).__name__}: {' '.join(str(error).split())}")
    results: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(results, mine)
    errors = [error for _, error in results if error]
    if errors:
        raise CheckpointError(f"{flag} {errors[0]}")
    return all(ok for ok, _ in results)


@contextmanager
def _without_dsv_state(models: Iterable[MegatronModule]) -> Iterator[bool]:
    """Hides predictors and statistics from the state dict while a checkpoint without them is loaded."""
    parts = [module for model in models for module in model.modules() if isinstance(module, KeepsPrecision)]
    for part in parts:
        part.in_checkpoint = False
    try:
        yield bool(parts)
    finally:
        for part in parts:
            part.in_checkpoint = True
