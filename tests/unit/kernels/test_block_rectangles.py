"""Rectangular block lists, in the Triton interpreter."""

import os
import subprocess
import sys
from pathlib import Path


def test_rectangles_in_the_interpreter():
    cases = Path(__file__).with_name("rectangle_interpreter_cases.py")
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider", str(cases)],
                            env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
