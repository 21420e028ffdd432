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

from megatron_dsv.transformer.fp32 import KeepsPrecision

DSV_PARTS = (".self_attention.predictor.", ".self_attention.statistics.")


class CheckpointError(ValueError):
    """A checkpoint that cannot be loaded, in one line."""


def guard(load_checkpoint: Callable[..., Any], args: argparse.Namespace) -> Callable[..., Any]:
    """Megatron's ``load_checkpoint`` with a look at the checkpoint before it."""

    def guarded_load_checkpoint(ddp_model: Any, *rest: Any, **kwargs: Any) -> Any:
        from megatron.core.utils import unwrap_model

        folder = _folder(args, kwargs.get("load_arg", "load"))
        if folder is None:
            return load_checkpoint(ddp_model, *rest, **kwargs)
        models = unwrap_model(ddp_model)

        def inspect() -> bool:
            check_optimizer(folder, args)
            return inspect_checkpoint(folder, models)

        with_dsv = _agree(inspect)
        if with_dsv:
            return load_checkpoint(ddp_model, *rest, **kwargs)
        with _without_dsv_state(models) as left_out:
            if left_out and torch.distributed.get_rank() == 0:
                print(f" {folder} holds no predictors: they start from their initial state", flush=True)
            return load_checkpoint(ddp_model, *rest, **kwargs)

    return guarded_load_checkpoint


def inspect_checkpoint(folder: Path, models: Iterable[MegatronModule]) -> bool:
    """Whether the checkpoint in ``folder`` holds what ``models`` need of DSV's state.

    Raises:
        CheckpointError: truncated files, another model's weights, or only a part of the predictors.
    """
    stored = _stored_shapes(folder)
    missing_dsv, present_dsv = [], []
    for model in models:
        for value in nested_values(model.sharded_state_dict()):
            if not isinstance(value, ShardedTensor | ShardedTensorFactory):
                continue
            for tensor in nested_values(value.build()) if isinstance(value, ShardedTensorFactory) else [value]:
                belongs_to_dsv = any(part in tensor.key for part in DSV_PARTS)
                if tensor.key not in stored:
                    if not belongs_to_dsv:
                        raise CheckpointError(f"--load {folder} is a checkpoint of another model: it has no "
                                              f"{tensor.key}; load a checkpoint of this model's preset")
                    missing_dsv.append(tensor.key)
                    continue
                if tuple(stored[tensor.key]) != tuple(tensor.global_shape):
                    raise CheckpointError(
                        f"--load {folder} is a checkpoint of another model: {tensor.key} has shape "
                        f"{tuple(stored[tensor.key])} there and {tuple(tensor.global_shape)} here; use the flags it "
                        "was trained with")
                if belongs_to_dsv:
                    present_dsv.append(tensor.key)
    if missing_dsv and present_dsv:
        raise CheckpointError(f"--load {folder} holds only a part of the predictors: {missing_dsv[0]} is missing; "
                              "use the --dsv-predictor-* flags it was trained with")
    return not missing_dsv


def check_optimizer(folder: Path, args: argparse.Namespace) -> None:
    """Raises CheckpointError if the optimizer state was saved by the other kind of optimizer.

    Megatron stores the state of the distributed optimizer under other keys and has no conversion.
    """
    if args.no_load_optim or args.finetune:
        return
    try:
        content = dist_checkpointing.load_content_metadata(str(folder)) or {}
    except Exception:
        return  # an unreadable folder is reported by the look at its tensors
    distributed = "distrib_optim_sharding_type" in content
    if distributed != args.use_distributed_optimizer:
        raise CheckpointError(
            f"--load {folder} was saved {'with' if distributed else 'without'} --use-distributed-optimizer, this run "
            f"{'without' if distributed else 'with'} it; use the same, or --no-load-optim for the weights alone")


def _stored_shapes(folder: Path) -> dict[str, tuple[int, ...]]:
    """Tensor shapes by key; checks that every file is as long as the checkpoint's own table says."""
    try:
        metadata = FileSystemReader(folder).read_metadata()
    except Exception as error:
        raise CheckpointError(f"--load {folder} is not a complete torch_dist checkpoint: its .metadata cannot be read "
                              f"({type(error).__name__}); use an earlier iteration with --ckpt-step") from error
    ends: dict[str, int] = {}
    for info in (metadata.storage_data or {}).values():
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    for name, end in ends.items():
        path = folder / name
        size = path.stat().st_size if path.is_file() else -1
        if size < end:
            state = "missing" if size < 0 else f"{size} bytes long, {end} are needed"
            raise CheckpointError(f"--load {folder} is truncated: {name} is {state}; use an earlier iteration with "
                                  "--ckpt-step")
    return {key: tuple(value.size) for key, value in metadata.state_dict_metadata.items() if hasattr(value, "size")}


def _folder(args: argparse.Namespace, load_arg: str) -> Path | None:
    """The folder that Megatron will load, or None when it will start from scratch or report by itself."""
    from megatron.training.checkpointing import get_checkpoint_name, get_checkpoint_tracker_filename, read_metadata

    load = getattr(args, load_arg)
    if load is None or not Path(get_checkpoint_tracker_filename(load)).is_file():
        return None
    iteration, release = read_metadata(get_checkpoint_tracker_filename(load))
    if args.ckpt_step:
        iteration = args.ckpt_step
    return Path(get_checkpoint_name(load, iteration, release, return_base_dir=True))


def _agree(check: Callable[[], bool]) -> bool:
    """Runs ``check`` on every rank; if it fails on any of them, all raise the first error."""
    try:
        mine: tuple[bool, str | None] = (check(), None)
    except CheckpointError as error:
        mine = (False, str(error))
    results: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(results, mine)
    errors = [error for _, error in results if error]
    if errors:
        raise CheckpointError(errors[0])
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
