"""`dsv prepare` after a kill or a crash, and on videos that changed, went, or cannot be read for a moment."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from prepare_runs import flags, report, tree

from megatron_dsv.cli.main import main
from megatron_dsv.data import dataset_folder, video_preparation
from megatron_dsv.data.latent_dataset import LatentDataset
from megatron_dsv.data.video_io import probe


def test_killed_at_any_moment_it_goes_on_to_the_same_data_set(clip_folder: Path, tmp_path: Path) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    assert main(flags(clip_folder, straight)) == 0
    command = [sys.executable, "-m", "megatron_dsv.cli.main", *flags(clip_folder, resumed, "--workers", "1")]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while not len(list(resumed.glob("samples/*/*.safetensors"))) > 3:
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(0.005)
    children = [int(child) for child in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    killed_with = len(list(resumed.glob("samples/*/*.safetensors")))
    assert killed_with < len(LatentDataset(straight))
    with pytest.raises(ValueError, match="--latent-data must be a finished data set, got "):
        LatentDataset(resumed)
    while any(Path(f"/proc/{child}").exists() and "Z" not in Path(f"/proc/{child}/stat").read_text().split()[2]
              for child in children):
        assert time.monotonic() < deadline, "a worker outlived its parent"
        time.sleep(0.05)
    assert main(flags(clip_folder, resumed)) == 0
    assert tree(resumed) == tree(straight)


@pytest.mark.parametrize("crash_at", [1, 2, 3, 5, 8, 10, 11, 12])
def test_a_crash_at_any_write_leaves_nothing_half_done(small_videos: Path, tmp_path: Path, crash_at: int,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    assert main(flags(small_videos, straight)) == 0
    replaced = 0

    class Crash(BaseException):
        pass

    def replace(source: Any, target: Any) -> None:
        nonlocal replaced
        replaced += 1
        if replaced == crash_at:
            raise Crash
        os.rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(dataset_folder.os, "replace", replace)
        with pytest.raises(Crash):
            main(flags(small_videos, resumed))
    if (resumed / "journal.jsonl").exists():
        with (resumed / "journal.jsonl").open("ab") as journal:
            journal.write(b'{"source": "clip_')
    for path in resumed.glob("samples/*/[!.]*"):
        dataset_folder.read_sample(path)
    assert main(flags(small_videos, resumed)) == 0
    assert tree(resumed) == tree(straight)
    assert main(["prepare", "--verify", str(resumed)]) == 0


def test_finished_videos_are_not_touched_again_and_changed_ones_are(
        small_videos: Path, tmp_path: Path, make_video: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "set"
    assert main(flags(small_videos, out)) == 0
    before = tree(out)
    probed: list[str] = []
    monkeypatch.setattr(video_preparation.video_io, "probe", lambda path: (probed.append(path.name), probe(path))[1])
    assert main(flags(small_videos, out)) == 0
    assert (probed, tree(out), report(out)["reused_videos"]) == ([], before, 3)

    make_video(small_videos / "clip_1.mp4", 12, height=32, width=48, seed=99)
    (small_videos / "clip_2.txt").write_text("a new caption")
    (small_videos / "clip_0.mp4").unlink()
    make_video(small_videos / "clip_3.mp4", 6, height=32, width=48, seed=3)
    assert main(flags(small_videos, out, "--prune")) == 0
    assert probed == ["clip_1.mp4", "clip_2.mp4", "clip_3.mp4"]
    assert report(out)["removed_samples"] == 6
    fresh = tmp_path / "fresh"
    assert main(flags(small_videos, fresh)) == 0
    assert tree(out) == tree(fresh)

    os.utime(small_videos / "clip_1.mp4", (1, 1))
    (out / LatentDataset(out).facts(0)["file"]).unlink()
    assert main(flags(small_videos, out)) == 0
    assert tree(out) == tree(fresh)


def test_samples_of_videos_that_cannot_be_seen_are_kept(small_videos: Path, tmp_path: Path,
                                                        make_video: Callable[..., Path],
                                                        capsys: pytest.CaptureFixture[str]) -> None:
    out, away = tmp_path / "set", tmp_path / "away"
    disk = small_videos / "disk"
    disk.mkdir()
    make_video(disk / "far.mp4", 12, height=32, width=48, seed=9)
    for number in range(3):
        (small_videos / f"clip_{number}.txt").write_text(f"caption {number}")
    assert main(flags(small_videos, out)) == 0
    before = tree(out)
    content = (small_videos / "clip_0.mp4").read_bytes()
    # A folder that is not mounted, a video and a caption that cannot be read.
    disk.rename(away)
    (small_videos / "clip_0.mp4").write_bytes(b"?" * len(content))
    (small_videos / "clip_1.txt").write_bytes(b"\xff")
    for _ in range(2):
        capsys.readouterr()
        assert main(flags(small_videos, out)) == 0
        assert tree(out) == before
        found = report(out)
        assert found["kept"] == [{"source": "clip_0.mp4", "reason": "unreadable", "samples": 2},
                                 {"source": "clip_1.mp4", "reason": "unreadable_caption", "samples": 2},
                                 {"source": "disk/far.mp4", "reason": "missing", "samples": 2}]
        assert {drop["source"]: drop["reason"] for drop in found["dropped"]} == {
            "clip_0.mp4": "unreadable", "clip_1.mp4": "unreadable_caption"}
        assert found["samples"] == 8
        assert "kept 6 samples of videos that are missing or cannot be read (--prune removes them): 3\n" \
            "  clip_0.mp4: unreadable, 2 samples\n" in capsys.readouterr().out
    # What is lost cannot be kept; what comes back is whole again.
    lost = next(line for line in map(LatentDataset(out).facts, range(8)) if line["source"] == "disk/far.mp4")
    (out / lost["file"]).unlink()
    assert main(flags(small_videos, out)) == 0
    assert report(out)["kept"][2]["samples"] == 1
    assert main(["prepare", "--verify", str(out)]) == 0
    away.rename(disk)
    (small_videos / "clip_0.mp4").write_bytes(content)
    (small_videos / "clip_1.txt").write_text("caption 1")
    assert main(flags(small_videos, out)) == 0
    assert tree(out) == before
    assert report(out)["kept"] == []

    # A video that was moved is in the data set once; pruning leaves what can be seen.
    (disk / "far.mp4").rename(small_videos / "near.mp4")
    (small_videos / "clip_2.mp4").rename(tmp_path / "clip_2.mp4")
    assert main(flags(small_videos, out)) == 0
    assert [video["source"] for video in report(out)["kept"]] == ["clip_2.mp4"]
    assert report(out)["removed_samples"] == 2
    assert main(flags(small_videos, out, "--prune")) == 0
    fresh = tmp_path / "fresh"
    assert main(flags(small_videos, fresh)) == 0
    assert tree(out) == tree(fresh)
    assert (report(out)["removed_samples"], report(out)["kept"]) == (2, [])


@pytest.mark.parametrize("damage", [Path.unlink, lambda path: path.write_bytes(path.read_bytes()[:-8] + b"damaged!")])
def test_a_lost_or_damaged_embedding_of_the_empty_caption_is_written_again(
        small_videos: Path, tmp_path: Path, damage: Callable[[Path], object]) -> None:
    out = tmp_path / "set"
    assert main(flags(small_videos, out)) == 0
    before = tree(out)
    damage(out / "null_text.safetensors")
    assert main(["prepare", "--verify", str(out)]) == 1
    assert main(flags(small_videos, out)) == 0
    assert tree(out) == before
    assert report(out)["reused_videos"] == 3
    assert main(["prepare", "--verify", str(out)]) == 0


@pytest.mark.parametrize("lost", [None, "journal.jsonl", "index.jsonl"])
def test_a_damaged_sample_is_encoded_again_and_gets_no_new_checksum(small_videos: Path, tmp_path: Path,
                                                                    lost: str | None) -> None:
    out = tmp_path / "set"
    assert main(flags(small_videos, out)) == 0
    before = tree(out)
    damaged = out / LatentDataset(out).facts(0)["file"]
    content = bytearray(damaged.read_bytes())
    content[-1] ^= 1
    damaged.write_bytes(content)
    assert main(["prepare", "--verify", str(out)]) == 1
    # Whatever makes the next run look at the videos again.
    for path in small_videos.iterdir():
        os.utime(path, (1, 1))
    if lost is not None:
        (out / lost).unlink()
    assert main(flags(small_videos, out)) == 0
    assert tree(out) == before
    assert main(["prepare", "--verify", str(out)]) == 0
