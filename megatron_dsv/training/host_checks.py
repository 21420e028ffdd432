"""What a launch asks of the host it runs on: devices, and folders that it will write to."""

from __future__ import annotations

import argparse
import os
from pathlib import Path

import torch

from megatron_dsv.config import DSVConfig
from megatron_dsv.config_fields import flag_of, from_args
from megatron_dsv.training.cp_costs import costs_of
from megatron_dsv.training.kernel_checks import check_gpu

_WRITTEN = ("save", "tensorboard_dir", "wandb_save_dir")
_ANYWHERE = ("auto", "reference", "sdpa")
"""Attention backends that run without a GPU."""
_READ = ("nccl_communicator_config_path", "te_precision_config_file", "tp_comm_overlap_cfg")


def check_host(args: argparse.Namespace) -> None:
    """Check what only this host knows, before anything is built on it.

    Raises:
        ValueError, NotImplementedError: one line with the flag, what is allowed, what it got and the way out.
    """
    _check_devices(args)
    check_folders(args)


def check_folders(args: argparse.Namespace) -> None:
    """The part of ``check_host`` that concerns folders and files, which hosts without a GPU see alike.

    Raises:
        ValueError: as ``check_host``.
    """
    for name in _WRITTEN:
        folder = getattr(args, name, None)
        if folder is not None and "://" not in folder:
            try:
                _check_writable(name, folder)
            except OSError as error:
                raise ValueError(f"{flag_of(name)} must be a folder that this host can write, got {folder}: "
                                 f"{error.strerror}; mend that, or name another") from None
    for name in _READ:
        file = getattr(args, name, None)
        if file is not None and not Path(file).is_file():
            raise ValueError(f"{flag_of(name)} must be a file, got {file}, which does not exist")
    if args.context_parallel_size > 1:
        costs_of(from_args(DSVConfig, args), device=None, head_dim=args.kv_channels)


def _check_devices(args: argparse.Namespace) -> None:
    if torch.cuda.is_available():
        check_gpu(args, torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))))
        return
    if args.distributed_backend == "nccl":
        raise ValueError("--distributed-backend nccl needs CUDA, which this host does not have; use gloo")
    if args.async_save:
        raise NotImplementedError("--async-save needs CUDA, which this host does not have; drop it")
    if args.gpu_sniff_test_interval is not None:
        raise ValueError("--gpu-sniff-test-interval needs CUDA, which this host does not have; drop it")
    if args.profile and not args.use_pytorch_profiler:
        raise ValueError("--profile needs CUDA, which this host does not have; add --use-pytorch-profiler")
    for name in ("dsv_sparse_backend", "dsv_dense_backend"):
        backend = getattr(args, name)
        # Triton's interpreter, for tests, runs its kernels on the CPU.
        interpreted = backend == "triton" and os.environ.get("TRITON_INTERPRET") == "1"
        if backend not in _ANYWHERE and not interpreted:
            raise ValueError(f"{flag_of(name)} {backend} needs CUDA, which this host does not have; use auto")


def _check_writable(name: str, folder: str) -> None:
    path = Path(folder).absolute()
    if path.exists() and not path.is_dir():
        raise ValueError(f"{flag_of(name)} must be a folder, got {folder}, which is a file; name another")
    existing = next(parent for parent in (path, *path.parents) if parent.exists())
    if not existing.is_dir():
        raise ValueError(f"{flag_of(name)} must be a folder, got {folder}, whose parent {existing} is a file; name "
                         "another")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise ValueError(f"{flag_of(name)} must be a folder that this user may write, got {folder}; name another, or "
                         f"change the rights of {existing}")
