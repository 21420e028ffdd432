"""Cross-attention from video tokens to text tokens.

Dims: s video tokens (of this rank's shard under sequence parallelism), L text tokens, b batch, H hidden, h local heads,
d head dim.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_dsv.kernels.dense_attention.api import dense_attention
from megatron_dsv.transformer.norms import FullWidthRMSNorm


@dataclass(frozen=True)
class DiTCrossAttentionSubmodules:
    """Builders of the linear layers: column-parallel ``linear_q`` and ``linear_kv``, row-parallel ``linear_proj``."""

    linear_q: Any
    linear_kv: Any
    linear_proj: Any


class DiTCrossAttention(MegatronModule):
    """Every video token attends to every text token, padding included, as in Wan 2.1.

    Text is replicated over tensor-parallel ranks and never split along the sequence, whatever the layout.

    Args:
        config: Megatron's transformer configuration.
        submodules: the linear layers.
        layer_number: global, from 1.
        pg_collection: Megatron's process groups (``tp`` is used).
        qk_norm: RMS norm of query and key over the full width.
        dense_backend: ``dense_attention`` backend.
        deterministic: gradients must repeat bitwise.
    """

    def __init__(self, config: TransformerConfig, submodules: DiTCrossAttentionSubmodules, layer_number: int,
                 pg_collection: Any, *, qk_norm: bool, dense_backend: str, deterministic: bool) -> None:
        super().__init__(config=config)
        self.layer_number = layer_number
        self.tp_group = pg_collection.tp
        self.dense_backend = dense_backend
        self.deterministic = deterministic
        self.head_dim = config.kv_channels
        width = config.kv_channels * config.num_attention_heads
        self.heads = config.num_attention_heads // self.tp_group.size()
        replicated_input = copy.copy(config)
        # The text input is whole on every rank, so its projection must not gather or scatter along the sequence.
        replicated_input.sequence_parallel = False
        common: dict[str, Any] = {"is_expert": False, "tp_group": self.tp_group}
        self.linear_q = submodules.linear_q(
            config.hidden_size, width, config=config, init_method=config.init_method, gather_output=False,
            bias=config.add_bias_linear, skip_bias_add=False, tp_comm_buffer_name="q", **common)
        self.linear_kv = submodules.linear_kv(
            config.hidden_size, 2 * width, config=replicated_input, init_method=config.init_method,
            gather_output=False, bias=config.add_bias_linear, skip_bias_add=False, tp_comm_buffer_name="kv", **common)
        self.linear_proj = submodules.linear_proj(
            width, config.hidden_size, config=config, init_method=config.output_layer_init_method,
            bias=config.add_bias_linear, input_is_parallel=True, skip_bias_add=True, tp_comm_buffer_name="proj",
            **common)
        self.q_norm = FullWidthRMSNorm(self.heads, self.head_dim, config.layernorm_epsilon, self.tp_group) \
            if qk_norm else None
        self.k_norm = FullWidthRMSNorm(self.heads, self.head_dim, config.layernorm_epsilon, self.tp_group) \
            if qk_norm else None

    def forward(self, hidden_states: Tensor, context: Tensor) -> tuple[Tensor, Tensor | None]:
        """hidden_states [s, b, H], context [L, b, H] -> output [s, b, H] and its bias, not yet added."""
        query, _ = self.linear_q(hidden_states)
        key_value, _ = self.linear_kv(context)
        query = query.unflatten(-1, (self.heads, self.head_dim))
        key, value = key_value.unflatten(-1, (self.heads, 2 * self.head_dim)).chunk(2, dim=-1)
        if self.q_norm is not None and self.k_norm is not None:
            query, key = self.q_norm(query), self.k_norm(key)
        out = dense_attention(query, key, value, softmax_scale=self.head_dim**-0.5, backend=self.dense_backend,
                              deterministic=self.deterministic)
        return self.linear_proj(out.flatten(2))
