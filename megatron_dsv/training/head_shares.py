"""What every head of the whole model keeps at its present budget: the statistics that plans and traces start from.

Dims: L layers and H query heads of the whole model, h heads of one tensor-parallel rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch.distributed import ProcessGroup

from megatron_dsv.transformer.self_attention import DSVSelfAttention


@dataclass(frozen=True)
class HeadShares:
    """By sequence length.

    Attributes:
        kept: [lengths][L][H] kept keys over keys, of a sparse layer, or of one that would be; 1 before any profile.
        sparse: [lengths][L] whether the layer attends sparsely.
    """

    kept: tuple[tuple[tuple[float, ...], ...], ...]
    sparse: tuple[tuple[bool, ...], ...]


def gather(attentions: Mapping[int, DSVSelfAttention], lengths: Sequence[int], *, layers: int, heads: int,
           model_group: ProcessGroup, device: torch.device, windows: Sequence[float] | None = None) -> HeadShares:
    """Joins the layers of all pipeline stages and the heads of all tensor-parallel ranks; every rank must call it.

    Args:
        attentions: of this rank, by global layer number from 1.
        lengths: sequence lengths in tokens.
        layers, heads: L and H.
        model_group: all ranks of one model (tensor x pipeline).
        device: of the group's backend.
        windows: what the window baseline keeps at each length; needed where layers attend to windows.
    """
    table = torch.zeros(len(lengths), layers, heads + 1, dtype=torch.float64)
    for number, attention in attentions.items():
        mine = attention.selector.query_heads
        for place, (row, tokens) in enumerate(zip(table[:, number - 1], lengths)):
            kept, sparse = _of_layer(attention, tokens, None if windows is None else windows[place])
            row[mine.start:mine.stop] = torch.tensor(kept, dtype=torch.float64)
            # The first tensor-parallel rank speaks for the layer.
            row[heads] = float(sparse and mine.start == 0)
    table = table.to(device)
    torch.distributed.all_reduce(table, group=model_group)
    rows = table.tolist()
    return HeadShares(tuple(tuple(tuple(row[:heads]) for row in length) for length in rows),
                      tuple(tuple(bool(row[heads]) for row in length) for length in rows))


def _of_layer(attention: DSVSelfAttention, tokens: int, window: float | None) -> tuple[list[float], bool]:
    """([h] kept shares, whether the layer is sparse) for a sequence of so many tokens."""
    selector, dsv = attention.selector, attention.dsv
    heads = len(selector.query_heads)
    if dsv.window_fraction is not None:
        assert window is not None
        return [window] * heads, True
    if attention.statistics is None:
        return [1.0] * heads, False
    blocks = -(-tokens // dsv.dsv_kv_block_size)
    budgets = selector.budgets(blocks)
    kept = [1.0] * heads if budgets is None else [budget / blocks for budget in budgets]
    return kept, selector.attends_sparsely(tokens)
