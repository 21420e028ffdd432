"""What is timed: shapes, points and the suites made of them.

A point is one row of the results. Points of one shape form a group: they share q, k, v and the dense baselines, and are
timed in turns in one run. Groups are what ``--part i/n`` deals out.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from megatron_dsv.config import DSVConfig

GRANULARITIES = {"block-64": (64, 64), "block-128": (128, 128), "token-128": (128, 1)}
"""Name -> (tokens of a query group, tokens of a key block)."""

DEFAULTS = DSVConfig()
RANK = DEFAULTS.dsv_predictor_rank
LAYER_HEADS = 24
DENSITY_GRID = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.35, 0.4, 0.45, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0)
"""Kept shares at which the dispatcher is asked for its way."""


@dataclass(frozen=True)
class Shape:
    """One attention layer on one device, batch 1.

    Attributes:
        tokens: queries and keys.
        heads: query heads, as many key/value heads.
        head_dim: channels of a head.
        shards: devices that share the projection: each projects tokens / shards for all heads of the layer, as a
            head-parallel context-parallel rank does, and attends with its own heads.
        hidden: width of the hidden state that is projected.
    """

    tokens: int
    heads: int = LAYER_HEADS
    head_dim: int = 128
    shards: int = 1
    hidden: int = LAYER_HEADS * 128


@dataclass(frozen=True)
class Point:
    """One sparse measurement; ``case``, ``granularity``, ``backend``, ``lists`` and ``keep_ratio`` are its key.

    Selection scores blocks as a run does by default, unless ``proxies`` says otherwise.
    """

    case: str
    granularity: str
    backend: str
    lists: str = "uniform"
    keep_ratio: float = 0.1
    deterministic: bool = False
    proxies: int = DEFAULTS.dsv_predictor_proxies

    @property
    def blocks(self) -> tuple[int, int]:
        """(tokens of a query group, tokens of a key block)."""
        return GRANULARITIES[self.granularity]


@dataclass(frozen=True)
class Group:
    """Points of one shape, and how to measure them.

    Attributes:
        dispatch: granularities whose point is chosen when it runs: the largest kept share that the dispatcher sends to
            sparse attention.
        dense: names of the dense baselines.
    """

    shape: Shape
    points: tuple[Point, ...]
    dispatch: tuple[str, ...] = ()
    dense: tuple[str, ...] = ("flash4", "cudnn")

    @property
    def cases(self) -> set[str]:
        """Names of the cases inside."""
        return {point.case for point in self.points} | ({dispatch_case(self.shape)} if self.dispatch else set())

    @property
    def cost(self) -> float:
        """Rough seconds on a GPU once its kernels are compiled, to deal groups out evenly."""
        work = (self.shape.tokens / 65536) ** 2 * self.shape.heads / 24 * self.shape.head_dim / 128
        dense = max(2.2, 0.3 * work * 2.5)
        return (2.3 + 0.08 * work) * (len(self.points) + len(self.dispatch)) + 2 * dense + 4


def dispatch_case(shape: Shape) -> str:
    """Case name of the dispatcher's points."""
    return f"dispatch-{shape.tokens // 1024}k" if shape.tokens % 1024 == 0 else f"dispatch-{shape.tokens}"


def suite(name: str) -> list[Group]:
    """The groups of ``hopper`` or ``smoke``.

    Raises:
        ValueError: an unknown name.
    """
    suites = {"hopper": _hopper, "smoke": _smoke}
    if name not in suites:
        raise ValueError(f"--suite must be one of {', '.join(sorted(suites))}, got {name!r}")
    return suites[name]()


