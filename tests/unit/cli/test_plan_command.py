import json

import pytest

from megatron_dsv.cli.main import main
from megatron_dsv.context_parallel.plan import CPPlan

SMALL = ["plan", "--model", "model/wan2.1-1.3b", "--gpus", "8", "--tokens", "65536"]


def test_it_ranks_layouts_and_writes_plans_and_a_plot(tmp_path, capsys):
    out, picture = tmp_path / "plan.json", tmp_path / "plan.png"
    assert main([*SMALL, "--top", "2", "--blocks", "--json", str(out), "--plot", str(picture)]) == 0
    text = capsys.readouterr().out
    assert "wan2.1-1.3b, 65,536 tokens, global batch 8, 8 GPUs of h200" in text
    assert "times as fast as the best dense layout" in text
    assert text.count("TP ") == 3
    (data,) = json.loads(out.read_text())
    plan = CPPlan.from_json(data["plan"])
    assert len(plan.blocks[0]) == 30
    best, second = data["layouts"]
    assert plan.topo.cp == best["layout"]["cp"]
    assert best["step_ms"] <= second["step_ms"] < data["dense"]["step_ms"]
    assert picture.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_recorded_trace_decides_which_blocks_are_sparse(tmp_path, capsys):
    trace = tmp_path / "trace.json"
    trace.write_text(json.dumps({"layers": [
        {"density": [1.0 if layer % 2 else 0.05] * 12, "coverage": {"2": [0.4] * 12}} for layer in range(30)]}))
    out = tmp_path / "plan.json"
    assert main([*SMALL, "--layout", "1x1x8x1", "--sparsity", str(trace), "--json", str(out)]) == 0
    plan = CPPlan.from_json(json.loads(out.read_text())[0]["plan"])
    assert [block.sparse for block in plan.blocks[0]] == [layer % 2 == 0 for layer in range(30)]


def test_a_dense_job(capsys):
    assert main([*SMALL, "--dense", "--layout", "1x1x2x4"]) == 0
    assert "30 dense" in capsys.readouterr().out


@pytest.mark.parametrize(("flags", "message"), [
    (["--layout", "8x1"], "--layout must be four sizes, TPxPPxCPxDP such as 8x2x4x2, got '8x1'"),
    (["--layout", "8x1x1x1"], "--layout 8x1x1x1 cannot run: TP 8 must divide the 12 key/value heads"),
    (["--layout", "1x1x1x1"], "layout must take all 8 GPUs, got TP 1 x PP 1 x CP 1 x DP 1"),
    (["--gpus", "5000"], "--gpus must be between 1 and 4096, got 5000"),
    (["--gpus", "12"], "the number of GPUs must be at most one node, 8, or a multiple of it, got 12"),
    (["--top", "0"], "--top must be at least 1, got 0"),
    (["--cluster", "b200"], "no cluster 'b200'; clusters: "),
    (["--model", "model/none"], "no preset 'model/none'"),
    (["--model", "none.yaml"], "--model none.yaml: cannot be read: No such file or directory"),
    (["--sparsity", "none"], "sparsity must be one of dsv-2.7b, toy-blocks, or a recorded .json file, got 'none'"),
    (["--sparsity", "none.json"], "sparsity none.json: cannot be read"),
    (["--sparsity-cap", "1"], r"sparsity cap must be in [0, 1), got 1.0"),
    (["--head-spread", "-1"], "head spread must be in [0, 3], got -1.0"),
    (["--global-batch-size", "0"], "global batch must be at least 1, got 0"),
    (["--tokens", "0"], "tokens must be at least 1, got 0"),
    (["--kv-block-size", "0"], "kv block must be at least 1, got 0"),
    (["--json", "none/plan.json"], "--json must lie in a folder that exists"),
])
def test_misuse_is_one_line(flags, message, capsys):
    assert main([*SMALL, *flags]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(("content", "message"), [
    ("[]", "must be JSON with a list `layers`"),
    ("{", "must be JSON with a list `layers`"),
    ('{"layers": [{}]}', "layer 0: 'density'"),
    ('{"layers": [{"density": [2.0]}]}', r"layer 0: density must be shares in \[0, 1\], got \[2.0\]"),
    ('{"layers": [{"density": [0.5]}]}', "layer 0: density must have one entry per head, 12"),
    (json.dumps({"layers": [{"density": [0.5] * 12}]}), "must have the model's 30 layers, got 1"),
])
def test_a_bad_trace_is_one_line(tmp_path, content, message, capsys):
    import re

    trace = tmp_path / "trace.json"
    trace.write_text(content)
    assert main([*SMALL, "--sparsity", str(trace)]) == 2
    assert re.search(message, capsys.readouterr().err)


def test_what_cannot_fit_says_which_limit(capsys):
    assert main(["plan", "--model", "model/dsv-30b", "--cluster", "h800", "--gpus", "8", "--tokens", "524288"]) == 2
    error = capsys.readouterr().err
    assert "no layout of 8 GPUs fits; the nearest is TP 8" in error
    assert "GiB of 75.0 that a GPU can use" in error
