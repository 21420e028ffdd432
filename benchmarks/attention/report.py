"""Rows on disk, the goals they are held against, and the tables of docs/kernels.md.

A row's key is case, granularity, backend, lists and keep_ratio. A red row has no number, only what was wrong in its
gate; in files it stands in place of the row that it would have replaced. A goal names the rows it looks at, a figure
of a row, and a bound; the best row counts where users may choose (the best backend), the worst where they may not.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Row = dict[str, Any]

DENSE = ("flash4", "cudnn", "sdpa")
"""Dense baselines that a row may have."""
KEY = ("case", "granularity", "backend", "lists", "keep_ratio")
_BLOCKS = ("block-64", "block-128")


def key(row: Row) -> tuple[Any, ...]:
    """What a newer row replaces. Of the dispatcher's rows that is the choice, whatever way and share it was."""
    return tuple(row[name] for name in (KEY[:2] if row["case"].startswith("dispatch") else KEY))


def red(point: Any, reason: str) -> Row:
    """The row of a point whose gate is red."""
    return {name: getattr(point, name) for name in KEY} | {"red": reason}


def green(rows: Iterable[Row]) -> list[Row]:
    """The rows that have numbers."""
    return [row for row in rows if "red" not in row]


def merge(path: Path, rows: Sequence[Row]) -> None:
    """Writes ``rows``, red ones too, in place of older ones of the same key; of two the later one stays."""
    newest = {key(row): row for row in (*read(path), *rows)}
    merged = sorted(newest.values(), key=lambda row: tuple(map(str, key(row))))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(json.dumps(row) for row in merged) + "\n]\n")


def read(path: Path) -> list[Row]:
    """All rows of a file, red ones too; none if there is no file."""
    return json.loads(path.read_text()) if path.is_file() else []


def load(path: Path) -> list[Row]:
    """The rows of a file that have numbers; none if there is no file."""
    return green(read(path))


def speedup(row: Row) -> float:
    """The fastest dense kernel over the whole sparse sequence."""
    dense = fastest_dense(row)
    return float("nan") if dense is None else dense / row["total_ms"]


def fastest_dense(row: Row) -> float | None:
    """Milliseconds of the fastest dense baseline of the row."""
    return min((row[f"dense_{name}_ms"] for name in DENSE if row.get(f"dense_{name}_ms") is not None), default=None)


@dataclass(frozen=True)
class Goal:
    """One line of the table.

    Attributes:
        name: what is asked, for a reader.
        bound: the figure to reach.
        at_least: whether larger is better.
        figure: maps all rows to the figures that count, one a row or pair of rows.
        best: the best of them counts, else the worst.
        unit: how a figure is written, with ``{}`` for the number.
    """

    name: str
    bound: float
    at_least: bool
    figure: Callable[[Sequence[Row]], Iterable[float]]
    best: bool
    unit: str = "{:.2f}x"

    def reached(self, rows: Sequence[Row]) -> float | None:
        """The figure that counts, or None where nothing was measured."""
        figures = list(self.figure(rows))
        if not figures:
            return None
        return max(figures) if self.at_least == self.best else min(figures)

    def met(self, rows: Sequence[Row]) -> bool | None:
        """Whether the goal is reached; None where nothing was measured."""
        figure = self.reached(rows)
        if figure is None:
            return None
        return figure >= self.bound if self.at_least else figure <= self.bound


def _where(rows: Sequence[Row], case: str, keep: float | None = 0.1, granularities: tuple[str, ...] = _BLOCKS,
           backend: str | None = None, lists: str = "uniform") -> list[Row]:
    return [row for row in rows if row["case"] == case and row["granularity"] in granularities
            and row["lists"] == lists and keep in (None, row["keep_ratio"]) and backend in (None, row["backend"])]


def _faster(name: str, bound: float, case: str, **where: Any) -> Goal:
    return Goal(name, bound, True, lambda rows: [speedup(row) for row in _where(rows, case, **where)], best=True)


def _skewed(rows: Sequence[Row]) -> Iterable[float]:
    """Skewed over uniform, of the fastest backend of each granularity."""
    for granularity in (*_BLOCKS, "token-128"):
        sides = [[row["total_ms"] for row in _where(rows, "64k", granularities=(granularity,), lists=lists)]
                 for lists in ("skewed", "uniform")]
        if all(sides):
            yield min(sides[0]) / min(sides[1])


def _selection_share(rows: Sequence[Row], granularity: str) -> Iterable[float]:
    """Selection over total, of each shape's fastest row at 90% sparsity."""
    for case in ("64k", "128k", "256k"):
        found = _where(rows, case, granularities=(granularity,))
        if found:
            best = min(found, key=lambda row: row["total_ms"])
            yield 100 * best["selection_ms"] / best["total_ms"]


def _dispatch(rows: Sequence[Row]) -> Iterable[float]:
    """Chosen way over dense."""
    for row in rows:
        if row["case"].startswith("dispatch"):
            yield 1 / speedup(row)


def _deterministic(rows: Sequence[Row], granularities: tuple[str, ...]) -> Iterable[float]:
    for row in _where(rows, "64k-deterministic", granularities=granularities):
        for free in _where(rows, "64k", granularities=(row["granularity"],), backend=row["backend"]):
            yield ((row["forward_ms"] + row["backward_ms"]) / (free["forward_ms"] + free["backward_ms"]))


