"""Selection rules: scores of (query group, key/value block) pairs -> KVSelection.

A rule says what bounds a row: a count, a share of the mass, or both. ``kernels.block_selection`` then makes the rows.
A new rule of that kind is one entry of ``RULES``.

Dims: b batch, h query heads, G key/value heads, Nq query groups, Nk key/value blocks. A row is (batch, head, group).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dsv.kernels.block_scores.api import ChunkedScores
from megatron_dsv.kernels.block_selection.api import select_rows
from megatron_dsv.kernels.block_selection.limits import RowRule
from megatron_dsv.kernels.lengths import Length, key_lengths, longest_on_host, query_lengths
from megatron_dsv.kernels.selection import KVSelection


@dataclass(frozen=True)
class SelectionRule:
    """What a rule counts by.

    Attributes:
        by_mass: a row keeps the fewest blocks whose mass reaches ``theta``, so the scores must be masses or
            log-sum-exps. Without it every row of a head keeps as many, and a head that may keep all is dense.
        capped_by_budget: ``head_budgets`` is required and caps the rows.
    """

    by_mass: bool
    capped_by_budget: bool


RULES: dict[str, SelectionRule] = {
    "topk": SelectionRule(by_mass=False, capped_by_budget=True),
    "mass": SelectionRule(by_mass=True, capped_by_budget=False),
    "topk-mass": SelectionRule(by_mass=True, capped_by_budget=True),
    "all": SelectionRule(by_mass=False, capped_by_budget=False),
}


def select(scores: Tensor | ChunkedScores, *, rule: str, num_kv_heads: int, num_queries: int, num_keys: int,
           q_block_size: int, kv_block_size: int, head_budgets: Sequence[int] | None = None,
           head_floors: Sequence[int] | None = None, head_caps: Sequence[int] | None = None, theta: float = 0.9,
           score_kind: str = "mass", kv_length: Length = None, query_length: Length = None,
           query_group_ids: Tensor | None = None, keep_own_block: bool = True, prefix_blocks: int = 0,
           backend: str = "auto") -> KVSelection:
    """Turn scores into the lists of blocks that every query group attends to.

    Padding blocks are never selected and groups of padding attend to nothing. Forced blocks are always inside and
    count towards the budget; a budget below the largest possible number of them is raised to it. A NaN score never
    wins. Nothing waits for the device: the capacity follows from the budgets alone.

    Args:
        scores: fp32 [b, h, Nq, Nk]; larger is better. Whole, or in chunks that are computed when needed.
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
        theta: target share of the mass for the mass rules, in (0, 1] (``--dsv-budget-mass``), a multiple of 2^-22.
        score_kind: what the scores are: ``mass`` (not negative), ``lse`` (log-sum-exp, turned into masses by a
            softmax over the row) or ``max`` (a ranking only, for rules that do not sum).
        kv_length: real keys: None for all, an int, or an integer tensor [b] or [b, G].
        query_length: real query tokens of the whole sequence: None for ``num_queries``, an int, or [b].
        query_group_ids: int64 [Nq], the number of each row's group in the whole sequence; default 0, 1, ... A group
            knows its own blocks and its padding by this number.
        keep_own_block: force the blocks that overlap the group's own tokens (self-attention).
        prefix_blocks: force this many leading blocks, at least 0.
        backend: of ``kernels.block_selection``.

    Returns:
        The selection, on the device of ``scores``. A head of ``topk`` whose budget covers every block that may be
        valid has dense rows; nothing is stored for them.

    Raises:
        ValueError: an unknown rule, shapes or budgets that do not fit, or scores that the rule cannot use.
    """
    chosen = _rule(rule, score_kind, theta)
    if prefix_blocks < 0:
        raise ValueError(f"prefix_blocks must be at least 0, got {prefix_blocks}")
    b, h, _, nk = _check_shapes(scores, num_kv_heads, num_queries, num_keys, q_block_size, kv_block_size,
                                 query_group_ids, query_length)
    device = scores.device
    most = -(-longest_on_host(kv_length, num_keys) // kv_block_size)
    caps, floors = _limits(chosen, rule, h, most, head_budgets, head_floors, head_caps)
    forced_bound = prefix_blocks + (_own_block_bound(q_block_size, kv_block_size) if keep_own_block else 0)
    caps = [min(max(cap, forced_bound, 1), max(most, 1)) for cap in caps]
    widths = [0 if not chosen.by_mass and cap >= most else cap for cap in caps]
    row_rule = RowRule(widths=tuple(widths), caps=tuple(caps), floors=tuple(floors), by_mass=chosen.by_mass,
                       score_kind=score_kind, theta=theta, keep_own_block=keep_own_block, prefix_blocks=prefix_blocks,
                       q_block_size=q_block_size, kv_block_size=kv_block_size)
    return select_rows(
        scores, row_rule,
        kv_length=key_lengths(kv_length, batch=b, num_kv_heads=num_kv_heads, num_keys=num_keys, device=device),
        query_length=query_lengths(query_length, batch=b, num_queries=num_queries, device=device),
        query_group_ids=query_group_ids, num_queries=num_queries, num_keys=num_keys,
        max_row_count=max(caps) if all(widths) else nk, backend=backend)


def _own_block_bound(q_block_size: int, kv_block_size: int) -> int:
    """Most blocks that a query group's token range can overlap."""
    if kv_block_size % q_block_size == 0:
        return 1
    if q_block_size % kv_block_size == 0:
        return q_block_size // kv_block_size
    return (q_block_size + kv_block_size - 2) // kv_block_size + 1


