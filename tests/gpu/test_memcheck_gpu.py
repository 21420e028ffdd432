"""compute-sanitizer's memcheck over every own kernel, where the sanitizer is installed."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SWEEP = Path(__file__).with_name("memcheck_sweep.py")
PARTS = 6

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")]


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="needs compute-sanitizer of the CUDA toolkit")
@pytest.mark.parametrize("part", range(1, PARTS + 1))
def test_no_kernel_touches_memory_that_is_not_its_own(part):
    sweep = [sys.executable, str(SWEEP), "--part", f"{part}/{PARTS}"]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(SWEEP.parents[2]), *filter(None, [
        os.environ.get("PYTHONPATH")])])}
    for command in (sweep, ["compute-sanitizer", "--tool", "memcheck", "--error-exitcode", "9", *sweep]):
        done = subprocess.run(command, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                              timeout=280, check=False)
        assert done.returncode == 0, done.stdout[-4000:]
        assert re.search(r"^ran [1-9]\d* cases$", done.stdout, re.MULTILINE)
    assert "ERROR SUMMARY: 0 errors" in done.stdout
