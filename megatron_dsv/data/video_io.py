"""Video and image files through PyAV: their timestamps, chosen frames as RGB tensors, and H.264 files written.

Dims: T frames, H x W pixels of the result. Tensors are [3, T, H, W], RGB, fp32 in [-1, 1]. Times are in seconds.
A still image is a video of one frame.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any

import av
import numpy as np
import torch
from av.video.reformatter import VideoReformatter
from torch import Tensor

VIDEO_SUFFIXES = frozenset({".mp4", ".m4v", ".mov", ".mkv", ".webm", ".avi", ".mpg", ".mpeg", ".ts"})
IMAGE_SUFFIXES = frozenset({".png", ".jpg", ".jpeg", ".webp", ".bmp"})
_H264_ENCODER = "libx264"
# A still scene in a recording of changing rate may pause for seconds; beyond this, timestamps are wrong or frames lost.
_PAUSE_SECONDS, _PAUSE_INTERVALS, _LONGEST_INTERVAL_SECONDS = 5.0, 20, 60.0


class UnreadableVideoError(ValueError):
    """A file that cannot be decoded as video; the message says why in one line, without the path."""


class TimestampJumpError(ValueError):
    """Timestamps that a video cannot be resampled by; the message says where in one line, without the path."""


@dataclass(frozen=True)
class VideoInfo:
    """What a video file holds.

    Attributes:
        width, height: pixels as displayed, that is upright and with square pixels.
        pts: presentation timestamps of all frames, ascending, in units of the stream's time base.
        times: the same in seconds, from 0 for the first frame.
        keyframes: timestamps where decoding can start, ascending, in units of the time base.
    """

    width: int
    height: int
    pts: tuple[int, ...]
    times: tuple[float, ...]
    keyframes: tuple[int, ...] = ()


def is_image(path: Path) -> bool:
    """Whether the file's suffix says that it is a still image."""
    return path.suffix.lower() in IMAGE_SUFFIXES


def probe(path: Path) -> VideoInfo:
    """Size and timestamps of a file; one frame is decoded.

    Raises:
        UnreadableVideoError: no video stream, no frame, no timestamps, or damaged data.
    """
    try:
        with _opened(path) as container:
            video = _video_stream(container)
            base = video.time_base or Fraction(1, 1)
            packets = [(packet.pts, packet.is_keyframe) for packet in container.demux(video)
                       if packet.size and not packet.is_discard]
        with _opened(path) as container:
            first = next(container.decode(_video_stream(container)), None)
            if first is None:
                raise UnreadableVideoError("no frame can be decoded")
            aspect = _pixel_aspect(container)
    except (av.error.FFmpegError, OSError, EOFError) as error:
        raise UnreadableVideoError(_reason(error)) from error
    width, height = max(1, round(first.width * aspect)), first.height
    if _display_turn(first)[0]:
        width, height = height, width
    if is_image(path):
        return VideoInfo(width, height, (0,), (0.0,))
    known = sorted({pts for pts, _ in packets if pts is not None})
    if len(known) != len(packets) or not known:
        raise UnreadableVideoError("frames have no timestamps; remux the file to mp4 or mkv")
    return VideoInfo(width, height, tuple(known), tuple(float((value - known[0]) * base) for value in known),
                     tuple(sorted(pts for pts, is_key in packets if is_key)))


def resampled_frames(times: Sequence[float], fps: float | None) -> list[int]:
    """Numbers of the frames that show a video at ``fps`` frames a second: the nearest frame to each instant.

    Args:
        times: seconds of each frame, ascending from 0.
        fps: wanted rate; None keeps every frame as it is. A rate above the video's repeats frames.

    Raises:
        TimestampJumpError: a frame comes so long after the one before it that clips would show one picture throughout.
    """
    if fps is None or len(times) < 2:
        return list(range(len(times)))
    known = np.asarray(times, dtype=np.float64)
    gaps = np.diff(known)
    interval, longest = float(np.median(gaps)), int(np.argmax(gaps))
    if gaps[longest] > min(max(_PAUSE_SECONDS, _PAUSE_INTERVALS * interval), _LONGEST_INTERVAL_SECONDS):
        raise TimestampJumpError(f"by {gaps[longest]:.6g} s after {known[longest]:.2f} s; remux or cut the file")
    count = int((known[-1] + interval) * fps + 1e-6)
    wanted = np.arange(count) / fps
    after = np.clip(np.searchsorted(known, wanted), 1, len(known) - 1)
    nearer_before = wanted - known[after - 1] <= known[after] - wanted + 1e-9
    return [int(frame) for frame in np.where(nearer_before, after - 1, after)]


