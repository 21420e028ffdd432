"""What a run leaves behind: TensorBoard events, a wandb run, lines on stdout, and the file that repeats it."""

import json
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from megatron_dsv.testing.pretrain import run_pretrain
from megatron_dsv.training.main import main

FLAGS = ("--num-layers 2 --global-batch-size 4 --eval-interval 3 --dsv-kv-block-size 4 --dsv-sparse-stage auto "
         "--dsv-gate-recall 0.05 --dsv-budget-mass 0.5")
STEPS = 6
PER_STEP = {"loss", "grad-norm", "learning-rate", "dsv/predictor_loss", "dsv/predictor_grad_norm",
            "dsv/predictor_skipped_layers", "dsv/tokens_per_second", "dsv/tflops_dense", "dsv/tflops_useful"}
PER_PROFILE = {f"dsv/layer_{layer:03d}/{name}" for layer in (1, 2)
               for name in ("sparse", "sparsity", "keep_ratio", "recall")}
BINS = {f"loss t[{low:.2f},{low + 0.25:.2f})" for low in (0.0, 0.25, 0.5, 0.75)}


def offline(argv: list[str]) -> None:
    """The program with wandb's own switch for a run without a network."""
    os.environ["WANDB_MODE"] = "offline"
    os.environ["WANDB_SILENT"] = "true"
    main(argv)


@pytest.fixture(scope="module")
def run(train, tmp_path_factory) -> tuple[Path, Any]:
    pytest.importorskip("wandb")
    folder = tmp_path_factory.mktemp("run")
    log = train(f"{FLAGS} --save {folder} --save-interval 6 --tensorboard-dir {folder}/tensorboard "
                f"--wandb-project video --wandb-exp-name small --wandb-save-dir {folder}/wandb", steps=STEPS,
                main=offline)
    return folder, log


def _tensorboard(folder: Path) -> dict[str, dict[int, float]]:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: {event.step: event.value for event in events.Scalars(tag)} for tag in events.Tags()["scalars"]}


def _wandb_records(path: Path) -> Iterator[bytes]:
    """Records of a .wandb file: a header of 7 bytes, then LevelDB's log, whose blocks of 32 KiB hold pieces of records
    with their checksum (4 bytes), length (2) and kind (1: whole, 2: first, 3: middle, 4: last)."""
    data = path.read_bytes()
    assert data[:4] == b":W&B"
    position, record = 7, b""
    while position + 7 <= len(data):
        left = 32768 - position % 32768
        if left < 7:
            position += left
            continue
        length, kind = struct.unpack("<HB", data[position + 4:position + 7])
        record = (b"" if kind in (1, 2) else record) + data[position + 7:position + 7 + length]
        position += 7 + length
        if kind in (1, 4):
            yield record


def _wandb(folder: Path) -> dict[str, dict[int, float]]:
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.rglob("*.wandb")
    series: dict[str, dict[int, float]] = {}
    for data in _wandb_records(path):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") != "history":
            continue
        items = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        for name, value in items.items():
            if not name.startswith("_"):
                series.setdefault(name, {})[record.history.step.num] = value
    return series


@pytest.mark.parametrize("reader", ["tensorboard", "wandb"])
def test_every_number_arrives(run, reader):
    folder, log = run
    series = _tensorboard(folder / "tensorboard") if reader == "tensorboard" else _wandb(folder / "wandb")
    missing = (PER_STEP | PER_PROFILE | BINS) - series.keys()
    assert not missing, sorted(series)
    for name in PER_STEP:
        assert sorted(series[name]) == list(range(1, STEPS + 1)), name
    for name in PER_PROFILE:
        assert sorted(series[name]) == [1, 3, 5], name
    assert list(series["loss"].values()) == pytest.approx(log.loss("loss"), rel=1e-6)
    assert list(series["grad-norm"].values()) == pytest.approx(log.grad_norms, rel=1e-6)
    assert [series["dsv/layer_002/sparse"][step] for step in (1, 3, 5)] == [0, 0, 1]
    assert 0 < series["dsv/layer_001/keep_ratio"][5] < 1
    assert series["dsv/tflops_useful"][6] < series["dsv/tflops_dense"][6]
    assert series["dsv/tflops_useful"][1] == series["dsv/tflops_dense"][1]
    # Four samples a step, each in one bin: the bins' mean is the loss where each has one.
    for step, loss in series["loss"].items():
        bins = [series[name][step] for name in BINS if step in series[name]]
        assert min(bins) - 1e-6 <= loss <= max(bins) + 1e-6
    assert not any("ppl" in name.lower() for name in series)


def test_stdout(run):
    _, log = run
    text = "\n".join(log.output)
    validations = re.findall(r"validation loss at iteration [36]( on validation set)? \| loss value: \d", text)
    assert len(validations) == 3, "two, and one at last"
    assert not re.search(r"\bppl\b", text, re.IGNORECASE)
    assert len(re.findall(r"^ profile at step [135]:$", text, re.MULTILINE)) == 3
    printed = [float(value) for value in re.findall(r"\| loss: (\S+) \|", text)]
    first, second, *others = log.loss("loss")
    per_step = [float(seconds) / 1e3 for seconds in re.findall(r"elapsed time per iteration \(ms\): (\S+)", text)]
    rates = [float(rate) for rate in re.findall(r"dsv/tokens_per_second: (\S+)", text)]
    # Four samples of 3 x 4 x 6 tokens a step; the second line's time is that of two steps.
    tokens = [seconds * rate for seconds, rate in zip(per_step, rates, strict=True)]
    assert tokens == pytest.approx([288] * STEPS, rel=0.3)
    # Megatron's second line is a mean that begins with the first step, which had a line of its own.
    assert printed == pytest.approx([first, (first + second) / 2, *others], rel=1e-6)


def test_the_saved_configuration_repeats_the_run(run):
    folder, log = run
    assert yaml.safe_load((folder / "config.yaml").read_text())["dsv-gate-recall"] == 0.05
    again = run_pretrain(["--config", str(folder / "config.yaml"), "--save", str(folder / "again"), "--tensorboard-dir",
                          str(folder / "again"), "--wandb-save-dir", str(folder / "again")], main=offline)
    assert again.losses == log.losses
    assert again.grad_norms == log.grad_norms
    assert again.validation == log.validation
