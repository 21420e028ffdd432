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
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.transformer.module import MegatronModule
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.api import CheckpointException

from megatron_dsv.transformer.fp32 import KeepsPrecision

DSV_PARTS = (".self_attention.predictor.", ".self_attention.statistics.")
LAYERS = "decoder.layers."


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded, in one line."""


def guard(load_checkpoint: Callable[..., Any], args: argparse.Namespace) -> Callable[..., Any]:
    """Megatron's ``load_checkpoint`` with a look at the checkpoint before it."""

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
            if flag == "--load":
                check_optimizer(folder, args)
            return with_dsv

        if root is None or _agree(flag, inspect):
            return load_checkpoint(ddp_model, *rest, **kwargs)
        if args.dsv_sparse_stage == "sparse":
            raise CheckpointError(f"{flag} {root} holds no predictors, and --dsv-sparse-stage sparse needs trained "
                                  "ones; start with predictor or auto")
        with _without_dsv_state(models) as left_out:
            if left_out and torch.distributed.get_rank() == 0:
                print(f" {root} holds no predictors: they start from their initial state", flush=True)
            return load_checkpoint(ddp_model, *rest, **kwargs)

    return guarded_load_checkpoint


def inspect_checkpoint(folder: Path, models: Iterable[MegatronModule]) -> bool:
    """Whether the checkpoint in ``folder`` holds what ``models`` need of DSV's state.

    Raises:
        CheckpointError: truncated files, another model's weights, or only a part of the predictors.
    """
    stored = _stored_shapes(folder)
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


def check_optimizer(folder: Path, args: argparse.Namespace) -> None:
    """Raises CheckpointError if the optimizer state was saved by the other kind of optimizer.

    Megatron stores the state of the distributed optimizer under other keys and has no conversion.
    """
    if args.no_load_optim or args.finetune:
        return
    try:
        content = dist_checkpointing.load_content_metadata(str(folder)) or {}
    except (Exception, CheckpointException) as error:
        raise CheckpointError(f"{folder} is not a complete torch_dist checkpoint: its common state cannot be read "
                              f"({type(error).__name__}); use an earlier iteration with --ckpt-step") from error
    distributed = "distrib_optim_sharding_type" in content
    if distributed != args.use_distributed_optimizer:
        raise CheckpointError(
            f"{folder} was saved {'with' if distributed else 'without'} --use-distributed-optimizer, this run "
            f"{'without' if distributed else 'with'} it; use the same, or --no-load-optim for the weights alone")


def _stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Tensor shapes by key; checks that every file is as long as the checkpoint's own table says."""
    incomplete = f"{folder} is not a complete torch_dist checkpoint"
    try:
        complete = dist_checkpointing.check_is_distributed_checkpoint(str(folder))
    except Exception:
        complete = False
    if not complete:
        raise CheckpointError(f"{incomplete}: its metadata.json is missing or cannot be read; use an earlier "
                              "iteration with --ckpt-step")
    try:
        metadata = FileSystemReader(folder).read_metadata()
    except Exception as error:
        raise CheckpointError(f"{incomplete}: its .metadata cannot be read ({type(error).__name__}); use an earlier "
                              "iteration with --ckpt-step") from error
    ends: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in ends.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else -1
        if size < end:
            state = "missing" if size < 0 else f"{size} bytes long, {end} are needed"
            raise CheckpointError(f"{folder} is truncated: {name} is {state}; use an earlier iteration with "
                                  "--ckpt-step")
    return {key: tuple(value.size) for key, value in metadata.state_dict_metadata.items() if hasattr(value, "size")}


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
        mine = (False, f"cannot be read: {type(error).__name__}: {error}")
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
