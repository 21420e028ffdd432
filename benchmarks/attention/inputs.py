"""Inputs whose predicted scores yield lists of a known kind, through the whole selection.

The low-rank queries and keys are drawn first, then a hidden state and a weight whose product they are, so that the
timed projection is a real one.

Dims: S tokens, h heads, r rank, H hidden, n shards, d head dim; batch 1 throughout.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from attention.cases import RANK, Point, Shape

_AMPLITUDE = 4.0
_TOKEN_NOISE = 0.05
_WAVES = 5
_HUB_SHARE = 0.008
_HUB_READERS = 0.85


@dataclass(frozen=True)
class Problem:
    """q, k, v and the gradient of the output, [S, 1, h, d] each."""

    q: Tensor
    k: Tensor
    v: Tensor
    dout: Tensor

    @property
    def nbytes(self) -> int:
        """Bytes of the four."""
        return sum(x.numel() * x.element_size() for x in (self.q, self.k, self.v, self.dout))


@dataclass(frozen=True)
class Hidden:
    """x [S / n, H], weight [n * 2 * h * r, H] and bias: x weight^T + bias holds the low-rank queries and keys."""

    x: Tensor
    weight: Tensor
    bias: Tensor


def problem(shape: Shape, device: torch.device, dtype: torch.dtype, seed: int = 0) -> Problem:
    """Normal random tensors."""
    generator = torch.Generator(device).manual_seed(seed)
    size = (shape.tokens, 1, shape.heads, shape.head_dim)
    return Problem(*(torch.randn(size, device=device, dtype=dtype, generator=generator) for _ in range(4)))


def budgets(shape: Shape, point: Point) -> list[int]:
    """Blocks that every row of a head keeps.

    Uniform lists: the same for all heads, the whole number nearest to the kept share. Skewed lists: two heads keep
    everything, and the others share what is left of the uniform lists' entries, none more than one block more than
    another.

    Raises:
        ValueError: two dense heads would take more than there is.
    """
    blocks = -(-shape.tokens // point.blocks[1])
    even = [max(1, round(point.keep_ratio * blocks))] * shape.heads
    if point.lists == "uniform":
        return even
    others = shape.heads - 2
    left = sum(even) - 2 * blocks
    if others < 1 or left < others:
        raise ValueError(f"skewed lists at keep ratio {point.keep_ratio} need more than 2 / keep_ratio heads, "
                         f"got {shape.heads}")
    share = [left // others + (number < left % others) for number in range(others)]
    return [blocks, *share[:others // 2], blocks, *share[others // 2:]]


def hidden(shape: Shape, point: Point, device: torch.device, dtype: torch.dtype, seed: int = 1) -> Hidden:
    """Hidden state and projection for the lists of ``point``."""
    generator = torch.Generator(device).manual_seed(seed)
    low_rank = (_uniform if point.lists == "uniform" else _skewed)(shape, *point.blocks, device, generator)
    return _unproject(shape, low_rank, dtype, generator)


def _unproject(shape: Shape, low_rank: Tensor, dtype: torch.dtype, generator: torch.Generator) -> Hidden:
    """Hidden state and orthonormal weight whose product is ``low_rank`` [S, 2, h, r]."""
    # A rank holds a slice of the tokens and the columns of every rank's heads; one drawing serves all of them.
    columns = low_rank.reshape(shape.shards, shape.tokens // shape.shards, -1).transpose(0, 1).flatten(1)
    weight = _orthonormal(columns.shape[1], shape.hidden, low_rank.device)
    x = columns @ weight
    noise = torch.randn(x.shape, device=x.device, generator=generator)
    x += noise - noise @ weight.t() @ weight
    bias = torch.zeros(columns.shape[1], device=x.device, dtype=dtype)
    return Hidden(x.to(dtype), weight.to(dtype), bias)


@functools.cache
def _orthonormal(rows: int, columns: int, device: torch.device) -> Tensor:
    """fp32 [rows, columns] with orthonormal rows."""
    generator = torch.Generator(device).manual_seed(7)
    square = torch.randn(columns, rows, device=device, generator=generator)
    return torch.linalg.qr(square)[0].t().contiguous()


def _uniform(shape: Shape, q_block: int, kv_block: int, device: torch.device, generator: torch.Generator) -> Tensor:
    """Every query group and every key block looks in a random direction of its own, all of one length.

    By symmetry every block is chosen equally often, but for chance.
    """
    return _spread(shape, (_directions(shape, q_block, device, generator), q_block),
                   (_directions(shape, kv_block, device, generator), kv_block), generator)


def _skewed(shape: Shape, q_block: int, kv_block: int, device: torch.device, generator: torch.Generator) -> Tensor:
    """Hubs that most groups read, neighbours in the sequence, and random directions for the rest."""
    queries = _positions(shape, q_block, device, generator)
    keys = _positions(shape, kv_block, device, generator)
    queries[..., 0] = (torch.rand(queries.shape[:2], device=device, generator=generator) < _HUB_READERS).float()
    # Tokens become hubs in runs, as a salient object would make them; a block is the shortest run.
    run = max(1, 16 // kv_block)
    places = torch.rand((-(-keys.shape[0] // run), shape.heads), device=device, generator=generator).argsort(0)
    hubs = places < max(1, round(_HUB_SHARE * places.shape[0]))
    keys[..., 0] = hubs.repeat_interleave(run, 0)[:keys.shape[0]] * _AMPLITUDE**2
    return _spread(shape, (queries, q_block), (keys, kv_block), generator)


def _positions(shape: Shape, block: int, device: torch.device, generator: torch.Generator) -> Tensor:
    """[blocks, h, r]: channel 0 free for hubs, sine and cosine waves of the position, random directions."""
    blocks = -(-shape.tokens // block)
    features = torch.zeros(blocks, shape.heads, RANK, device=device)
    place = (torch.arange(blocks, device=device) + 0.5) * (block / shape.tokens)
    finest = max(4.0, shape.tokens / 512)
    for wave in range(_WAVES):
        angle = 2 * math.pi * finest ** (wave / (_WAVES - 1)) * place
        features[..., 1 + 2 * wave] = angle.cos()[:, None] * 1.5
        features[..., 2 + 2 * wave] = angle.sin()[:, None] * 1.5
    rest = RANK - 1 - 2 * _WAVES
    features[..., -rest:] = torch.randn((blocks, shape.heads, rest), device=device, generator=generator)
    return features


def _directions(shape: Shape, block: int, device: torch.device, generator: torch.Generator) -> Tensor:
    """[blocks, h, r] random vectors of length ``_AMPLITUDE``."""
    blocks = -(-shape.tokens // block)
    drawn = torch.randn((blocks, shape.heads, RANK), device=device, generator=generator)
    return drawn / drawn.norm(dim=-1, keepdim=True) * _AMPLITUDE


def _spread(shape: Shape, queries: tuple[Tensor, int], keys: tuple[Tensor, int],
            generator: torch.Generator) -> Tensor:
    """[S, 2, h, r]: every token takes its block's vector, and a little noise."""
    sides = []
    for vectors, block in (queries, keys):
        tokens = vectors.repeat_interleave(block, 0)[:shape.tokens]
        noise = torch.randn(tokens.shape, device=tokens.device, generator=generator)
        sides.append(tokens + _TOKEN_NOISE * noise)
    return torch.stack(sides, 1)
