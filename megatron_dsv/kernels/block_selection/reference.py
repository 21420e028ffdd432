"""The rows of a selection in plain torch: sorts, masks and scatters, a few heads at a time. Waits for no device.

Scores may come in chunks; no more than one of them is held.

Dims: b batch, h query heads, Nq query groups, Nk key/value blocks. A row is (batch, head, group); pairs are
(batch, head), batch first.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dsv.kernels.block_scores.api import ChunkedScores, ScoreChunk
from megatron_dsv.kernels.block_selection.limits import THETA_UNIT, RowRule, own_blocks
from megatron_dsv.kernels.host_values import on_device

_CHUNK_ELEMENTS = 2**25
"""Scores handled at once, or one group of one head; bounds the int64 temporaries to 256 MiB each."""


@dataclass(frozen=True)
class ScoredRows:
    """Some rows of a few neighbouring (batch, head) pairs; dims as ScoreChunk: [pairs, groups, Nk].

    Attributes:
        ranking: fp32 [pairs, groups, Nk]; the score, +inf where a block is forced, -inf where it is padding. Never NaN.
        mass: int64 [pairs, groups, Nk], the score as a mass in fixed point, 0 for padding; None for rules that do not
            use it.
        valid: bool [pairs, 1, Nk]; blocks that hold a real key.
        num_forced: int64 [pairs, groups]; forced blocks of each row.
        floor: int64 [pairs]; fewest blocks a row keeps.
        cap: int64 [pairs]; most blocks a row keeps.
        widest: the largest ``cap``, known on the host.
        theta: target share of the row's mass, in units of 1 / THETA_UNIT.
    """

    ranking: Tensor
    mass: Tensor | None
    valid: Tensor
    num_forced: Tensor
    floor: Tensor
    cap: Tensor
    widest: int
    theta: int


def select_rows(scores: Tensor | ChunkedScores, rule: RowRule, kv_length: Tensor, query_length: Tensor,
                query_group_ids: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """(kv_indices, row_start, row_count) of scores fp32 [b, h, Nq, Nk]; kv_length [b, G], query_length [b]."""
    b, h, nq, nk = scores.shape
    device = scores.device
    starts, width, cap, floor = (x.repeat(b) for x in on_device(rule.table(b * nq), torch.int64, device))
    block = torch.arange(nk, device=device)
    length = kv_length.repeat_interleave(h // kv_length.shape[1], dim=1).reshape(-1, 1)
    group = torch.arange(nq, device=device) if query_group_ids is None else query_group_ids
    real_group = (group * rule.q_block_size < query_length[:, None]).repeat_interleave(h, 0)

    row = torch.arange(b, device=device).repeat_interleave(h)[:, None] * nq + torch.arange(nq, device=device)
    row_start = starts[:, None] + row * width[:, None]
    row_count = torch.zeros(b * h, nq, dtype=torch.int32, device=device)
    kv_indices = torch.zeros(rule.capacity(b * nq) + 1, dtype=torch.int32, device=device)
    for chunk in _chunks(scores) if any(rule.widths) else ():
        for pairs, groups in _pieces(chunk, rule.widths):
            part = slice(chunk.first_pair + pairs.start, chunk.first_pair + pairs.stop)
            among = slice(chunk.first_group + groups.start, chunk.first_group + groups.stop)
            rows = _scored_rows(chunk.scores[pairs, groups], rule, (block * rule.kv_block_size < length[part])[:, None],
                                _forced(group[among], block, rule), floor[part], cap[part],
                                max(rule.widths[pair % h] for pair in range(part.start, part.stop)))
            mask = (_keep_mass(rows) if rule.by_mass else _keep_topk(rows)) & real_group[part, among, None]
            row_count[part, among] = mask.sum(-1, dtype=torch.int32)
            _pack(mask, row_start[part, among], kv_indices)
    row_start = torch.where((width == 0)[:, None] & real_group, -1, row_start)
    return kv_indices[:-1], row_start.view(b, h, nq), row_count.view(b, h, nq)


def _keep_topk(rows: ScoredRows) -> Tensor:
    """Exactly ``cap`` best blocks of every row (all of them where fewer are valid); ties go to the lower index."""
    best = rows.ranking.topk(rows.widest, dim=-1).values
    last = (rows.cap - 1)[:, None, None].expand(*best.shape[:-1], 1)
    threshold = best.gather(-1, last)
    above = rows.ranking > threshold
    level = rows.ranking == threshold
    # torch.topk breaks ties as it likes; counting along the row gives the places that are left to the first of them
    places = rows.cap[:, None, None] - above.sum(-1, keepdim=True)
    return (above | (level & (level.cumsum(-1, dtype=torch.int32) <= places))) & rows.valid


def _keep_mass(rows: ScoredRows) -> Tensor:
    """The fewest best blocks whose share of the row's mass reaches ``theta``, within floor and cap.

    Forced blocks come first and count. The block that crosses ``theta`` is kept; ties go to the lower index.
    """
    assert rows.mass is not None
    order = rows.ranking.argsort(dim=-1, descending=True, stable=True)
    running = rows.mass.gather(-1, order).cumsum(-1)
    # In two parts: the product of a long row's whole mass and theta would not fit 64 bits.
    total = running[..., -1:]
    target = total // THETA_UNIT * rows.theta + (total % THETA_UNIT * rows.theta + THETA_UNIT - 1) // THETA_UNIT
    count = (running < target).sum(-1) + 1
    count = torch.maximum(torch.maximum(count, rows.num_forced), rows.floor[:, None])
    count = torch.minimum(count, rows.cap[:, None])
    lane = torch.arange(order.shape[-1], device=order.device)
    mask = torch.zeros_like(rows.ranking, dtype=torch.bool)
    return mask.scatter_(-1, order, lane < count[..., None]) & rows.valid


def _scored_rows(scores: Tensor, rule: RowRule, valid: Tensor, forced: Tensor, floor: Tensor, cap: Tensor,
                 widest: int) -> ScoredRows:
    largest = torch.finfo(scores.dtype).max
    # a real block must beat padding even if its score is -inf or NaN, and must not pass for a forced one
    ranking = scores.nan_to_num(nan=-largest, posinf=largest, neginf=-largest)
    mass = None
    if rule.by_mass:
        weights = ranking.clamp_min(0.0)
        if rule.score_kind == "lse":
            weights = (ranking - ranking.masked_fill(~valid, -largest).amax(-1, keepdim=True)).exp()
        mass = _fixed_point(weights.masked_fill(~valid, 0.0))
    forced = forced & valid
    ranking = ranking.masked_fill(~valid, -torch.inf).masked_fill(forced, torch.inf)
    return ScoredRows(ranking=ranking, mass=mass, valid=valid, num_forced=forced.sum(-1), floor=floor, cap=cap,
                      widest=widest, theta=rule.theta_units)


def _fixed_point(mass: Tensor) -> Tensor:
    """int64 multiples of 2^-23 of the power of two below the row's largest mass: sums that no order can change."""
    exponent = (mass.amax(-1, keepdim=True).view(torch.int32) >> 23).clamp_min(23)
    return (mass * ((277 - exponent) << 23).view(torch.float32)).long()


