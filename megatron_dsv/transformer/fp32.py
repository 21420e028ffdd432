"""Modules that keep their own precision, and that a dense model's checkpoint may lack."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.core.transformer.utils import ensure_metadata_has_dp_cp_group, make_sharded_tensors_for_checkpoint
from torch import Tensor, nn


class KeepsPrecision(nn.Module):
    """A module whose parameters and buffers move between devices but never change dtype.

    Megatron casts the whole model to bf16 or fp16 (Float16Module). Predictors and statistics are kept in fp32,
    as in the DSV artifact.

    Attributes:
        in_checkpoint: False while a checkpoint without this state is loaded.
        head_axes: names of the tensors whose first axis is the local heads, split over tensor-parallel ranks.
        tp_group: tensor-parallel group.
    """

    in_checkpoint = True
    head_axes: tuple[str, ...] = ()
    tp_group: Any = None

    def sharded_state_dict(self, prefix: str = "", sharded_offsets: tuple = (), metadata: dict | None = None) -> dict:
        """Megatron's distributed-checkpoint hook."""
        if not self.in_checkpoint:
            return {}
        metadata = ensure_metadata_has_dp_cp_group(metadata)
        return make_sharded_tensors_for_checkpoint(
            self.state_dict(prefix="", keep_vars=True), prefix, dict.fromkeys(self.head_axes, 0), sharded_offsets,
            tp_group=self.tp_group, dp_cp_group=metadata["dp_cp_group"])

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        if self.in_checkpoint:
            super()._load_from_state_dict(*args, **kwargs)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
        def move_only(tensor: Tensor) -> Tensor:
            moved = fn(tensor)
            return moved if moved.dtype == tensor.dtype else tensor.to(moved.device)

        return super()._apply(move_only, recurse)
