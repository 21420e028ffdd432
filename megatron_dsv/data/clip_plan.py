"""Which clips of a video become samples, and in which shape. Pure arithmetic.

Dims: frames are counted after resampling to the wanted rate; sizes are in pixels.
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, order=True)
class PixelBucket:
    """Shape of a clip: height x width pixels, frames."""

    height: int
    width: int
    frames: int

    def __str__(self) -> str:
        return f"{self.height}x{self.width}x{self.frames}"


def parse_bucket(text: str) -> PixelBucket:
    """A bucket from ``HxWxF``, such as 480x832x81.

    Raises:
        ValueError: the text is not three positive integers.
    """
    match = re.fullmatch(r"([1-9]\d*)x([1-9]\d*)x([1-9]\d*)", text.strip())
    if match is None:
        raise ValueError(f"--bucket must be HEIGHTxWIDTHxFRAMES, such as 480x832x81, got {text}")
    return PixelBucket(*(int(number) for number in match.groups()))


def choose_bucket(buckets: Sequence[PixelBucket], height: int, width: int, frames: int) -> PixelBucket | None:
    """The bucket for a video of ``frames`` frames of height x width pixels, or None if it is too short for all.

    Of the buckets that are not longer than the video: those of the nearest aspect ratio, then the longest, then the
    largest that needs no enlarging (else the smallest). A bucket of one frame is for still images; a video takes one
    only where no bucket has more frames.
    """
    if frames > 1 and any(bucket.frames > 1 for bucket in buckets):
        buckets = [bucket for bucket in buckets if bucket.frames > 1]
    fitting = [bucket for bucket in buckets if bucket.frames <= frames]
    if not fitting:
        return None

    def preference(bucket: PixelBucket) -> tuple[float, int, bool, int]:
        aspect = round(abs(math.log(bucket.width / bucket.height) - math.log(width / height)), 6)
        enlarged = bucket.height > height or bucket.width > width
        area = bucket.height * bucket.width
        return aspect, -bucket.frames, enlarged, area if enlarged else -area

    return min(fitting, key=preference)


def clip_starts(total: int, frames: int, stride: int | None, clips: int | None) -> list[int]:
    """First frames of the clips of a video.

    Args:
        total: frames of the video.
        frames: frames of a clip.
        stride: frames from one clip's start to the next one's; None means ``frames``, clips end to end.
        clips: how many to keep, spread evenly over the video; None keeps all.
    """
    starts = list(range(0, total - frames + 1, stride or frames))
    if clips is None or clips >= len(starts):
        return starts
    # The middle of each of `clips` equal shares, so that one clip comes from the middle of the video.
    return [starts[(2 * share + 1) * len(starts) // (2 * clips)] for share in range(clips)]
