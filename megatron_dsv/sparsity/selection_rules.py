"""Selection rules: one score per (query group, key/value block) -> KVSelection.

A rule answers, for every row of scores, which blocks stay. ``select`` does what is common to all of them: padding,
forced blocks, budgets, dense rows and the packed lists. A new rule is one function and one entry of ``RULES``.

Dims: b batch, h query heads, G key/value heads, Nq query groups, Nk key/value blocks. A row is (batch, head, group).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dsv.kernels.selection import DENSE_ROW, KVSelection
from megatron_dsv.sparsity.lengths import Length, key_lengths, longest_on_host, query_lengths

_CHUNK_ELEMENTS = 2**25
"""Scores handled at once; bounds the int64 temporaries to 256 MiB each when the blocks are single tokens."""


@dataclass(frozen=True)
class ScoredRows:
    """What a rule sees: the rows of a few neighbouring heads.

    Attributes:
        ranking: fp32 [b, h, Nq, Nk]; the score, +inf where a block is forced, -inf where it is padding. Never NaN.
        mass: fp32 [b, h, Nq, Nk], the score as a share-like mass, 0 for padding; None for rules that do not use it.
        valid: bool [b, h, 1, Nk]; blocks that hold a real key.
        num_forced: int64 [b, h, Nq]; forced blocks of each row.
        floor: int64 [h]; fewest blocks a row keeps.
        cap: int64 [h]; most blocks a row keeps.
        widest: the largest ``cap``, known on the host.
        theta: target share of the row's mass.
    """

    ranking: Tensor
    mass: Tensor | None
    valid: Tensor
    num_forced: Tensor
    floor: Tensor
    cap: Tensor
    widest: int
    theta: float


@dataclass(frozen=True)
class SelectionRule:
    """A rule and what it needs.

    Attributes:
        keep: maps the rows to a boolean mask [b, h, Nq, Nk] of the blocks that stay, at most ``cap`` a row.
        fixed_count: every row of a head keeps ``cap`` blocks, so a head whose cap covers all of them is dense.
        capped_by_budget: ``head_budgets`` is required and caps the rows.
        uses_mass: the rule sums scores, so they must be masses or log-sum-exps.
    """

    keep: Callable[[ScoredRows], Tensor]
    fixed_count: bool
    capped_by_budget: bool
    uses_mass: bool


def keep_topk(rows: ScoredRows) -> Tensor:
    """Exactly ``cap`` best blocks of every row (all of them where fewer are valid); ties go to the lower index."""
    best = rows.ranking.topk(rows.widest, dim=-1).values
    last = (rows.cap - 1)[None, :, None, None].expand(*best.shape[:-1], 1)
    threshold = best.gather(-1, last)
    above = rows.ranking > threshold
    level = rows.ranking == threshold
    # torch.topk breaks ties as it likes; counting along the row gives the places that are left to the first of them
    places = rows.cap[None, :, None, None] - above.sum(-1, keepdim=True)
    return (above | (level & (level.cumsum(-1, dtype=torch.int32) <= places))) & rows.valid


def keep_mass(rows: ScoredRows) -> Tensor:
    """The fewest best blocks whose share of the row's mass reaches ``theta``, within floor and cap.

    Forced blocks come first and count. The block that crosses ``theta`` is kept; ties go to the lower index.
    """
    assert rows.mass is not None
    order = rows.ranking.argsort(dim=-1, descending=True, stable=True)
    running = rows.mass.gather(-1, order).cumsum(-1)
    count = (running < rows.theta * running[..., -1:]).sum(-1) + 1
    count = torch.maximum(torch.maximum(count, rows.num_forced), rows.floor[None, :, None])
    count = torch.minimum(count, rows.cap[None, :, None])
    lane = torch.arange(order.shape[-1], device=order.device)
    mask = torch.zeros_like(rows.ranking, dtype=torch.bool)
    return mask.scatter_(-1, order, lane < count[..., None]) & rows.valid


RULES: dict[str, SelectionRule] = {
    "topk": SelectionRule(keep_topk, fixed_count=True, capped_by_budget=True, uses_mass=False),
    "mass": SelectionRule(keep_mass, fixed_count=False, capped_by_budget=False, uses_mass=True),
    "topk-mass": SelectionRule(keep_mass, fixed_count=False, capped_by_budget=True, uses_mass=True),
    "all": SelectionRule(keep_topk, fixed_count=True, capped_by_budget=False, uses_mass=False),
}


def select(scores: Tensor, *, rule: str, num_kv_heads: int, num_queries: int, num_keys: int, q_block_size: int,
           kv_block_size: int, head_budgets: Sequence[int] | None = None, head_floors: Sequence[int] | None = None,
           head_caps: Sequence[int] | None = None, theta: float = 0.9, score_kind: str = "mass",
           kv_length: Length = None, query_length: Length = None, query_group_ids: Tensor | None = None,
           keep_own_block: bool = True, prefix_blocks: int = 0) -> KVSelection:
    """Turn scores into the lists of blocks that every query group attends to.

    Padding blocks are never selected and groups of padding attend to nothing. Forced blocks are always inside and
    count towards the budget; a budget below the largest possible number of them is raised to it. A NaN score never
    wins. Nothing waits for the device: the capacity follows from the budgets alone.

    Args:
        scores: fp32 [b, h, Nq, Nk]; larger is better.
        rule: a name of ``RULES``. ``topk``: ``head_budgets`` blocks a row. ``mass``: the fewest blocks that reach
            ``theta``; does not read ``head_budgets``. ``topk-mass``: the same, at most ``head_budgets``. ``all``:
            everything, the scores are not read.
        num_kv_heads: G; h is a multiple of it.
        num_queries: query tokens of the q that goes with the selection, padding included; Nq groups of them.
        num_keys: key tokens of the k and v that go with it, padding included; Nk blocks of them.
        q_block_size: tokens per query group.
        kv_block_size: tokens per key/value block; 1 for single tokens.
        head_budgets: h blocks per row, host ints of at least 1.
        head_floors: h host ints, fewest blocks per row for the mass rules; default 1.
        head_caps: h host ints, most blocks per row for the mass rules; default all of them.
        theta: target share of the mass for the mass rules, in (0, 1] (``--dsv-budget-mass``).
        score_kind: what the scores are: ``mass`` (not negative), ``lse`` (log-sum-exp, turned into masses by a
            softmax over the row) or ``max`` (a ranking only, for rules that do not sum).
        kv_length: real keys: None for all, an int, or an integer tensor [b] or [b, G].
        query_length: real query tokens of the whole sequence: None for ``num_queries``, an int, or [b].
        query_group_ids: int64 [Nq], the number of each row's group in the whole sequence; default 0, 1, ... A group
            knows its own blocks and its padding by this number.
        keep_own_block: force the blocks that overlap the group's own tokens (self-attention).
        prefix_blocks: force this many leading blocks.

    Returns:
        The selection, on the device of ``scores``. A head of ``topk`` whose budget covers every block that may be
        valid has dense rows; nothing is stored for them.

    Raises:
        ValueError: an unknown rule, shapes or budgets that do not fit, or scores that the rule cannot use.
    """
    chosen = _rule(rule, score_kind, theta)
    b, h, nq, nk = _check_shapes(scores, num_kv_heads, num_queries, num_keys, q_block_size, kv_block_size,
                                 query_group_ids, query_length)
    device = scores.device
    most = -(-longest_on_host(kv_length, num_keys) // kv_block_size)
    caps, floors = _limits(chosen, rule, h, most, head_budgets, head_floors, head_caps)
    forced_bound = prefix_blocks + (_own_block_bound(q_block_size, kv_block_size) if keep_own_block else 0)
    caps = [min(max(cap, forced_bound, 1), max(most, 1)) for cap in caps]
    dense = [chosen.fixed_count and cap >= most for cap in caps]

    lengths = key_lengths(kv_length, batch=b, num_kv_heads=num_kv_heads, num_keys=num_keys, device=device)
    block = torch.arange(nk, device=device)
    valid = (block * kv_block_size < lengths[..., None]).repeat_interleave(h // num_kv_heads, dim=1)[:, :, None]
    group = torch.arange(nq, device=device) if query_group_ids is None else query_group_ids
    reals = query_lengths(query_length, batch=b, num_queries=num_queries, device=device)
    real_group = (group * q_block_size < reals[:, None])[:, None, :]
    forced = _forced(group, block, q_block_size, kv_block_size, keep_own_block, prefix_blocks)

    widths = [0 if is_dense else cap for is_dense, cap in zip(dense, caps, strict=True)]
    capacity = b * nq * sum(widths)
    width = _host_ints(widths, device)
    before = _host_ints([b * nq * sum(widths[:i]) for i in range(h)], device)
    row = torch.arange(b, device=device)[:, None, None] * nq + torch.arange(nq, device=device)
    row_start = before[None, :, None] + row * width[None, :, None]
    row_count = torch.zeros(b, h, nq, dtype=torch.int32, device=device)
    kv_indices = torch.zeros(capacity + 1, dtype=torch.int32, device=device)

    cap, floor = _host_ints(caps, device), _host_ints(floors, device)
    for heads in _head_runs(widths, b * nq * nk):
        rows = _scored_rows(chosen, score_kind, scores[:, heads], valid[:, heads], forced, floor[heads], cap[heads],
                            max(widths[heads]), theta)
        mask = chosen.keep(rows) & real_group[..., None]
        row_count[:, heads] = mask.sum(-1, dtype=torch.int32)
        _pack(mask, row_start[:, heads], kv_indices)

    if any(dense):
        is_dense = (width == 0)[None, :, None] & real_group
        row_start = torch.where(is_dense, DENSE_ROW, row_start)
    return KVSelection(kv_indices=kv_indices[:capacity], row_start=row_start, row_count=row_count, kv_length=lengths,
                       num_queries=num_queries, num_keys=num_keys, q_block_size=q_block_size,
                       kv_block_size=kv_block_size, max_row_count=nk if any(dense) else max(caps))


def _scored_rows(rule: SelectionRule, score_kind: str, scores: Tensor, valid: Tensor, forced: Tensor, floor: Tensor,
                 cap: Tensor, widest: int, theta: float) -> ScoredRows:
    largest = torch.finfo(scores.dtype).max
    # a real block must beat padding even if its score is -inf or NaN, and must not pass for a forced one
    ranking = scores.nan_to_num(nan=-largest, posinf=largest, neginf=-largest)
    ranking = ranking.masked_fill(~valid, -torch.inf)
    mass = None
    if rule.uses_mass and score_kind == "mass":
        mass = ranking.clamp_min(0.0)
    elif rule.uses_mass:
        mass = ranking.softmax(-1).nan_to_num(nan=0.0)
    forced = forced & valid
    return ScoredRows(ranking=ranking.masked_fill(forced, torch.inf), mass=mass, valid=valid,
                      num_forced=forced.sum(-1), floor=floor, cap=cap, widest=widest, theta=theta)


def _forced(group: Tensor, block: Tensor, q_block_size: int, kv_block_size: int, own: bool, prefix: int) -> Tensor:
    """bool [Nq, Nk]: blocks that overlap the group's token range, and the leading ones."""
    forced = (block < prefix).expand(group.shape[0], -1)
    if not own:
        return forced
    first = group * q_block_size // kv_block_size
    last = ((group + 1) * q_block_size - 1) // kv_block_size
    return forced | ((block >= first[:, None]) & (block <= last[:, None]))


