"""Video files in and out: the right frames, the right way up, in the right colours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from megatron_dsv.data import video_io
from megatron_dsv.data.video_io import (
    FrameReader,
    TimestampJumpError,
    UnreadableVideoError,
    probe,
    resampled_frames,
    write_mp4,
)


def clip(path: Path, info: video_io.VideoInfo, frames: Sequence[int], height: int, width: int) -> torch.Tensor:
    """The frames as a reader of their own gives them."""
    with FrameReader(path, info, height, width) as reader:
        return reader.read(frames)


def decoded(path: Path) -> np.ndarray:
    """All frames uint8 [T, H, W, 3] by plain sequential decoding."""
    with av.open(str(path)) as container:
        return np.stack([frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)])


def quadrants(height: int = 32, width: int = 48) -> torch.Tensor:
    """A still [3, 1, H, W]: red, green, blue and white quarters, in reading order."""
    still = torch.full((3, 1, height, width), -0.8)
    still[0, :, : height // 2, : width // 2] = 0.8
    still[1, :, : height // 2, width // 2:] = 0.8
    still[2, :, height // 2:, : width // 2] = 0.8
    still[:, :, height // 2:, width // 2:] = 0.8
    return still


@pytest.mark.parametrize("frames", [[0], [119], [40, 41, 45, 45, 60], list(range(97, 114))])
def test_chosen_frames_of_a_real_clip_are_those_of_sequential_decoding(real_clips: Path, frames: list[int]) -> None:
    path = real_clips / "bikes.mp4"
    info = probe(path)
    assert (info.height, info.width, len(info.pts)) == (272, 640, 250)
    got = ((clip(path, info, frames, 272, 640) + 1) * 127.5).permute(1, 2, 3, 0).numpy()
    assert np.abs(got - decoded(path)[frames].astype(np.float32)).mean() < 1.0


def test_one_reader_gives_any_sequence_of_clips(real_clips: Path) -> None:
    """Next clip, overlap, gap, backwards and the same again: each as if it were the only one."""
    path = real_clips / "carphone_pristine.mp4"
    info = probe(path)
    with FrameReader(path, info, 144, 193) as reader:
        for frames in ([0, 1, 2], [3, 4, 5], [4, 5, 6], [40, 41], [10, 10, 12], [10, 12], [118, 119]):
            assert torch.equal(reader.read(frames), clip(path, info, frames, 144, 193))
    assert info.keyframes[0] == info.pts[0]


def test_written_video_reads_back_in_order_and_colour(tmp_path: Path, make_video: Callable[..., Path]) -> None:
    path = make_video(tmp_path / "v.mp4", 12, fps=24)
    info = probe(path)
    assert info.times == pytest.approx([frame / 24 for frame in range(12)], abs=1e-4)
    levels = clip(path, info, range(12), 16, 16)[:, :, 8:].mean((0, 2, 3))
    assert torch.allclose(levels, (torch.arange(12) * 7 % 29 / 14.5 - 1) * 0.9, atol=0.03)
    colours = quadrants()
    write_mp4(tmp_path / "c.mp4", colours.expand(-1, 5, -1, -1), 10)
    back = clip(tmp_path / "c.mp4", probe(tmp_path / "c.mp4"), [4], 32, 48)
    assert (back - colours).abs().mean() < 0.06
    assert sorted(path.name for path in tmp_path.iterdir()) == ["c.mp4", "v.mp4"]


def test_scaled_to_cover_and_cropped_at_the_centre(tmp_path: Path) -> None:
    video = torch.full((3, 3, 32, 96), -0.9)
    video[:, :, :, 32:64] = 0.9
    write_mp4(tmp_path / "wide.mp4", video, 10)
    info = probe(tmp_path / "wide.mp4")
    square = clip(tmp_path / "wide.mp4", info, [1], 16, 16)
    assert square.mean() > 0.8
    tall = clip(tmp_path / "wide.mp4", info, [1], 64, 64)
    assert tall[..., 4:-4].mean() > 0.8


@pytest.mark.parametrize("mirrored", [False, True])
@pytest.mark.parametrize("turn", [0, 90, 180, 270])
def test_turned_and_mirrored_phone_video_is_upright(tmp_path: Path, turn: int, mirrored: bool) -> None:
    upright = quadrants()
    path = tmp_path / "phone.mp4"
    stored = torch.rot90(upright, turn // 90, (2, 3))
    write_mp4(path, (stored.flip(3) if mirrored else stored).expand(-1, 3, -1, -1), 10)
    content = bytearray(path.read_bytes())
    # Display matrix of the track header: the mirroring undone, then a clockwise turn that undoes the turn above.
    cos, sin = {0: (1, 0), 90: (0, 1), 180: (-1, 0), 270: (0, -1)}[turn]
    side = -1 if mirrored else 1
    matrix = b"".join((value & 0xFFFFFFFF).to_bytes(4, "big") for value in (
        side * cos << 16, side * sin << 16, 0, -sin << 16, cos << 16, 0, 0, 0, 1 << 30))
    start = content.index(b"tkhd") + 4 + 40
    content[start:start + 36] = matrix
    path.write_bytes(content)
    info = probe(path)
    assert (info.height, info.width) == (32, 48)
    assert (clip(path, info, [0], 32, 48) - upright).abs().mean() < 0.06


def test_square_pixels(real_clips: Path) -> None:
    info = probe(real_clips / "carphone_pristine.mp4")
    assert (info.height, info.width) == (144, round(176 * 128 / 117))


@pytest.mark.parametrize("name", ["still.png", "still%03d.png", "still.jpg"])
def test_a_still_image_is_a_video_of_one_frame(tmp_path: Path, name: str) -> None:
    pixels = ((quadrants()[:, 0] + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 0).contiguous().numpy()
    frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
    frame.save(tmp_path / "plain.png" if name.endswith("png") else tmp_path / "plain.jpg")
    path = (tmp_path / f"plain{Path(name).suffix}").rename(tmp_path / name)
    info = probe(path)
    assert (info.height, info.width, info.times) == (32, 48, (0.0,))
    got = clip(path, info, [0], 32, 48)
    assert got.shape == (3, 1, 32, 48)
    assert (got - quadrants()).abs().mean() < (0.06 if name.endswith("jpg") else 0.005)


@pytest.mark.parametrize(("times", "fps", "expected"), [
    ([0, 0.1, 0.2, 0.3], None, [0, 1, 2, 3]),
    ([0, 0.1, 0.2, 0.3], 5, [0, 2]),
    ([0, 0.1, 0.2, 0.3], 20, [0, 0, 1, 1, 2, 2, 3, 3]),
    ([0, 0.1, 0.2, 0.9, 1.0], 10, [0, 1, 2, 2, 2, 2, 3, 3, 3, 3, 4]),
    ([0], 10, [0]),
])
def test_resampling_takes_the_nearest_frame(times: list[float], fps: float | None, expected: list[int]) -> None:
    assert resampled_frames(times, fps) == expected


@pytest.mark.parametrize(("times", "message"), [
    ([*np.arange(11) / 25, 600], "by 599.6 s after 0.40 s; remux or cut the file"),
    ([*np.arange(11) / 25, 1e9], r"by 1e\+09 s after 0.40 s"),
    ([0, *np.arange(5000, 5010)], "by 5000 s after 0.00 s"),
    ([0, 1e9], r"by 1e\+09 s after 0.00 s"),
    (np.arange(9) * 61, "by 61 s after 0.00 s"),
])
def test_timestamps_that_jump_are_named_and_no_picture_is_repeated_for_minutes(times: list[float],
                                                                               message: str) -> None:
    with pytest.raises(TimestampJumpError, match=f"^{message}"):
        resampled_frames(times, 24)
    assert resampled_frames(times, None) == list(range(len(times)))


@pytest.mark.parametrize("times", [[0, 1, 5.5, 6, 7], [0, 3, 6, 40, 43], [0, 50, 100]])
def test_pauses_of_slow_and_uneven_videos_are_no_jumps(times: list[float]) -> None:
    assert set(resampled_frames(times, 24)) == set(range(len(times)))


def test_resampling_keeps_the_duration(real_clips: Path) -> None:
    times = probe(real_clips / "carphone_pristine.mp4").times
    frames = resampled_frames(times, 16)
    assert len(frames) == int(120 / (30000 / 1001) * 16)
    for instant, frame in enumerate(frames):
        assert abs(times[frame] - instant / 16) <= min(abs(time - instant / 16) for time in times) + 1e-9


@pytest.mark.parametrize("content", [b"", b"not a video", None])
def test_damaged_files_say_so_in_one_line(tmp_path: Path, real_clips: Path, content: bytes | None) -> None:
    path = tmp_path / "bad.mp4"
    path.write_bytes((real_clips / "bikes.mp4").read_bytes()[:100_000] if content is None else content)
    with pytest.raises(UnreadableVideoError) as caught:
        probe(path)
    assert "\n" not in str(caught.value)
    assert str(tmp_path) not in str(caught.value)


def test_a_file_cut_in_its_data_names_the_missing_frame(tmp_path: Path, make_video: Callable[..., Path]) -> None:
    path = make_video(tmp_path / "v.mp4", 10)
    info = probe(path)
    longer = video_io.VideoInfo(info.width, info.height, (*info.pts, info.pts[-1] + 9999), (*info.times, 5.0))
    with pytest.raises(UnreadableVideoError, match=r"frame 10 \(at 5\.00 s\) cannot be decoded"):
        clip(path, longer, [9, 10], 16, 16)


def test_the_same_video_is_written_in_the_same_bytes(tmp_path: Path) -> None:
    torch.manual_seed(0)
    video = torch.nn.functional.interpolate(torch.randn(1, 3, 5, 16, 24), size=(9, 64, 96), mode="trilinear")[0]
    written = set()
    for _ in range(20):
        write_mp4(tmp_path / "v.mp4", video, 8)
        written.add((tmp_path / "v.mp4").read_bytes())
    assert len(written) == 1


def test_misuse_of_the_writer_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match=r"H and W even, got \[3, 2, 7, 8\]"):
        write_mp4(tmp_path / "v.mp4", torch.zeros(3, 2, 7, 8), 10)
    with pytest.raises(ValueError, match="fps must be above 0, got 0"):
        write_mp4(tmp_path / "v.mp4", torch.zeros(3, 2, 8, 8), 0)
    monkeypatch.setattr(av, "codecs_available", frozenset())
    with pytest.raises(NotImplementedError, match="no encoder libx264; install the PyAV wheel"):
        write_mp4(tmp_path / "v.mp4", torch.zeros(3, 2, 8, 8), 10)
    assert list(tmp_path.iterdir()) == []