class FrameReader:
    """Reads clips of one file, scaled with their aspect kept to cover height x width and cropped at the centre.

    Clips in ascending order are decoded in one pass; a jump costs at most the way from the keyframe before it.

    Args:
        path: the file that ``info`` was probed from.
        info: result of ``probe``.
        height, width: pixels of the result.
    """

    def __init__(self, path: Path, info: VideoInfo, height: int, width: int) -> None:
        self._path = path
        self._info = info
        self._size = height, width
        self._reformatter = VideoReformatter()
        self._pass = ExitStack()
        self._decoded: Iterator[Any] = iter(())
        self._aspect = 1.0
        self._position: int | None = None
        self._fitted: dict[int, np.ndarray] = {}

    def __enter__(self) -> FrameReader:
        return self

    def __exit__(self, *exception: object) -> None:
        self._pass.close()

    def read(self, frames: Sequence[int]) -> Tensor:
        """Frames by number, ascending, repeats allowed: fp32 [3, len(frames), height, width] in [-1, 1].

        Raises:
            UnreadableVideoError: a wanted frame cannot be decoded.
        """
        wanted = [self._info.pts[frame] for frame in frames]
        try:
            self._decode(wanted)
            if not self._fitted.keys() >= set(wanted):
                # Some containers seek past the wanted frame: read from the start instead.
                self._start_pass(None)
                self._decode(wanted)
        except (av.error.FFmpegError, OSError, EOFError) as error:
            raise UnreadableVideoError(_reason(error)) from error
        for frame, pts in zip(frames, wanted):
            if pts not in self._fitted:
                raise UnreadableVideoError(f"frame {frame} (at {self._info.times[frame]:.2f} s) cannot be decoded")
        pixels = torch.from_numpy(np.stack([self._fitted[pts] for pts in wanted]))
        return pixels.permute(3, 0, 1, 2).float() / 127.5 - 1

    def _decode(self, wanted: Sequence[int]) -> None:
        """Adds the wanted frames to the fitted ones, as many as are met; forgets frames before the first."""
        self._fitted = {pts: pixels for pts, pixels in self._fitted.items() if pts >= wanted[0]}
        remaining = {pts for pts in wanted if pts not in self._fitted}
        if not remaining:
            return
        first, last = min(remaining), max(remaining)
        position = self._position
        if position is None or first <= position or any(position < key <= first for key in self._info.keyframes):
            self._start_pass(first)
        for frame in self._decoded:
            self._position = 0 if is_image(self._path) else frame.pts
            if self._position in remaining:
                if frame.is_corrupt:
                    raise UnreadableVideoError(f"damaged data at timestamp {self._position}")
                self._fitted[self._position] = _fit(frame, self._aspect, self._reformatter, *self._size)
            if self._position is not None and self._position >= last:
                break

    def _start_pass(self, first: int | None) -> None:
        """Opens the file anew, at the keyframe before timestamp ``first``, or at its start."""
        self._pass.close()
        container = self._pass.enter_context(_opened(self._path))
        video = _video_stream(container)
        self._aspect = _pixel_aspect(container)
        self._position = None
        if first is not None and not is_image(self._path):
            container.seek(first, stream=video)
        self._decoded = container.decode(video)


