"""Which query rows train the predictors and which query groups are held out to measure them.

Everything is a pure function of the sequence length and a counter (the training step), so every rank and a resumed run
draw the same. Some groups are held out for good: no predictor is ever trained on the rows it is measured on.
"""

from __future__ import annotations

import torch
from torch import Tensor

HELD_OUT_PERIOD = 8
"""One query group of every so many neighbours is held out."""


def is_held_out(group_ids: Tensor, num_groups: int) -> Tensor:
    """bool, like ``group_ids``: whether the group is never trained on.

    One group of each run of ``HELD_OUT_PERIOD`` neighbours is held out, a different place of the run each time, so
    that the held-out groups do not line up in one column of the video. With fewer groups than that it is the last one;
    a single group is not held out, as nothing would be left to train on.

    Args:
        group_ids: int64, numbers of query groups.
        num_groups: groups of the sequence that hold a real query.
    """
    if num_groups < HELD_OUT_PERIOD:
        return (group_ids == num_groups - 1) & (num_groups > 1)
    run = group_ids // HELD_OUT_PERIOD
    return group_ids % HELD_OUT_PERIOD == (3 * run + HELD_OUT_PERIOD // 2) % HELD_OUT_PERIOD


def sample_rows(num_queries_valid: int, stride: int, offset: int, *, q_block_size: int) -> Tensor:
    """Query rows for the predictor loss: one in ``stride``, starting at ``offset``, without the held-out groups.

    Args:
        num_queries_valid: real queries of the sequence, at least 1.
        stride: at least 1 (``--dsv-predictor-query-stride``).
        offset: the step counter; all rows have had their turn after ``stride`` steps.
        q_block_size: queries per group.

    Returns:
        int64 [R] on the CPU, ascending, R >= 1.

    Raises:
        ValueError: a length or stride below 1.
    """
    if num_queries_valid < 1 or stride < 1:
        raise ValueError("sample_rows needs num_queries_valid and stride of at least 1, got "
                         f"{num_queries_valid} and {stride}; the stride is --dsv-predictor-query-stride")
    rows = torch.arange(num_queries_valid)
    rows = rows[~is_held_out(rows // q_block_size, -(-num_queries_valid // q_block_size))]
    return rows[offset % min(stride, len(rows)) :: stride]


def sample_groups(num_queries_valid: int, count: int, offset: int, *, q_block_size: int) -> Tensor:
    """Held-out query groups for the profile, another choice at each ``offset``.

    Args:
        num_queries_valid: real queries of the sequence, at least 1.
        count: groups wanted, at least 1 (``--dsv-profile-groups``); fewer are returned where fewer are held out.
        offset: a counter of profiles.
        q_block_size: queries per group.

    Returns:
        int64 [min(count, held out)] on the CPU, ascending; spread over the sequence. The only group of a sequence with
        one group is returned although it is trained on.

    Raises:
        ValueError: a length or count below 1.
    """
    if num_queries_valid < 1 or count < 1:
        raise ValueError("sample_groups needs num_queries_valid and count of at least 1, got "
                         f"{num_queries_valid} and {count}; the count is --dsv-profile-groups")
    num_groups = -(-num_queries_valid // q_block_size)
    groups = torch.arange(num_groups)
    groups = groups[is_held_out(groups, num_groups)] if num_groups > 1 else groups
    count = min(count, len(groups))
    spread = torch.arange(count) * len(groups) // count
    return groups[(spread + offset) % len(groups)].sort().values
