"""The training program on all GPUs of a host: every plan of one launch timed, against one GPU where it fits."""

from __future__ import annotations

import json
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from launches import reason

from cp.block import ALONE, PLANNED
from cp.train_cases import Case, predicted_ms
from megatron_dsv.cli.plan import load_model
from megatron_dsv.context_parallel.calibration import Calibration
from megatron_dsv.testing.latents import write_latents

ROOT = Path(__file__).resolve().parents[2]
STEP = re.compile(r"iteration\s+(\d+)/.*?elapsed time per iteration \(ms\): ([\d.]+).*?\| loss: ([-+.\dEenaif]+)")
PEAK = re.compile(r"^ARM (\{.*\})$", re.MULTILINE)
SHAPES = {65536: (16, 128, 128), 262144: (64, 128, 128), 512: (8, 16, 16), 1024: (16, 16, 16)}
"""Tokens -> latent frames, rows, columns, under patches of 1 x 2 x 2."""


def cases(tokens: int, model: str, sparsity: float, calibration: str, *, short: bool,
          launches: str | None = None) -> list[list[Case]]:
    """Launches at one length; those of one list run side by side, on GPUs of their own.

    Args:
        tokens: of a sample.
        model: preset or file.
        sparsity: of the sparse arms.
        calibration: file of constants.
        short: few steps, for the longest sequences; nothing on one GPU.
        launches: ``sparse`` or ``dense`` alone; None is both.
    """
    shape = load_model(model)

    def case(name: str, ranks: int, sparse: bool, arms: Sequence[tuple[int, str]], steps: int) -> Case:
        return Case(f"{name}, {tokens} tokens", ranks, tokens, sparsity if sparse else None, tuple(arms), steps,
                    shape.heads, shape.head_dim, calibration)

    if short:
        groups = [[case("sparse, two GPUs", 2, True, [(0, "(2, 1)"), (5, "(1, 2)"), (9, PLANNED)], 13)],
                  [case("dense, two GPUs", 2, False, [(0, "(2, 1)")], 1)]]
    else:
        groups = [[case("sparse, two GPUs", 2, True, [(0, "(1, 2)"), (5, "(2, 1)"), (9, PLANNED)], 29)],
                  [case("dense, two GPUs", 2, False, [(0, "(1, 2)"), (4, "(2, 1)")], 7)],
                  [case("sparse, one GPU", 1, True, [(0, ALONE)], 5),
                   case("dense, one GPU", 1, False, [(0, ALONE)], 4)]]
    groups = [[one for one in group if launches is None or one.name.startswith(launches)] for group in groups]
    return [group for group in groups if group]


