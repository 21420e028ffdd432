"""What every op of the triton folders shares on its way from tensors to a launch; imports no Triton itself."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_MAX_GRID = 65535
"""Programs along any axis of a grid but the first."""
_REACH = 2**31
"""Elements that the 32-bit offsets within a tile reach."""


@dataclass(frozen=True)
class Tile:
    """BLOCK_M query rows x BLOCK_N keys, with triton's num_warps and num_stages; ``tail`` is the step where masks are
    needed, which is rare in lists of whole blocks. ``max_registers`` a thread, where the compiler should use fewer."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    tail: int = 32
    max_registers: int | None = None


@dataclass(frozen=True)
class Launch:
    """One kernel launch, complete; ``arguments`` are run-time values and ``constants`` compile-time ones, by name."""

    kernel: Any
    grid: tuple[int, ...]
    arguments: dict[str, Any]
    constants: dict[str, Any]
    tile: Tile

    def run(self) -> None:
        """Launches it, unless the grid is empty.

        Raises:
            NotImplementedError: the device takes no such grid.
        """
        if 0 in self.grid:
            return
        if max(self.grid[1:], default=0) > _MAX_GRID:
            raise NotImplementedError(f"backend='triton' takes batch x heads up to {_MAX_GRID}, got a grid of "
                                      f"{self.grid}; split the batch or use backend='reference'")
        self.kernel[self.grid](**self.arguments, **self.constants, num_warps=self.tile.num_warps,
                               num_stages=self.tile.num_stages, maxnreg=self.tile.max_registers)


def launch_device(x: Tensor) -> AbstractContextManager:
    """Makes x's device current for a while: Triton launches on the current one."""
    return torch.cuda.device(x.device) if x.is_cuda else nullcontext()


def power_of_two(number: int) -> int:
    """The smallest power of two that is at least ``number``, and at least 1."""
    return 1 << max(0, number - 1).bit_length()


def padded_dim(dim: int) -> int:
    """Columns of a tile that holds ``dim`` of them: tensor cores take 16 or more."""
    return max(16, power_of_two(dim))


def check_reach(tokens: int, *tensors: Tensor) -> None:
    """Raises NotImplementedError where 128, or ``tokens``, tokens of a tensor [s, ...] span 2^31 elements or more."""
    for x in tensors:
        if x.shape[0] > 1 and x.stride(0) * max(128, tokens) >= _REACH:
            raise NotImplementedError(f"backend='triton' takes tokens whose stride times {max(128, tokens)} is below "
                                      f"2^31 elements, got a stride of {x.stride(0)}; copy the tensor or use "
                                      "backend='reference'")