def _rule(name: str, score_kind: str, theta: float) -> SelectionRule:
    if name not in RULES:
        raise ValueError(f"rule of a selection must be one of {', '.join(sorted(RULES))}, got {name!r}")
    if score_kind not in ("mass", "lse", "max"):
        raise ValueError(f"--dsv-score-reduction must be one of mass, lse, max, got {score_kind!r}")
    if RULES[name].by_mass and score_kind == "max":
        raise ValueError(f"--dsv-selection-rule {name} sums scores, so --dsv-score-reduction must be mass or lse, "
                         "got max; use rule topk with it")
    if not 0.0 < theta <= 1.0:
        raise ValueError(f"theta of a selection must be in (0, 1], got {theta}")
    return RULES[name]


def _limits(rule: SelectionRule, name: str, heads: int, most: int, budgets: Sequence[int] | None,
            floors: Sequence[int] | None, caps: Sequence[int] | None) -> tuple[list[int], list[int]]:
    """Most and fewest blocks per row of every head."""
    for what, values in (("head_budgets", budgets), ("head_floors", floors), ("head_caps", caps)):
        if values is not None and (len(values) != heads or not all(isinstance(x, int) and x >= 1 for x in values)):
            raise ValueError(f"{what} must be {heads} ints of at least 1, one for each head, got {list(values)}")
    upper = [most] * heads
    if rule.capped_by_budget:
        if budgets is None:
            raise ValueError(f"rule {name!r} needs head_budgets, one int for each head, got None")
        upper = list(budgets)
    if rule.by_mass and caps is not None:
        upper = [min(pair) for pair in zip(upper, caps, strict=True)]
    return upper, [1] * heads if floors is None else list(floors)


def _check_shapes(scores: Tensor | ChunkedScores, num_kv_heads: int, num_queries: int, num_keys: int, q_block_size: int,
                  kv_block_size: int, query_group_ids: Tensor | None,
                  query_length: Length) -> tuple[int, int, int, int]:
    if q_block_size < 1 or kv_block_size < 1:
        raise ValueError(f"q_block_size and kv_block_size must be at least 1, got {q_block_size} and {kv_block_size}")
    nq, nk = -(-num_queries // q_block_size), -(-num_keys // kv_block_size)
    dtype = scores.dtype if isinstance(scores, Tensor) else torch.float32
    if len(scores.shape) != 4 or tuple(scores.shape[2:]) != (nq, nk) or dtype != torch.float32:
        raise ValueError(f"scores must be float32 [b, h, {nq}, {nk}] for {num_queries} queries and {num_keys} keys, "
                         f"got {dtype} {tuple(scores.shape)}")
    if num_kv_heads < 1 or scores.shape[1] % num_kv_heads:
        raise ValueError(f"num_kv_heads must divide the {scores.shape[1]} query heads, got {num_kv_heads}")
    if query_group_ids is not None and (query_group_ids.shape != (nq,) or query_group_ids.is_floating_point()):
        raise ValueError(f"query_group_ids must be [{nq}] integers, got {query_group_ids.dtype} "
                         f"{tuple(query_group_ids.shape)}")
    if query_group_ids is not None and query_length is None:
        raise ValueError("query_length must be given along with query_group_ids: the rows are a part of the sequence")
    return scores.shape[0], scores.shape[1], nq, nk
