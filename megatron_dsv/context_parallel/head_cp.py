"""head_cp: ranks of a head group trade token shards for heads, each as many heads as the plan gives it, none included.

Before: every rank holds its own s tokens of all heads. After: the g_h s tokens of the whole group, of its own heads.
Heads move as units, one key/value head with its query heads. They are moved and never summed again, so how they are
assigned changes no bit of any result.

Dims: s tokens of this rank, b batch, G key/value heads (units), n units of this rank, d channels; a tensor has
``ratio`` heads a unit: [s, b, G * ratio, d].
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dsv.context_parallel.comm import SubGroup
from megatron_dsv.kernels.host_values import on_device


@dataclass(frozen=True)
class HeadExchange:
    """The exchange of one block.

    Attributes:
        group: the head group.
        units: units of every member by place, ascending.
    """

    group: SubGroup
    units: tuple[tuple[int, ...], ...]

    @property
    def mine(self) -> tuple[int, ...]:
        """Units that this rank computes."""
        return self.units[self.group.me]

    @property
    def total(self) -> int:
        """G."""
        return sum(len(units) for units in self.units)

    def to_heads(self, tensors: Sequence[Tensor], what: str) -> list[Tensor]:
        """Tensors [s, b, G * ratio, d], alike but for the ratio -> [g_h * s, b, n * ratio, d], chunks in place order.

        The results are views of one buffer. One call, whatever the number of tensors.
        """
        if self.group.size == 1:
            return list(tensors)
        ratios = [x.shape[2] // self.total for x in tensors]
        full = torch.cat(list(tensors), 2) if len(tensors) > 1 else tensors[0]
        s, b, _, d = full.shape
        columns = self._columns_of(ratios, full.device)
        sizes = [s * b * index.numel() * d for index in columns]
        sent = full.new_empty(sum(sizes))
        for slab, index in zip(sent.split(sizes), columns):
            torch.index_select(full, 2, index, out=slab.view(s, b, index.numel(), d))
        width = len(self.mine) * sum(ratios)
        received = full.new_empty((self.group.size * s, b, width, d))
        self.group.all_to_all(received.view(-1), sent, [s * b * width * d] * self.group.size, sizes, what).wait()
        return list(received.split([len(self.mine) * ratio for ratio in ratios], 2))

    def to_tokens(self, tensors: Sequence[Tensor], ratios: Sequence[int], what: str) -> list[Tensor]:
        """The inverse of ``to_heads``: [g_h * s, b, n * ratio, d] -> [s, b, G * ratio, d]."""
        if self.group.size == 1:
            return list(tensors)
        full = (torch.cat(list(tensors), 2) if len(tensors) > 1 else tensors[0]).contiguous()
        s, (b, width, d) = full.shape[0] // self.group.size, full.shape[1:]
        columns = self._columns_of(ratios, full.device)
        sizes = [s * b * index.numel() * d for index in columns]
        received = full.new_empty(sum(sizes))
        self.group.all_to_all(received, full.view(-1), sizes, [s * b * width * d] * self.group.size, what).wait()
        out = full.new_empty((s, b, self.total * sum(ratios), d))
        for slab, index in zip(received.split(sizes), columns):
            out.index_copy_(2, index, slab.view(s, b, index.numel(), d))
        return list(out.split([self.total * ratio for ratio in ratios], 2))

    def _columns_of(self, ratios: Sequence[int], device: torch.device) -> list[Tensor]:
        """For every member, the heads that it computes among those of all tensors, one after the other."""
        starts = [self.total * sum(ratios[:number]) for number in range(len(ratios))]
        return [on_device(tuple(start + unit * ratio + head for start, ratio in zip(starts, ratios) for unit in units
                                for head in range(ratio)), torch.int64, device)
                for units in self.units]
