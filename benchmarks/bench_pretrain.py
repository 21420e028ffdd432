"""Times the unchanged entry script on one GPU: dense, predictor and sparse arms of one preset, from a prepared set.

    python benchmarks/bench_pretrain.py --latent-data DIR --output benchmarks/results/h200/pretrain.json

Each arm is a fresh process. A step's time is Megatron's own `elapsed time per iteration`; the median leaves out the
first steps (compilation) and steps with a profile. With a forced keep ratio the sparse arm measures speed alone: a
random model's selection means nothing, and its rows say so.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import json
import math
import os
import re
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import yaml
from gpus import need_gpus
from launches import reason

from megatron_dsv import presets
from megatron_dsv.config_fields import parse_sizes
from megatron_dsv.data.latent_dataset import LatentDataset
from megatron_dsv.models.embeddings import token_grid

ROOT = Path(__file__).resolve().parent.parent
STEP = re.compile(r"iteration\s+(\d+)/.*?elapsed time per iteration \(ms\): ([\d.]+).*?\| loss: ([-+.\dEenaif]+)")
BACKEND = re.compile(r"(dense|sparse)_attention: backend='auto' took '(\w+)' for the (forward and backward|\w+)")
BLOCKS = re.compile(r"dsv_(q|kv)_block_size \.+ (\d+)")
MEMORY = re.compile(r"max allocated: ([\d.]+)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--latent-data", required=True)
    parser.add_argument("--output", required=True, help="JSON file; rows of the same arm are replaced.")
    parser.add_argument("--preset", default="wan2.1-1.3b")
    parser.add_argument("--arms", nargs="+", default=["dense", "predictor", "sparse"])
    parser.add_argument("--transformer-impl", default="local")
    parser.add_argument("--keep-ratio", type=float, default=0.2)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--skip", type=int, default=4, help="steps left out of the median.")
    parser.add_argument("--logs", default=None, help="folder for each arm's output.")
    parser.add_argument("--extra", nargs=argparse.REMAINDER, default=[], help="more flags of the entry script.")
    args = parser.parse_args()
    need_gpus(parser, 1)
    try:
        tokens = tokens_of(args)
    except ValueError as error:
        parser.error(str(error))
    rows = []
    for arm in args.arms:
        rows.append(run_arm(args, arm, tokens))
        merge(Path(args.output), rows[-1:])
        print(json.dumps({key: value for key, value in rows[-1].items() if key != "versions"}), flush=True)
    return 0 if all(row["completed"] for row in rows) else 1


def run_arm(args: argparse.Namespace, arm: str, tokens: int) -> dict[str, Any]:
    """One process of the entry script on samples of ``tokens``, read off its output."""
    command = [
        sys.executable, str(ROOT / "pretrain_video_dit.py"), "--config", f"model/{args.preset}",
        "--latent-data", args.latent_data, "--latent-valid-samples", "0", "--eval-iters", "0",
        "--micro-batch-size", "1", "--global-batch-size", "1", "--train-iters", str(args.steps), "--lr", "1e-4",
        "--bf16", "--log-interval", "1", "--recompute-granularity", "full", "--recompute-method", "uniform",
        "--recompute-num-layers", "1", "--num-workers", "2", "--transformer-impl", args.transformer_impl,
        "--dsv-sparse-stage", arm, "--dsv-profile-interval", "1000"]
    if arm == "sparse":
        command += ["--dsv-keep-ratio", str(args.keep_ratio)]
    command += args.extra
    environment = os.environ | {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1",
                                "MASTER_PORT": "0", "CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONUNBUFFERED": "1"}
    started = time.monotonic()
    done = subprocess.run(command, env=environment, cwd=ROOT, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, check=False)
    if args.logs:
        Path(args.logs).mkdir(parents=True, exist_ok=True)
        (Path(args.logs) / f"{args.preset}-{arm}-{args.transformer_impl}.log").write_text(done.stdout)
    return row(args, arm, tokens, done.stdout, done.returncode, time.monotonic() - started)


def row(args: argparse.Namespace, arm: str, tokens: int, printed: str, status: int, wall_s: float) -> dict[str, Any]:
    """What a launch printed, as a row."""
    steps = {int(number): (float(ms), float(loss)) for number, ms, loss in STEP.findall(printed)}
    counted = [ms for number, (ms, _) in steps.items() if number > args.skip]
    if status or not counted:
        print(printed[-6000:], f"FAILED {arm}: status {status}, {len(steps)} steps; {reason(printed)}", sep="\n",
              file=sys.stderr)
    step_ms = statistics.median(counted) if counted else float("nan")
    memory = [float(megabytes) for megabytes in MEMORY.findall(printed)]
    losses = [loss for _, loss in steps.values()]
    return {
        "preset": args.preset, "tokens": tokens, "stage": arm, "transformer_impl": args.transformer_impl,
        "attention_backend": backends(printed),
        "blocks": " x ".join(size for _, size in sorted(set(BLOCKS.findall(printed)), reverse=True))
        if arm == "sparse" else "",
        "keep_ratio": args.keep_ratio if arm == "sparse" else 1.0,
        "keep_ratio_note": "forced, for timing only: a random model selects nothing useful" if arm == "sparse" else "",
        "step_ms": round(step_ms, 1), "tokens_per_s": round(tokens / step_ms * 1e3) if counted else 0,
        "peak_gib": round(max(memory, default=0.0) / 1024, 2), "steps": len(steps),
        "loss_first": losses[0] if losses else None, "loss_last": losses[-1] if losses else None,
        "recompute": "full", "completed": status == 0 and len(steps) == args.steps,
        "wall_s": round(wall_s, 1), "versions": versions()}


def backends(printed: str) -> str:
    """What ``auto`` took, as ``dense flash4`` or ``sparse flash4 forward, cudnn backward``; all that were taken."""
    found: dict[str, dict[str, str]] = {}
    for kind, backend, passes in BACKEND.findall(printed):
        for name in passes.split(" and "):
            found.setdefault(kind, {})[name] = backend
    return "; ".join(
        f"{kind} " + (by_pass["forward"] if len(set(by_pass.values())) == 1 and "forward" in by_pass
                      else ", ".join(f"{backend} {name}" for name, backend in by_pass.items()))
        for kind, by_pass in found.items())


def tokens_of(args: argparse.Namespace) -> int:
    """Tokens of the data set's largest shape under the preset's patch."""
    preset = yaml.safe_load(presets.path(f"model/{args.preset}").read_text())
    patch = parse_sizes(preset.get("dit-patch-size", "1x2x2"))
    return max(math.prod(token_grid(shape[1:], patch)) for shape in LatentDataset(args.latent_data).buckets)


def versions() -> dict[str, str]:
    """Device and packages behind the numbers."""
    import torch

    names = ("torch", "triton", "megatron-core", "transformer-engine", "flash-attn-4", "nvidia-cudnn-frontend", "numpy")
    found = {}
    for name in names:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "absent"
    found["device"] = torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu"
    found["cudnn"] = str(torch.backends.cudnn.version())
    return found


def merge(path: Path, rows: list[dict[str, Any]]) -> None:
    """Writes ``rows`` into the file, in place of older rows of the same arm."""
    def key(row: dict[str, Any]) -> tuple[Any, ...]:
        return row["preset"], row["stage"], row["transformer_impl"], row["keep_ratio"], row["attention_backend"]

    old = json.loads(path.read_text()) if path.is_file() else []
    fresh = {key(row) for row in rows}
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([row for row in old if key(row) not in fresh] + rows, indent=1) + "\n")


if __name__ == "__main__":
    raise SystemExit(main())
