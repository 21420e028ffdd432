"""The core attention module of DSV: hands q, k, v and what was selected to the attention scheme.

Dims: s tokens, b batch, h local query heads, G local key/value heads, d head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor

from megatron_dsv.config import DSVConfig
from megatron_dsv.context_parallel.hybrid_cp import HybridScheme
from megatron_dsv.context_parallel.local import LocalScheme
from megatron_dsv.context_parallel.partial_attention import Kernels
from megatron_dsv.context_parallel.plan_commit import PlanStore
from megatron_dsv.context_parallel.scheme import AttentionScheme, Pending


class DSVCoreAttention(MegatronModule):
    """Drop-in core attention for megatron.core's SelfAttention; dense unless ``pending`` carries a selection.

    Args:
        config: Megatron's transformer configuration.
        layer_number: global, from 1.
        dsv: the sparse-attention configuration.
        softmax_scale: factor on the logits; 1 / sqrt(d) if None.
        attn_mask_type, attention_type, cp_comm_type, pg_collection: accepted because Megatron's attention passes them.
        plans: the plan in force under context parallelism; None without.

    Raises:
        ValueError: context parallelism without plans.
        NotImplementedError: attention dropout, which no kernel of this package has.
    """

    def __init__(self, config: TransformerConfig, layer_number: int, dsv: DSVConfig, *,
                 softmax_scale: float | None = None, attn_mask_type: Any = None, attention_type: str = "self",
                 cp_comm_type: str | None = None, pg_collection: Any = None, plans: PlanStore | None = None) -> None:
        super().__init__(config=config)
        if config.context_parallel_size > 1 and plans is None:
            raise ValueError(f"--context-parallel-size {config.context_parallel_size} needs a plan: pass plans=, a "
                             "PlanStore, to the function that makes the layer's spec")
        if config.attention_dropout:
            raise NotImplementedError(
                f"--attention-dropout must be 0, got {config.attention_dropout}; the attention kernels have no "
                "dropout; in Python pass TransformerConfig(attention_dropout=0.0), whose own default is not 0")
        head_dim = config.kv_channels
        self.layer_number = layer_number
        self.softmax_scale = head_dim**-0.5 if softmax_scale is None else softmax_scale
        tp = pg_collection.tp if pg_collection is not None else None
        heads = config.num_attention_heads // (1 if tp is None else tp.size())
        first = 0 if tp is None else tp.rank() * heads
        query_heads, proxies = range(first, first + heads), dsv.dsv_predictor_proxies
        kernels = Kernels(dsv.dsv_dense_backend, dsv.dsv_sparse_backend, dsv.dsv_deterministic)
        self.scheme: AttentionScheme = LocalScheme(query_heads, proxies, kernels) if plans is None else HybridScheme(
            plans.manager, query_heads, tp_rank=0 if tp is None else tp.rank(), proxies=proxies, kernels=kernels)

    def forward(self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None, /, *,
                attn_mask_type: Any = None, attention_bias: Tensor | None = None, packed_seq_params: Any = None,
                pending: Pending | None = None) -> Tensor:
        """query [s, b, h, d], key and value [s, b, G, d] -> [s, b, h * d].

        Raises:
            NotImplementedError: a mask, bias or packed sequences, none of which full video attention has.
        """
        for name, given in (("attention_mask", attention_mask), ("attention_bias", attention_bias),
                            ("packed_seq_params", packed_seq_params)):
            if given is not None:
                raise NotImplementedError(f"DSVCoreAttention serves full, unmasked attention: {name} must be None; "
                                          "pass kv_length to DSVSelfAttention to hide padding")
        if pending is None:
            length = torch.full((key.shape[1],), key.shape[0], dtype=torch.int32, device="cpu")
            pending = Pending(selection=None, kv_length=length)
        out = self.scheme.attend(query, key, value, pending, softmax_scale=self.softmax_scale)
        return out.reshape(*out.shape[:2], -1)
