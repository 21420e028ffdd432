"""Profiles of query groups whose sequence is all at hand."""

from __future__ import annotations

from dataclasses import replace

from torch import Tensor

from megatron_dsv.kernels.lengths import Length, query_lengths
from megatron_dsv.kernels.selection import KVSelection
from megatron_dsv.sparsity.profile import GroupProfile, gathered_rows, profile_gathered_groups


def profile_query_groups(q: Tensor, k: Tensor, *, group_ids: Tensor, q_block_size: int, kv_block_size: int,
                         softmax_scale: float, theta: float, budget_mass: float, kv_length: Length = None,
                         query_length: Length = None, selection: KVSelection | None = None,
                         sparsity_stride: int = 1, backend: str = "auto") -> GroupProfile:
    """Profile some query groups of a whole sequence.

    Args:
        q: [s, b, h, d].
        k: [s, b, G, d].
        group_ids: int64 [n], numbers of the groups to sample.
        query_length: real queries: None for all, an int, or [b].
        selection: what the predictor chose for this q and k, all groups; None leaves ``recall`` without a count.

    The other arguments, the result and the errors are those of ``profile_gathered_groups``.
    """
    rows = gathered_rows(group_ids, q_block_size).to(q.device)
    reals = query_lengths(query_length, batch=q.shape[1], num_queries=q.shape[0], device=q.device)
    valid = rows[:, None] < reals.clamp_max(q.shape[0])
    kept = None if selection is None else selected_blocks(selection, group_ids)
    return profile_gathered_groups(
        q.index_select(0, rows.clamp_max(q.shape[0] - 1)), k, valid_rows=valid, q_block_size=q_block_size,
        kv_block_size=kv_block_size, softmax_scale=softmax_scale, theta=theta, budget_mass=budget_mass,
        kv_length=kv_length, kept_blocks=kept, sparsity_stride=sparsity_stride, backend=backend)


def selected_blocks(selection: KVSelection, group_ids: Tensor) -> Tensor:
    """bool [b, h, n, Nk]: the blocks that some groups of a selection keep. Reads no other group's list."""
    ids = group_ids.to(selection.row_start.device)
    part = replace(selection, row_start=selection.row_start[:, :, ids], row_count=selection.row_count[:, :, ids],
                   num_queries=ids.numel() * selection.q_block_size, transposed=None)
    return part.block_mask()
