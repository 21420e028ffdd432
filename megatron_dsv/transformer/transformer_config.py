"""Megatron's TransformerConfig with the two configurations that the layers of a video DiT read besides it."""

from __future__ import annotations

from dataclasses import dataclass, field

from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_dsv.config import DSVConfig


@dataclass
class DiTTransformerConfig(TransformerConfig):
    """TransformerConfig of a video DiT.

    Attributes:
        dsv: the sparse-attention configuration.
        dit_qk_norm: ``rms`` for RMS norm of queries and keys over the full width, or ``none``.
        dit_cross_attn_norm: learned norm before cross-attention.
        has_cond_embedder: tells Megatron to reduce the gradients of conditioning layers, which every pipeline stage
            holds a copy of, over the pipeline.
        seed: of the run; initialises the layers that Megatron does not.
    """

    dsv: DSVConfig = field(default_factory=DSVConfig)
    dit_qk_norm: str = "rms"
    dit_cross_attn_norm: bool = True
    has_cond_embedder: bool = True
    seed: int = 1234
