"""`dsv sample` from a saved run: a readable video of the right size, dense and sparse; a mistake is one line."""

import contextlib
import io
import multiprocessing
import shutil
from pathlib import Path
from typing import Any

import av
import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader

from megatron_dsv.cli.main import main as dsv
from megatron_dsv.testing.latents import write_latents

FLAGS = ("--num-layers 2 --global-batch-size 2 --eval-iters 0 --dsv-kv-block-size 4 --dsv-sparse-stage auto "
         "--dsv-gate-recall 0.05 --dsv-gate-passes 1 --dsv-budget-mass 0.5 --ema-decay 0.9 --use-distributed-optimizer")
STEPS = "--steps 3 --guidance 2"


@pytest.fixture(scope="module")
def saved(train, tmp_path_factory) -> Path:
    """A run on two tensor-parallel ranks: sampling takes one."""
    folder = tmp_path_factory.mktemp("run")
    train(f"{FLAGS} --tensor-model-parallel-size 2 --sequence-parallel --lr 2e-2 --save {folder} --save-interval 4", 2,
          steps=4)
    return folder


def _call(argv: list[str], sink: Any) -> None:
    torch.set_num_threads(1)
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        code = dsv(argv)
    sink.send((code, out.getvalue(), err.getvalue()))


def _dsv(argv: list[str]) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of `dsv` in a process of its own: sampling sets up Megatron's globals."""
    context = multiprocessing.get_context("fork")
    reader, writer = context.Pipe(duplex=False)
    process = context.Process(target=_call, args=(argv, writer))
    process.start()
    writer.close()
    try:
        return reader.recv()
    except EOFError:
        pytest.fail("the process died")
    finally:
        process.join(60)


