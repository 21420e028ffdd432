"""Megatron's process groups and small configurations on forked CPU ranks, for tests of single modules."""

from __future__ import annotations

from typing import Any

import torch

from megatron_dsv.platform import cpu


def initialize(tensor_parallel: int = 1, pipeline_parallel: int = 1, seed: int = 1234) -> Any:
    """Groups and random state for this rank; returns Megatron's ProcessGroupCollection."""
    cpu.enable()
    from megatron.core import parallel_state
    from megatron.core.process_groups_config import ProcessGroupCollection
    from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed

    parallel_state.initialize_model_parallel(tensor_parallel, pipeline_parallel)
    torch.manual_seed(seed)
    model_parallel_cuda_manual_seed(seed)
    return ProcessGroupCollection.use_mpu_process_groups()


def transformer_config(cls: type, *, tensor_parallel: int = 1, pipeline_parallel: int = 1, **fields: Any) -> Any:
    """A small fp32 configuration of class ``cls`` (TransformerConfig or a subclass)."""
    settings: dict[str, Any] = {
        "num_layers": 2, "hidden_size": 48, "num_attention_heads": 4, "ffn_hidden_size": 96,
        "attention_dropout": 0.0, "hidden_dropout": 0.0, "gradient_accumulation_fusion": False,
        "bias_dropout_fusion": False, "masked_softmax_fusion": False, "persist_layer_norm": False,
        "layernorm_epsilon": 1e-6, "pipeline_dtype": torch.float32, "transformer_impl": "local",
        "tensor_model_parallel_size": tensor_parallel, "pipeline_model_parallel_size": pipeline_parallel,
    }
    return cls(**(settings | fields))
