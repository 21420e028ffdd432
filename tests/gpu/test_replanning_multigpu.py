"""Planning while training over NCCL on two GPUs: plans follow the profiles, times are of events, a resume keeps all.

The links of the cluster file are so slow that what travels decides: all keys of a peer make heads the better split, few
of them the sequence.
"""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from megatron_dsv import presets
from megatron_dsv.testing.latents import write_latents
from megatron_dsv.testing.torchrun import torchrun

ROOT = Path(__file__).resolve().parents[2]
FLAGS = ("--config model/debug --latent-valid-samples 0 --eval-iters 0 --micro-batch-size 1 --global-batch-size 2 --lr "
         "1e-3 --lr-decay-style constant --log-interval 1 --num-workers 0 --num-layers 2 --hidden-size 256 "
         "--num-attention-heads 4 --ffn-hidden-size 512 --dsv-profile-interval 2 --dsv-dense-above 1.0 "
         "--dsv-kv-block-size 16 --dsv-sparse-stage sparse --dsv-budget-mass 0.05 --no-dsv-keep-own-block "
         "--context-parallel-size 2 --use-distributed-optimizer").split()


def launch(ranks: int, argv: list[str], environment: dict[str, str]) -> str:
    """What the ranks printed."""
    command = [*torchrun(ranks), str(ROOT / "pretrain_video_dit.py"), *argv]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def replan_and_resume(folder: Path, environment: dict[str, str], *precision: str) -> None:
    """Two launches and what they must leave behind."""
    data = write_latents(folder / "data", [(5, 16, 24)] * 4)
    slow = re.sub(r"gbps: \d+", "gbps: 0.001", presets.path("cluster/h200").read_text())
    cluster, run = folder / "slow.yaml", folder / "run"
    cluster.write_text(re.sub(r"latency-us: \d+, peer-us: \d+", "latency-us: 0, peer-us: 0", slow))
    flags = [*FLAGS, *precision, "--latent-data", str(data), "--dsv-cp-cluster", str(cluster), "--save", str(run),
             "--save-interval", "8", "--load", str(run)]
    first = launch(2, [*flags, "--train-iters", "8"], environment)
    rows = [json.loads(line) for line in (run / "plans.jsonl").read_text().splitlines()]
    assert [row["event"] for row in rows] == ["committed"] * len(rows), first[-3000:]
    assert [(row["step"], row["version"]) for row in rows[:2]] == [(0, 1), (1, 2)]
    assert len({row["splits"] for row in rows}) > 1, rows
    measured = re.findall(r"ms of attention at step (\d+): (sparse \w+) (\S+) measured", first)
    assert measured, first[-3000:]
    assert all(float(ms) > 0 for _, _, ms in measured)
    trace = [json.loads(line) for line in (run / "sparsity.jsonl").read_text().splitlines()]
    assert trace[-1]["layers"][0]["coverage"]["2"]
    second = launch(2, [*flags, "--train-iters", "10"], environment)
    again = [json.loads(line) for line in (run / "plans.jsonl").read_text().splitlines()][len(rows):]
    assert (again[0]["event"], again[0]["version"], again[0]["splits"]) == \
        ("resumed", rows[-1]["version"], rows[-1]["splits"]), second[-3000:]


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_two_gpus_replan_and_resume(tmp_path):
    replan_and_resume(tmp_path, {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCHDYNAMO_DISABLE": "1"}, "--bf16")


@pytest.mark.slow
def test_the_same_program_on_a_cpu(tmp_path):
    replan_and_resume(tmp_path, {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
