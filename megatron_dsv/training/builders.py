"""Builds the model from parsed arguments, for Megatron's `pretrain()` and for sampling."""

from __future__ import annotations

import argparse
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.training.argument_utils import core_transformer_config_from_args
from torch.nn import functional

from megatron_dsv.config import DSVConfig
from megatron_dsv.config_fields import from_args
from megatron_dsv.context_parallel.plan_commit import PlanStore
from megatron_dsv.models.config import VideoDiTConfig
from megatron_dsv.models.video_dit import VideoDiT
from megatron_dsv.transformer.layer_specs import get_dit_layer_spec
from megatron_dsv.transformer.transformer_config import DiTTransformerConfig


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU in its tanh approximation."""
    return functional.gelu(x, approximate="tanh")


def build_config(args: argparse.Namespace) -> DiTTransformerConfig:
    """Megatron's transformer configuration of this model, with the DSV configuration inside."""
    config = core_transformer_config_from_args(args, DiTTransformerConfig)
    config.dsv = from_args(DSVConfig, args)
    config.gated_linear_unit = args.dit_mlp == "geglu"
    config.activation_func = gelu_tanh if args.dit_mlp == "gelu-tanh" else functional.gelu
    config.bias_activation_fusion = False
    config.variable_seq_lengths = len(args.latent_shapes) > 1
    return config


def make_process_groups() -> None:
    """Megatron's process groups of a model that is not split."""
    parallel_state.initialize_model_parallel()


def process_groups(given: Any = None) -> Any:
    """Megatron's process groups: those given, or those that it made last."""
    return ProcessGroupCollection.use_mpu_process_groups() if given is None else given


def build_model(args: argparse.Namespace, pre_process: bool = True, post_process: bool = True,
                pg_collection: Any = None, vp_stage: int | None = None, plans: PlanStore | None = None) -> VideoDiT:
    """The VideoDiT of this pipeline stage, in fp32 on the CPU; Megatron moves and casts it.

    ``plans`` is the plan in force under context parallelism.
    """
    pg_collection = process_groups(pg_collection)
    config = build_config(args)
    spec = get_dit_layer_spec(config.dsv, implementation=args.transformer_impl, qk_norm=args.dit_qk_norm == "rms",
                              cross_attn_norm=args.dit_cross_attn_norm, seed=args.seed, plans=plans)
    return VideoDiT(config, from_args(VideoDiTConfig, args), spec, pre_process=pre_process, post_process=post_process,
                    pg_collection=pg_collection, vp_stage=vp_stage)
