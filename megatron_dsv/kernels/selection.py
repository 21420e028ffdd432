"""KVSelection: which keys each query group attends to. The one type that policy, kernels and placement share.

Dims: b batch, h query heads, G key/value heads (h % G == 0), Nq query groups, Nk key/value blocks, s tokens.
Rows are (batch, query head, query group); the key/value head of query head ``i`` is ``i // (h // G)``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

DENSE_ROW = -1
"""``row_start`` of a row that attends to every valid key; nothing is stored for it."""

_CHUNK_ELEMENTS = 2**25
"""Entries transposed at once; bounds the temporaries to about 1 GiB."""


@dataclass(frozen=True)
class KVSelection:
    """A ragged list of key/value blocks (or single tokens) for every row.

    Attributes:
        kv_indices: int32 [capacity]; block (or token, if ``kv_block_size`` is 1) numbers into the k, v that are passed
            along with this selection, ascending and unique within a row. Rows may share storage.
        row_start: int64 [b, h, Nq]; first entry of the row in ``kv_indices``; ``DENSE_ROW`` (-1) means every valid key.
        row_count: int32 [b, h, Nq]; entries of the row; 0 attends to nothing (out 0, lse -inf, gradients 0).
            Ignored where ``row_start`` is -1.
        kv_length: int32 [b, G]; keys at or after it are padding and are never attended. Below 0 it counts as 0, above
            ``num_keys`` as that.
        num_queries: query tokens of the q passed along (the last group may be ragged).
        num_keys: key tokens of the k, v passed along (the last block may be ragged).
        q_block_size: tokens per query group.
        kv_block_size: tokens per key/value block; 1 selects single tokens.
        max_row_count: host-side upper bound of the entries of any row, known from the budgets, so that nothing waits
            for the device. A dense row has as many entries as there are valid blocks: where a row may be dense, give
            ``num_kv_blocks``. ``padded`` checks the bound on the device.
        transposed: the key-major twin (rows are (batch, query head, key block), entries are query groups), or None.
            In a twin ``num_queries`` and ``num_keys`` (and the block sizes) keep their meaning; only the row axis and
            the meaning of the entries swap. ``row_start`` has shape [b, h, Nk]. Dense rows of the original appear in
            the twin as ordinary entries.
        max_entries: host-side upper bound of the entries of all rows together, dense rows included; None knows no
            better than ``max_row_count`` for every row. It bounds the memory of the twin.
    """

    kv_indices: Tensor
    row_start: Tensor
    row_count: Tensor
    kv_length: Tensor
    num_queries: int
    num_keys: int
    q_block_size: int
    kv_block_size: int
    max_row_count: int
    transposed: KVSelection | None = field(default=None)
    max_entries: int | None = None

    def __post_init__(self) -> None:
        for name, dtype in (("kv_indices", torch.int32), ("row_start", torch.int64), ("row_count", torch.int32),
                            ("kv_length", torch.int32)):
            got = getattr(self, name).dtype
            if got != dtype:
                raise ValueError(f"KVSelection.{name} must be {dtype}, got {got}")
        if self.row_start.shape != self.row_count.shape or self.row_start.dim() != 3:
            raise ValueError("KVSelection.row_start and row_count must both be [b, h, Nq], got "
                             f"{tuple(self.row_start.shape)} and {tuple(self.row_count.shape)}")
        if self.q_block_size < 1 or self.kv_block_size < 1:
            raise ValueError("KVSelection block sizes must be at least 1, got "
                             f"q_block_size={self.q_block_size}, kv_block_size={self.kv_block_size}")

    @property
    def num_query_groups(self) -> int:
        """Query groups: ceil(num_queries / q_block_size)."""
        return -(-self.num_queries // self.q_block_size)

    @property
    def num_kv_blocks(self) -> int:
        """Key/value blocks: ceil(num_keys / kv_block_size)."""
        return -(-self.num_keys // self.kv_block_size)

    @property
    def entries_bound(self) -> int:
        """Upper bound of the entries of all rows together."""
        rows = self.row_start.numel() * max(0, self.max_row_count)
        return rows if self.max_entries is None else min(rows, self.max_entries)

    def padded(self, fill: int = -1) -> tuple[Tensor, Tensor]:
        """Indices as a rectangle, for backends that want one.

        Returns:
            indices int32 [b, h, Nq, max(1, max_row_count)] with ``fill`` after each row's entries, and counts int32
            [b, h, Nq]. A dense row lists every block that holds a valid key.

        Raises:
            RuntimeError: a row has more entries than ``max_row_count``; on CUDA a device-side assertion, since nothing
                waits for the device.
        """
        counts = self.entries()
        width = max(1, self.max_row_count)
        return _rectangle(self.kv_indices, self.row_start, counts, width, fill), counts

    def entries(self) -> Tensor:
        """Entries of every row, int32 [b, h, Nq]: ``row_count``, and the valid blocks where a row is dense.

        Raises RuntimeError as ``padded`` does.
        """
        group_ratio = self.row_start.shape[1] // self.kv_length.shape[1]
        valid_blocks = (self.kv_length.clamp(0, self.num_keys) + self.kv_block_size - 1) // self.kv_block_size
        valid_blocks = valid_blocks.repeat_interleave(group_ratio, dim=1)[..., None]
        counts = torch.where(self.row_start == DENSE_ROW, valid_blocks.to(torch.int32), self.row_count)
        # A rectangle that is too narrow would drop keys without a word.
        torch._assert_async((counts <= max(0, self.max_row_count)).all(),
                            "KVSelection.max_row_count must bound the entries of every row; a dense row has one for "
                            "each valid block")
        return counts

    def block_mask(self) -> Tensor:
        """Boolean [b, h, Nq, Nk], True where a row selects a block. For tests, profiles and small inputs only."""
        indices, _ = self.padded(fill=self.num_kv_blocks)
        mask = torch.zeros(*indices.shape[:-1], self.num_kv_blocks + 1, dtype=torch.bool, device=indices.device)
        return mask.scatter_(-1, indices.long(), True)[..., :-1]

    def with_transposed(self) -> KVSelection:
        """This selection with its key-major twin attached, built on the device without a host synchronisation."""
        if self.transposed is not None:
            return self
        if self.row_start.is_cuda:
            # The mechanism of one device type; nothing else of this module needs Triton.
            from megatron_dsv.kernels.block_selection.triton.launch import transpose
            return replace(self, transposed=transpose(self))
        return replace(self, transposed=_transpose(self))


def from_block_mask(mask: Tensor, kv_length: Tensor, *, num_queries: int, num_keys: int, q_block_size: int,
                    kv_block_size: int, max_row_count: int | None = None) -> KVSelection:
    """Selection from a boolean mask [b, h, Nq, Nk].

    ``max_row_count`` defaults to the number of blocks, a bound that needs no device synchronisation.
    """
    counts = mask.sum(-1, dtype=torch.int32)
    flat = counts.reshape(-1).long()
    starts = torch.cumsum(flat, 0) - flat
    order = torch.argsort(mask.reshape(-1, mask.shape[-1]).to(torch.int8), dim=-1, descending=True, stable=True)
    width = mask.shape[-1]
    capacity = flat.numel() * width
    lane = torch.arange(width, device=mask.device)
    target = torch.where(lane < flat[:, None], starts[:, None] + lane, capacity)
    packed = torch.zeros(capacity + 1, dtype=torch.int32, device=mask.device)
    packed.scatter_(0, target.reshape(-1), order.to(torch.int32).reshape(-1))
    return KVSelection(
        kv_indices=packed[:-1], row_start=starts.reshape(counts.shape), row_count=counts, kv_length=kv_length,
        num_queries=num_queries, num_keys=num_keys, q_block_size=q_block_size, kv_block_size=kv_block_size,
        max_row_count=width if max_row_count is None else max_row_count)


def _rectangle(kv_indices: Tensor, row_start: Tensor, counts: Tensor, width: int, fill: int) -> Tensor:
    """int32 [*rows, width] from row_start and counts [*rows]: each row's entries, then ``fill``."""
    lane = torch.arange(width, device=kv_indices.device)
    listed = row_start.clamp_min(0)[..., None] + lane
    if kv_indices.numel():
        listed = kv_indices[listed.clamp_max_(kv_indices.numel() - 1)]
    lane = lane.to(torch.int32)
    indices = torch.where((row_start == DENSE_ROW)[..., None], lane, listed)
    return torch.where(lane < counts[..., None], indices, fill).to(torch.int32)


