"""Coverage of selections: which share of the others' keys a sequence rank needs, for every split, from one profile.

Every rank notes which key blocks each of its chunks of queries needs; joined over the ranks, that is one table for the
finest cut, and every coarser cut is a union of its rows. So one run tells what all splits would exchange.

Dims: n key/value heads of this rank, G of this tensor-parallel rank, C chunks of the sequence, Nk key blocks.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from megatron_dsv.context_parallel.geometry import Split, splits
from megatron_dsv.context_parallel.key_stages import needed_blocks
from megatron_dsv.kernels.host_values import on_device
from megatron_dsv.kernels.selection import KVSelection


def chunk_needs(selection: KVSelection, chunks: int) -> Tensor:
    """uint8 [n, chunks, Nk]: key blocks that some query group of a chunk selects, in the first sample.

    Args:
        selection: of query groups that belong to so many chunks, equally many each.

    Raises:
        ValueError: query groups that do not divide.
    """
    groups, heads = selection.row_start.shape[2], selection.kv_length.shape[1]
    if groups % chunks:
        raise ValueError(f"the {groups} query groups of a selection must be equally many of {chunks} chunks")
    each = groups // chunks
    starts = torch.arange(selection.num_kv_blocks, device=selection.kv_length.device) * selection.kv_block_size
    real = starts < selection.kv_length[0, :, None]
    rows = []
    for chunk in range(chunks):
        part = slice(chunk * each, (chunk + 1) * each)
        one = replace(selection, row_start=selection.row_start[:1, :, part],
                      row_count=selection.row_count[:1, :, part], kv_length=selection.kv_length[:1],
                      transposed=None, max_entries=None)
        rows.append(needed_blocks(one, heads, selection.num_kv_blocks)[0] & real)
    return torch.stack(rows, 1).to(torch.uint8)


def coverage(needs: Tensor) -> dict[int, Tensor]:
    """Coverage by number of sequence ranks: g_s -> fp32 [G], of the rank that needs most, in the worse layout.

    Args:
        needs: uint8 [G, C, Nk], joined over all ranks; Nk is a multiple of C.
    """
    _, ranks, blocks = needs.shape
    found: dict[int, Tensor] = {}
    for split in splits(ranks, ranks):
        if split.g_s > 1:
            shares = _of_split(needs, split, blocks // ranks)
            found[split.g_s] = torch.maximum(found[split.g_s], shares) if split.g_s in found else shares
    return dict(sorted(found.items()))


def _of_split(needs: Tensor, split: Split, chunk_blocks: int) -> Tensor:
    place = [split.s_rank(chunk) for chunk in range(split.size)]
    owner = on_device(tuple(place), torch.int64, needs.device).repeat_interleave(chunk_blocks)
    shares = []
    for j in range(split.g_s):
        rows = on_device(split.chunks(j), torch.int64, needs.device)
        wanted = needs.index_select(1, rows).amax(1)
        others = owner != j
        shares.append((wanted * others).sum(-1, dtype=torch.float32) / others.sum())
    return torch.stack(shares).amax(0)
