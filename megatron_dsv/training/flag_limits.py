"""Which values Megatron's own flags may have, as a table: Megatron finds most of these mistakes late or never."""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from megatron_dsv.config_fields import flag_of

_MAX_SEED = 2**31 - 1
"""Megatron adds offsets of ranks to the seed, and numpy takes 32 bits."""


@dataclass(frozen=True)
class Limit:
    """Attributes: ``allowed`` in words, ``holds`` for an allowed value, ``way_out`` where the words do not say it."""

    allowed: str
    holds: Callable[[Any], bool]
    way_out: str = ""


def _count(way_out: str = "") -> Limit:
    return Limit("an integer of at least 1", lambda value: value >= 1, way_out)


def _at_least_0(way_out: str = "", noun: str = "an integer") -> Limit:
    return Limit(f"{noun} of at least 0", lambda value: value >= 0, way_out)


def _positive(way_out: str = "") -> Limit:
    return Limit("a number above 0", lambda value: value > 0, way_out)


def _share(way_out: str = "") -> Limit:
    return Limit("a number of at least 0 and below 1", lambda value: 0 <= value < 1, way_out)


_NEVER = "leave it unset to do without"

LIMITS: dict[str, Limit] = {
    # the model
    **dict.fromkeys(("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "kv_channels",
                     "seq_length", "max_position_embeddings", "recompute_num_layers",
                     "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
                     "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"), _count()),
    "init_method_std": _positive("0.02 is usual"),
    "layernorm_epsilon": _positive("1e-6 is usual"),
    # the loop
    **dict.fromkeys(("micro_batch_size", "global_batch_size", "eval_micro_batch_size", "eval_global_batch_size",
                     "log_interval", "tensorboard_log_interval", "tensorboard_queue_size",
                     "distributed_timeout_minutes", "distributed_timeout_seconds_after_init", "ddp_num_buckets",
                     "ddp_bucket_size", "dist_ckpt_workers", "num_dataset_builder_threads"), _count()),
    "train_iters": _count("to evaluate alone use --skip-train"),
    "train_samples": _count("to evaluate alone use --skip-train"),
    "eval_interval": _count("to switch evaluation off use --eval-iters 0"),
    "eval_iters": _at_least_0(),
    "start_eval_at_iter": _at_least_0(),
    "num_workers": _at_least_0("0 loads data in the training process"),
    "manual_gc_interval": _at_least_0(),
    "ckpt_step": _count("leave it unset to take the newest iteration"),
    **dict.fromkeys(("save_interval", "save_retain_interval", "exit_interval",
                     "exit_duration_in_mins", "log_memory_interval", "train_sync_interval", "gpu_sniff_test_interval",
                     "check_weight_hash_across_dp_replicas_interval"), _count(_NEVER)),
    "iterations_to_skip": _count(),
    "profile_step_start": _at_least_0(),
    "profile_step_end": _at_least_0(),
    "profile_ranks": _at_least_0(),
    "seed": Limit(f"an integer of at least 1 and at most {_MAX_SEED}", lambda value: 1 <= value <= _MAX_SEED),
    # the optimizer
    "lr": _positive("1e-4 is usual for pretraining"),
    "min_lr": _at_least_0(noun="a number"),
    "lr_warmup_init": _at_least_0(noun="a number"),
    "lr_warmup_iters": _at_least_0(),
    "lr_warmup_samples": _at_least_0(),
    "lr_warmup_fraction": _share(),
    **dict.fromkeys(("lr_decay_iters", "lr_decay_samples", "lr_wsd_decay_iters", "lr_wsd_decay_samples"),
                    _count("leave it unset to take the length of the run")),
    **dict.fromkeys(("weight_decay", "start_weight_decay", "end_weight_decay"), _at_least_0(noun="a number")),
    "clip_grad": _at_least_0("0 switches clipping off", noun="a number"),
    **dict.fromkeys(("adam_beta1", "adam_beta2", "sgd_momentum"), _share()),
    "adam_eps": _positive("1e-8 is usual"),
    "loss_scale": _positive("leave it unset for a dynamic scale"),
    "initial_loss_scale": _positive(),
    "min_loss_scale": _positive(),
    "loss_scale_window": _positive(),
    "hysteresis": _count(),
}
"""Argument -> limit; an argument that is None was not given."""


_OTHER_FLAGS = {"fp8": "fp8_format", "fp4": "fp4_format", "layernorm_zero_centered_gamma": "apply_layernorm_1p",
                "layernorm_epsilon": "norm_epsilon"}


def megatron_flag(name: str) -> str:
    """The flag that sets an argument; a few of Megatron's have another name than their argument."""
    return flag_of(_OTHER_FLAGS.get(name, name))


def check_limits(args: argparse.Namespace) -> None:
    """Check every argument against :data:`LIMITS`, and every number of any flag for being finite.

    Raises:
        ValueError: one line with the flag, what is allowed, what it got and the way out.
    """
    for name, limit in LIMITS.items():
        for value in _numbers(getattr(args, name, None)):
            if not limit.holds(value):
                way_out = f"; {limit.way_out}" if limit.way_out else ""
                raise ValueError(f"{megatron_flag(name)} must be {limit.allowed}, got {value}{way_out}")
    for name, given in vars(args).items():
        for value in _numbers(given):
            if not math.isfinite(value):
                raise ValueError(f"{megatron_flag(name)} must be a finite number, got {value}")


def _numbers(given: Any) -> Iterator[int | float]:
    for value in given if isinstance(given, list) else [given]:
        if isinstance(value, int | float) and not isinstance(value, bool):
            yield value