def choose(groups: list[Group], part: tuple[int, int], only: str | None) -> list[Group]:
    """The groups of part i of n (from 1), or those with case ``only``, cut down to it.

    Groups go, the costliest first, to the part that has the least to do.

    Raises:
        ValueError: no such case, or a part out of range.
    """
    if only is not None:
        known = sorted({case for group in groups for case in group.cases})
        if only not in known:
            raise ValueError(f"--only must be one of {', '.join(known)}, got {only!r}")
        cut = [replace(group, points=tuple(point for point in group.points if point.case == only),
                       dispatch=group.dispatch if dispatch_case(group.shape) == only else ())
               for group in groups if only in group.cases]
        return cut
    index, count = part
    if not 1 <= index <= count:
        raise ValueError(f"--part must be i/n with 1 <= i <= n, got {index}/{count}")
    load = [0.0] * count
    dealt: dict[int, list[int]] = {number: [] for number in range(count)}
    for number in sorted(range(len(groups)), key=lambda number: -groups[number].cost):
        least = min(range(count), key=lambda part: load[part])
        load[least] += groups[number].cost
        dealt[least].append(number)
    return [groups[number] for number in sorted(dealt[index - 1])]


_BEST = (("block-128", "flash4"), ("block-128", "cudnn"), ("block-64", "cudnn"))
_OWN = (("block-64", "triton"), ("block-128", "triton"))
_AUTO = (("block-128", "auto"),)


def _points(case: str, kinds: tuple[tuple[str, str], ...], keeps: tuple[float, ...] = (0.1,),
            lists: str = "uniform") -> tuple[Point, ...]:
    return tuple(Point(case, granularity, backend, lists, keep) for keep in keeps for granularity, backend in kinds)


def _hopper() -> list[Group]:
    token = (("token-128", "triton"),)
    every = (*_BEST, *_OWN, *token, *_AUTO, ("block-64", "auto"))
    blocks = (*_BEST, *_OWN, *_AUTO)
    repeatable = tuple(Point("64k-deterministic", granularity, "triton", deterministic=True)
                       for granularity in GRANULARITIES)
    one_proxy = (Point("64k-one-proxy", "block-64", "cudnn", proxies=1),
                 Point("64k-one-proxy", "block-128", "flash4", proxies=1),
                 Point("64k-one-proxy", "token-128", "triton", proxies=1))
    groups = [
        Group(Shape(65536), _points("64k", every) + _points("64k", every[:6], lists="skewed") + repeatable),
        Group(Shape(65536), _points("64k", blocks, keeps=(0.05, 0.2)) + _points("64k", token, keeps=(0.2,)) + one_proxy,
              dispatch=tuple(GRANULARITIES)),
        Group(Shape(262144), _points("256k", blocks)),
        Group(Shape(65536, heads=3, shards=8), _points("3heads-64k", blocks)),
        *(Group(Shape(65536, head_dim=dim, hidden=LAYER_HEADS * dim),
                _points(f"d{dim}", (("block-128", "flash4"), *_OWN))) for dim in (256, 64, 96)),
        Group(Shape(16384), _points("16k", blocks), dispatch=("block-64", "block-128")),
        Group(Shape(131072), _points("128k", blocks)),
        Group(Shape(4096), (), dispatch=tuple(GRANULARITIES)),
        *(Group(Shape(tokens, heads=3, shards=8), _points(f"3heads-{tokens // 1024}k", blocks))
          for tokens in (16384, 32768)),
        *(Group(Shape(tokens), (), dispatch=("block-64", "block-128")) for tokens in (8192, 32768))]
    return groups


def _smoke() -> list[Group]:
    """Everything but the size: runs on a CPU in seconds."""
    shape = Shape(512, heads=4, head_dim=16, hidden=192)
    kinds = tuple((granularity, "reference") for granularity in GRANULARITIES)
    shard = Shape(512, heads=2, head_dim=16, shards=2, hidden=192)
    return [Group(shape, _points("smoke", kinds, keeps=(0.25, 0.7)) + _points("smoke", kinds, (0.7,), "skewed"),
                  dispatch=("block-64",), dense=("sdpa",)),
            Group(shard, _points("smoke-shard", kinds[:1], keeps=(0.25,)), dense=("sdpa",))]
