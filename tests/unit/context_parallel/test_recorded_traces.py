"""A run's sparsity.jsonl: what is appended is what `dsv plan` reads, also after a kill."""

import json
import re
from pathlib import Path

import pytest

from megatron_dsv.cli.main import main
from megatron_dsv.context_parallel.plan import CPPlan
from megatron_dsv.context_parallel.sparsity_traces import Recorded, append, load
from megatron_dsv.context_parallel.statistics import BlockStats


def profile(share: float, layers: int = 2, heads: int = 4) -> list[BlockStats]:
    return [BlockStats(tuple(share + head / 100 for head in range(heads)), ((2, (0.5,) * heads), (4, (0.25,) * heads)))
            for _ in range(layers)]


def read(file: Path, tokens: int = 1024) -> Recorded:
    return load(str(file), heads=4, groups=4, tokens=tokens)


def test_the_last_profile_of_the_nearest_length_counts(tmp_path):
    """Of a run that was also profiled on images: they have six blocks and keep all."""
    file = tmp_path / "sparsity.jsonl"
    for step, share, tokens in ((50, 0.5, 65536), (100, 0.25, 65536), (150, 0.125, 16384), (200, 0.9, 24)):
        append(file, profile(share), step=step, tokens=tokens)
    assert read(file, 65536) == (profile(0.25), 65536)
    assert read(file, 262144) == (profile(0.25), 65536)
    assert read(file, 20000) == (profile(0.125), 16384)
    assert read(file, 1) == (profile(0.9), 24)
    file.write_text(file.read_text() + '{"layers": [{"density": [0.5, 0.5, 0.5, 0.5]}]}\n')
    assert read(file, 65536) == (profile(0.25), 65536), "a line that says no length is the farthest"


def test_the_last_profile_counts(tmp_path):
    file = tmp_path / "sparsity.jsonl"
    for step, share in ((50, 0.5), (100, 0.25)):
        append(file, profile(share), step=step, tokens=1024)
    assert read(file) == (profile(0.25), 1024)
    assert [json.loads(line)["step"] for line in file.read_text().splitlines()] == [50, 100]


def test_a_line_that_was_cut_short_spoils_no_other(tmp_path):
    file = tmp_path / "sparsity.jsonl"
    append(file, profile(0.5), step=50, tokens=1024)
    whole = file.read_text()
    file.write_text(whole + whole[:40])
    assert read(file).blocks == profile(0.5)
    append(file, profile(0.25), step=100, tokens=1024)
    assert read(file).blocks == profile(0.25)
    assert len(file.read_text().splitlines()) == 3


@pytest.mark.parametrize(("text", "message"), [
    ("", "must be JSON with a list `layers`, a profile a line"),
    ('{"layers": 3}\n', "must be JSON with a list `layers`, a profile a line"),
    ('{"layers": [{"density": [2.0]}]}\n', "layer 0: density must be shares in [0, 1], got [2.0]"),
    ('{"layers": [{"density": [0.5]}]}\n', "layer 0: density must have one entry per head, 4, and coverage one per "
     "key/value head, 4, got 1 and []"),
])
def test_what_is_no_trace_is_refused(tmp_path, text, message):
    file = tmp_path / "sparsity.jsonl"
    file.write_text(text)
    with pytest.raises(ValueError, match=re.escape(f"sparsity {file}: {message}")):
        read(file)


def test_a_job_is_planned_from_what_a_run_recorded(tmp_path, capsys):
    file, out = tmp_path / "sparsity.jsonl", tmp_path / "plan.json"
    append(file, profile(0.8, layers=30, heads=12), step=50, tokens=32768)
    append(file, [BlockStats((1.0 if layer % 3 else 0.05,) * 12) for layer in range(30)], step=100, tokens=32768)
    append(file, profile(0.8, layers=30, heads=12), step=150, tokens=24)
    assert main(["plan", "--model", "model/wan2.1-1.3b", "--gpus", "8", "--tokens", "65536", "--layout", "1x1x8x1",
                 "--sparsity", str(file), "--json", str(out)]) == 0
    plan = CPPlan.from_json(json.loads(out.read_text())[0]["plan"])
    assert [block.sparse for block in plan.blocks[0]] == [layer % 3 == 0 for layer in range(30)]
    assert f"--sparsity {file}: the nearest profile is of 32768 tokens; its shares are taken for 65536\n" in (
        capsys.readouterr().out)
