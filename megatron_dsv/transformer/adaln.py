"""adaLN-single: one timestep projection for the whole model, one learned table a block.

Dims: s tokens, b batch, H hidden. Shift, scale and gate are [b, H]; tables are [rows, H].
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from megatron_dsv.kernels.fusion import fused_on_cuda


@fused_on_cuda
def modulated_norm(x: Tensor, shift: Tensor, scale: Tensor, eps: float) -> Tensor:
    """Layer norm of x [s, b, H] without affine parameters, then ``(1 + scale) x + shift`` in fp32."""
    normed = functional.layer_norm(x.float(), x.shape[-1:], eps=eps)
    return (normed * (1 + scale.float()) + shift.float()).to(x.dtype)


@fused_on_cuda
def gated_residual(residual: Tensor, x: Tensor, bias: Tensor | None, gate: Tensor) -> Tensor:
    """``residual + gate (x + bias)`` in fp32; residual and x [s, b, H], bias [H] or None."""
    update = x.float() if bias is None else x.float() + bias.float()
    return (residual.float() + gate.float() * update).to(residual.dtype)


class ModulationTable(nn.Module):
    """A block's learned offsets to the shared timestep projection.

    Args:
        rows: vectors a block needs: 6 in a layer (shift, scale, gate for attention and MLP), 2 in the output head.
        hidden_size: H.
        sequence_parallel: tokens are spread over TP ranks, so the table's gradient is partial on each of them.
    """

    def __init__(self, rows: int, hidden_size: int, sequence_parallel: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(rows, hidden_size))
        self.weight.sequence_parallel = sequence_parallel  # type: ignore[attr-defined]

    def reset_parameters(self, generator: torch.Generator) -> None:
        """Normal with standard deviation 1 / sqrt(H), drawn on the CPU so that every layout draws the same."""
        values = torch.randn(self.weight.shape, generator=generator) / self.weight.shape[1] ** 0.5
        with torch.no_grad():
            self.weight.copy_(values)

    def forward(self, timestep_emb: Tensor) -> tuple[Tensor, ...]:
        """timestep_emb [b, rows, H] -> ``rows`` tensors [b, H], fp32."""
        return (timestep_emb.float() + self.weight.float()).unbind(1)
