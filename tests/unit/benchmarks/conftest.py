"""Benchmarks are scripts beside the package; their folder joins the path as it does when one is run."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "benchmarks"))