def _forced(group: Tensor, block: Tensor, rule: RowRule) -> Tensor:
    """bool [Nq, Nk]: blocks that overlap the group's token range, and the leading ones."""
    forced = (block < rule.prefix_blocks).expand(group.shape[0], -1)
    if not rule.keep_own_block:
        return forced
    first, last = own_blocks(group[:, None], rule.q_block_size, rule.kv_block_size)
    return forced | ((block >= first) & (block <= last))


def _pack(mask: Tensor, row_start: Tensor, kv_indices: Tensor) -> None:
    """Write each row's kept block numbers, ascending, from its start; the rest lands in the last, spare slot."""
    rank = mask.cumsum(-1, dtype=torch.int32) - 1
    target = torch.where(mask, row_start[..., None] + rank, kv_indices.numel() - 1)
    block = torch.arange(mask.shape[-1], dtype=torch.int32, device=mask.device).expand_as(mask)
    kv_indices.scatter_(0, target.reshape(-1), block.reshape(-1))


def _chunks(scores: Tensor | ChunkedScores) -> Iterable[ScoreChunk]:
    if isinstance(scores, ChunkedScores):
        return scores
    # An expanded batch is not copied.
    return (ScoreChunk(item * scores.shape[1], 0, part) for item, part in enumerate(scores))


def _pieces(chunk: ScoreChunk, widths: Sequence[int]) -> Iterator[tuple[slice, slice]]:
    """(pairs, groups) within a chunk: neighbouring pairs that store lists, few enough to bound the temporaries."""
    pairs, groups, blocks = chunk.scores.shape
    most = max(1, _CHUNK_ELEMENTS // max(1, groups * blocks))
    step = max(1, _CHUNK_ELEMENTS // max(1, blocks))

    def stores(pair: int) -> bool:
        return widths[(chunk.first_pair + pair) % len(widths)] > 0

    start = 0
    while start < pairs:
        stop = start
        while stop < pairs and stop - start < most and stores(stop):
            stop += 1
        for first in range(0, groups, step) if stop > start else ():
            yield slice(start, stop), slice(first, min(first + step, groups))
        start = max(stop, start + 1)
