"""The profile's ops in plain torch: softmax rows in memory, and sorts; runs on any device.

Dims: n query groups of g tokens, s keys, b batch, h query heads, G key/value heads, d head dim, Nk key blocks.
"""

from __future__ import annotations

import torch
from torch import Tensor

_TILE_ELEMENTS = 2**24
"""Attention probabilities held at once (64 MiB in fp32), or one group's."""


def block_mass(q: Tensor, k: Tensor, valid_rows: Tensor, kv_length: Tensor, *, q_block_size: int, kv_block_size: int,
               softmax_scale: float) -> Tensor:
    """[b, h, n, Nk], fp32 (fp64 for fp64), of q [n * g, b, h, d], k [s, b, G, d], valid_rows [n * g, b]."""
    rows, b, h, _ = q.shape
    s, _, g_kv, _ = k.shape
    dtype = torch.float64 if k.dtype == torch.float64 else torch.float32
    groups, blocks = rows // q_block_size, -(-s // kv_block_size)
    out = torch.zeros((b, h, groups, blocks), dtype=dtype, device=k.device)
    step = max(1, _TILE_ELEMENTS // (q_block_size * max(1, s)))
    for batch in range(b):
        for head in range(h):
            kv_head = head // (h // g_kv)
            keys = k[:, batch, kv_head].to(dtype)
            padding = torch.arange(s, device=k.device) >= kv_length[batch, kv_head]
            for first in range(0, groups, step):
                tile = slice(first * q_block_size, min(first + step, groups) * q_block_size)
                logits = q[tile, batch, head].to(dtype) @ keys.T * softmax_scale
                mass = logits.masked_fill_(padding, -torch.inf).softmax(-1)
                # Without a real key a softmax is NaN.
                unread = ~valid_rows[tile, batch, None] | (kv_length[batch, kv_head] == 0)
                mass = mass.masked_fill(unread, 0.0).unflatten(0, (-1, q_block_size)).sum(1)
                mass = torch.nn.functional.pad(mass, (0, blocks * kv_block_size - s))
                out[batch, head, first:first + step] = mass.unflatten(1, (blocks, kv_block_size)).sum(-1)
    return out


def smallest_set(mass: Tensor, target: float) -> Tensor:
    """[...] of mass [..., width], by sorting."""
    running = mass.sort(dim=-1, descending=True).values.cumsum(-1)
    total = running[..., -1]
    count = (running < target * total[..., None]).sum(-1) + 1
    return torch.where(total.isnan(), total, count.to(total.dtype))
