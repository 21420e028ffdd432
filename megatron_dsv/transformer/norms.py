"""RMS norm of queries and keys over the full width of all heads, also when heads are spread over TP ranks.

Dims: s tokens, b batch, h local heads, d head dim.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn

from megatron_dsv.kernels.fusion import fused_on_cuda


class _SumOverRanks(torch.autograd.Function):
    """Sum over a group whose result every rank uses: the gradient is summed over the group too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: torch.distributed.ProcessGroup) -> Tensor:
        ctx.group = group
        total = x.clone()
        torch.distributed.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        total = grad.contiguous().clone()
        torch.distributed.all_reduce(total, group=ctx.group)
        return total, None


@fused_on_cuda
def _sum_of_squares(x: Tensor) -> Tensor:
    return x.float().square().sum(dim=(-2, -1), keepdim=True)


@fused_on_cuda
def _scale(x: Tensor, mean_square: Tensor, weight: Tensor, eps: float) -> Tensor:
    normed = x.float() * torch.rsqrt(mean_square + eps)
    return (normed * weight.float()).to(x.dtype)


class FullWidthRMSNorm(nn.Module):
    """RMS norm over heads x head dim of all tensor-parallel ranks, with one weight per channel (Wan 2.1's QK norm).

    Args:
        heads: local heads.
        head_dim: channels a head.
        eps: added to the mean square.
        tp_group: tensor-parallel group, or None for one rank.
    """

    def __init__(self, heads: int, head_dim: int, eps: float, tp_group: torch.distributed.ProcessGroup | None) -> None:
        super().__init__()
        self.tp_group = tp_group
        self.tp_size = 1 if tp_group is None else tp_group.size()
        self.eps = eps
        self.weight = nn.Parameter(torch.ones(heads, head_dim))
        set_tensor_model_parallel_attributes(self.weight, True, 0, 1)

    def forward(self, x: Tensor) -> Tensor:
        """x [s, b, h, d] -> the same shape and dtype."""
        squares = _sum_of_squares(x)
        if self.tp_size > 1:
            squares = _SumOverRanks.apply(squares, self.tp_group)
        width = self.weight.numel() * self.tp_size
        return _scale(x, squares / width, self.weight, self.eps)

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Megatron's distributed-checkpoint hook: the weight is split by head over TP."""
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, {"weight": 0}, sharded_offsets,
            tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"])
