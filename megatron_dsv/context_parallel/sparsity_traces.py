"""Sparsity of every block and head for plans made before a run: recorded by one, or built in.

Symbols: H query heads, G key/value units.
"""

from __future__ import annotations

import math
import random
import re
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from megatron_dsv.context_parallel import json_lines
from megatron_dsv.context_parallel.statistics import BlockStats, modelled_coverage

BUILT_IN: dict[str, tuple[float, ...]] = {
    # Measured sparsity of the blocks of a trained 2.7B model of 32 layers, as the DSV artifact lists it; layers 7 to 28
    # lie between 0.969 and 0.988 there and are spread over that range here.
    "dsv-2.7b": (0.012, 0.011, 0.022, 0.754, 0.906, 0.945, 0.965, *(0.969,) * 5, *(0.975,) * 6, *(0.982,) * 6,
                 *(0.988,) * 5, 0.953, 0.953, 0.021),
    # Layers 0, 1, 3, 5, 7 of a toy model at 16,384 tokens: blocks of 64 that hold 90% of the mass of groups of 64.
    "toy-blocks": (0.111, 0.914, 0.799, 0.891, 0.315),
}
"""Block sparsities from the first layer to the last; other depths take the layer at the same relative depth."""


@dataclass(frozen=True)
class Trace:
    """How built-in sparsities become heads.

    Attributes:
        name: of ``BUILT_IN``.
        cap: largest sparsity of a block; what the published vector says beyond it is not trusted.
        spread: standard deviation of the logarithm of the heads' densities around their block's.
        pattern: of coverage (``statistics.PATTERNS``).
    """

    name: str = "dsv-2.7b"
    cap: float = 0.95
    spread: float = 0.5
    pattern: str = "clustered"

    def __post_init__(self) -> None:
        if self.name not in BUILT_IN:
            raise ValueError(f"sparsity must be one of {', '.join(BUILT_IN)}, or a recorded .json file, "
                             f"got {self.name!r}")
        if not 0.0 <= self.cap < 1.0:
            raise ValueError(f"sparsity cap must be in [0, 1), got {self.cap}")
        if not 0.0 <= self.spread <= 3.0:
            raise ValueError(f"head spread must be in [0, 3], got {self.spread}")

    def densities(self, layers: int) -> list[float]:
        """[layers] mean density of each block."""
        vector = BUILT_IN[self.name]
        picked = [vector[round(layer * (len(vector) - 1) / max(1, layers - 1))] for layer in range(layers)]
        return [1.0 - min(self.cap, sparsity) for sparsity in picked]

    def stats(self, layers: int, heads: int, groups: int, *, tokens: int, q_block: int, sizes: Sequence[int]
              ) -> list[BlockStats]:
        """Statistics of every block; ``sizes`` are the numbers of sequence ranks that coverage is modelled for."""
        made: dict[float, BlockStats] = {}
        for mean in self.densities(layers):
            if mean not in made:
                density = spread_heads(mean, heads, self.spread)
                made[mean] = BlockStats(density, modelled_coverage(
                    density, heads // groups, tokens=tokens, q_block=q_block, pattern=self.pattern, sizes=sizes))
        return [made[mean] for mean in self.densities(layers)]


def spread_heads(mean: float, heads: int, spread: float) -> tuple[float, ...]:
    """[heads] densities with this mean, log-normal, in an order that is fixed and not sorted."""
    normal = statistics.NormalDist()
    factors = [math.exp(spread * normal.inv_cdf((head + 0.5) / heads)) for head in range(heads)]
    random.Random(heads).shuffle(factors)
    scale = mean * heads / sum(factors)
    # What a full head cannot take, the others do.
    for _ in range(heads):
        shares = [min(1.0, scale * factor) for factor in factors]
        short = mean * heads - sum(shares)
        rest = sum(factor for factor, share in zip(factors, shares) if share < 1.0)
        if short <= 1e-9 or not rest:
            break
        scale += short / rest
    return tuple(shares)


def append(path: Path, stats: Sequence[BlockStats], *, step: int, tokens: int) -> None:
    """Adds a profile to a trace: one line of JSON with ``step``, ``tokens`` and ``layers``."""
    layers = [{"density": [round(share, 4) for share in block.density],
               "coverage": {str(ranks): [round(share, 4) for share in row] for ranks, row in block.coverage}}
              for block in stats]
    json_lines.append(path, {"step": step, "tokens": tokens, "layers": layers})


class Recorded(NamedTuple):
    """A profile of a run: statistics of every block, and ``tokens`` of the samples that it was taken of, if it says."""

    blocks: list[BlockStats]
    tokens: int | None


def load(path: str, *, heads: int, groups: int, tokens: int) -> Recorded:
    """A recorded trace: of a run's ``.jsonl``, the last profile of the length nearest to ``tokens``, or JSON of one.

    A profile has ``layers``, each with ``density`` [H] and ``coverage`` {ranks: [G]}.

    Args:
        tokens: of the sequence that is planned. Lengths are compared by their ratio.

    Raises:
        ValueError: one line that names the file and the layer.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(f"sparsity {path}: cannot be read: {error.strerror}") from None
    data = _nearest_profile(text, tokens) if path.endswith(".jsonl") else _profile(text)
    if data is None:
        raise ValueError(f"sparsity {path}: must be JSON with a list `layers`" + (
            ", a profile a line" if path.endswith(".jsonl") else ""))
    return Recorded(_blocks(path, data["layers"], heads, groups), _length(data))


_HEAD = re.compile(r'\{"step": \d+, "tokens": (\d+),')
"""How ``append`` begins a line: the long rest of most need not be parsed."""


def _nearest_profile(text: str, tokens: int) -> dict | None:
    """The last whole line of the nearest length; a run that is killed may leave a part of one."""
    best, nearest = None, math.inf
    for line in reversed(text.splitlines()):
        head = _HEAD.match(line)
        if best is not None and head is not None and _distance(int(head[1]), tokens) >= nearest:
            continue
        data = _profile(line)
        if data is not None and (best is None or _distance(_length(data), tokens) < nearest):
            best, nearest = data, _distance(_length(data), tokens)
    return best


def _length(data: dict[str, Any]) -> int | None:
    tokens = data.get("tokens")
    return tokens if isinstance(tokens, int) and tokens > 0 else None


def _distance(tokens: int | None, planned: int) -> float:
    return abs(math.log(tokens / planned)) if tokens else math.inf


def _profile(text: str) -> dict | None:
    data = json_lines.parse(text)
    return data if isinstance(data, dict) and isinstance(data.get("layers"), list) else None


def _blocks(path: str, rows: list, heads: int, groups: int) -> list[BlockStats]:
    stats = []
    for layer, row in enumerate(rows):
        try:
            coverage = tuple(sorted((int(ranks), tuple(map(float, units)))
                                    for ranks, units in row.get("coverage", {}).items()))
            block = BlockStats(tuple(map(float, row["density"])), coverage)
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise ValueError(f"sparsity {path}: layer {layer}: {error}") from None
        if len(block.density) != heads or any(len(units) != groups for _, units in block.coverage):
            raise ValueError(f"sparsity {path}: layer {layer}: density must have one entry per head, {heads}, and "
                             f"coverage one per key/value head, {groups}, got {len(block.density)} and "
                             f"{[len(units) for _, units in block.coverage]}")
        stats.append(block)
    return stats