class TrainBench:
    """Runs launches and reads their logs.

    Args:
        model: preset or file of the model.
        flags: more flags of the training program.
        logs: folder for the launches' output; None keeps none.
        on_gpu: one GPU a rank; otherwise gloo on this CPU.
    """

    def __init__(self, model: str, flags: Sequence[str], logs: Path | None, on_gpu: bool) -> None:
        self.model, self.flags, self.logs, self.on_gpu = model, list(flags), logs, on_gpu
        self.shape = load_model(model)
        self.losses: dict[str, list[float]] = {}
        self.failures: list[str] = []

    def predictions(self, groups: list[list[Case]]) -> dict[tuple[str, str], float]:
        """(launch, arm) -> milliseconds of a step, before anything ran."""
        return {(case.name, arm): predicted_ms(arm, case, self.shape)
                for group in groups for case in group for _, arm in case.arms}

    def run(self, groups: list[list[Case]], say: Callable[[str], None], deadline: float | None = None
            ) -> list[dict[str, Any]]:
        """Rows of all launches; what would begin after ``deadline`` seconds is left out and named."""
        predicted = self.predictions(groups)
        for (launch, arm), ms in predicted.items():
            say(f"# predicted {ms:10.1f} ms a step: {launch}, {arm}")
        started, rows = time.monotonic(), []
        with tempfile.TemporaryDirectory(prefix="bench-cp-") as folder:
            data: dict[int, Path] = {}
            for group in groups:
                if deadline is not None and time.monotonic() - started > deadline:
                    self.failures.append(f"left out after {deadline:.0f} s: {', '.join(case.name for case in group)}")
                    continue
                for case in group:
                    if case.tokens not in data:
                        data[case.tokens] = write_latents(Path(folder) / str(case.tokens), [SHAPES[case.tokens]] * 2,
                                                          text_dim=self.shape.text_dim)
                running = [(case, self._start(case, data[case.tokens], Path(folder), number))
                           for number, case in enumerate(group)]
                for case, process in running:
                    output, _ = process.communicate()
                    rows += self._rows(case, output, process.returncode, predicted, say)
                say(f"# {time.monotonic() - started:.0f} s")
        return rows

    def _start(self, case: Case, data: Path, folder: Path, number: int) -> subprocess.Popen[str]:
        schedule = folder / f"{case.name}.json"
        schedule.write_text(case.to_json(), encoding="utf-8")
        flags = [
            "--latent-data", str(data), "--latent-valid-samples", "0", "--eval-iters", "0", "--micro-batch-size", "1",
            "--global-batch-size", "1", "--train-iters", str(case.steps), "--lr", "1e-4", "--log-interval", "1",
            "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1",
            "--num-workers", "1", "--use-distributed-optimizer", "--dsv-profile-interval", "1000",
            "--dsv-sparse-stage", "dense" if case.sparsity is None else "sparse", *self.flags]
        flags = ["--config", self.model, *flags]
        if case.ranks > 1:
            flags += ["--context-parallel-size", str(case.ranks), "--dsv-cp-plan", "sequence"]
        # `--standalone` takes a free port, so that launches side by side do not meet.
        launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost",
                    "--nproc-per-node", str(case.ranks)]
        environment = os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "PYTHONUNBUFFERED": "1"}
        if self.on_gpu and case.ranks == 1:
            environment["CUDA_VISIBLE_DEVICES"] = str(number)
        return subprocess.Popen([*launcher, str(ROOT / "benchmarks/cp/scheduled_pretrain.py"), str(schedule), *flags],
                                cwd=ROOT, env=environment, text=True, stdout=subprocess.PIPE,
                                stderr=subprocess.STDOUT)

    def _rows(self, case: Case, output: str, status: int, predicted: dict[tuple[str, str], float],
              say: Callable[[str], None]) -> list[dict[str, Any]]:
        if self.logs is not None:
            self.logs.mkdir(parents=True, exist_ok=True)
            (self.logs / f"{case.name.replace(', ', '-').replace(' ', '_')}.log").write_text(output, encoding="utf-8")
        steps = {int(number) - 1: (float(ms), float(loss)) for number, ms, loss in STEP.findall(output)}
        if status or len(steps) < case.steps:
            self.failures.append(f"{case.name}: status {status}, {len(steps)} of {case.steps} steps; "
                                 f"{reason(output)}")
            say(output[-4000:])
        self.losses[case.name] = [loss for _, (_, loss) in sorted(steps.items())]
        peaks = {row["arm"]: row["peak_gib"] for row in map(json.loads, PEAK.findall(output))}
        mib = Calibration.load(case.calibration).cluster.communicator_mib
        rows = []
        for _, arm in case.arms:
            timed = [steps[step][0] for step in case.timed_steps(arm) if step in steps]
            if not timed:
                continue
            ms, expected = statistics.median(timed), predicted[case.name, arm]
            rows.append({
                "case": "train", "tokens": case.tokens, "sparsity": case.sparsity or 0.0,
                "plan": arm if case.sparsity is not None or arm == ALONE else f"{arm} dense", "ranks": case.ranks,
                "measured_ms": round(ms, 1), "predicted_ms": round(expected, 1), "error": round(ms / expected - 1, 4),
                "exposed_comm_ms": None, "mib_per_communicator": mib if self.on_gpu else None,
                "peak_gib": peaks.get(arm), "steps": len(timed),
                "warmed": case.timed_steps(arm).start >= 2,
                "losses": [steps[step][1] for step in case.timed_steps(arm) if step in steps]})
            say(f"{case.name:32} {arm:10} {ms:10.1f} ms, predicted {expected:10.1f} ({ms / expected - 1:+.1%}), "
                f"peak {peaks.get(arm)} GiB, {len(timed)} steps")
        return rows

    def compare(self, say: Callable[[str], None]) -> None:
        """Losses of the same step on two GPUs and on one."""
        for name, alone in self.losses.items():
            other = self.losses.get(name.replace("one GPU", "two GPUs"), [])
            if "one GPU" in name and other:
                pairs = list(zip(alone, other))
                worst = max(abs(a - b) / abs(a) for a, b in pairs)
                say(f"# {name}: losses of {len(pairs)} steps differ by {worst:.2e} at most from those on two GPUs: "
                    + ", ".join(f"{a:.6f} {b:.6f}" for a, b in pairs))
