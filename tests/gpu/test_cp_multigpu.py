"""Context-parallel attention over NCCL in bf16, every split of two GPUs, against fp64."""

import os
import subprocess
from pathlib import Path

import pytest
import torch

from megatron_dsv.testing.torchrun import torchrun

WORKER = Path(__file__).with_name("cp_worker.py")
ROOT = WORKER.parents[2]


def launch(ranks: int, environment: dict[str, str]) -> str:
    """What the ranks printed."""
    command = [*torchrun(ranks), str(WORKER)]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | environment, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=240, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


@pytest.mark.multigpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_every_split_of_two_gpus():
    assert "checked 6 plans on 2 cuda ranks" in launch(2, {})


@pytest.mark.slow
def test_the_same_program_without_a_gpu():
    assert "checked 6 plans on 2 cpu ranks" in launch(2, {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"})