def _memory(rows: Sequence[Row], granularity: str) -> Iterable[float]:
    for row in _where(rows, "256k", granularities=(granularity,)):
        if row["dense_peak_mib"]:
            yield 100 * (row["peak_mib"] / row["dense_peak_mib"] - 1)


GOALS: tuple[Goal, ...] = (
    _faster("64k, 90% sparse, block mode, best backend", 8.0, "64k"),
    _faster("64k, 95% sparse, block mode, best backend", 13.0, "64k", keep=0.05),
    _faster("64k, 80% sparse, block mode, best backend", 4.2, "64k", keep=0.2),
    _faster("64k, own Triton kernels, 64 x 64", 7.0, "64k", granularities=("block-64",), backend="triton"),
    _faster("64k, own Triton kernels, 128 x 128", 6.8, "64k", granularities=("block-128",), backend="triton"),
    _faster("64k, single tokens, groups of 128", 4.8, "64k", granularities=("token-128",)),
    _faster("128k, block mode, best backend", 8.0, "128k"),
    _faster("256k, block mode, best backend", 8.0, "256k"),
    _faster("16k, 24 heads, best backend", 6.5, "16k"),
    _faster("64k, 3 heads, best backend", 8.0, "3heads-64k"),
    _faster("32k, 3 heads, best backend (stretch)", 6.0, "3heads-32k"),
    _faster("16k, 3 heads, best backend (stretch)", 3.5, "3heads-16k"),
    _faster("64k, head dim 64, best backend", 8.0, "d64"),
    _faster("64k, head dim 96, best backend", 6.5, "d96"),
    _faster("64k, head dim 256, best backend", 5.0, "d256"),
    Goal("skewed lists over uniform ones, worst granularity", 1.10, False, _skewed, best=False),
    Goal("selection of the total, blocks of 64, 64k and above", 4.0, False,
         lambda rows: _selection_share(rows, "block-64"), best=False, unit="{:.1f}%"),
    Goal("selection of the total, single tokens, 64k and above", 6.0, False,
         lambda rows: _selection_share(rows, "token-128"), best=False, unit="{:.1f}%"),
    Goal("the dispatcher's way over dense, worst", 1.02, False, _dispatch, best=False),
    Goal("deterministic over free, forward + backward, blocks", 1.15, False,
         lambda rows: _deterministic(rows, _BLOCKS), best=False),
    Goal("deterministic over free, forward + backward, single tokens", 1.6, False,
         lambda rows: _deterministic(rows, ("token-128",)), best=False),
    Goal("peak memory over dense, 256k, 24 heads, blocks of 128, leanest backend", 2.0, False,
         lambda rows: _memory(rows, "block-128"), best=True, unit="{:+.1f}%"),
    Goal("peak memory over dense, 256k, 24 heads, blocks of 64, leanest backend", 4.0, False,
         lambda rows: _memory(rows, "block-64"), best=True, unit="{:+.1f}%"),
)


def goal_table(rows: Sequence[Row], measured_only: bool = False) -> str:
    """Markdown: goal, bound, reached, met or missed."""
    lines = ["| 90% sparse, 24 heads of 128 unless said | goal | reached | |", "|---|---|---|---|"]
    for goal in GOALS:
        figure, met = goal.reached(rows), goal.met(rows)
        if figure is None and measured_only:
            continue
        bound = f"{'>=' if goal.at_least else '<='} {goal.unit.format(goal.bound)}"
        reached = "not measured" if figure is None else goal.unit.format(figure)
        verdict = {True: "met", False: "**missed**", None: ""}[met]
        lines.append(f"| {goal.name} | {bound} | {reached} | {verdict} |")
    return "\n".join(lines)


_COLUMNS = (("case", "case"), ("lists of", "granularity"), ("backend", "backend"), ("lists", "lists"),
            ("kept", "keep_ratio"), ("dense flash4", "dense_flash4_ms"), ("dense cuDNN", "dense_cudnn_ms"),
            ("selection", "selection_ms"), ("forward", "forward_ms"), ("backward", "backward_ms"),
            ("total", "total_ms"))


def row_table(rows: Sequence[Row]) -> str:
    """Markdown: every row, times in ms, and how much faster than the fastest dense kernel."""
    lines = ["| " + " | ".join(title for title, _ in _COLUMNS) + " | faster | peak GiB |",
             "|" + "---|" * (len(_COLUMNS) + 2)]
    for row in rows:
        cells = [_cell(row[name]) for _, name in _COLUMNS]
        peak = "" if row["peak_mib"] is None else f"{row['peak_mib'] / 1024:.2f}"
        faster = f"{speedup(row):.2f}x" if fastest_dense(row) is not None else ""
        lines.append("| " + " | ".join(cells) + f" | {faster} | {peak} |")
    return "\n".join(lines)


def _cell(value: Any) -> str:
    if value is None:
        return "-"
    return f"{value:.3g}" if isinstance(value, float) and value < 1 else (
        f"{value:.2f}" if isinstance(value, float) else str(value))


def write_tables(document: Path, rows: Sequence[Row]) -> None:
    """Puts the tables between the markers of ``document``.

    Raises:
        ValueError: a pair of markers is missing.
    """
    text = document.read_text()
    for name, table in (("goals", goal_table(rows)), ("rows", row_table(rows))):
        begin, end = (f"<!-- attention {name}: {side} -->" for side in ("begin", "end"))
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"--report needs the markers {begin!r} and {end!r} once each in {document}")
        head, tail = text.split(begin)[0], text.split(end)[1]
        text = f"{head}{begin}\n{table}\n{end}{tail}"
    document.write_text(text)
