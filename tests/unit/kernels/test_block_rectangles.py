"""Rectangular block lists, and what library kernels are given with them, in the Triton interpreter."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron_dsv.kernels.sparse_attention.head_chunks import RECTANGLE_ENTRIES, head_chunks


@pytest.mark.parametrize(("heads", "kv_heads"), [(24, 24), (24, 6), (7, 7), (5, 1)])
@pytest.mark.parametrize("row_entries", [0, 1, 2**21, 2**23, 2**30])
@pytest.mark.parametrize("most_heads", [None, 0, 10])
def test_chunks_of_heads_stay_within_their_bounds_and_hold_every_head_once(heads, kv_heads, row_entries, most_heads):
    ratio = heads // kv_heads
    chunks = list(head_chunks(heads, kv_heads, row_entries=row_entries, most_heads=most_heads))
    assert [head for part, _ in chunks for head in range(part.start, part.stop)] == list(range(heads))
    assert [head for _, part in chunks for head in range(part.start, part.stop)] == list(range(kv_heads))
    for part, kv_part in chunks:
        assert (part.start, part.stop) == (kv_part.start * ratio, kv_part.stop * ratio)
        size = part.stop - part.start
        assert size == ratio or (size * row_entries <= RECTANGLE_ENTRIES and size <= (most_heads or heads))
    if row_entries <= 1 and most_heads is None:
        assert len(chunks) == 1


@pytest.mark.parametrize("cases", ["rectangle_interpreter_cases.py", "library_interpreter_cases.py"])
def test_cases_in_the_interpreter(cases):
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    result = subprocess.run([sys.executable, "-m", "pytest", "-x", "-p", "no:cacheprovider",
                             str(Path(__file__).with_name(cases))],
                            env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    assert " passed" in result.stdout
