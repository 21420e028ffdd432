"""What a run may start from, and what it refuses: one line, exit status 2, and the checkpoint as it was."""

import hashlib
import os
import pickle
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch.distributed.checkpoint import FileSystemReader

from megatron_dsv.testing.latents import write_latents
from megatron_dsv.testing.pretrain import run_pretrain
from megatron_dsv.testing.programs import run_program
from megatron_dsv.testing.ranks import run_ranks

FLAGS = (
    "--config model/debug --latent-valid-samples 2 --eval-iters 0 --micro-batch-size 1 --global-batch-size 2 --lr 2e-3 "
    "--lr-decay-style constant --log-interval 1 --num-workers 0 --dsv-q-block-size 16 --dsv-kv-block-size 4 "
    "--dsv-predictor-query-stride 8 --dsv-dense-above 1.0 --num-layers 2 --hidden-size 48 --ffn-hidden-size 96"
).split()
PREDICTOR = "--dsv-sparse-stage predictor"
ENTRY = Path(__file__).parents[2] / "pretrain_video_dit.py"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_latents(tmp_path_factory.mktemp("latents"), [(1, 8, 12)] * 8)


@pytest.fixture(scope="module")
def argv(data: Path) -> Callable[[str, int], list[str]]:
    """argv(flags, steps) of the small model."""
    return lambda flags, steps: [*FLAGS, "--latent-data", str(data), "--train-iters", str(steps), *flags.split()]


@pytest.fixture(scope="module")
def saved(argv, tmp_path_factory) -> dict[str, Path]:
    """Checkpoints after two steps: dense, and with predictors."""
    folders = {}
    for stage in ("dense", "predictor"):
        folders[stage] = tmp_path_factory.mktemp(stage)
        run_pretrain(argv(f"--dsv-sparse-stage {stage} --save {folders[stage]} --save-interval 2", 2))
    return folders


@pytest.fixture(scope="module")
def dense(argv, saved):
    """Steps 3 to 5 of the dense run."""
    return run_pretrain(argv(f"--load {saved['dense']}", 5))


def _digest(folder: Path) -> dict[str, str]:
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*")) if path.is_file()}


@pytest.fixture
def refusal(argv, tmp_path) -> Callable[..., str]:
    """refusal(folder, flags, ranks): the one line with which the program refuses to load ``folder``."""

    def run(folder: Path, flags: str = "", ranks: int = 1) -> str:
        before = _digest(folder)
        # Saving to the same folder, as a resumed run does: its configuration must survive the refusal too.
        arguments = argv(f"--load {folder} --save {folder} --save-interval 1 {flags}", 4)
        outcomes = run_ranks(run_program, ranks, arguments, str(tmp_path))
        assert [code for code, _ in outcomes] == [2] * ranks
        lines = [line for _, text in outcomes for line in text.splitlines()]
        assert len(lines) == 1, lines
        assert _digest(folder) == before, "the checkpoint must stay as it was"
        return lines[0]

    return run


def _copy(source: Path, target: Path) -> tuple[Path, Path]:
    """A copy of a run folder, and its iteration folder."""
    shutil.copytree(source, target)
    return target, target / "iter_0000002"


def test_sparse_needs_trained_predictors(refusal, saved):
    line = refusal(saved["dense"], "--dsv-sparse-stage sparse", 2)
    assert "holds no predictors" in line
    assert "start with predictor or auto" in line


@pytest.mark.parametrize("stage", ["predictor", "auto"])
def test_dsv_starts_from_a_dense_checkpoint(argv, saved, dense, stage):
    before = _digest(saved["dense"])
    log = run_pretrain(argv(f"--dsv-sparse-stage {stage} --load {saved['dense']}", 5), keep_state=True)
    assert log.iterations == [3, 4, 5]
    assert log.losses == dense.losses
    assert log.grad_norms == dense.grad_norms
    assert "holds no predictors: they start from their initial state" in log.output[0]
    assert any(".predictor." in name for name in log.states[0])
    assert _digest(saved["dense"]) == before


