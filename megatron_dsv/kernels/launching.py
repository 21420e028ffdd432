"""What every op with a folder of Triton kernels shares: who serves, what is refused, a launch and its tile."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

logger = logging.getLogger(__name__)

WAY_OUT = "use backend='reference'"
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
MAX_WIDTH = 256
"""Widest last dim that a tile takes."""
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


def reach_limit(tokens: int, *tensors: Tensor) -> str | None:
    """As ``kind_limit``, for tensors [s, ...] of which 128, or ``tokens``, tokens span 2^31 elements or more."""
    reach = max(128, tokens)
    for x in tensors:
        if x.shape[0] > 1 and x.stride(0) * reach >= _REACH:
            return (f"takes tokens whose stride times {reach} is below 2^31 elements, got a stride of {x.stride(0)}; "
                    f"copy the tensor or {WAY_OUT}")
    return None


def check_reach(tokens: int, *tensors: Tensor) -> None:
    """Raises NotImplementedError where ``reach_limit`` names one."""
    if (limit := reach_limit(tokens, *tensors)) is not None:
        raise NotImplementedError(f"backend='triton' {limit}")


def kind_limit(*groups: Sequence[Tensor], widths: str) -> str | None:
    """What keeps the Triton kernels from tensors of these dtypes and last dims, and the way out; or None.

    Args:
        groups: the tensors of each must share a dtype.
        widths: what the tensors' last dims are, in words.
    """
    interpret = interpreted()
    # The interpreter's product of bf16 is wrong.
    allowed = _DTYPES[1:] if interpret else _DTYPES
    dtypes = [x.dtype for group in groups for x in group]
    mixed = any(x.dtype != group[0].dtype for group in groups for x in group)
    if mixed or any(dtype not in allowed for dtype in dtypes):
        return (f"takes {', '.join(map(str, allowed))}{' under TRITON_INTERPRET=1' if interpret else ''}"
                f"{', queries as their keys' if mixed else ''}, got {', '.join(dict.fromkeys(map(str, dtypes)))}; "
                f"{WAY_OUT}")
    widest = max(x.shape[-1] for group in groups for x in group)
    return f"takes {widths} up to {MAX_WIDTH}, got {widest}; {WAY_OUT}" if widest > MAX_WIDTH else None


def check_triton(op: str, device: torch.device, limit: str | None) -> None:
    """Raises NotImplementedError where ``limit`` names one, or where no Triton kernel runs on ``device``."""
    if device.type != "cuda" and not interpreted():
        limit = f"needs CUDA tensors (or TRITON_INTERPRET=1), got {device.type}; {WAY_OUT}"
    if limit is not None:
        raise NotImplementedError(f"backend='triton' of {op} {limit}")


def choose_or_log(op: str, backend: str, device: torch.device, limit: Callable[[], str | None]) -> str:
    """``backend``, or for ``auto`` what serves: triton on CUDA unless a limit keeps it, else reference; logged once.

    Args:
        limit: what ``check_triton`` is given when triton is asked for; called on CUDA alone.
    """
    if backend != "auto":
        return backend
    if device.type != "cuda":
        chosen, reason = "reference", f"the tensors lie on a {device.type} device"
    elif (kept := limit()) is not None:
        chosen, reason = "reference", f"triton {kept.partition(';')[0]}"
    else:
        chosen, reason = "triton", "the tensors lie on a cuda device"
    _log_choice(op, chosen, reason)
    return chosen


def interpreted() -> bool:
    """Whether Triton interprets its kernels (TRITON_INTERPRET=1): then they take tensors on the CPU."""
    import triton
    return bool(triton.knobs.runtime.interpret)


@functools.cache
def _log_choice(op: str, chosen: str, reason: str) -> None:
    logger.info("%s: backend='auto' took %r because %s", op, chosen, reason)
