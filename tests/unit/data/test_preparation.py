"""`dsv prepare` on real clips: content, drops, and every refusal."""

from __future__ import annotations

import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from prepare_runs import SHAPE, flags, report, tree
from safetensors import safe_open

from megatron_dsv.cli.main import main
from megatron_dsv.data import video_preparation
from megatron_dsv.data.codecs import HaarCodec
from megatron_dsv.data.latent_dataset import LatentDataset
from megatron_dsv.data.text import HashTextEncoder
from megatron_dsv.data.video_io import FrameReader, probe


def test_a_codec_is_described_once(small_videos: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A description reads the whole folder of a VAE."""
    assert main(flags(small_videos, tmp_path / "set")) == 0
    describe, described = HaarCodec.describe, []
    monkeypatch.setattr(HaarCodec, "describe", lambda self: described.append(self) or describe(self))
    # Everything is there, so that no worker is started.
    assert main(flags(small_videos, tmp_path / "set", "--workers", "2")) == 0
    assert len(described) == 1


def test_samples_are_the_codec_on_the_right_frames(clip_folder: Path, tmp_path: Path) -> None:
    (clip_folder / "bikes.txt").write_text("two people ride bikes")
    out = tmp_path / "set"
    assert main(flags(clip_folder, out, "--clips-per-video", "2", "--fps", "12.5", "--latent-dtype", "fp32")) == 0
    data = LatentDataset(out)
    assert len(data) == 6
    assert data.buckets == {(16, 2, 4, 6): [0, 1, 2, 3, 4, 5]}
    record = next(number for number in range(6) if data.facts(number)["source"] == "bikes.mp4")
    facts = data.facts(record)
    path = clip_folder / "bikes.mp4"
    # 12.5 frames a second of a 25 frames a second video: every second frame.
    frames = [2 * (facts["start_frame"] + step) for step in range(5)]
    with FrameReader(path, probe(path), 32, 48) as reader:
        expected = HaarCodec().encode(reader.read(frames))
    item = data[record]
    assert torch.equal(item["latents"], expected)
    text = HashTextEncoder(dim=16).encode(["two people ride bikes"])[0]
    assert item["text_length"] == 5
    assert torch.equal(item["text"][:5], text)
    assert not item["text"][5:].any()
    assert torch.equal(data.null_text[:1], HashTextEncoder(dim=16).encode([""])[0])
    with safe_open(out / facts["file"], "pt") as stream:
        assert json.loads(stream.metadata()["sample"])["caption"] == "two people ride bikes"
    assert report(out)["captions"] == {"name": 2, "txt": 1}


def test_everything_dropped_is_accounted_for(small_videos: Path, tmp_path: Path, make_video: Callable[..., Path],
                                             capsys: pytest.CaptureFixture[str],
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    shutil.copy(small_videos / "clip_0.mp4", small_videos / "copy.mp4")
    make_video(small_videos / "short.mp4", 4)
    (small_videos / "broken.mp4").write_bytes(b"no video at all")
    shutil.copy(small_videos / "clip_1.mp4", small_videos / "mute.mp4")
    with (small_videos / "mute.mp4").open("ab") as stream:
        stream.write(b"\0" * 8)
    (small_videos / "mute.txt").write_text(" \n")
    (small_videos / "notes.md").write_text("x")
    (small_videos / "link.mp4").symlink_to(tmp_path / "nowhere.mp4")
    encode = HaarCodec.encode

    def poisoned(self: HaarCodec, video: torch.Tensor) -> torch.Tensor:
        latents = encode(self, video)
        return latents * float("nan") if poisoned_path == "clip_2.mp4" else latents

    poisoned_path = ""

    def noted(path: Path) -> Any:
        nonlocal poisoned_path
        poisoned_path = path.name
        return probe(path)

    monkeypatch.setattr(HaarCodec, "encode", poisoned)
    monkeypatch.setattr(video_preparation.video_io, "probe", noted)
    table = tmp_path / "captions.csv"
    table.write_text("file,caption\nclip_0.mp4,one two\nnowhere.mp4,x\n")
    out = tmp_path / "set"
    arguments = flags(small_videos, out, "--captions", str(table), "--text-max-tokens", "2")
    assert main([*arguments, "--strict"]) == 1
    printed = capsys.readouterr()
    found = report(out)
    assert {drop["source"]: drop["reason"] for drop in found["dropped"]} == {
        "copy.mp4": "duplicate", "short.mp4": "too_short", "broken.mp4": "unreadable", "mute.mp4": "empty_caption",
        "clip_2.mp4": "non_finite_latents", "link.mp4": "unreadable"}
    assert found["drop_counts"] == {"unreadable": 2, "non_finite_latents": 2, "duplicate": 1, "empty_caption": 1,
                                    "too_short": 1}
    assert found["ignored_files"] == ["notes.md"]
    assert found["unused_caption_rows"] == ["nowhere.mp4"]
    assert found["captions"] == {"csv": 1, "name": 5}
    assert found["notes"] == {"caption_truncated": 3}
    assert found["samples"] == 4
    assert "short.mp4: too_short, 4 frames, needs 5" in printed.out
    assert "copy.mp4: duplicate, same content as clip_0.mp4" in printed.out
    assert printed.err.splitlines()[-1] == "dsv prepare: error: --strict, and 7 videos or clips were dropped"
    monkeypatch.setattr(HaarCodec, "encode", encode)
    assert main(arguments) == 0
    assert report(out)["samples"] == 6


def test_buckets_take_videos_and_stills_apart(small_videos: Path, tmp_path: Path, clip_folder: Path) -> None:
    import av

    frame = av.VideoFrame.from_ndarray((torch.rand(64, 48, 3) * 255).to(torch.uint8).numpy(), format="rgb24")
    frame.save(small_videos / "still.png")
    shutil.copy(clip_folder / "bikes.mp4", small_videos)
    out = tmp_path / "set"
    assert main(["prepare", "--input", str(small_videos), "--output", str(out), "--bucket", "64x48x1", "32x48x9",
                 "--bucket", "32x80x5", "--clips-per-video", "1"]) == 0
    data = LatentDataset(out)
    by_shape = {shape: [data.facts(record)["source"] for record in records] for shape, records in data.buckets.items()}
    assert by_shape == {(16, 1, 8, 6): ["still.png"], (16, 2, 4, 10): ["bikes.mp4"],
                        (16, 3, 4, 6): ["clip_0.mp4", "clip_1.mp4", "clip_2.mp4"]}
    assert not data[data.buckets[16, 1, 8, 6][0]]["latents"].isnan().any()


def test_linked_folders_are_entered_once_and_the_output_is_not_input(small_videos: Path, tmp_path: Path) -> None:
    root = tmp_path / "root"
    (root / "sub" / ".hidden").mkdir(parents=True)
    (root / "linked").symlink_to(small_videos)
    (root / "sub" / "loop").symlink_to(root)
    shutil.copy(small_videos / "clip_0.mp4", root / "sub" / ".hidden")
    out = root / "set"
    for _ in range(2):
        assert main(flags(root, out)) == 0
        assert {LatentDataset(out).facts(record)["source"] for record in range(6)} == {
            f"linked/clip_{number}.mp4" for number in range(3)}
        assert report(out)["ignored_files"] == []


def test_verify_finds_every_kind_of_damage(small_videos: Path, tmp_path: Path,
                                           capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "set"
    assert main(flags(small_videos, out)) == 0
    assert main(["prepare", "--verify", str(out)]) == 0
    data = LatentDataset(out)
    flipped, gone = (out / data.facts(record)["file"] for record in (0, 1))
    content = bytearray(flipped.read_bytes())
    content[-1] ^= 1
    flipped.write_bytes(content)
    gone.unlink()
    (flipped.parent / "stray.safetensors").write_bytes(b"x")
    (out / "null_text.safetensors").write_bytes(b"x")
    capsys.readouterr()
    assert main(["prepare", "--verify", str(out)]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert [line.split(": ")[1] for line in lines] == [
        "content differs from its checksum", "content differs from its checksum", "No such file or directory",
        "not in the index"]


@pytest.mark.parametrize(("changed", "flag"), [
    (["--fps", "5"], "--fps"), (["--stride", "2"], "--stride"), (["--latent-dtype", "fp32"], "--latent-dtype"),
    (["--codec-channels", "8"], "--codec"), (["--text-max-tokens", "9"], "--text-encoder"),
    (["--clips-per-video", "1"], "--clips-per-video"),
    (["--frames", "9"], "--height, --width, --frames or --bucket"),
])
def test_other_settings_need_another_output(small_videos: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str],
                                            changed: list[str], flag: str) -> None:
    out = tmp_path / "set"
    assert main(flags(small_videos, out)) == 0
    before = tree(out)
    capsys.readouterr()
    assert main([*flags(small_videos, out), *changed]) == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert message.startswith(f"dsv prepare: error: {flag} must be as it was when {out} was prepared")
    assert message.endswith("for other settings use another --output")
    assert tree(out) == before


@pytest.mark.parametrize(("arguments", "message"), [
    (["--input", "{tmp}/none", "--output", "{tmp}/o", *SHAPE], "--input must be a folder of videos, got .*not exist"),
    (["--output", "{tmp}/o", *SHAPE], "--input must name a folder, got nothing"),
    (["--input", "{tmp}", *SHAPE], "--output must name a folder, got nothing"),
    (["--input", "{tmp}", "--output", "{tmp}/o", *SHAPE], "--input must hold videos or images .*which has none"),
    (["--input", "{in}", "--output", "{tmp}/o", "--frames", "5"], "--height must be given, or --bucket in place of"),
    (["--input", "{in}", "--output", "{tmp}/o", *SHAPE, "--bucket", "8x8x1"], "--height must be left out beside"),
    (["--input", "{in}", "--output", "{tmp}/o", "--bucket", "8x8x4"],
     r"--frames must be 4k\+1 for codec haar, got 4; the nearest smaller one is 1 \(clips of 8x8x4\)"),
    (["--input", "{in}", "--output", "{tmp}/o", *SHAPE, "--fps", "0"], "--fps must be above 0, got 0"),
    (["--input", "{in}", "--output", "{tmp}/o", *SHAPE, "--fps", "nan"], "--fps must be above 0, got nan"),
    (["--input", "{in}", "--output", "{tmp}/o", *SHAPE, "--fps", "inf"], "--fps must be above 0, got inf"),
    (["--input", "{in}", "--output", "{tmp}/o", *SHAPE, "--stride", "-1"], "--stride must be above 0, got -1"),
    (["--input", "{in}", "--output", "{tmp}/o", *SHAPE, "--frames", "0"], "--frames must be at least 1, got 0"),
    (["--input", "{in}", "--output", "{tmp}/o", *SHAPE, "--height", "-8"], "--height must be at least 1, got -8"),
    (["--input", "{in}", "--output", "{tmp}/o", *SHAPE, "--width", "0"], "--width must be at least 1, got 0"),
    (["--input", "{in}", "--output", "{tmp}/o", *SHAPE, "--device", "meta"], "--device must be cpu or cuda, got meta"),
    (["--input", "{in}", "--output", "{in}/clip_0.mp4", *SHAPE],
     r"--output must be a folder that can be made and written, got .*clip_0\.mp4 \(File exists\)"),
    (["--input", "{in}", "--output", "{in}/clip_0.mp4/o", *SHAPE],
     r"--output must be a folder that can be made and written, got .* \(Not a directory\)"),
    (["--input", "{in}", "--output", "{tmp}/o", *SHAPE, "--clips-per-video", "some"],
     "--clips-per-video must be a positive number or all, got some"),
    (["--input", "{in}", "--output", "{tmp}/o", *SHAPE, "--workers", "-1"], "--workers must be at least 0, got -1"),
    (["--input", "{in}", "--output", "{tmp}/o", *SHAPE, "--latent-dtype", "fp8"], "--latent-dtype must be one of bf16"),
    (["--input", "{in}", "--output", "{tmp}/o", *SHAPE, "--device", "gpu"], "--device must be a torch device"),
    (["--input", "{in}", "--output", "{in}", *SHAPE], "--output must be an empty or new folder, or a data set, got"),
    (["--verify", "{in}"], r"--verify must be a folder written by `dsv prepare`, got .*which has no dataset\.json"),
])
def test_misuse_is_one_line_that_names_the_flag(small_videos: Path, tmp_path: Path, arguments: list[str], message: str,
                                                capsys: pytest.CaptureFixture[str]) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    filled = [text.replace("{tmp}", str(empty)).replace("{in}", str(small_videos)) for text in arguments]
    assert main(["prepare", *filled]) == 2
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 1, lines
    assert re.search(f"^dsv prepare: error: {message}", lines[0]), lines[0]
    # Nothing is started before everything is checked.
    assert not (empty / "o").exists()


def test_one_writer_at_a_time_and_nothing_prepared(small_videos: Path, tmp_path: Path,
                                                   capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "set"
    out.mkdir()
    with (out / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        assert main(flags(small_videos, out)) == 2
    assert "--output must not be in use" in capsys.readouterr().err
    assert main([*flags(small_videos, out), "--frames", "81"]) == 1
    assert "--input gave no sample" in capsys.readouterr().err.splitlines()[-1]
    assert list(out.iterdir()) == [], "a folder that was there stays, and is as it was"
    # The next try may have other settings.
    new = tmp_path / "new"
    for output in (out, new):
        assert main([*flags(small_videos, output), "--frames", "77"]) == 1
    assert not new.exists()
    assert main(flags(small_videos, out)) == 0
    kept = tree(out)
    (small_videos / "extra.mp4").write_bytes(b"no video")
    assert main(flags(small_videos, out)) == 0
    assert tree(out) == kept


def test_names_that_are_not_utf8_cost_the_video_and_nothing_else(small_videos: Path, tmp_path: Path,
                                                                 capsys: pytest.CaptureFixture[str]) -> None:
    foreign = os.fsdecode(b"\xe9.mp4")
    try:
        # In order the first of two copies: the one that has a name is prepared.
        (small_videos / "clip_1.mp4").rename(small_videos / f"b{foreign}")
        shutil.copy(small_videos / f"b{foreign}", small_videos / "c.mp4")
        (small_videos / f"note{foreign}.dat").write_text("x")
    except OSError:
        pytest.skip("this file system takes UTF-8 names alone")
    out = tmp_path / os.fsdecode(b"s\xe9t")
    for _ in range(2):
        capsys.readouterr()
        assert main(flags(small_videos, out)) == 0
        printed = capsys.readouterr().out
        assert "\n  b\\xe9.mp4: name_not_utf8, rename it" in printed.encode().decode()
        found = report(out)
        assert found["dropped"] == [{"source": "b\\xe9.mp4", "reason": "name_not_utf8", "detail": "rename it"}]
        assert (found["samples"], found["ignored_files"]) == (6, ["note\\xe9.mp4.dat"])
    (out / "null_text.safetensors").unlink()
    capsys.readouterr()
    assert main(["prepare", "--verify", str(out)]) == 1
    assert capsys.readouterr().out.encode().endswith(b"s\\xe9t/null_text.safetensors: No such file or directory\n")
    moved = small_videos.rename(tmp_path / os.fsdecode(b"v\xe9"))
    assert main(flags(moved, tmp_path / "other")) == 2
    assert re.search(r'--input must take folders whose names are UTF-8, got ".*/v\\xe9"; rename the folder',
                     capsys.readouterr().err)
    assert not (tmp_path / "other").exists()


def test_a_video_whose_timestamps_jump_is_dropped_where_they_count(small_videos: Path, tmp_path: Path) -> None:
    import av

    with av.open(str(small_videos / "far.mkv"), "w") as container:
        stream = container.add_stream("libx264", rate=25)
        stream.height, stream.width, stream.pix_fmt = 32, 48, "yuv420p"
        stream.codec_context.time_base = Fraction(1, 1000)
        for milliseconds in (0, 40, 80, 120, 160, 10**12):
            frame = av.VideoFrame.from_ndarray(np.full((32, 48, 3), milliseconds % 251, np.uint8), format="rgb24")
            frame.pts, frame.time_base = milliseconds, Fraction(1, 1000)
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    assert main(flags(small_videos, tmp_path / "set", "--fps", "24")) == 0
    assert report(tmp_path / "set")["dropped"] == [{
        "source": "far.mkv", "reason": "timestamps_jump", "detail": "by 1e+09 s after 0.16 s; remux or cut the file"}]
    assert main(flags(small_videos, tmp_path / "own_rate")) == 0
    assert (report(tmp_path / "own_rate")["dropped"], len(LatentDataset(tmp_path / "own_rate"))) == ([], 7)