def test_dense_starts_from_a_dsv_checkpoint(argv, saved, dense):
    log = run_pretrain(argv(f"--load {saved['predictor']}", 5), 2)
    assert log.loss("loss") == pytest.approx(dense.loss("loss"), rel=2e-6)
    assert "holds no predictors" not in log.output[0]


def test_a_job_that_resumes_itself_starts_from_scratch(argv, tmp_path):
    job = f"--load {tmp_path} --save {tmp_path} --save-interval 2"
    scratch, log = (run_pretrain(argv(flags, 2)) for flags in ("", job))
    assert f"--load {tmp_path} holds no checkpoint yet" in log.output[0]
    assert log.iterations == [1, 2]
    assert log.losses == scratch.losses


def test_only_a_part_of_the_predictors(saved, refusal, tmp_path):
    folder, weights = _copy(saved["predictor"], tmp_path / "run")
    table = pickle.loads((weights / ".metadata").read_bytes())
    key = next(key for key in table.state_dict_metadata if key.endswith("predictor.key_bias"))
    del table.state_dict_metadata[key]
    table.storage_data = {index: info for index, info in table.storage_data.items() if index.fqn != key}
    (weights / ".metadata").write_bytes(pickle.dumps(table))
    line = refusal(folder, PREDICTOR)
    assert "holds only a part of the predictors" in line
    assert "predictor.key_bias is missing" in line


OTHER_MODELS = {
    "--hidden-size 96": "trained with --hidden-size 48, this run has --hidden-size 96",
    "--num-layers 3": "trained with --num-layers 2, this run has --num-layers 3",
    "--ffn-hidden-size 192 --finetune": "trained with --ffn-hidden-size 96, this run has --ffn-hidden-size 192",
    "--dit-position sincos": "trained with --dit-position rope, this run has --dit-position sincos.*--finetune",
    "--norm-epsilon 1e-4": "trained with --norm-epsilon 1e-06, this run has --norm-epsilon 0.0001",
    "--no-dit-cross-attn-norm": "trained with --dit-cross-attn-norm, this run has --no-dit-cross-attn-norm",
}


@pytest.mark.parametrize("flags", OTHER_MODELS)
def test_another_models_checkpoint(saved, refusal, flags):
    line = refusal(saved["dense"], flags)
    assert "is a checkpoint of another model" in line
    assert re.search(OTHER_MODELS[flags], line), line


PARTS = {
    "--dit-qk-norm none": "it has decoder.layers.cross_attention.k_norm.weight, which this model has not",
    "--dit-mlp geglu": "mlp.linear_fc1.weight has shape",
}


@pytest.mark.parametrize("flags", PARTS)
def test_parts_of_another_model_are_seen_without_its_flags(saved, refusal, flags):
    assert PARTS[flags] in refusal(saved["dense"], f"{flags} --finetune")


def test_a_model_with_more_parts_than_the_checkpoint(argv, refusal, tmp_path):
    folder = tmp_path / "bare"
    run_pretrain(argv(f"--no-dit-cross-attn-norm --save {folder} --save-interval 1", 1))
    line = refusal(folder, "--finetune")
    assert "is a checkpoint of another model: it has no decoder.layers.cross_attention_norm" in line


def test_another_predictor_rank(saved, refusal):
    line = refusal(saved["predictor"], f"{PREDICTOR} --dsv-predictor-rank 8")
    assert "predictor.query_weight has shape (2, 4, 16, 48) there and (2, 4, 8, 48) here" in line


def test_the_other_kind_of_optimizer(saved, refusal):
    line = refusal(saved["dense"], "--use-distributed-optimizer")
    assert "was saved without --use-distributed-optimizer, this run is with --use-distributed-optimizer" in line
    assert "--no-load-optim" in line


