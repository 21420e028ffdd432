"""What a run was started with, written into its folder before the first step."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import enum
import functools
import importlib.metadata
import os
import shlex
from pathlib import Path
from typing import Any

import yaml

import megatron_dsv
from megatron_dsv.training.save_failures import told

_PATHS = frozenset({"save", "load", "latent-data", "pretrained-checkpoint", "tensorboard-dir", "wandb-save-dir",
                    "memory-snapshot-path", "flight-recorder-dump-path", "config-logger-dir",
                    "nccl-communicator-config-path", "ckpt-convert-save", "te-precision-config-file",
                    "dump-param-to-param-group-map", "dsv-cp-calibration"})
"""Settings that name a file or a folder, relative to where the run was launched."""

_PATHS_OR_NAMES = frozenset({"dsv-cp-cluster"})
"""Settings that name a YAML file by its ending, or else something packaged."""


def install(args: argparse.Namespace) -> None:
    """Makes Megatron's ``pretrain()`` write the run's configuration once the model is built and loaded.

    Not before: a launch that is refused leaves the folder that it would resume as it was. So does one that only
    evaluates, which would put its own settings in the place of the run's.
    """
    if args.skip_train:
        return
    from megatron.training import training

    setup = training.setup_model_and_optimizer

    @functools.wraps(setup)
    def setup_and_write(*rest: Any, **kwargs: Any) -> Any:
        result = setup(*rest, **kwargs)
        write_run_config(args)
        return result

    training.setup_model_and_optimizer = setup_and_write


def write_run_config(args: argparse.Namespace, folder: str | None = None) -> Path | None:
    """Write ``config.yaml``, ``resolved.yaml`` and a line of ``launches.txt``; rank 0 only.

    ``config.yaml`` is the merged result of files and flags, with absolute paths: ``--config config.yaml`` launches the
    same from any folder, and so resumes a run whose ``--load`` is its own ``--save``; other folders repeat it.
    ``resolved.yaml`` is every argument after validation; ``launches.txt`` gains a line per launch.

    Args:
        args: what :func:`megatron_dsv.training.arguments.parse` returned.
        folder: where to; default ``--save``, else ``--tensorboard-dir``.

    Returns:
        The path of ``config.yaml``, or None on other ranks and for a run that has no folder.

    Raises:
        NotSavedHereError: the folder cannot be written.
    """
    folder = folder or args.save or args.tensorboard_dir
    if args.rank != 0 or folder is None:
        return None
    target = Path(folder)
    with told("the run's configuration", folder):
        target.mkdir(parents=True, exist_ok=True)
        _write(args, target)
    return target / "config.yaml"


def _write(args: argparse.Namespace, target: Path) -> None:
    versions = {"megatron-dsv": megatron_dsv.__version__}
    versions |= {name: importlib.metadata.version(name) for name in ("megatron-core", "torch")}
    header = (f"# {', '.join(f'{name} {version}' for name, version in versions.items())}; {args.world_size} ranks\n"
              f"# {shlex.join(args.launch_argv)}\n")
    settings = _with_absolute_paths(args.launch_settings)
    _replace(target / "config.yaml", header + yaml.safe_dump(settings, sort_keys=False, width=120))
    resolved = {name: _plain(value) for name, value in sorted(vars(args).items()) if not name.startswith("_")}
    _replace(target / "resolved.yaml", yaml.safe_dump(resolved, width=120))
    stamp = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    with (target / "launches.txt").open("a", encoding="utf-8") as log:
        log.write(f"{stamp} ranks={args.world_size} {shlex.join(args.launch_argv)}\n")


def names_path(key: str) -> bool:
    """Whether a setting names a file or a folder, or may."""
    return key in _PATHS | _PATHS_OR_NAMES


def _with_absolute_paths(settings: dict[str, Any]) -> dict[str, Any]:
    return {key: os.path.abspath(str(value)) if _is_path(key, str(value)) else value
            for key, value in settings.items()}


def _is_path(key: str, value: str) -> bool:
    if key in _PATHS_OR_NAMES:
        return value.endswith((".yaml", ".yml"))
    return key in _PATHS and "://" not in value


def _replace(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        os.replace(partial, path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink()
        raise


def _plain(value: Any) -> Any:
    if isinstance(value, enum.Enum):
        return value.name
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, list | tuple):
        return [_plain(entry) for entry in value]
    if isinstance(value, dict):
        return {str(key): _plain(entry) for key, entry in value.items()}
    return str(value)
