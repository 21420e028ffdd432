"""Megatron's TransformerConfig with what the layers of a video DiT read besides it."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dsv.config import DSVConfig


@dataclass
class DiTTransformerConfig(TransformerConfig):
    """TransformerConfig of a video DiT.

    Attributes:
        dsv: the sparse-attention configuration.
        has_cond_embedder: tells Megatron to reduce the gradients of conditioning layers, which every pipeline stage
            holds a copy of, over the pipeline.
        seed: of the run; initialises the layers that Megatron does not.
    """

    dsv: DSVConfig = field(default_factory=DSVConfig)
    has_cond_embedder: bool = True
    seed: int = 1234
