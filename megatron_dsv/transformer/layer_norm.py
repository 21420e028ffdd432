"""The norm of local (not Transformer Engine) specs.

Dims: the last dimension of the input is hidden_size; any leading dimensions, [s, b, h] in a transformer layer.
"""

import torch
from megatron.core.transformer import TransformerConfig

_CLASSES = {"LayerNorm": torch.nn.LayerNorm, "RMSNorm": torch.nn.RMSNorm}


class LocalNorm:
    """Builds torch's LayerNorm or RMSNorm after `config.normalization`; use the class itself in a ModuleSpec.

    Megatron's WrappedTorchNorm refuses sequence parallel and `persist_layer_norm`; torch's modules need neither
    refused: under sequence parallel each rank normalises its own tokens, and the gradients of the weights, partial per
    TP rank, are summed because the parameters carry `sequence_parallel=True`.

    Args:
        config: reads `normalization`, `sequence_parallel`, `layernorm_zero_centered_gamma`.
        hidden_size: size of the last dimension.
        eps: added to the variance (LayerNorm) or the mean square (RMSNorm).
        elementwise_affine: False leaves the weight and bias out, as an adaLN block wants.

    Raises:
        ValueError: `config.normalization` is neither LayerNorm nor RMSNorm.
        NotImplementedError: `--apply-layernorm-1p`.
    """

    def __new__(  # type: ignore[misc]
        cls, config: TransformerConfig, hidden_size: int, eps: float = 1e-5, elementwise_affine: bool = True
    ) -> torch.nn.Module:
        if config.normalization not in _CLASSES:
            raise ValueError(f"--normalization must be one of {sorted(_CLASSES)}, got {config.normalization!r}")
        if config.layernorm_zero_centered_gamma:
            raise NotImplementedError(
                "--apply-layernorm-1p needs --transformer-impl transformer_engine; drop it for the local norm"
            )
        norm = _CLASSES[config.normalization](hidden_size, eps=eps, elementwise_affine=elementwise_affine)
        for parameter in norm.parameters():
            parameter.sequence_parallel = config.sequence_parallel
        return norm
