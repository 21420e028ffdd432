"""``dsv report``: a run's metrics from its TensorBoard folder, as a table, a CSV file or a plot; and its plans."""

from __future__ import annotations

import argparse
import csv
import math
import sys
from pathlib import Path

from megatron_dsv.cli.output_file import check_output_file
from megatron_dsv.context_parallel import json_lines
from megatron_dsv.metrics import METRICS

Series = dict[str, list[tuple[int, float]]]
"""(step, value) by metric name, in the order of steps."""


_TWIN = "vs samples"
"""Megatron writes its own metrics a second time, over consumed samples, under a name that ends so."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The folder and the kinds of output."""
    parser.add_argument("folder", help="folder given to --tensorboard-dir, or the run's folder that holds it")
    parser.add_argument("--match", default="", metavar="TEXT", help="only metrics whose name contains this; "
                        f"those over consumed samples are listed where it contains {_TWIN!r}")
    parser.add_argument("--layers", action="store_true", help="also list the metrics of single layers")
    parser.add_argument("--csv", default=None, metavar="FILE", help="write every point: name, step, value")
    parser.add_argument("--plot", default=None, metavar="FILE", help="plot every listed metric over steps (matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Print the table; write what else was asked for."""
    for flag, file in (("--csv", args.csv), ("--plot", args.plot)):
        if file is not None:
            check_output_file(flag, file)
    everything = read(args.folder)
    series = {name: points for name, points in everything.items()
              if args.match in name and (args.layers or "/layer_" not in name)
              and (_TWIN in args.match or not name.endswith(_TWIN))}
    if not series:
        layers = "" if args.layers else " (metrics of single layers are listed with --layers)"
        raise ValueError(f"--match must be a part of one of the {len(everything)} metrics in {args.folder}, such as "
                         f"{next(iter(everything))}, got {args.match!r}{layers}")
    print(table(series))
    plans = [] if args.match else read_plans(args.folder)
    if plans:
        print(f"\n{plan_table(plans)}")
    if args.csv:
        with open(args.csv, "w", newline="", encoding="utf-8") as file:
            writer = csv.writer(file)
            writer.writerow(("name", "step", "value"))
            writer.writerows((name, step, value) for name, points in series.items() for step, value in points)
        print(f"wrote {args.csv}")
    if args.plot:
        plot(series, args.plot)
        print(f"wrote {args.plot}")
    return 0


def read(folder: str) -> Series:
    """Every scalar of the event files below ``folder``; where launches overlap, the later launch's value counts.

    Raises:
        ValueError: no such folder, no event file in it, or none that holds a scalar.
    """
    if not Path(folder).is_dir():
        raise ValueError(f"the folder must be one that --tensorboard-dir named, got {folder}, which does not exist")
    files = sorted(Path(folder).rglob("*tfevents*"), key=lambda path: (path.stat().st_mtime, path.name))
    if not files:
        raise ValueError(f"the folder must hold TensorBoard event files, got {folder}; was --tensorboard-dir given?")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.util import tensor_util

    merged: dict[str, dict[int, float]] = {}
    for file in files:
        events = EventAccumulator(str(file), size_guidance={"scalars": 0, "tensors": 0})
        events.Reload()
        for name in events.Tags()["scalars"]:
            merged.setdefault(name, {}).update((event.step, event.value) for event in events.Scalars(name))
        for name in events.Tags()["tensors"]:
            for event in events.Tensors(name):
                value = tensor_util.make_ndarray(event.tensor_proto)
                if value.ndim == 0 and value.dtype.kind == "f":
                    merged.setdefault(name, {})[event.step] = float(value)
    if not merged:
        raise ValueError(f"the folder must hold scalars in its event files, got {folder}, whose {len(files)} event "
                         "files have none yet; a run writes the first after --log-interval steps")
    return {name: sorted(points.items()) for name, points in sorted(merged.items())}


def read_plans(folder: str) -> list[dict]:
    """What became of every context-parallel plan, in order, from the ``plans.jsonl`` files below ``folder``.

    Lines that a kill or a full disk cut short are left out; one line on stderr says how many of each file.

    Raises:
        ValueError: a line that no run wrote.
    """
    rows: list[dict] = []
    for file in sorted(Path(folder).rglob("plans.jsonl"), key=lambda path: path.stat().st_mtime):
        torn = 0
        for number, line in enumerate(file.read_text(encoding="utf-8", errors="replace").splitlines(), start=1):
            row = json_lines.parse(line)
            if row is None:
                torn += 1
                continue
            try:
                rows.append({name: row[name] for name in ("step", "event", "version", "splits")} | row)
            except (KeyError, TypeError) as error:
                raise ValueError(f"{file}, line {number}: must be what a run wrote: {error}") from None
        if torn:
            print(f"{file}: {torn} line{'s' if torn > 1 else ''} cut short and left out", file=sys.stderr)
    return rows


def plan_table(rows: list[dict]) -> str:
    """A line for every plan: when it came, what became of it, its splits, and what it promised or why it failed."""
    lines = [f"{'step':>8}  {'plan':>5}  {'':9}  splits"]
    for row in rows:
        before, after = row.get("predicted_ms", (0.0, 0.0))
        promise = f"{before:.4g} -> {after:.4g} ms" if before else f"{after:.4g} ms" if after else row.get("reason", "")
        version = row.get("refused", row["version"])
        lines.append(f"{row['step']:>8}  {version:>5}  {row['event']:9}  {row['splits']}  {promise}".rstrip())
    return "\n".join(lines)


def table(series: Series) -> str:
    """First and last value, range and unit of each metric; "-" for what a profile did not measure of a layer."""
    width = max(len(name) for name in series)
    lines = [f"{'metric':{width}}  {'steps':>13}  {'first':>10}  {'last':>10}  {'min':>10}  {'max':>10}  unit"]
    for name, points in series.items():
        values = [value for _, value in points if math.isfinite(value)] or [math.nan]
        steps = f"{points[0][0]}-{points[-1][0]}"
        row = METRICS.get(name if "/layer_" not in name else f"dsv/{name.rsplit('/', 1)[1]}")
        # A profile that measured nothing of a layer is no run that diverged.
        shown = ["-" if math.isnan(value) and row and row.per_layer else f"{value:.4g}"
                 for value in (points[0][1], points[-1][1], min(values), max(values))]
        lines.append(f"{name:{width}}  {steps:>13}  {'  '.join(f'{value:>10}' for value in shown)}  "
                     f"{row.unit if row else ''}".rstrip())
    return "\n".join(lines)


def plot(series: Series, path: str) -> None:
    """One panel per metric, written to ``path``; ValueError if matplotlib is not installed."""
    try:
        import matplotlib
    except ImportError:
        raise ValueError("--plot needs matplotlib, which is not installed; use --csv, or install it") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    columns = min(3, len(series))
    rows = math.ceil(len(series) / columns)
    figure, axes = pyplot.subplots(rows, columns, figsize=(5 * columns, 3 * rows), squeeze=False)
    for axis in axes.flat[len(series):]:
        axis.set_visible(False)
    for axis, (name, points) in zip(axes.flat, series.items(), strict=False):
        axis.plot(*zip(*points, strict=True))
        axis.set_title(name)
        axis.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(path)
    pyplot.close(figure)