def _own_block_bound(q_block_size: int, kv_block_size: int) -> int:
    """Most blocks that a query group's token range can overlap."""
    if kv_block_size % q_block_size == 0:
        return 1
    if q_block_size % kv_block_size == 0:
        return q_block_size // kv_block_size
    return (q_block_size + kv_block_size - 2) // kv_block_size + 1


def _pack(mask: Tensor, row_start: Tensor, kv_indices: Tensor) -> None:
    """Write each row's kept block numbers, ascending, from its start; the rest lands in the last, spare slot."""
    rank = mask.cumsum(-1, dtype=torch.int32) - 1
    target = torch.where(mask, row_start[..., None] + rank, kv_indices.numel() - 1)
    block = torch.arange(mask.shape[-1], dtype=torch.int32, device=mask.device).expand_as(mask)
    kv_indices.scatter_(0, target.reshape(-1), block.reshape(-1))


def _head_runs(widths: Sequence[int], elements_per_head: int) -> Iterator[slice]:
    """Neighbouring heads that store lists, few enough at a time to bound the temporaries."""
    most = max(1, _CHUNK_ELEMENTS // max(1, elements_per_head))
    start = 0
    while start < len(widths):
        stop = start
        while stop < len(widths) and stop - start < most and widths[stop]:
            stop += 1
        if stop > start:
            yield slice(start, stop)
        start = max(stop, start + 1)


def _host_ints(values: Sequence[int], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.int64).to(device, non_blocking=True)


def _rule(name: str, score_kind: str, theta: float) -> SelectionRule:
    if name not in RULES:
        raise ValueError(f"--dsv-selection-rule must be one of {', '.join(sorted(RULES))}, got {name!r}")
    if score_kind not in ("mass", "lse", "max"):
        raise ValueError(f"--dsv-score-reduction must be one of mass, lse, max, got {score_kind!r}")
    if RULES[name].uses_mass and score_kind == "max":
        raise ValueError(f"--dsv-selection-rule {name} sums scores, so --dsv-score-reduction must be mass or lse, "
                         "got max; use rule topk with it")
    if not 0.0 < theta <= 1.0:
        raise ValueError(f"theta of a selection must be in (0, 1], got {theta}")
    return RULES[name]


def _limits(rule: SelectionRule, name: str, heads: int, most: int, budgets: Sequence[int] | None,
            floors: Sequence[int] | None, caps: Sequence[int] | None) -> tuple[list[int], list[int]]:
    """Most and fewest blocks per row of every head."""
    for what, values in (("head_budgets", budgets), ("head_floors", floors), ("head_caps", caps)):
        if values is not None and (len(values) != heads or min(values) < 1):
            raise ValueError(f"{what} must be {heads} ints of at least 1, one for each head, got {list(values)}")
    upper = [most] * heads
    if rule.capped_by_budget:
        if budgets is None:
            raise ValueError(f"rule {name!r} needs head_budgets, one int for each head, got None")
        upper = list(budgets)
    if rule.uses_mass and caps is not None:
        upper = [min(pair) for pair in zip(upper, caps, strict=True)]
    return upper, [1] * heads if floors is None else list(floors)


def _check_shapes(scores: Tensor, num_kv_heads: int, num_queries: int, num_keys: int, q_block_size: int,
                  kv_block_size: int, query_group_ids: Tensor | None,
                  query_length: Length) -> tuple[int, int, int, int]:
    nq, nk = -(-num_queries // q_block_size), -(-num_keys // kv_block_size)
    if scores.dim() != 4 or scores.shape[2:] != (nq, nk) or scores.dtype != torch.float32:
        raise ValueError(f"scores must be float32 [b, h, {nq}, {nk}] for {num_queries} queries and {num_keys} keys, "
                         f"got {scores.dtype} {tuple(scores.shape)}")
    if num_kv_heads < 1 or scores.shape[1] % num_kv_heads:
        raise ValueError(f"num_kv_heads must divide the {scores.shape[1]} query heads, got {num_kv_heads}")
    if query_group_ids is not None and query_group_ids.shape != (nq,):
        raise ValueError(f"query_group_ids must be [{nq}], got {tuple(query_group_ids.shape)}")
    if query_group_ids is not None and query_length is None:
        raise ValueError("query_length must be given along with query_group_ids: the rows are a part of the sequence")
    return scores.shape[0], scores.shape[1], nq, nk
