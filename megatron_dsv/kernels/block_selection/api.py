"""Which blocks every row keeps: from scores to the lists of a KVSelection.

Padding is never kept. Forced blocks come first, then larger scores, then lower indices; NaN counts as the smallest. A
row keeps ``cap`` blocks in this order (all valid ones where they are fewer), or, by mass, the fewest whose mass
reaches theta of the row's, within floor and cap and never without a forced block. Masses are summed in fixed point,
23 bits below the row's largest, so that both backends agree on every set. A group that begins at or after its
query_length keeps nothing; any other row of a head without places (width 0) is dense.

Scores are not asked for where every head is dense.

Backends: ``reference`` (torch), ``triton`` (one launch for each chunk of scores; up to 16,384 blocks; CUDA, or
TRITON_INTERPRET=1 on the CPU), ``auto`` (triton on CUDA where it can serve the request; logged once).

Dims: b batch, h query heads, G key/value heads (h % G == 0), Nq query groups, Nk key/value blocks.
"""

from __future__ import annotations

from types import ModuleType

from torch import Tensor

from megatron_dsv.kernels.block_scores.api import ChunkedScores
from megatron_dsv.kernels.block_selection import reference
from megatron_dsv.kernels.block_selection.limits import RowRule
from megatron_dsv.kernels.launching import choose_or_log
from megatron_dsv.kernels.selection import KVSelection

BACKENDS = ("auto", "reference", "triton")


def select_rows(scores: Tensor | ChunkedScores, rule: RowRule, *, kv_length: Tensor, query_length: Tensor,
                query_group_ids: Tensor | None, num_queries: int, num_keys: int, max_row_count: int,
                backend: str = "auto") -> KVSelection:
    """The selection that ``rule`` makes of ``scores``. Nothing waits for the device.

    Args:
        scores: fp32 [b, h, Nq, Nk], whole or in chunks that are computed when needed; larger is better.
        rule: limits of every head, and what is forced.
        kv_length: int32 [b, G] on the device of the scores; keys at or after it are padding.
        query_length: int32 [b] there; queries at or after it are padding.
        query_group_ids: int64 [Nq] there, the number of each row's group in the whole sequence; None for 0, 1, ...
        num_queries, num_keys: in tokens, padding included.
        max_row_count: bound on the entries of a row, dense ones included.
        backend: one of ``BACKENDS``.

    Raises:
        ValueError: an unknown backend; a rule for another number of heads, or with rows of more than Nk places.
        NotImplementedError: ``triton`` cannot serve the request; the message names the way out.
    """
    b, h, nq, nk = scores.shape
    if len(rule.widths) != h or max(rule.widths, default=0) > max(nk, 1):
        raise ValueError(f"rule must have {h} widths, one for each head, of at most the {nk} blocks of a row, got "
                         f"{list(rule.widths)}")
    match choose_or_log("select_rows", backend, scores.device, lambda: _triton().limit(nk)):
        case "reference":
            rows = reference.select_rows(scores, rule, kv_length, query_length, query_group_ids)
        case "triton":
            rows = _triton().select_rows(scores, rule, kv_length, query_length, query_group_ids)
        case _:
            raise ValueError(f"backend of select_rows must be one of {', '.join(BACKENDS)}, got {backend!r}")
    kv_indices, row_start, row_count = rows
    most = -(-num_keys // rule.kv_block_size)
    return KVSelection(
        kv_indices=kv_indices, row_start=row_start, row_count=row_count, kv_length=kv_length, num_queries=num_queries,
        num_keys=num_keys, q_block_size=rule.q_block_size, kv_block_size=rule.kv_block_size,
        max_row_count=max_row_count, max_entries=b * nq * sum(width or most for width in rule.widths))


def _triton() -> ModuleType:
    from megatron_dsv.kernels.block_selection.triton import launch
    return launch