def _transpose(selection: KVSelection) -> KVSelection:
    """Key-major twin by a stable sort of the listed (key block, query group) pairs; entries stay ascending."""
    b, h, nq = selection.row_start.shape
    nk, width = selection.num_kv_blocks, max(1, selection.max_row_count)
    device = selection.kv_indices.device
    entries = selection.entries().reshape(b * h, nq)
    row_start = selection.row_start.reshape(b * h, nq)
    groups = torch.empty(b * h, nq * width, dtype=torch.int32, device=device)
    twin_start = torch.empty(b * h, nk, dtype=torch.int64, device=device)
    twin_count = torch.empty(b * h, nk, dtype=torch.int32, device=device)
    # As many heads at once as memory allows and int32 keys can tell apart.
    step = max(1, min(_CHUNK_ELEMENTS // max(1, nq * width), (2**31 - 1) // (nk + 1)))
    for first in range(0, b * h, step):
        heads = slice(first, min(first + step, b * h))
        n = heads.stop - heads.start
        # Unused places of the rectangle sort behind the last block of their head.
        keys = _rectangle(selection.kv_indices, row_start[heads], entries[heads], width, nk).reshape(n, -1)
        keys += (torch.arange(n, dtype=torch.int32, device=device) * (nk + 1))[:, None]
        ordered, order = keys.reshape(-1).sort(stable=True)
        groups[heads] = (order.div_(width, rounding_mode="floor").remainder_(nq)).reshape(n, -1)
        bounds = torch.searchsorted(ordered, torch.arange(n * (nk + 1), dtype=torch.int32, device=device))
        bounds = bounds.reshape(n, nk + 1)
        twin_start[heads] = bounds[:, :-1] + heads.start * nq * width
        twin_count[heads] = bounds.diff(dim=1)
    return replace(selection, kv_indices=groups.reshape(-1), row_start=twin_start.reshape(b, h, nk),
                   row_count=twin_count.reshape(b, h, nk), max_row_count=nq, transposed=None)
