"""What one attention layer knows about its own sparsity: measured statistics and its place in the schedule.

Dims: h local query heads.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from megatron_dsv.sparsity.profile import FIELDS as STATISTICS
from megatron_dsv.sparsity.profile import GroupProfile
from megatron_dsv.sparsity.schedule import LayerState, decode_states, encode_states
from megatron_dsv.transformer.fp32 import KeepsPrecision


class LayerStatistics(KeepsPrecision):
    """Running statistics per head and the layer's schedule state, as buffers that checkpoints reshard.

    Buffers: ``head_sparsity``, ``head_block_fraction``, ``head_recall`` fp32 [h] and ``means`` fp32 [3] (the same
    three, averaged over the heads of all tensor-parallel ranks), all NaN until first measured, and ``schedule_state``
    int32 [1, 3]. Host copies are read once after each change, so a step never waits for the device.

    Args:
        heads: h.
        tp_group: tensor-parallel group, for checkpoints.
    """

    head_axes = tuple(f"head_{name}" for name in STATISTICS)

    def __init__(self, heads: int, tp_group: torch.distributed.ProcessGroup | None) -> None:
        super().__init__()
        self.tp_group = tp_group
        for name in STATISTICS:
            self.register_buffer(f"head_{name}", torch.full((heads,), float("nan")))
        self.register_buffer("means", torch.full((len(STATISTICS),), float("nan")))
        self.register_buffer("schedule_state", encode_states([LayerState()]))
        self.pending: GroupProfile | None = None
        self._block_fractions: list[float] | None = None
        self._layer_means: list[float] | None = None
        self._state: LayerState | None = None
        self.register_load_state_dict_post_hook(lambda module, _: module.forget_host_copies())

    def add(self, profile: GroupProfile) -> None:
        """Adds one micro-batch's sums to the profile of this step."""
        self.pending = profile if self.pending is None else self.pending + profile

    def running(self) -> Tensor:
        """Running statistics fp32 [3, h], rows in the order of ``STATISTICS``."""
        return torch.stack([self.get_buffer(f"head_{name}") for name in STATISTICS])

    def forget_host_copies(self) -> None:
        """The buffers changed: read them again when next asked."""
        self._block_fractions = None
        self._layer_means = None
        self._state = None

    def block_fractions(self) -> list[float]:
        """Measured share of blocks each local head needs, NaN before the first profile."""
        if self._block_fractions is None:
            self._block_fractions = self.get_buffer("head_block_fraction").tolist()
        return self._block_fractions

    def layer_means(self) -> dict[str, float]:
        """Mean over all heads of each statistic, NaN before the first profile."""
        if self._layer_means is None:
            self._layer_means = self.get_buffer("means").tolist()
        return dict(zip(STATISTICS, self._layer_means, strict=True))

    def layer_block_fraction(self) -> float:
        """Mean share of blocks that the layer's heads need."""
        return self.layer_means()["block_fraction"]

    def state(self) -> LayerState:
        """The layer's place in the dense -> sparse schedule."""
        if self._state is None:
            self._state = decode_states(self.get_buffer("schedule_state").cpu())[0]
        return self._state

    @torch.no_grad()
    def forget(self, names: Collection[str]) -> None:
        """Makes some of ``STATISTICS`` unmeasured again; a layer without its recall has to pass the gate anew."""
        for row, name in enumerate(STATISTICS):
            if name in names:
                self.get_buffer(f"head_{name}").fill_(float("nan"))
                self.get_buffer("means")[row] = float("nan")
        if "recall" in names:
            self.get_buffer("schedule_state").copy_(encode_states([LayerState()]))
        self.forget_host_copies()

    @torch.no_grad()
    def update(self, running: Tensor, layer_means: Tensor, state: LayerState) -> None:
        """Stores running statistics [3, h] in the order of ``STATISTICS``, their means [3], and the schedule state."""
        for name, value in zip(STATISTICS, running, strict=True):
            self.get_buffer(f"head_{name}").copy_(value)
        self.get_buffer("means").copy_(layer_means)
        self.get_buffer("schedule_state").copy_(encode_states([state]))
        self.forget_host_copies()
