"""Budgets: measured share of the blocks that holds the target mass -> blocks that every row of a head keeps.

A budget is a list of host ints, so that a selection knows its capacity and its launch bounds without asking the
device. Statistics reach the host once a profile, never within a step.

Dims: h query heads.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import Tensor

_ROUNDING = 1e-6
"""Share of the blocks that the representation error of an fp32 fraction may add; not worth one block more."""


def head_budgets(block_fraction: Tensor | Sequence[float], num_kv_blocks: int, *,
                 forced_keep_ratio: float | None = None, min_keep_ratio: float = 0.02) -> list[int]:
    """Blocks that each row of a head keeps, rounded up.

    Args:
        block_fraction: [h] on the host; the share of the valid blocks that holds ``--dsv-budget-mass`` of a query
            group's true mass, measured at the granularity of the selection. NaN means never measured.
        num_kv_blocks: blocks (or tokens) that hold a real key.
        forced_keep_ratio: kept share of every head in (0, 1], whatever was measured (``--dsv-keep-ratio``).
        min_keep_ratio: floor of the measured share in [0, 1] (``--dsv-min-keep-ratio``); a forced share is taken as
            it is.

    Returns:
        h ints between 1 and ``num_kv_blocks``. A head that was never measured keeps everything.

    Raises:
        ValueError: a share out of range, a tensor that is not on the host, or no block.
    """
    if num_kv_blocks < 1:
        raise ValueError(f"num_kv_blocks must be at least 1, got {num_kv_blocks}")
    if forced_keep_ratio is not None and not 0.0 < forced_keep_ratio <= 1.0:
        raise ValueError(f"--dsv-keep-ratio must be in (0, 1], got {forced_keep_ratio}")
    if not 0.0 <= min_keep_ratio <= 1.0:
        raise ValueError(f"--dsv-min-keep-ratio must be in [0, 1], got {min_keep_ratio}")
    measured = _host_floats(block_fraction)
    if forced_keep_ratio is not None:
        return [_round_up(forced_keep_ratio, num_kv_blocks)] * len(measured)
    shares = [1.0 if math.isnan(share) else share for share in measured]
    if any(not -_ROUNDING <= share <= 1.0 + _ROUNDING for share in shares):
        raise ValueError(f"block_fraction must be in [0, 1], got {shares}")
    return [_round_up(max(share, min_keep_ratio), num_kv_blocks) for share in shares]


def _round_up(share: float, blocks: int) -> int:
    return min(blocks, max(1, math.ceil((share - _ROUNDING) * blocks)))


def _host_floats(values: Tensor | Sequence[float]) -> list[float]:
    if not isinstance(values, Tensor):
        return [float(value) for value in values]
    if values.device.type != "cpu" or values.dim() != 1:
        raise ValueError("block_fraction must be [h] on the CPU (copy it once a profile, not in the step), got "
                         f"{tuple(values.shape)} on {values.device}")
    return values.double().tolist()
