"""Wiring: which module sits where in a layer. The only place that knows both Megatron's linears and ours."""

from __future__ import annotations

import functools
from typing import Any

from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules

from megatron_dsv.config import DSVConfig
from megatron_dsv.context_parallel.plan_commit import PlanStore
from megatron_dsv.transformer.cross_attention import DiTCrossAttention, DiTCrossAttentionSubmodules
from megatron_dsv.transformer.dit_layer import DiTLayer, DiTLayerSubmodules
from megatron_dsv.transformer.dsv_attention import DSVCoreAttention
from megatron_dsv.transformer.layer_norm import LocalNorm
from megatron_dsv.transformer.self_attention import DSVSelfAttention

IMPLEMENTATIONS = ("local", "transformer_engine")


def get_dsv_self_attention_spec(dsv: DSVConfig, *, implementation: str = "local", full_width_qk_norm: bool = False,
                                seed: int = 1234, plans: PlanStore | None = None) -> ModuleSpec:
    """Spec of ``DSVSelfAttention``, to put in place of ``SelfAttention`` in any megatron.core layer.

    Args:
        dsv: the sparse-attention configuration.
        implementation: whose linear layers: ``local`` (Megatron's own) or ``transformer_engine``.
        full_width_qk_norm: RMS norm of queries and keys over all heads; leave it off for models whose configuration
            asks Megatron for a per-head norm.
        seed: initialises the predictors.
        plans: the plan in force under context parallelism; None without.

    Raises:
        ValueError: a value of ``dsv`` that its flag would refuse, or an unknown implementation.
    """
    dsv.validate()
    column, row, _ = _linears(implementation)
    return ModuleSpec(
        module=DSVSelfAttention,
        params={"attn_mask_type": AttnMaskType.no_mask, "dsv": dsv, "full_width_qk_norm": full_width_qk_norm,
                "seed": seed, "plans": plans},
        submodules=SelfAttentionSubmodules(linear_qkv=column, core_attention=functools.partial(
            DSVCoreAttention, dsv=dsv, plans=plans), linear_proj=row))


def get_dsv_layer_spec(dsv: DSVConfig, *, implementation: str = "local", seed: int = 1234,
                       plans: PlanStore | None = None) -> ModuleSpec:
    """Spec of a plain megatron.core TransformerLayer whose self-attention is DSV's.

    For bidirectional models without masks. Give it to ``TransformerBlock``, and let
    ``megatron_dsv.training.dsv_controller.DSVController`` drive the predictors.

    Args:
        dsv, implementation, seed, plans: see ``get_dsv_self_attention_spec``.
    """
    column, row, norm = _linears(implementation)
    return ModuleSpec(module=TransformerLayer, submodules=TransformerLayerSubmodules(
        input_layernorm=norm,
        self_attention=get_dsv_self_attention_spec(dsv, implementation=implementation, seed=seed, plans=plans),
        self_attn_bda=get_bias_dropout_add,
        pre_mlp_layernorm=norm,
        mlp=functools.partial(MLP.as_mlp_submodule, submodules=MLPSubmodules(linear_fc1=column, linear_fc2=row)),
        mlp_bda=get_bias_dropout_add))


def get_dit_layer_spec(dsv: DSVConfig, *, implementation: str = "local", qk_norm: bool = True,
                       cross_attn_norm: bool = True, seed: int = 1234,
                       plans: PlanStore | None = None) -> ModuleSpec:
    """Spec of a ``DiTLayer``: the Wan 2.1 block, or the paper's with both norms off.

    Args:
        dsv, implementation, seed, plans: see ``get_dsv_self_attention_spec``.
        qk_norm: RMS norm of queries and keys over the full width, in self- and cross-attention.
        cross_attn_norm: learned norm before cross-attention.
    """
    column, row, norm = _linears(implementation)
    return ModuleSpec(module=DiTLayer, submodules=DiTLayerSubmodules(
        self_attention=get_dsv_self_attention_spec(dsv, implementation=implementation, full_width_qk_norm=qk_norm,
                                                   seed=seed, plans=plans),
        cross_attention=ModuleSpec(
            module=DiTCrossAttention, params={"qk_norm": qk_norm, "dense_backend": dsv.dsv_dense_backend,
                                              "deterministic": dsv.dsv_deterministic},
            submodules=DiTCrossAttentionSubmodules(linear_q=column, linear_kv=column, linear_proj=row)),
        cross_attention_norm=norm if cross_attn_norm else None,
        mlp=MLPSubmodules(linear_fc1=column, linear_fc2=row)))


def _linears(implementation: str) -> tuple[Any, Any, Any]:
    """Column-parallel linear, row-parallel linear, norm."""
    if implementation == "local":
        return ColumnParallelLinear, RowParallelLinear, LocalNorm
    if implementation == "transformer_engine":
        from megatron.core.extensions.transformer_engine import (
            HAVE_TE,
            TEColumnParallelLinear,
            TENorm,
            TERowParallelLinear,
        )
        if not HAVE_TE:
            raise ValueError("--transformer-impl transformer_engine needs Transformer Engine, which is not installed; "
                             "install the extra `te`, or use --transformer-impl local")
        return TEColumnParallelLinear, TERowParallelLinear, TENorm
    raise ValueError(f"--transformer-impl must be one of {', '.join(IMPLEMENTATIONS)}, got {implementation!r}")
