"""Tables of docs/scaling.md from the rows of a run."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

HEADERS = {
    "block": "| sparsity | plan | measured ms | predicted ms | | exposed exchange ms | peak GiB | dense beside it ms |",
    "train": "| tokens | sparsity | plan | GPUs | step ms | predicted ms | | peak GiB | steps |",
}


def table(case: str, rows: Sequence[dict[str, Any]]) -> str:
    """Markdown of the rows of one case, "block" or "train"."""
    header = HEADERS[case]
    lines = [header, "|" + "---|" * (header.count("|") - 1)]
    for row in rows:
        if row["case"] == case:
            lines.append(_block(row) if case == "block" else _train(row))
    return "\n".join(lines)


def write(document: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Puts the tables of the cases that were measured between the markers of ``document``.

    Raises:
        ValueError: a pair of markers is missing.
    """
    text = document.read_text(encoding="utf-8")
    for case in sorted({row["case"] for row in rows}):
        begin, end = (f"<!-- two GPUs, {case}: {side} -->" for side in ("begin", "end"))
        if text.count(begin) != 1 or text.count(end) != 1:
            raise ValueError(f"--report needs the markers {begin!r} and {end!r} once each in {document}")
        head, tail = text.split(begin)[0], text.split(end)[1]
        text = f"{head}{begin}\n{table(case, rows)}\n{end}{tail}"
    document.write_text(text, encoding="utf-8")


def _block(row: dict[str, Any]) -> str:
    beside = row.get("dense_beside_ms")
    return (f"| {_kind(row)} | {_plan(row)} | {row['measured_ms']:.1f} | {row['predicted_ms']:.1f} | "
            f"{row['error']:+.1%} | {_number(row['exposed_comm_ms'])} | {_number(row['peak_gib'])} | "
            f"{_number(beside)} |")


def _train(row: dict[str, Any]) -> str:
    return (f"| {row['tokens']:,} | {_kind(row)} | {_plan(row)} | {row['ranks']} | {row['measured_ms']:,.0f} | "
            f"{row['predicted_ms']:,.0f} | {row['error']:+.1%} | {_number(row['peak_gib'])} | "
            f"{row['steps']}{'' if row['warmed'] else ', which also compiled'} |")


def _kind(row: dict[str, Any]) -> str:
    return f"{row['sparsity']:.0%}" if row["sparsity"] else "dense"


def _plan(row: dict[str, Any]) -> str:
    return row["plan"].split(" heads")[0].removesuffix(" none")


def _number(value: float | None) -> str:
    return "" if value is None else f"{value:.1f}"
