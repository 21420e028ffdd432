"""From pooled queries and low-rank keys to kernel launches, a bounded part of the heads and groups at a time.

Dims: s query tokens, sk key tokens, b batch, h query heads, G key/value heads, r predictor rank, P proxies per query
group, Nq query groups, Nk key/value blocks, T steps of several blocks.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from megatron_dsv.kernels.block_scores.triton.kernels import (
    _block_combine_kernel,
    _block_partial_kernel,
    _key_bound_kernel,
    _pool_queries_kernel,
)
from megatron_dsv.kernels.launching import (
    WAY_OUT,
    Launch,
    Tile,
    check_triton,
    interpreted,
    kind_limit,
    launch_device,
    padded_dim,
    power_of_two,
    reach_limit,
)

_SPAN_TOKENS = 4096
"""Keys that one program scores: enough to bury its start, few enough that short grids fill the device."""
_BOUND_TOKENS = 1024
"""Keys that one program takes the norms of."""
_SCRATCH_BYTES = 128 << 20
"""Bound on the values of (proxy, block) pairs that exist at once."""


def limit(block: int, *inputs: Tensor) -> str | None:
    """What keeps these kernels from tensors of which a program takes ``block`` tokens, or None."""
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        return f"has no backward; call it under torch.no_grad() or {WAY_OUT}, which is differentiable"
    return kind_limit(inputs, widths="ranks") or reach_limit(block, *inputs)


@dataclass(frozen=True)
class Chunk:
    """Part of the rows: (batch, head) pairs from ``first_pair`` on, groups from ``first_group`` on."""

    first_pair: int
    pairs: int
    first_group: int
    groups: int


def chunks(q_pooled: Tensor, num_keys: int, *, kv_block_size: int, proxies: int) -> Iterator[Chunk]:
    """All rows in parts whose scratch stays within the bound, or exceeds it by less than a tile of one head.

    Parts begin at whole tiles: which rows share a tile, and where a row lies in it, decides how its exponentials are
    computed, so that a part's scores are those of the whole bit for bit.
    """
    rows, b, h, _ = q_pooled.shape
    groups, blocks = rows // proxies, -(-num_keys // kv_block_size)
    group_bytes = 4 * proxies * max(1, blocks)
    pairs = max(1, min(b * h, _SCRATCH_BYTES // max(1, group_bytes * groups)))
    step = groups if pairs > 1 else max(1, min(groups, _SCRATCH_BYTES // group_bytes))
    # Parts of like size: a short last one would leave the device half empty.
    pairs = _even(b * h, pairs)
    step = _even(groups, step)
    tile = _partial_tile(q_pooled).block_m
    whole_tiles = tile // math.gcd(tile, proxies)
    step = -(-step // whole_tiles) * whole_tiles
    for first_pair in range(0, b * h, pairs):
        for first_group in range(0, groups, max(1, step)):
            yield Chunk(first_pair, min(pairs, b * h - first_pair), first_group, min(step, groups - first_group))


def block_scores(q_pooled: Tensor, k_lr: Tensor, kv_length: Tensor, *, kv_block_size: int, proxies: int,
                 reduction: str, softmax_scale: float) -> Tensor:
    """fp32 [b, h, Nq, Nk] of q_pooled [Nq * P, b, h, r] and k_lr [sk, b, G, r]; kv_length [b, G]."""
    rows, b, h, _ = q_pooled.shape
    shape = (b, h, rows // proxies, -(-k_lr.shape[0] // kv_block_size))
    out = torch.empty(shape, dtype=torch.float32, device=q_pooled.device)
    scorer = Scorer(q_pooled, k_lr, kv_length, kv_block_size=kv_block_size, proxies=proxies, reduction=reduction,
                    softmax_scale=softmax_scale)
    for chunk in chunks(q_pooled, k_lr.shape[0], kv_block_size=kv_block_size, proxies=proxies):
        part = out.flatten(0, 1)[chunk.first_pair:chunk.first_pair + chunk.pairs]
        part = part[:, chunk.first_group:chunk.first_group + chunk.groups]
        if part.is_contiguous():
            scorer.scores(chunk, part)
        else:
            part.copy_(scorer.scores(chunk))
    return out


def score_chunks(q_pooled: Tensor, k_lr: Tensor, kv_length: Tensor, *, kv_block_size: int, proxies: int,
                 reduction: str, softmax_scale: float) -> Iterator[tuple[Chunk, Tensor]]:
    """Every chunk with its scores, fp32 [pairs, groups, Nk]; those of ``block_scores`` bit for bit."""
    scorer = Scorer(q_pooled, k_lr, kv_length, kv_block_size=kv_block_size, proxies=proxies, reduction=reduction,
                    softmax_scale=softmax_scale)
    for chunk in chunks(q_pooled, k_lr.shape[0], kv_block_size=kv_block_size, proxies=proxies):
        yield chunk, scorer.scores(chunk)


class Scorer:
    """Scores of one set of queries and keys, chunk by chunk.

    Args:
        q_pooled: [Nq * P, b, h, r].
        k_lr: [sk, b, G, r].
        kv_length: [b, G].

    Raises:
        NotImplementedError: what the kernels do not serve; the message names the way out.
    """

    def __init__(self, q_pooled: Tensor, k_lr: Tensor, kv_length: Tensor, *, kv_block_size: int, proxies: int,
                 reduction: str, softmax_scale: float) -> None:
        check_triton("block_scores", k_lr.device, limit(kv_block_size, q_pooled, k_lr))
        self.q_pooled, self.k_lr = (x if x.stride(-1) == 1 else x.contiguous() for x in (q_pooled, k_lr))
        self.kv_length = kv_length.contiguous()
        self.kv_block_size, self.proxies, self.reduction = kv_block_size, proxies, reduction
        self.softmax_scale = softmax_scale
        self.num_blocks = -(-k_lr.shape[0] // kv_block_size)
        self.bound = torch.empty((*k_lr.shape[1:3], -(-k_lr.shape[0] // _BOUND_TOKENS)), dtype=torch.float32,
                                 device=k_lr.device)
        if reduction != "max":
            with launch_device(k_lr):
                plan_bound(self.k_lr, self.kv_length, self.bound).run()

    def scores(self, chunk: Chunk, out: Tensor | None = None) -> Tensor:
        """fp32 [pairs, groups, Nk], contiguous."""
        if out is None:
            out = torch.empty((chunk.pairs, chunk.groups, self.num_blocks), dtype=torch.float32,
                              device=self.q_pooled.device)
        partial, total = (torch.empty(shape, dtype=torch.float32, device=out.device)
                          for shape in self.scratch_shapes(chunk))
        with launch_device(out):
            self.plan_partial(chunk, partial, total).run()
            self.plan_combine(chunk, partial, total, out).run()
        return out

    def scratch_shapes(self, chunk: Chunk) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Of the values of blocks [pairs, T, groups * P, blocks of a step], and of spans [pairs, spans, groups * P]."""
        per_step = self._tile_and_step()[1]
        steps, rows = -(-self.num_blocks // per_step), chunk.groups * self.proxies
        return (chunk.pairs, steps, rows, per_step), (chunk.pairs, -(-steps // self._span(per_step)), rows)

    def plan_partial(self, chunk: Chunk, partial: Tensor, total: Tensor) -> Launch:
        """The pass over keys; writes ``partial`` and ``total``."""
        tile, per_step = self._tile_and_step()
        rank = self.q_pooled.shape[-1]
        constants: dict[str, Any] = {
            "TAKE_MAX": self.reduction == "max", "MIXED": not interpreted(),
            "KV_BLOCK": self.kv_block_size, "PER_STEP": per_step, "SPAN": self._span(per_step),
            "BOUND_SPANS": power_of_two(self.bound.shape[-1]), "RANK": rank, "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n, "BLOCK_D": padded_dim(rank)}
        grid = (-(-partial.shape[2] // tile.block_m) * total.shape[1] * chunk.pairs, 1)
        return Launch(_block_partial_kernel, grid, self._arguments(chunk, partial, total), constants, tile)

    def _arguments(self, chunk: Chunk, partial: Tensor, total: Tensor) -> dict[str, Any]:
        """Run-time arguments of the pass over keys."""
        q, k = self.q_pooled, self.k_lr
        return {"q_ptr": q, "k_ptr": k, "bound_ptr": self.bound, "partial_ptr": partial, "total_ptr": total,
                "kv_length_ptr": self.kv_length, **_strides(q, k), "first_pair": chunk.first_pair,
                "first_row": chunk.first_group * self.proxies, "num_rows": partial.shape[2], "num_keys": k.shape[0],
                "num_steps": partial.shape[1], "heads": q.shape[2], "kv_heads": k.shape[2], "spans": total.shape[1],
                "bound_spans": self.bound.shape[-1], "scale_log2": self.softmax_scale * math.log2(math.e)}

    def plan_combine(self, chunk: Chunk, partial: Tensor, total: Tensor, out: Tensor) -> Launch:
        """The pass over blocks; writes out [pairs, groups, Nk] contiguous."""
        padded = power_of_two(self.proxies)
        groups = max(1, 32 // padded)
        block = min(power_of_two(self.num_blocks), max(16, 4096 // (groups * padded)))
        block_tiles = -(-self.num_blocks // block)
        arguments = {"partial_ptr": partial, "total_ptr": total, "out_ptr": out, "num_groups": chunk.groups,
                     "num_rows": partial.shape[2], "num_blocks": self.num_blocks, "num_steps": partial.shape[1],
                     "spans": total.shape[1], "block_tiles": block_tiles}
        constants: dict[str, Any] = {
            "REDUCTION": self.reduction, "PROXIES": self.proxies, "PROXIES_PADDED": padded,
            "PER_STEP": partial.shape[3], "SPANS": power_of_two(total.shape[1]), "GROUPS": groups, "BLOCK_K": block}
        grid = (block_tiles * -(-chunk.groups // groups) * chunk.pairs, 1)
        return Launch(_block_combine_kernel, grid, arguments, constants, Tile(groups, block, 4, 1))

    def _span(self, per_step: int) -> int:
        """Steps that one program of the pass over keys takes."""
        return max(1, _SPAN_TOKENS // (per_step * self.kv_block_size))

    def _tile_and_step(self) -> tuple[Tile, int]:
        """The tile of the pass over keys, and how many blocks a step takes."""
        tile = _partial_tile(self.q_pooled)
        return tile, max(1, tile.block_n // power_of_two(self.kv_block_size))


def pool_queries(q_lr: Tensor, query_length: Tensor, *, q_block_size: int, proxies: int) -> Tensor:
    """[Nq * P, b, h, r] means over the valid tokens of q_lr [s, b, h, r]; query_length [b]."""
    check_triton("pool_queries", q_lr.device, limit(q_block_size, q_lr))
    q_lr = q_lr if q_lr.stride(-1) == 1 else q_lr.contiguous()
    s, b, h, r = q_lr.shape
    out = torch.empty((-(-s // q_block_size) * proxies, b, h, r), dtype=q_lr.dtype, device=q_lr.device)
    with launch_device(q_lr):
        plan_pool(q_lr, query_length.contiguous(), out, q_block_size // proxies).run()
    return out


def plan_pool(q_lr: Tensor, query_length: Tensor, out: Tensor, tokens: int) -> Launch:
    """Means of ``tokens`` tokens each; writes out [rows, b, h, r] contiguous."""
    s, b, h, r = q_lr.shape
    columns = min(512, power_of_two(h * r))
    lanes = max(1, min(power_of_two(tokens), 8192 // columns))
    arguments = {"q_ptr": q_lr, "out_ptr": out, "query_length_ptr": query_length,
                 **{f"stride_q{axis}": q_lr.stride(i) for i, axis in enumerate("sbh")}, "tokens": s,
                 "columns": h * r, "batch": b}
    constants = {"TOKENS": tokens, "RANK": r, "BLOCK_T": lanes, "BLOCK_C": columns}
    return Launch(_pool_queries_kernel, (out.shape[0], b * -(-h * r // columns)), arguments, constants,
                  Tile(lanes, columns, 4, 1))


def plan_bound(k_lr: Tensor, kv_length: Tensor, bound: Tensor) -> Launch:
    """Largest squared norm of the keys; writes bound [b, G, spans] contiguous."""
    block_d = padded_dim(k_lr.shape[-1])
    tile = Tile(1, max(16, 8192 // block_d), 4, 1)
    arguments = {"k_ptr": k_lr, "bound_ptr": bound, "kv_length_ptr": kv_length,
                 **{f"stride_k{axis}": k_lr.stride(i) for i, axis in enumerate("sbg")}, "num_keys": k_lr.shape[0],
                 "kv_heads": k_lr.shape[2], "spans": bound.shape[-1]}
    constants = {"SPAN": _BOUND_TOKENS, "RANK": k_lr.shape[-1], "BLOCK_N": tile.block_n, "BLOCK_D": block_d}
    return Launch(_key_bound_kernel, (bound.shape[-1], k_lr.shape[1] * k_lr.shape[2]), arguments, constants, tile)


def _partial_tile(q_pooled: Tensor) -> Tile:
    rank = q_pooled.shape[-1]
    if q_pooled.dtype == torch.float32:
        # fp32 multiplies without tensor cores: small tiles keep it within registers, and compile within seconds.
        return Tile(32, 32, 4, 1) if rank <= 64 else Tile(16, 32, 4, 1)
    return Tile(128, 64, 4, 3) if rank <= 64 else Tile(64, 64, 4, 1)


def _even(total: int, part: int) -> int:
    """The smallest part that needs no more parts than ``part`` does."""
    return -(-total // max(1, -(-total // max(1, part))))


def _strides(q_pooled: Tensor, k_lr: Tensor) -> dict[str, int]:
    strides = {f"stride_q{axis}": q_pooled.stride(i) for i, axis in enumerate("sbh")}
    return strides | {f"stride_k{axis}": k_lr.stride(i) for i, axis in enumerate("sbg")}