def write_mp4(path: Path, video: Tensor, fps: float) -> None:
    """Writes an H.264 mp4 file, the same bytes for the same video; the file appears whole or not at all.

    Args:
        path: the file; its folder must exist.
        video: [3, T, H, W] in [-1, 1] (values outside are clamped); H and W even.
        fps: frames a second.

    Raises:
        ValueError: the shape or the rate does not fit.
        NotImplementedError: this build of PyAV has no H.264 encoder.
    """
    if video.dim() != 4 or video.shape[0] != 3 or video.shape[1] < 1 or video.shape[2] % 2 or video.shape[3] % 2:
        raise ValueError(f"video must be [3, T, H, W] with T at least 1, H and W even, got {list(video.shape)}")
    if not fps > 0:
        raise ValueError(f"fps must be above 0, got {fps}")
    if _H264_ENCODER not in av.codecs_available:
        raise NotImplementedError(f"this build of PyAV has no encoder {_H264_ENCODER}; install the PyAV wheel (av)")
    frames = ((video.detach().float().clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8).permute(1, 2, 3, 0)
    partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with av.open(str(partial), "w", format="mp4") as container:
            stream = container.add_stream(_H264_ENCODER, rate=Fraction(fps).limit_denominator(1001))
            stream.height, stream.width = video.shape[2:]
            stream.pix_fmt = "yuv420p"
            # libx264's macroblock tree gives other bytes from one call to the next, even on one thread.
            stream.options = {"crf": "18", "x264-params": "mbtree=0"}
            for pixels in frames.cpu().contiguous().numpy():
                for packet in stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")):
                    container.mux(packet)
            for packet in stream.encode():
                container.mux(packet)
        os.replace(partial, path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    """A container on a file. Images are opened by their bytes: their names may look like sequence patterns."""
    if is_image(path):
        with path.open("rb") as stream, av.open(stream) as container:
            yield container
    else:
        with av.open(f"file:{path}") as container:
            yield container


def _video_stream(container: Any) -> Any:
    if not container.streams.video:
        raise UnreadableVideoError("no video stream")
    return container.streams.video[0]


def _pixel_aspect(container: Any) -> float:
    """Width over height of one pixel as displayed."""
    ratio = _video_stream(container).sample_aspect_ratio
    return float(ratio) if ratio else 1.0


def _display_turn(frame: Any) -> tuple[bool, bool, bool]:
    """How a decoded frame is turned upright: whether its axes are swapped, then its rows, then its columns reversed.

    Phones, cameras and editors ask for any of the eight turns and mirrorings; other angles count as the nearest.
    """
    stored = frame.side_data.get("DISPLAYMATRIX")
    if stored is None:
        return False, False, False
    # The pixel at column x and row y is displayed at column a x + c y and row b x + d y.
    a, b, _, c, d = np.frombuffer(bytes(stored), np.int32)[:5].tolist()
    if abs(b) + abs(c) > abs(a) + abs(d):
        return True, b < 0, c < 0
    return False, d < 0, a < 0


def _fit(frame: Any, aspect: float, reformatter: VideoReformatter, height: int, width: int) -> np.ndarray:
    """One frame as uint8 RGB [height, width, 3]: scaled to cover, turned upright, cropped at the centre."""
    swapped, rows_reversed, columns_reversed = _display_turn(frame)
    box_height, box_width = (width, height) if swapped else (height, width)
    scale = max(box_width / (frame.width * aspect), box_height / frame.height)
    fitted = reformatter.reformat(frame, width=max(box_width, round(frame.width * aspect * scale)),
                                  height=max(box_height, round(frame.height * scale)), format="rgb24",
                                  interpolation="BICUBIC")
    pixels = fitted.to_ndarray()
    pixels = pixels.swapaxes(0, 1) if swapped else pixels
    pixels = pixels[::-1 if rows_reversed else 1, ::-1 if columns_reversed else 1]
    top, left = (pixels.shape[0] - height) // 2, (pixels.shape[1] - width) // 2
    return np.ascontiguousarray(pixels[top:top + height, left:left + width])


def _reason(error: BaseException) -> str:
    """One line of an error's text, without the path that PyAV adds."""
    text = getattr(error, "strerror", None) or str(error).strip() or type(error).__name__
    return text.splitlines()[0]
