"""Whether the attention kernels that a launch asks for can serve it: by kind on any host, by device where there is one.

Nothing here imports a kernel library: what one serves is known without it.
"""

from __future__ import annotations

import argparse

import torch

from megatron_dsv.config import DSVConfig
from megatron_dsv.config_fields import from_args
from megatron_dsv.kernels.dense_attention import flash4
from megatron_dsv.kernels.library import PACKAGES, hopper_limit
from megatron_dsv.kernels.sparse_attention import choice


def check_kinds(args: argparse.Namespace) -> None:
    """Check backends that were asked for by name against data type, head size, blocks and determinism.

    A kernel would refuse them when it is first used, which for the sparse one is when a layer's gate opens.

    Raises:
        NotImplementedError: one line with the flag, what is allowed, what it got and the way out.
    """
    dsv = from_args(DSVConfig, args)
    if dsv.may_be_sparse:
        limit = choice.limit_of_kind(
            dsv.dsv_sparse_backend, dtype=_dtype(args), heads=args.num_attention_heads,
            kv_heads=args.num_attention_heads, head_dim=_head_dim(args), q_block_size=dsv.dsv_q_block_size,
            kv_block_size=dsv.dsv_kv_block_size, deterministic=dsv.dsv_deterministic)
        if limit is not None:
            raise NotImplementedError(f"--dsv-sparse-backend {dsv.dsv_sparse_backend} {limit} "
                                      f"({_kind(args)}); use auto, which takes one that can serve")
    if dsv.dsv_dense_backend == "flash4" and (limit := flash4.limit_of_kind(_dtype(args), _head_dim(args))):
        raise NotImplementedError(f"--dsv-dense-backend flash4 {limit} ({_kind(args)}); use auto, which takes one "
                                  "that can serve")


def check_gpu(args: argparse.Namespace, device: torch.device | None) -> None:
    """Check what GPUs refuse: libraries that they lack, and gradients that must repeat.

    Args:
        args: validated.
        device: this rank's GPU; None for GPUs that are not here, which are taken for Hopper ones with every library.

    Raises:
        NotImplementedError: one line with the flag, what is allowed, what it got and the way out.
    """
    dsv = from_args(DSVConfig, args)
    for flag, backend, used in (("--dsv-dense-backend", dsv.dsv_dense_backend, True),
                                ("--dsv-sparse-backend", dsv.dsv_sparse_backend, dsv.may_be_sparse)):
        if used and backend in PACKAGES and (limit := _missing(backend, device)):
            raise NotImplementedError(f"{flag} {backend} {limit}; use auto, which takes one that can serve")
    _check_repeatable(args, dsv, device)
    _check_split_sequences(args, dsv)


def _check_repeatable(args: argparse.Namespace, dsv: DSVConfig, device: torch.device | None) -> None:
    """sdpa's backward repeats on CUDA in torch's deterministic mode alone, and as one of two plain passes never."""
    split = args.context_parallel_size > 1
    if not dsv.dsv_deterministic or dsv.dsv_dense_backend not in ("auto", "sdpa") or \
            (args.deterministic_mode and not split):
        return
    reason = "sdpa was asked for"
    if dsv.dsv_dense_backend == "auto":
        limit = _missing("flash4", device) or flash4.limit_of_kind(_dtype(args), _head_dim(args))
        if limit is None:
            return
        reason = f"flash4 {limit}"
    where = f" with --context-parallel-size {args.context_parallel_size}" if split else ""
    mode = "" if split else "add --deterministic-mode, under which they do, "
    raise NotImplementedError(
        f"--dsv-deterministic{where} needs --dsv-dense-backend flash4 or reference, got {dsv.dsv_dense_backend}: "
        f"{reason}, and gradients of sdpa do not repeat; {mode}install flash-attn-4 on Hopper GPUs, use reference "
        "(slow), or drop --dsv-deterministic")


def _check_split_sequences(args: argparse.Namespace, dsv: DSVConfig) -> None:
    """Dense blocks of a split sequence take plain passes, of which sdpa has none in fp32 on CUDA."""
    always_sparse = dsv.window_fraction is not None or (
        dsv.dsv_sparse_stage == "sparse" and dsv.dsv_keep_ratio is not None)
    if args.context_parallel_size > 1 and dsv.dsv_dense_backend in ("auto", "sdpa") and not always_sparse and \
            _dtype(args) == torch.float32:
        raise NotImplementedError(
            f"--context-parallel-size {args.context_parallel_size} needs --bf16 or --fp16 on GPUs, got fp32: no fast "
            "kernel of dense attention merges parts in it; add --bf16, or use --dsv-dense-backend reference (slow)")


def _missing(backend: str, device: torch.device | None) -> str | None:
    return None if device is None else hopper_limit(backend, device)


def _dtype(args: argparse.Namespace) -> torch.dtype:
    """Of queries, keys and values."""
    return torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else torch.float32


def _head_dim(args: argparse.Namespace) -> int:
    return args.kv_channels or args.hidden_size // args.num_attention_heads


def _kind(args: argparse.Namespace) -> str:
    """The flags that make a kind, in words."""
    precision = next((f"--{name}" for name in ("bf16", "fp16") if getattr(args, name)), "neither --bf16 nor --fp16")
    deterministic = ", --dsv-deterministic" if args.dsv_deterministic else ""
    return (f"{precision}, heads of {_head_dim(args)}, --dsv-q-block-size {args.dsv_q_block_size}, "
            f"--dsv-kv-block-size {args.dsv_kv_block_size}{deterministic}")
