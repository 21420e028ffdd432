import dataclasses
import json

import pytest

from megatron_dsv.cli.main import main
from megatron_dsv.context_parallel import cluster
from megatron_dsv.context_parallel.calibration import Calibration
from megatron_dsv.context_parallel.cluster import Link
from megatron_dsv.context_parallel.cost_model import Handling, Surcharge
from megatron_dsv.context_parallel.kernel_rates import CalibratedKernels, Line

TOY = ["--tokens", "32", "64", "--density", "0.25", "0.75", "--q-block-size", "8", "--kv-block-size", "8",
       "--seconds", "0.001"]


@pytest.fixture
def model(tmp_path):
    path = tmp_path / "toy.yaml"
    path.write_text("num-layers: 2\nhidden-size: 64\nnum-attention-heads: 2\nffn-hidden-size: 128\n")
    return str(path)


def test_one_rank_writes_constants_that_plans_read(model, tmp_path, capsys):
    out = tmp_path / "calibration.json"
    assert main(["bench", "--calibrate", "--model", model, "--output", str(out), *TOY]) == 0
    text = capsys.readouterr().out
    made = Calibration.load(out)
    assert "64 tokens, 2 heads of 32, forward and backward" in text
    assert "one rank: links, overlap and communicators are those of h200" in text
    assert made.digest in text
    assert made.cluster == cluster.load("h200")
    made.check(q_block=8, kv_block=8, head_dim=32)
    assert [(row["tokens"], row["sparse"]) for row in made.measured["blocks"]] == [
        (32, False), (32, True), (32, True), (64, False), (64, True), (64, True)]


@pytest.mark.parametrize(("flags", "message"), [
    ([], "dsv bench measures with --calibrate; got nothing to do"),
    (["--calibrate", "--tokens", "64"], "tokens of a calibration must be two different sizes at least, got [64]"),
    (["--calibrate", "--density", "0.5", "0.5"], "densities of a calibration must be two different sizes at least"),
    (["--calibrate", "--payload-kib", "1"], "payloads of a calibration must be two different sizes at least"),
    (["--calibrate", "--tokens", "64", "100"], "must be multiples of 8, of 1 ranks x query groups of 8"),
    (["--calibrate", "--seconds", "0"], "--seconds must be above 0, got 0.0"),
    (["--calibrate", "--output", "none/c.json"], "--output must lie in a folder that exists"),
    (["--calibrate", "--cluster", "b200"], "no cluster 'b200'"),
    (["--calibrate", "--predictor-rank", "64"], "hidden must be at least 2 x heads x rank, 256, got 64"),
])
def test_misuse(flags, message, model, capsys):
    assert main(["bench", "--model", model, *TOY, *flags]) == 2
    assert message in capsys.readouterr().err


def test_too_few_gpus_are_one_line_at_once(model, monkeypatch, capsys):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    assert main(["bench", "--calibrate", "--model", model]) == 2
    assert "it needs 1 GPU for --tokens 32768 65536, the default, found 0; give short" in capsys.readouterr().err
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 1)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert main(["bench", "--calibrate", "--model", model]) == 2
    assert "it needs 2 GPUs, one for each rank of this host, found 1; start fewer ranks" in capsys.readouterr().err


def test_a_number_of_ranks_that_is_none(model, monkeypatch, capsys):
    monkeypatch.setenv("WORLD_SIZE", "abc")
    assert main(["bench", "--calibrate", "--model", model, *TOY]) == 2
    assert "WORLD_SIZE must be a whole number of at least 1, got 'abc'" in capsys.readouterr().err


def test_a_plan_takes_its_constants_from_a_calibration(tmp_path, capsys):
    path, out = tmp_path / "calibration.json", tmp_path / "plan.json"
    kernels = CalibratedKernels(Line(0, 1.5e-6), Line(0, 4e-6), Line(0, 2e-6), Line(0, 5e-6), Line(0, 1e-6))
    made = Calibration(dataclasses.replace(cluster.load("h200x2"), node_link=Link(50.0, 30.0)), kernels, Handling(),
                       64, 64, 128)

    def steps(calibration):
        calibration.save(path)
        assert main(["plan", "--model", "model/wan2.1-1.3b", "--gpus", "8", "--tokens", "65536", "--layout", "1x1x8x1",
                     "--calibration", str(path), "--json", str(out)]) == 0
        return json.loads(out.read_text())[0]["layouts"][0]["step_ms"]

    first = steps(made)
    slower = dataclasses.replace(kernels, sparse_backward=Line(0, 50e-6), dense_backward=Line(0, 40e-6))
    assert steps(dataclasses.replace(made, kernels=slower)) > 1.4 * first
    dear = Handling(heads=Surcharge(1e8), rows=Surcharge(1e8), keys=Surcharge(1e8))
    # 30 blocks of 8 micro-batches, 100 ms more each by the least of the splits.
    assert steps(dataclasses.replace(made, handling=dear)) == pytest.approx(first + 24_000, rel=0.02)
    assert main(["plan", "--model", "model/wan2.1-1.3b", "--gpus", "8", "--tokens", "65536", "--kv-block-size", "1",
                 "--calibration", str(path)]) == 2
    assert "the job has 64, 1 and 128; run `dsv bench --calibrate`" in capsys.readouterr().err