def _sample(saved: Path, output: Path, flags: str = "", prompt: str = "moving texture number 3") -> np.ndarray:
    """The decoded frames [T, H, W, 3] of a sample."""
    code, out, err = _dsv(["sample", str(saved), "--prompt", prompt, "--output", str(output), *STEPS.split(),
                           *flags.split()])
    assert code == 0, err
    assert out.splitlines()[-1] == f"wrote {output}"
    assert "backend=" not in out + err
    with av.open(str(output)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


@pytest.fixture(scope="module")
def default(saved, tmp_path_factory) -> tuple[Path, np.ndarray]:
    path = tmp_path_factory.mktemp("samples") / "default.mp4"
    return path, _sample(saved, path)


def test_the_default_is_the_size_of_the_data(default):
    """Latents [16, 3, 8, 12] are 9 frames of 64 x 96 through the Haar codec."""
    _, frames = default
    assert frames.shape == (9, 64, 96, 3)
    assert frames.std() > 1


def test_the_same_seed_gives_the_same_bytes(saved, default, tmp_path):
    path, frames = default
    again = _sample(saved, tmp_path / "again.mp4")
    assert (again == frames).all()
    assert (tmp_path / "again.mp4").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("flags", ["--seed 1", "--weights raw", "--attention sparse", "--guidance 1", "--shift 4",
                                   "--negative-prompt still"])
def test_each_knob_changes_the_video(saved, default, tmp_path, flags):
    frames = _sample(saved, tmp_path / "other.mp4", flags)
    assert frames.shape == default[1].shape
    assert (frames != default[1]).any()


def test_the_prompt_changes_the_video(saved, default, tmp_path):
    assert (_sample(saved, tmp_path / "other.mp4", prompt="something else") != default[1]).any()


def test_ema_is_the_default_where_there_is_one(saved, default, tmp_path):
    assert (_sample(saved, tmp_path / "ema.mp4", "--weights ema") == default[1]).all()


def test_sparse_keeps_to_the_budget_that_is_asked_for(saved, default, tmp_path):
    sparse, tighter, whole = (_sample(saved, tmp_path / f"{name}.mp4", f"--attention sparse {flags}")
                              for name, flags in (("measured", ""), ("tight", "--keep-ratio 0.1"),
                                                  ("whole", "--keep-ratio 1.0")))
    assert (sparse != tighter).any()
    # Everything kept is dense attention, up to rounding that the encoder may show as a grey level.
    assert np.abs(whole.astype(int) - default[1]).max() <= 2


def test_another_size(saved, tmp_path):
    """Sizes that are no multiple of the cube; an iteration's own folder is as good as the run's."""
    frames = _sample(saved / "iter_0000004", tmp_path / "other.mp4", "--frames 5 --height 48 --width 32 --fps 8")
    assert frames.shape == (5, 48, 32, 3)


def _without_config(run: Path) -> None:
    (run / "config.yaml").unlink()


def _truncated(run: Path) -> None:
    path = next((run / "iter_0000004").glob("*.distcp"))
    path.write_bytes(path.read_bytes()[:-1000])


def _other_bytes(run: Path) -> None:
    """The right length, and one bit of a weight another."""
    weights = run / "iter_0000004"
    stored = FileSystemReader(weights).read_metadata().storage_data
    info = next(info for index, info in stored.items() if index.fqn.endswith("self_attention.linear_proj.weight"))
    path = weights / info.relative_path
    data = bytearray(path.read_bytes())
    data[info.offset + info.length // 2] ^= 1
    path.write_bytes(bytes(data))


MISTAKES: dict[str, tuple[str, Any, str]] = {
    "no-folder": ("", shutil.rmtree, "CHECKPOINT must be a folder that a run saved to"),
    "no-config": ("", _without_config, "config.yaml is missing"),
    "truncated": ("", _truncated, "is truncated"),
    "damaged": ("", _other_bytes, "does not have the checksum that it was written with"),
    "sizes": ("--frames 5", None, "--frames, --height and --width must be given together"),
    "frames": ("--frames 4 --height 48 --width 32", None, "frames"),
    "height": ("--frames 5 --height 50 --width 32", None, "height"),
    "keep-ratio": ("--keep-ratio 0.5", None, "--keep-ratio needs --attention sparse"),
    "keep-ratio-range": ("--attention sparse --keep-ratio 1.5", None, "keep-ratio must be"),
    "data": ("--latent-data /nowhere", None, "--latent-data must be a folder written by `dsv prepare`"),
    "steps": ("--steps 0", None, "--steps must be an integer of at least 1"),
    "shift": ("--shift 0", None, "--shift must be a number above 0"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_one_line(saved, tmp_path, mistake):
    flags, damage, message = MISTAKES[mistake]
    folder = saved
    if damage is not None:
        folder = tmp_path / "run"
        shutil.copytree(saved, folder)
        damage(folder)
    output = tmp_path / "none.mp4"
    code, _, err = _dsv(["sample", str(folder), "--prompt", "x", "--output", str(output), *flags.split()])
    assert code == 2
    assert len(err.splitlines()) == 1, err
    assert err.startswith("dsv sample: error: ")
    assert message in err
    assert not output.exists()


@pytest.mark.parametrize(("width", "message"), [
    ({"text_dim": 32}, "--dit-text-dim 64, got {folder} with 32"),
    ({"channels": 4}, "--dit-latent-channels 16, got {folder} with 4")])
def test_another_data_set_must_fit_the_model(saved, tmp_path, width, message):
    folder = write_latents(tmp_path / "data", [(3, 8, 12)], **width)
    code, _, err = _dsv(["sample", str(saved), "--prompt", "x", "--output", str(tmp_path / "none.mp4"),
                         "--latent-data", str(folder)])
    assert (code, len(err.splitlines())) == (2, 1), err
    assert "--latent-data must be a data set for the run's " + message.format(folder=folder) in err


def test_sparse_needs_predictors_and_ema_needs_an_average(train, tmp_path):
    folder = tmp_path / "dense"
    train(f"--num-layers 2 --global-batch-size 2 --eval-iters 0 --save {folder} --save-interval 1", steps=1)
    common = ["sample", str(folder), "--prompt", "x", "--output", str(tmp_path / "x.mp4")]
    code, _, err = _dsv([*common, "--attention", "sparse"])
    assert (code, len(err.splitlines())) == (2, 1), err
    assert "--attention sparse needs a checkpoint with predictors" in err
    code, _, err = _dsv([*common, "--weights", "ema"])
    assert (code, len(err.splitlines())) == (2, 1), err
    assert "--weights ema needs a run with --ema-decay" in err
