"""Context parallelism on the GPUs of one host: predicted from a calibration at other lengths, then measured.

    torchrun --nproc-per-node 2 benchmarks/bench_cp.py --part block              # H200s; merged into the results
    torchrun --nproc-per-node 2 benchmarks/bench_cp.py --part block --size toy   # gloo, any CPU, seconds
    python benchmarks/bench_cp.py --part train --tokens 65536                    # starts its own ranks on two GPUs
    python benchmarks/bench_cp.py --part train --size toy                        # gloo, any CPU, minutes
    python benchmarks/bench_cp.py --report                                       # tables of docs/scaling.md

``block`` is one attention block of dsv-2.7b: projection to low rank, selection, exchanges, attention, backward. Every
arm is checked first; a red one has no numbers, and the exit status is 1. ``exposed_comm_ms`` is the block's time less
that of the same block with exchanges replaced by local copies of the same bytes.
``train`` is the training program with one plan after another, on two GPUs and, at 65,536 tokens, on one.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from attention.report import load
from bench_attention import versions
from cp import tables
from cp.block import LIMIT, Arm, BlockBench
from cp.train import SHAPES, TrainBench, cases
from gpus import need_gpus

from megatron_dsv.context_parallel import cluster
from megatron_dsv.context_parallel.calibration import Calibration
from megatron_dsv.context_parallel.microbenchmarks import Microbenchmarks, Sizes
from megatron_dsv.context_parallel.partial_attention import Kernels
from megatron_dsv.context_parallel.trial_block import TrialShape

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/h200x2/cp.json"
KEY = ("case", "tokens", "sparsity", "plan")


class Size(NamedTuple):
    """What is calibrated and what is predicted; no length is in both."""

    shape: TrialShape
    sparsities: tuple[float, ...]
    calibration_tokens: tuple[int, ...]
    densities: tuple[float, ...]
    payloads: tuple[int, ...]
    seconds: float


SIZES = {
    "h200x2": Size(TrialShape(131072, 16, 128, 2048), (0.8, 0.9, 0.95), (32768, 65536), (0.05, 0.2),
                   (2**20, 2**24, 2**26, 2**28), 1.0),
    "toy": Size(TrialShape(512, 4, 16, 128, q_block=16, kv_block=16), (0.5, 0.8), (128, 256), (0.2, 0.5),
                (2**12, 2**16), 0.02),
}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--part", choices=("block", "train"), default="block")
    parser.add_argument("--size", choices=tuple(SIZES), default="h200x2", help="what is measured.")
    parser.add_argument("--seconds", type=float, default=None, help="timed work an arm; the size's by default.")
    parser.add_argument("--sparse-backend", default="auto", help="of sparse attention.")
    parser.add_argument("--dense-backend", default="auto", help="of dense attention.")
    parser.add_argument("--calibration", type=Path, default=None,
                        help="constants of an earlier `dsv bench --calibrate`, in place of measuring them now.")
    parser.add_argument("--output", type=Path, default=None,
                        help=f"JSON to merge rows into; by default {RESULTS.relative_to(ROOT)}, nothing for toy.")
    parser.add_argument("--tokens", type=int, nargs="+", default=None, choices=tuple(SHAPES),
                        help="of --part train; 65536 by default, 512 for toy.")
    parser.add_argument("--model", default=None,
                        help="of --part train: a preset or a file; model/dsv-2.7b by default, model/debug for toy.")
    parser.add_argument("--sparsity", type=float, default=0.9, help="of --part train, mean over heads.")
    parser.add_argument("--launches", choices=("sparse", "dense"), default=None,
                        help="of --part train: these alone.")
    parser.add_argument("--deadline", type=float, default=None, help="no launch begins after so many seconds.")
    parser.add_argument("--logs", type=Path, default=None, help="folder for the output of launches.")
    parser.add_argument("--report", action="store_true",
                        help="write docs/scaling.md's tables from the output and stop.")
    parser.add_argument("--extra", nargs=argparse.REMAINDER, default=[],
                        help="more flags of the training program; must come last.")
    args = parser.parse_args(argv)
    if args.report:
        tables.write(ROOT / "docs/scaling.md", load(args.output or RESULTS))
        return 0
    size = SIZES[args.size]
    on_gpu = torch.cuda.is_available()
    if args.size != "toy" or on_gpu:
        need_gpus(parser, int(os.environ.get("LOCAL_WORLD_SIZE", "2")), f"--part {args.part} --size {args.size}",
                  "with CUDA_VISIBLE_DEVICES= it runs on the CPU" if args.size == "toy" else "--size toy runs anywhere")
    if args.part == "train":
        return train(args)
    if "LOCAL_RANK" not in os.environ:
        parser.exit(2, f"{parser.prog}: error: --part block needs ranks: start it with torchrun --nproc-per-node 2\n")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(minutes=3))
    try:
        output = args.output or (None if args.size == "toy" else RESULTS)
        return block(size, args.seconds or size.seconds, device, Kernels(args.dense_backend, args.sparse_backend),
                     args.calibration, output)
    finally:
        dist.destroy_process_group()


def block(size: Size, seconds: float, device: torch.device, kernels: Kernels, calibrated: Path | None,
          output: Path | None) -> int:
    """Calibrates, predicts, measures and compares; exit status 0 if every gate is green."""
    rank, started = dist.get_rank(), time.monotonic()

    def say(text: str) -> None:
        if rank == 0:
            print(text, flush=True)

    if rank:
        output = None
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    if calibrated is not None:
        calibration = Calibration.load(calibrated)
    else:
        sizes = Sizes(size.shape, size.calibration_tokens, size.densities, size.payloads, seconds, dtype)
        calibration = Microbenchmarks(sizes, device, cluster.load("h200x2"), dist.group.WORLD, kernels).calibrate()
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        calibration.save(output.with_name(f"{output.stem}_calibration.json"))
    say(f"# calibrated after {time.monotonic() - started:.0f} s: {calibration.cluster.node_link}, overlap "
        f"{calibration.cluster.overlap:.2f}, {calibration.cluster.communicator_mib} MiB a communicator\n"
        f"# {calibration.kernels}\n# {calibration.handling}")
    bench = BlockBench(size.shape, calibration, dist.group.WORLD, device, dtype, kernels, seconds, say)
    cases: list[list[Arm]] = [bench.arms(sparsity) for sparsity in (None, *size.sparsities)]
    bench.write_predictions([arm for arms in cases for arm in arms],
                            None if output is None else output.with_name(f"{output.stem}_predictions.json"))
    rows: list[dict[str, Any]] = []
    beside = next(arm for arm in cases[0] if arm.plan is not None and arm.plan.g_s == 1)
    for number, arms in enumerate(cases):
        rows += bench.measure(arms, beside if number else None)
        say(f"# {time.monotonic() - started:.0f} s")
        if output is not None:
            merge(output, rows)
    report(rows, say)
    for failure in bench.failures:
        say(f"FAILED {failure}")
    return 1 if bench.failures else 0


def train(args: argparse.Namespace) -> int:
    """Launches of the training program; exit status 0 if all of them ended well."""
    calibration = args.calibration or RESULTS.with_name(f"{RESULTS.stem}_calibration.json")
    on_gpu = torch.cuda.is_available()
    if args.output is None and args.size != "toy":
        args.output = RESULTS
    lengths, model = ([512], "model/debug") if args.size == "toy" else ([65536], "model/dsv-2.7b")
    lengths, model = args.tokens or lengths, args.model or model
    bench = TrainBench(model, ["--bf16"] * on_gpu + args.extra, args.logs, on_gpu)
    started = time.monotonic()
    for tokens in lengths:
        groups = cases(tokens, model, args.sparsity, str(calibration.resolve()), short=tokens > 131072,
                       launches=args.launches)
        left = None if args.deadline is None else args.deadline - (time.monotonic() - started)
        rows = bench.run(groups, functools.partial(print, flush=True), left)
        if args.output is not None and rows:
            args.output.parent.mkdir(parents=True, exist_ok=True)
            merge(args.output, rows)
    bench.compare(print)
    for failure in bench.failures:
        print(f"FAILED {failure}")
    return 1 if bench.failures else 0


def report(rows: list[dict[str, Any]], say) -> None:
    """How well predictions held, by sparsity."""
    for sparsity in sorted({row["sparsity"] for row in rows}):
        errors = [row["error"] for row in rows if row["sparsity"] == sparsity and row["ranks"] > 1]
        if errors:
            worst = max(errors, key=abs)
            say(f"# sparsity {sparsity:g}: {len(errors)} plans, the worst prediction is off by {worst:+.1%} "
                f"({'within' if abs(worst) <= LIMIT else 'BEYOND'} {LIMIT:.0%})")


def merge(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes ``rows`` with what ``path`` holds of other cases."""
    mine = {tuple(row[name] for name in KEY) for row in rows}
    # A planned row of an earlier run may have had other heads.
    cases = {(row["case"], row["tokens"], row["sparsity"]) for row in rows}
    old = [row for row in (load(path) if path.exists() else [])
           if tuple(row[name] for name in KEY) not in mine
           and (row["case"], row["tokens"], row["sparsity"]) not in cases]
    found = {**versions(), "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.cuda.is_available() else "-"}
    new = [row | {"versions": found} for row in rows]
    path.write_text(json.dumps(old + new, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
