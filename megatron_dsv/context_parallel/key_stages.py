"""In which stage the keys of which rank arrive, and a selection cut into one part per stage.

Sequence place j holds the keys of the chunks ``split.chunks(j)``. Stage 0 is a rank's own keys; the keys of the others
arrive in stages 1, 2, ..., those of place j + 1 first. Within a stage's buffer the keys keep their order in the
sequence, so rows stay ascending and padding stays at the end, in both layouts.

Dims: C chunks of the sequence, P places of a sequence group, b batch, h query heads, n key/value heads of this rank,
Nq query groups of this rank, Nk key blocks of the whole sequence, Nb = Nk / P blocks of one place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from megatron_dsv.context_parallel.geometry import Split
from megatron_dsv.kernels.host_values import on_device
from megatron_dsv.kernels.selection import DENSE_ROW, KVSelection

_CHUNK_ELEMENTS = 2**25
"""Entries of a selection handled at once; bounds the temporaries to about 1 GiB."""


@dataclass(frozen=True)
class KeyStages:
    """Static map from key blocks to stages, seen from one sequence place.

    Attributes:
        split: of the block.
        me: j, this rank's sequence place.
        stages: calls in which the others' keys arrive; more than there are others counts as one for each.
        chunk_blocks: key blocks of one chunk.
        block: tokens of a key block.
    """

    split: Split
    me: int
    stages: int
    chunk_blocks: int
    block: int

    @property
    def count(self) -> int:
        """Stages in which keys arrive."""
        return min(self.stages, self.split.g_s - 1)

    @property
    def place_blocks(self) -> int:
        """Nb."""
        return self.split.g_h * self.chunk_blocks

    @property
    def num_blocks(self) -> int:
        """Nk."""
        return self.split.size * self.chunk_blocks

    def sources(self, stage: int) -> tuple[int, ...]:
        """Places whose keys arrive in ``stage``, ascending."""
        return tuple(sorted((self.me + offset) % self.split.g_s for offset in self._offsets(stage)))

    def targets(self, stage: int) -> tuple[int, ...]:
        """Places that this rank's keys go to in ``stage``, ascending."""
        return tuple(sorted((self.me - offset) % self.split.g_s for offset in self._offsets(stage)))

    def stage_chunks(self, stage: int) -> tuple[int, ...]:
        """Chunks of the sequence whose keys a stage holds, in their order; stage 0 is this place's own."""
        places = (self.me,) if stage == 0 else self.sources(stage)
        return tuple(sorted(chunk for place in places for chunk in self.split.chunks(place)))

    def stage_of_block(self, device: torch.device) -> Tensor:
        """int64 [Nk]: the stage of every block."""
        by_chunk = {chunk: stage for stage in range(self.count + 1) for chunk in self.stage_chunks(stage)}
        chunks = on_device(tuple(by_chunk[chunk] for chunk in range(self.split.size)), torch.int64, device)
        return chunks[:, None].expand(-1, self.chunk_blocks).reshape(self.num_blocks)

    def by_place(self, x: Tensor) -> Tensor:
        """[b, n, Nk] in the order of the sequence -> [P, b, n, Nb], what each place holds in its own order."""
        b, n, _ = x.shape
        order = on_device(tuple(c for j in range(self.split.g_s) for c in self.split.chunks(j)), torch.int64, x.device)
        chunks = x.view(b, n, self.split.size, self.chunk_blocks).index_select(2, order)
        return chunks.view(b, n, self.split.g_s, self.place_blocks).permute(2, 0, 1, 3)

    def _offsets(self, stage: int) -> range:
        others = self.split.g_s - 1
        return range(1 + others * (stage - 1) // self.count, 1 + others * stage // self.count)


@dataclass(frozen=True)
class StagedSelection:
    """A selection cut by stages.

    Attributes:
        need: bool [b, n, Nk]; blocks of other places that some row of this rank attends to.
        position: int64 [b, n, Nk]; a block's place in the buffer of its stage, -1 where it is not held.
        parts: for every stage the selection of its buffer; ``num_keys`` and ``max_row_count`` are the largest possible.
    """

    need: Tensor
    position: Tensor
    parts: tuple[KVSelection, ...]

    def part(self, stage: int, blocks: int) -> KVSelection:
        """The selection of a stage whose buffer has room for ``blocks`` blocks."""
        part = self.parts[stage]
        return replace(part, num_keys=blocks * part.kv_block_size, max_row_count=min(part.max_row_count, blocks))


def cut(selection: KVSelection, stages: KeyStages, *, everything: bool = False) -> StagedSelection:
    """Cuts a selection over the whole sequence into stages; nothing waits for the device.

    Args:
        selection: of this rank's query groups, over all Nk blocks.
        everything: all blocks are needed, whatever the selection says: every key will be exchanged.
    """
    heads_kv = selection.kv_length.shape[1]
    device = selection.kv_indices.device
    starts = torch.arange(stages.num_blocks, device=device) * stages.block
    tokens = (selection.kv_length[..., None] - starts).clamp(0, stages.block)
    stage_of = stages.stage_of_block(device)
    need = needed_blocks(selection, heads_kv, stages.num_blocks)
    need = torch.ones_like(need) if everything else need & (tokens > 0)
    held = need | (stage_of == 0)
    position = torch.full(held.shape, -1, dtype=torch.int64, device=device)
    lengths = []
    for stage in range(stages.count + 1):
        here = held & (stage_of == stage)
        position = torch.where(here, here.cumsum(-1) - 1, position)
        lengths.append(tokens.masked_fill(~here, 0).sum(-1, dtype=torch.int32))
    return StagedSelection(need & (stage_of != 0), position,
                           _parts(selection, position, stage_of, lengths, stages))


def true_places(mask: Tensor, total: int) -> Tensor:
    """int64 [total]: flat places of the True elements, ascending; ``total`` must be their number. Nothing waits."""
    flat = mask.reshape(-1)
    slots = torch.where(flat, flat.cumsum(0) - 1, total)
    places = torch.empty(total + 1, dtype=torch.int64, device=mask.device)
    places.scatter_(0, slots, torch.arange(flat.numel(), device=mask.device))
    return places[:total]


def needed_blocks(selection: KVSelection, heads_kv: int, num_blocks: int) -> Tensor:
    """bool [b, n, Nk]: blocks that some query head of a key/value head selects in some group."""
    b, h, _ = selection.row_start.shape
    found = torch.zeros((b, h, num_blocks + 1), dtype=torch.bool, device=selection.kv_indices.device)
    for heads, _, part in _pieces(selection, heads_kv):
        indices, _ = part.padded(fill=num_blocks)
        found[:, heads] |= torch.zeros_like(found[:, heads]).scatter_(-1, indices.flatten(2).long(), True)
    return found[..., :-1].unflatten(1, (heads_kv, -1)).any(2)


def _parts(selection: KVSelection, position: Tensor, stage_of: Tensor, lengths: list[Tensor],
           stages: KeyStages) -> tuple[KVSelection, ...]:
    """Every row's entries sorted by stage in one buffer, and where each stage begins in it."""
    heads_kv = selection.kv_length.shape[1]
    counts = torch.zeros((len(lengths), *selection.row_start.shape), dtype=torch.int32, device=position.device)
    dense = selection.row_start == DENSE_ROW
    listed = torch.where(dense, 0, selection.row_count).reshape(-1).long()
    first = (listed.cumsum(0) - listed).reshape(dense.shape)
    capacity = selection.entries_bound
    buffer = torch.zeros(capacity + 1, dtype=torch.int32, device=position.device)
    ratio = dense.shape[1] // heads_kv
    table = torch.nn.functional.pad(position, (0, 1), value=-1)
    stage_table = torch.nn.functional.pad(stage_of, (0, 1))
    for heads, groups, part in _pieces(selection, heads_kv):
        indices, _ = part.padded(fill=stages.num_blocks)
        places = table[:, heads.start // ratio:heads.stop // ratio].repeat_interleave(ratio, 1)[:, :, None]
        indices = indices.long().masked_fill_(dense[:, heads, groups][..., None], stages.num_blocks)
        placed = places.expand(*indices.shape[:3], -1).gather(-1, indices)
        stage = torch.where(placed >= 0, stage_table[indices], len(lengths))
        offset = first[:, heads, groups]
        for number in range(len(lengths)):
            here = stage == number
            target = torch.where(here, offset[..., None] + here.cumsum(-1) - 1, capacity)
            buffer.scatter_(0, target.reshape(-1), placed.to(torch.int32).reshape(-1))
            counts[number][:, heads, groups] = here.sum(-1, dtype=torch.int32)
            offset = offset + counts[number][:, heads, groups]
    begins = first + counts.cumsum(0) - counts
    most = [len(stages.stage_chunks(number)) * stages.chunk_blocks for number in range(len(lengths))]
    return tuple(replace(
        selection, kv_indices=buffer[:capacity], row_start=torch.where(dense, DENSE_ROW, begins[number]),
        row_count=counts[number], kv_length=lengths[number], num_keys=most[number] * stages.block,
        max_row_count=min(selection.max_row_count, most[number]), transposed=None) for number in range(len(lengths)))


def _pieces(selection: KVSelection, heads_kv: int) -> Iterator[tuple[slice, slice, KVSelection]]:
    """(query heads, query groups, that part of the selection); parts hold whole key/value heads and few entries."""
    b, h, nq = selection.row_start.shape
    ratio, width = h // heads_kv, max(1, selection.max_row_count)
    lanes = max(1, min(heads_kv, _CHUNK_ELEMENTS // max(1, b * ratio * nq * width)))
    rows = max(1, min(nq, _CHUNK_ELEMENTS // max(1, b * ratio * width)))
    for lane in range(0, heads_kv, lanes):
        heads = slice(lane * ratio, min(heads_kv, lane + lanes) * ratio)
        for row in range(0, nq, rows):
            groups = slice(row, min(nq, row + rows))
            yield heads, groups, replace(
                selection, row_start=selection.row_start[:, heads, groups],
                row_count=selection.row_count[:, heads, groups],
                kv_length=selection.kv_length[:, lane:lane + lanes], transposed=None, max_entries=None)
