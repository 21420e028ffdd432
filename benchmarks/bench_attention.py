"""Sparse attention, selection included, against the best dense kernels of the same run; a correctness gate goes first.

    python benchmarks/bench_attention.py --suite hopper --part 1/2     # one GPU; rows are merged into the results
    python benchmarks/bench_attention.py --suite smoke                 # any CPU, seconds
    python benchmarks/bench_attention.py --report                      # tables of docs/kernels.md from the results

``total_ms`` is one timed sequence of projection, pooling, scores, selection, transposition, forward and backward; the
lists attended are the ones that sequence selected. Every point runs for ``--seconds`` in turns with the others of its
shape and with the dense kernels. A point whose gate is red has no numbers, and the exit status is 1.
"""

from __future__ import annotations

import argparse
import functools
import gc
import importlib.metadata
import math
import re
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from attention import inputs, report
from attention.cases import DEFAULTS, DENSITY_GRID, Group, Point, Shape, choose, dispatch_case, suite
from attention.gate import GateError, check_dense, check_samples, check_sparse
from attention.pipeline import DenseRun, SparseRun
from attention.timing import Clock, Times, interleaved, peak_mib
from gpus import need_gpus

from megatron_dsv.kernels.library import installed
from megatron_dsv.sparsity.dispatcher import use_sparse

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/h200/attention.json"
_PACKAGES = ("torch", "triton", "flash-attn-4", "nvidia-cudnn-frontend", "nvidia-cutlass-dsl")


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--suite", default="smoke", help="hopper or smoke.")
    parser.add_argument("--part", default="1/1", help="i/n: the i-th of n parts, from 1.")
    parser.add_argument("--only", default=None, help="one case of the suite, whatever the part.")
    parser.add_argument("--seconds", type=float, default=2.0, help="timed work a point.")
    parser.add_argument("--output", type=Path, default=None,
                        help="JSON to merge rows into; default for hopper benchmarks/results/h200/attention.json.")
    parser.add_argument("--deadline", type=float, default=None,
                        help="leave out what is not expected to end within these seconds; the status is then 1.")
    parser.add_argument("--merge", type=Path, nargs="+", default=None,
                        help="merge these files, of parts that ran side by side, into --output and stop.")
    parser.add_argument("--list", action="store_true", help="print the part's points and stop.")
    parser.add_argument("--report", action="store_true", help="render docs/kernels.md from --output and stop.")
    args = parser.parse_args(argv)
    output = args.output or (RESULTS if args.suite == "hopper" or args.report else None)
    for path in args.merge or ([output] if args.report else []):
        if not path.is_file():
            parser.error(f"{'--merge' if args.merge else '--report'} needs a file of rows, found none at {path}")
    if args.report:
        report.write_tables(ROOT / "docs/kernels.md", report.load(output))
        print(report.goal_table(report.load(output)))
        return 0
    if args.merge:
        if output is None:
            parser.error("--merge needs --output")
        report.merge(output, [row for path in args.merge for row in report.read(path)])
        return 0
    if not 0 < args.seconds < math.inf:
        parser.error(f"--seconds must be positive, got {args.seconds:g}")
    if not re.fullmatch(r"\d+/\d+", args.part):
        parser.error(f"--part must be i/n, such as 1/2, got {args.part!r}")
    try:
        index, count = map(int, args.part.split("/"))
        groups = choose(suite(args.suite), (index, count), args.only)
    except ValueError as error:
        parser.error(str(error))
    if args.list:
        for group in groups:
            print(group.shape, f"about {group.cost:.0f} s", *group.points, *group.dispatch, sep="\n  ")
        return 0
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if args.suite == "hopper" and device.type != "cuda":
        need_gpus(parser, 1, "--suite hopper", "--suite smoke runs anywhere")
    if args.suite == "hopper" and not installed("flash4"):
        parser.error("--suite hopper needs flash-attn-4, the fastest dense kernel: pip install 'megatron-dsv[kernels]'")
    if args.suite == "smoke":
        found = "no GPU was found, and this" if device.type == "cpu" else "this"
        print(f"# {found} is the smoke suite: tiny shapes that show that everything runs, and no time worth comparing; "
              "--suite hopper, on a GPU, measures", flush=True)
    return Bench(device, args.seconds, output, goals=args.suite == "hopper").run(groups, args.deadline)


