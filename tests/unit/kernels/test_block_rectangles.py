"""Rectangular block lists, and what library kernels are given with them, in the Triton interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.parametrize("cases", ["rectangle_interpreter_cases.py", "library_interpreter_cases.py"])
def test_cases_in_the_interpreter(cases):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider",
                             str(Path(__file__).with_name(cases))],
                            env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
