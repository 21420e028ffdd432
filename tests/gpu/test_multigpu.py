"""The entry program over NCCL on two GPUs: every layout computes what one GPU computes, from one checkpoint."""

import functools
import os
import re
import subprocess
from pathlib import Path

import pytest
import torch

from megatron_dsv.testing.latents import write_latents
from megatron_dsv.testing.torchrun import torchrun

ROOT = Path(__file__).resolve().parents[2]
LOSS = re.compile(r"iteration\s+(\d+)/.*?\| loss: ([-+.\dEe]+)")
FLAGS = [
    "--config", "model/debug", "--latent-valid-samples", "0", "--eval-iters", "0", "--micro-batch-size", "1",
    "--global-batch-size", "4", "--lr", "1e-3", "--lr-decay-style", "constant", "--log-interval", "1",
    "--num-workers", "0", "--bf16", "--num-layers", "4", "--hidden-size", "256", "--num-attention-heads", "4",
    "--ffn-hidden-size", "512", "--dsv-profile-interval", "2", "--dsv-dense-above", "1.0", "--ema-decay", "0.9"]
# Launches are short: compiling pointwise passes would take longer than they run.
ENVIRONMENT = os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "1", "TORCHDYNAMO_DISABLE": "1"}
SPARSE = "--dsv-sparse-stage sparse --dsv-keep-ratio 0.5 --dsv-freeze-selection"
TP2 = "--tensor-model-parallel-size 2"
CP2 = "--context-parallel-size 2"
LAYOUTS = {
    "dp2": "",
    "dp2-overlap": "--use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather",
    "tp2-sp": f"{TP2} --sequence-parallel",
    "pp2": "--pipeline-model-parallel-size 2",
    "cp2-recompute": f"{CP2} --dsv-cp-plan random --recompute-granularity full --recompute-method uniform "
                     "--recompute-num-layers 1",
    "cp2-overlap": f"{CP2} --dsv-cp-plan sequence --use-distributed-optimizer --overlap-grad-reduce "
                   "--overlap-param-gather",
}

needs_one = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
needs_two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")


def _launch(data: Path, flags: str, ranks: int, steps: int) -> str:
    """What a launch printed."""
    command = [*torchrun(ranks), str(ROOT / "pretrain_video_dit.py"), *FLAGS, "--latent-data", str(data),
               "--train-iters", str(steps), *flags.split()]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, text=True, stdout=subprocess.PIPE,
                          stderr=subprocess.STDOUT, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-4000:]
    return done.stdout


def _run(data: Path, flags: str, ranks: int, steps: int) -> list[float]:
    """Losses of a launch, at the printed precision."""
    found = LOSS.findall(_launch(data, flags, ranks, steps))
    return [float(loss) for _, loss in sorted((int(number), loss) for number, loss in found)]


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    return write_latents(tmp_path_factory.mktemp("latents"), [(5, 16, 24)] * 12)


class Start:
    """What one GPU wrote and went on to, launched when a test first asks for it."""

    def __init__(self, data: Path, folders: pytest.TempPathFactory) -> None:
        self.data, self.new_folder = data, folders
        self._folders: dict[str, Path] = {}

    def folder(self, optimizer: str) -> Path:
        """A checkpoint after two steps in which predictors learned, with the flag ``optimizer`` or with "" none."""
        if optimizer not in self._folders:
            folder = self._folders[optimizer] = self.new_folder.mktemp("start")
            _run(self.data, f"--dsv-sparse-stage predictor {optimizer} --save {folder} --save-interval 2", 1, 2)
        return self._folders[optimizer]

    @functools.cached_property
    def losses(self) -> list[float]:
        """Of two sparse steps on the checkpoint."""
        return _run(self.data, f"{SPARSE} --load {self.folder('')}", 1, 4)


@pytest.fixture(scope="module")
def start(data, tmp_path_factory):
    return Start(data, tmp_path_factory)


@pytest.mark.multigpu
@needs_two
@pytest.mark.parametrize("layout", LAYOUTS)
def test_two_gpus_equal_one(data, start, layout):
    flags = LAYOUTS[layout]
    folder = start.folder("--use-distributed-optimizer" if "distributed" in flags else "")
    losses = _run(data, f"{SPARSE} {flags} --load {folder}", 2, 4)
    assert losses == pytest.approx(start.losses, rel=2e-3)


@pytest.mark.multigpu
@needs_two
def test_a_context_rank_may_hold_nothing_but_padding(data):
    """Predictors learn, profiles are taken and layers go sparse, under another plan at every step."""
    flags = ("--dsv-sparse-stage auto --dsv-gate-recall 0.05 --dsv-profile-interval 1 --dsv-q-block-size 512 "
             "--dsv-kv-block-size 64 --no-dsv-keep-own-block")
    expected = _launch(data, flags, 1, 4)
    got = _launch(data, f"{flags} {CP2} --dsv-cp-plan random", 2, 4)
    # A selection in bf16 may turn on a tie, so that what it leads to is compared loosely.
    for name, tolerance in (("dsv/predictor_loss", 1e-2), ("dsv/recall", 2e-2), (r"\| loss", 2e-3),
                            ("dsv/sparse_layers", 0)):
        numbers = [[float(number) for number in re.findall(rf"{name}: ([-+.\dEe]+)", text)] for text in (got, expected)]
        assert numbers[0] == pytest.approx(numbers[1], rel=tolerance), name
        # There is no recall yet at the first step: no budget was measured before it.
        assert len(numbers[0]) == (3 if name == "dsv/recall" else 4)
    assert numbers[0][-1] == 4


@pytest.mark.gpu
@needs_one
def test_async_save_and_resume_on_one_gpu(data, tmp_path):
    flags = (f"--dsv-sparse-stage auto --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather "
             f"--async-save --save {tmp_path / 'run'} --load {tmp_path / 'run'} --save-interval 3")
    first = _run(data, flags, 1, 3)
    resumed = _run(data, flags, 1, 6)
    assert len(first) == len(resumed) == 3
    assert (tmp_path / "run" / "latest_checkpointed_iteration.txt").read_text() == "6"


@pytest.mark.gpu
@needs_one
def test_recomputation_attends_what_the_forward_attended(data, start):
    for recompute in ("--recompute-granularity selective",
                      "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"):
        losses = _run(data, f"{SPARSE} {recompute} --load {start.folder('')}", 1, 4)
        assert losses == pytest.approx(start.losses, rel=2e-3)


@pytest.mark.gpu
@needs_one
def test_auto_moves_layers_to_sparse(data):
    printed = _launch(data, "--dsv-sparse-stage auto --dsv-keep-ratio 0.5 --dsv-gate-recall 0.01 "
                            "--dsv-rollback-recall 0.005", 1, 8)
    layers = re.findall(r"layer +(\d+)  (\w+) +sparsity", printed)
    assert (layers[0][1], layers[-1][1]) == ("dense", "sparse")
    assert len(LOSS.findall(printed)) == 8