class Bench:
    """Runs groups and keeps what they gave: ``rows``, and ``failures`` with what was red or broke.

    ``goals`` says whether the shapes are those that the goals are about, so that they are held against them.
    """

    def __init__(self, device: torch.device, seconds: float, output: Path | None, *, goals: bool) -> None:
        self.device = device
        self.dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        self.seconds = seconds
        self.output = output
        self.goals = goals
        self.clock = Clock(device)
        self.versions = versions()
        self.rows: list[report.Row] = []
        self.failures: list[str] = []
        self._gates: dict[tuple, bool] = {}
        self._reds: dict[tuple, str] = {}
        self._spread: dict[tuple, dict[str, float]] = {}

    def run(self, groups: list[Group], deadline: float | None = None) -> int:
        """Exit status: 0 if everything asked for was measured."""
        started = time.monotonic()
        for group in groups:
            if deadline is not None and time.monotonic() - started + group.cost > deadline:
                self.fail(f"{', '.join(sorted(group.cases))}: left out, about {group.cost:.0f} s more than --deadline")
                continue
            try:
                rows = self.measure(group)
            except Exception as error:
                self.fail(f"{', '.join(sorted(group.cases))}: {described(error)}")
                rows = self._all_red(group, str(error)) if isinstance(error, GateError) else []
            if rows and self.output is not None:
                report.merge(self.output, rows)
            rows = report.green(rows)
            self.rows += rows
            if rows:
                print(report.row_table(rows), flush=True)
            print(f"# {time.monotonic() - started:.0f} s", flush=True)
            gc.collect()
            if self.device.type == "cuda":
                torch.cuda.empty_cache()
        if self.goals:
            print(report.goal_table(self.rows, measured_only=True))
        for failure in self.failures:
            print(f"FAILED {failure}", file=sys.stderr)
        return 1 if self.failures else 0

    def measure(self, group: Group) -> list[report.Row]:
        """Rows of one group, red ones too."""
        shape = group.shape
        problem = inputs.problem(shape, self.device, self.dtype)
        dense = self._dense(group, problem)
        dispatched = self._dispatched(group)
        hidden = functools.cache(functools.partial(self._hidden, shape))
        points = (*group.points, *filter(None, dispatched.values()))
        sparse = {point: SparseRun(shape, point, problem, hidden(point.granularity, point.lists),
                                   inputs.budgets(shape, point))
                  for point in points if self._green(point, shape)}
        sparse = {point: run for point, run in sparse.items() if self._sampled(run)}
        times = interleaved({**dense, **sparse}, self.clock, self.seconds)
        fastest = min(dense, key=lambda name: times[name].median())
        facts = self._shape_facts(shape, {name: times[name] for name in dense},
                                  peak_mib(dense[fastest], problem.nbytes))
        rows = [self._row(run, times[point], facts) for point, run in sparse.items()]
        rows += [self._dense_way(shape, granularity, fastest, facts)
                 for granularity, point in dispatched.items() if point is None]
        return rows + [report.red(point, self._reds[gate]) for point in points if point not in sparse
                       for gate in (self._sparse_gate(point, shape), (shape, point)) if gate in self._reds]

    def _all_red(self, group: Group, reason: str) -> list[report.Row]:
        """A red row for every point of a group whose baselines cannot be trusted."""
        chosen = (Point(dispatch_case(group.shape), granularity, "auto") for granularity in group.dispatch)
        return [report.red(point, reason) for point in (*group.points, *chosen)]

    def fail(self, what: str) -> None:
        print(f"# FAILED {what}", flush=True)
        self.failures.append(what)

    def _hidden(self, shape: Shape, granularity: str, lists: str) -> inputs.Hidden:
        return inputs.hidden(shape, Point("", granularity, "", lists), self.device, self.dtype)

    def _dense(self, group: Group, problem: inputs.Problem) -> dict[str, DenseRun]:
        """The baselines that serve the shape.

        Raises:
            GateError: one of them is wrong, so that nothing may be held against the others.
        """
        served = {}
        for name in group.dense:
            run = DenseRun(name, problem)
            reason = run.unserved()
            if reason is not None:
                print(f"# dense {name} has no number: {reason}", flush=True)
            elif self._gate(("dense", name, group.shape.head_dim),
                            functools.partial(check_dense, name, group.shape, self.device, self.dtype)):
                served[name] = run
            else:
                raise GateError(f"dense {name} is red, so no number of this shape can be held against the fastest one")
        return served

    def _green(self, point: Point, shape: Shape) -> bool:
        return self._gate(self._sparse_gate(point, shape),
                          lambda: check_sparse(point, shape, self.device, self.dtype))

    @staticmethod
    def _sparse_gate(point: Point, shape: Shape) -> tuple:
        """Points that share it share the gate on small inputs."""
        return point.granularity, point.backend, shape.head_dim, point.deterministic, point.proxies

    def _gate(self, key: tuple, check: Callable[[], None]) -> bool:
        """Runs a check once; anything but a pass is a failure."""
        if key not in self._gates:
            started = time.monotonic()
            try:
                check()
                self._gates[key] = True
                print(f"# gate green in {time.monotonic() - started:.1f} s: {key}", flush=True)
            except Exception as error:
                self._gates[key] = False
                self._reds[key] = str(error)
                self.fail(f"gate of {key}: {described(error)}")
        return self._gates[key]

    def _sampled(self, run: SparseRun) -> bool:
        """Checks samples of the timed problem and keeps what they say of the lists."""
        key = (run.shape, run.point)

        def check() -> None:
            self._spread[key] = check_samples(run)

        return self._gate(key, check)

    def _dispatched(self, group: Group) -> dict[str, Point | None]:
        """Granularity -> the point of the largest kept share that goes sparse, None where none does."""
        chosen: dict[str, Point | None] = {}
        for granularity in group.dispatch:
            point = Point(dispatch_case(group.shape), granularity, "auto")
            sparse = [keep for keep in DENSITY_GRID if self._goes_sparse(group.shape, point, keep)]
            chosen[granularity] = Point(point.case, granularity, "auto", keep_ratio=max(sparse)) if sparse else None
        return chosen

    def _goes_sparse(self, shape: Shape, point: Point, keep: float) -> bool:
        q_block, kv_block = point.blocks
        name = torch.cuda.get_device_name() if self.device.type == "cuda" else None
        return use_sparse(keep, num_tokens=shape.tokens, num_heads=shape.heads, head_dim=shape.head_dim,
                          q_block_size=q_block, kv_block_size=kv_block, device=name).sparse

    def _shape_facts(self, shape: Shape, times: dict[str, Times], dense_peak: float | None) -> dict[str, Any]:
        """What all rows of a shape share: sizes, the dense baselines, and the peak of the fastest of them."""
        facts: dict[str, Any] = {"tokens": shape.tokens, "heads": shape.heads, "head_dim": shape.head_dim,
                                 "projection_shards": shape.shards, "hidden": shape.hidden}
        for name in dict.fromkeys(("flash4", "cudnn", *times)):
            known = times.get(name)
            for stage in (None, *DenseRun.stages):
                field = f"dense_{name}_ms" if stage is None else f"dense_{name}_{stage}_ms"
                facts[field] = None if known is None else round(known.median(stage), 4)
        return facts | {"dense_peak_mib": dense_peak and round(dense_peak, 1)}

    def _row(self, run: SparseRun, times: Times, facts: dict[str, Any]) -> report.Row:
        point = run.point
        total = times.median()
        row = {"case": point.case, **facts, "keep_ratio": point.keep_ratio, "granularity": point.granularity,
               "backend": point.backend, "lists": point.lists, "deterministic": point.deterministic,
               "proxies": point.proxies, "reduction": DEFAULTS.dsv_score_reduction,
               **{f"{stage}_ms": round(times.median(stage), 4) for stage in run.stages}, "total_ms": round(total, 4)}
        for name in ("flash4", "cudnn"):
            dense = row[f"dense_{name}_ms"]
            row[f"speedup_vs_{name}"] = None if dense is None else round(dense / total, 3)
        peak = peak_mib(run, run.problem.nbytes)
        return row | self._spread[run.shape, point] | {
            "peak_mib": peak and round(peak, 1), "iterations": len(times.total), "sustained_s": round(times.seconds, 2),
            "versions": self.versions}

    def _dense_way(self, shape: Shape, granularity: str, name: str, facts: dict[str, Any]) -> report.Row:
        """The row of a shape that the dispatcher always sends to dense attention: that time is the dense time."""
        return {"case": dispatch_case(shape), **facts, "keep_ratio": None, "granularity": granularity,
                "backend": f"dense {name}", "lists": "none", "deterministic": False, "selection_ms": 0.0,
                "forward_ms": facts[f"dense_{name}_forward_ms"], "backward_ms": facts[f"dense_{name}_backward_ms"],
                "total_ms": facts[f"dense_{name}_ms"],
                "speedup_vs_flash4": None, "speedup_vs_cudnn": None, "peak_mib": facts["dense_peak_mib"],
                "versions": self.versions}


def described(error: Exception) -> str:
    """A red gate in one line; anything else with the place where it happened."""
    return str(error) if isinstance(error, GateError) else "".join(traceback.format_exception(error))


def versions() -> dict[str, str]:
    """Device, driver and packages behind the numbers."""
    found = {}
    for name in _PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    found["cudnn"] = str(torch.backends.cudnn.version())
    if torch.cuda.is_available():
        query = subprocess.run(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"], text=True,
                               capture_output=True, check=False)
        found["driver"] = query.stdout.strip().splitlines()[0] if query.stdout.strip() else "unknown"
    return found


if __name__ == "__main__":
    raise SystemExit(main())
