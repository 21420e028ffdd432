"""One block of a video diffusion transformer: adaLN-single, self-attention, cross-attention to text, MLP (Wan 2.1).

Dims: s tokens (of this rank's shard under sequence parallelism), b batch, H hidden, L text tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import BaseTransformerLayer, get_transformer_layer_offset
from torch import Tensor

from megatron_dsv.sparsity.token_layout import TokenLayout
from megatron_dsv.transformer.adaln import ModulationTable, gated_residual, modulated_norm
from megatron_dsv.transformer.rope3d import RopeTables


@dataclass(frozen=True)
class DiTLayerSubmodules:
    """Specs of a block; ``cross_attention_norm`` is a norm builder, or None for no norm."""

    self_attention: ModuleSpec
    cross_attention: ModuleSpec
    cross_attention_norm: Any
    mlp: MLPSubmodules


class DiTLayer(MegatronModule, BaseTransformerLayer):
    """A block whose shift, scale and gate come from the shared timestep projection plus a learned table.

    Args:
        config: Megatron's transformer configuration.
        submodules: specs of the parts.
        layer_number: from 1 within this pipeline stage; stored as the global number.
        pg_collection: Megatron's process groups.
        vp_stage: virtual pipeline stage.
    """

    def __init__(self, config: TransformerConfig, submodules: DiTLayerSubmodules, layer_number: int = 1,
                 pg_collection: Any = None, vp_stage: int | None = None) -> None:
        super().__init__(config=config)
        self.tp_group = pg_collection.tp
        self.layer_number = layer_number + get_transformer_layer_offset(config, vp_stage, pg_collection.pp.rank())
        self.modulation = ModulationTable(6, config.hidden_size, config.sequence_parallel)
        self.self_attention = build_module(submodules.self_attention, config=config, layer_number=self.layer_number,
                                           pg_collection=pg_collection)
        self.cross_attention_norm = None if submodules.cross_attention_norm is None else \
            submodules.cross_attention_norm(config=config, hidden_size=config.hidden_size,
                                            eps=config.layernorm_epsilon)
        self.cross_attention = build_module(submodules.cross_attention, config=config, layer_number=self.layer_number,
                                            pg_collection=pg_collection)
        self.mlp = MLP(config, submodules.mlp, ffn_hidden_size=config.ffn_hidden_size, tp_group=self.tp_group)

    def forward(self, hidden_states: Tensor, timestep_emb: Tensor, context: Tensor, kv_length: Tensor,
                rope: RopeTables | None, layout: TokenLayout | None = None) -> Tensor:
        """hidden_states [s, b, H], timestep_emb [b, 6, H], context [L, b, H], kv_length int32 [b] -> [s, b, H]."""
        eps = self.config.layernorm_epsilon
        shift_attn, scale_attn, gate_attn, shift_mlp, scale_mlp, gate_mlp = self.modulation(timestep_emb)

        normed = modulated_norm(hidden_states, shift_attn, scale_attn, eps)
        attended, bias = self.self_attention(normed, rope=rope, kv_length=kv_length, layout=layout)
        hidden_states = gated_residual(hidden_states, attended, bias, gate_attn)

        normed = hidden_states if self.cross_attention_norm is None else self.cross_attention_norm(hidden_states)
        crossed, bias = self.cross_attention(normed, context)
        hidden_states = hidden_states + (crossed if bias is None else crossed + bias)

        normed = modulated_norm(hidden_states, shift_mlp, scale_mlp, eps)
        transformed, bias = self.mlp(normed)
        return gated_residual(hidden_states, transformed, bias, gate_mlp)