@pytest.mark.parametrize("flags", ["--bf16", "--optimizer sgd"])
def test_another_kind_of_optimizer_takes_the_weights_alone(argv, saved, dense, refusal, flags):
    assert f"this run is with {flags}: the optimizer's state does not fit" in refusal(saved["dense"], flags)
    log = run_pretrain(argv(f"--load {saved['dense']} {flags} --no-load-optim", 3))
    assert log.iterations == [3]
    # bf16 keeps 8 bits of a weight and of an activation; the loss is a mean over 768 cells of each sample.
    assert log.loss("loss") == pytest.approx(dense.loss("loss")[:1], rel=2**-8 if "bf16" in flags else 1e-6)


def _truncate(weights: Path) -> None:
    path = next(weights.glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:-1000])


def _remove(pattern: str) -> Callable[[Path], None]:
    return lambda weights: next(weights.glob(pattern)).unlink()


def _corrupt(name: str, text: bytes) -> Callable[[Path], None]:
    return lambda weights: (weights / name).write_bytes(text) and None


def _scramble(weights: Path) -> None:
    """The right length, the wrong bytes: nothing but the common state is read before the model's tensors are."""
    path = next(weights.glob("*.distcp"))
    path.write_bytes(b"x" * path.stat().st_size)


def _flip(weights: Path) -> None:
    """One bit in the middle of the largest entry, some weight or moment."""
    stored = FileSystemReader(weights).read_metadata().storage_data
    info = max(stored.values(), key=lambda info: info.length)
    path = weights / info.relative_path
    data = bytearray(path.read_bytes())
    data[info.offset + info.length // 2] ^= 1
    path.write_bytes(bytes(data))


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "truncated": (_truncate, "is truncated: __0_0.distcp is"),
    "scrambled": (_scramble, "its common state cannot be read"),
    "one-bit": (_flip, "does not have the checksum that it was written with"),
    "no-data": (_remove("*.distcp"), "is truncated: __0_0.distcp is missing"),
    "corrupt-metadata": (_corrupt(".metadata", b"no pickle"), "its .metadata cannot be read"),
    "no-metadata": (_remove(".metadata"), "its .metadata cannot be read"),
    "no-metadata-json": (_remove("metadata.json"), "metadata.json"),
    "no-iteration": (shutil.rmtree, "does not exist"),
    "tracker": (_corrupt("../latest_checkpointed_iteration.txt", b"garbage"), "latest_checkpointed_iteration.txt"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_checkpoint(saved, refusal, tmp_path, damage):
    folder, weights = _copy(saved["predictor"], tmp_path / "run")
    act, message = DAMAGE[damage]
    act(weights)
    line = refusal(folder, PREDICTOR, 2 if damage in ("truncated", "one-bit") else 1)
    assert message in line


def test_an_iteration_that_was_never_saved(saved, refusal):
    assert "--ckpt-step" in refusal(saved["dense"], "--ckpt-step 7")


def test_the_program_itself(argv, saved, tmp_path):
    """The same through a process of its own, where a traceback or a message of Megatron's would show."""
    folder, weights = _copy(saved["dense"], tmp_path / "run")
    _truncate(weights)
    launcher = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in launcher}
    environment["PYTHONWARNINGS"] = "ignore"
    done = subprocess.run([sys.executable, str(ENTRY), *argv(f"--load {folder}", 4)], env=environment, text=True,
                          capture_output=True, timeout=120, check=False)
    assert done.returncode == 2, done.stderr[-2000:]
    assert "Traceback" not in done.stderr
    assert [line for line in done.stderr.splitlines() if "error" in line.lower()] == done.stderr.splitlines()[-1:]
    assert f"pretrain_video_dit.py: error: --load {weights} is truncated" in done.stderr


def test_a_finished_run_can_be_launched_again_and_go_on_with_smaller_batches(argv, saved):
    assert run_pretrain(argv(f"--load {saved['dense']}", 2)).iterations == []
    assert run_pretrain(argv(f"--load {saved['dense']} --global-batch-size 1", 4)).iterations == [3, 4]
