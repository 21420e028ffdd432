"""Benchmarks on hosts without their GPUs, and launches of benchmarks that fail."""

import sys

import bench_attention
import bench_components
import bench_cp
import bench_pretrain
import bench_timings
import pytest
import torch
from cp import train
from launches import reason

REPORT = """
======================================================
benchmarks/cp/scheduled_pretrain.py FAILED
------------------------------------------------------
  rank      : 0 (local_rank: 0)
  exitcode  : -9 (pid: 7)
  traceback : Signal 9 (SIGKILL) received by PID 7
======================================================
"""
CHILD = "torch.distributed.elastic.multiprocessing.errors.ChildFailedError: \n"


@pytest.mark.parametrize(("module", "flags", "gpus"), [
    (bench_cp, ["--part", "train"], 2),
    (bench_cp, ["--part", "train", "--tokens", "512", "--model", "model/dsv-2.7b"], 2),
    (bench_cp, ["--part", "block"], 2),
    (bench_attention, ["--suite", "hopper"], 1),
    (bench_components, ["--output", "rows.json"], 1),
    (bench_timings, ["--output", "rows.json"], 1),
    (bench_pretrain, ["--output", "rows.json", "--latent-data", "data"], 1),
])
def test_too_few_gpus_are_one_line_at_once(module, flags, gpus, monkeypatch, capsys, tmp_path):
    found = gpus - 1
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: found > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: found)
    monkeypatch.setattr(train.subprocess, "Popen", lambda *args, **kwargs: pytest.fail("a launch began"))
    monkeypatch.setattr(sys, "argv", ["benchmark", *flags])
    with pytest.raises(SystemExit, match="2"):
        module.main()
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert f"needs {gpus} GPU{'s' * (gpus > 1)}, found {found}" in error
    assert list(tmp_path.iterdir()) == []


def test_blocks_are_timed_by_ranks(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    with pytest.raises(SystemExit, match="2"):
        bench_cp.main(["--size", "toy"])
    assert "--part block needs ranks: start it with torchrun --nproc-per-node 2" in capsys.readouterr().err


@pytest.mark.parametrize(("output", "why"), [
    ("", "no output"),
    ("\nloading\n=====\n", "loading"),
    ("step 1\n" + CHILD + REPORT, "Signal 9 (SIGKILL) received by PID 7"),
    ("a.py: error: --lr must be positive, got 0\n" + CHILD + REPORT, "a.py: error: --lr must be positive, got 0"),
    ("[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB\n" + CHILD + "=====\n",
     "[rank0]: torch.OutOfMemoryError: CUDA out of memory. Tried 2 GiB"),
])
def test_a_failed_launch_says_why_in_one_line(output, why):
    assert reason(output) == why
