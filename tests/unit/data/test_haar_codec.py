"""The Haar codec against a textbook transform written with pairwise sums and differences."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatron_dsv.data.codecs import HaarCodec, build_codec, codec_from_description
from megatron_dsv.data.codecs.haar import band_level, band_rms, lowest_bands
from megatron_dsv.data.video_io import FrameReader, probe

ALL_BANDS = 768


def pairwise_haar(x: Tensor, axis: int) -> Tensor:
    """Orthonormal Haar transform along one axis: repeated (a+b)/sqrt 2 and (a-b)/sqrt 2; coarse details first."""
    x = x.movedim(axis, -1)
    details: list[Tensor] = []
    while x.shape[-1] > 1:
        even, odd = x[..., 0::2], x[..., 1::2]
        details.insert(0, (even - odd) / math.sqrt(2))
        x = (even + odd) / math.sqrt(2)
    return torch.cat([x, *details], dim=-1).movedim(-1, axis)


def oracle_bands(block: Tensor) -> Tensor:
    """Bands [3, 4, 8, 8] of one block [3, 4, 8, 8]."""
    colours = torch.tensor([[1, 1, 1], [1, 0, -1], [-1, 2, -1]], dtype=torch.float64)
    mixed = torch.einsum("pc,ctyx->ptyx", colours / colours.norm(dim=1, keepdim=True), block)
    return pairwise_haar(pairwise_haar(pairwise_haar(mixed, 1), 2), 3)


def random_video(frames: int, height: int, width: int) -> Tensor:
    return torch.rand(3, frames, height, width, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2 - 1


@pytest.mark.parametrize("channels", [1, 16, ALL_BANDS])
def test_latents_are_the_textbook_bands_over_their_scale(channels: int) -> None:
    video = random_video(9, 16, 24)
    latents = HaarCodec(channels, dtype=torch.float64).encode(video)
    assert latents.shape == (channels, 3, 2, 3)
    held = torch.cat([video[:, :1].expand(-1, 4, -1, -1), video[:, 1:]], dim=1)
    for t, h, w in [(0, 0, 0), (1, 1, 2), (2, 0, 1)]:
        bands = oracle_bands(held[:, 4 * t:4 * t + 4, 8 * h:8 * h + 8, 8 * w:8 * w + 8])
        expected = torch.stack([bands[band] / band_rms(*band) for band in lowest_bands(channels)])
        torch.testing.assert_close(latents[:, t, h, w], expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("frames", [1, 5, 9])
def test_all_bands_lose_nothing_and_keep_the_energy(frames: int) -> None:
    video = random_video(frames, 16, 8)
    codec = HaarCodec(ALL_BANDS, dtype=torch.float64)
    latents = codec.encode(video)
    torch.testing.assert_close(codec.decode(latents), video, rtol=0, atol=1e-14)
    bands = latents * torch.tensor([band_rms(*band) for band in lowest_bands(ALL_BANDS)])[:, None, None, None]
    held_energy = 4 * video[:, 0].square().sum() + video[:, 1:].square().sum()
    assert bands.square().sum().item() == pytest.approx(held_energy.item(), rel=1e-6)


def test_kept_bands_are_an_orthogonal_projection() -> None:
    video = random_video(9, 16, 16) * 0.3
    codec = HaarCodec(16, dtype=torch.float64)
    latents = codec.encode(video)
    decoded = codec.decode(latents)
    torch.testing.assert_close(codec.encode(decoded), latents, rtol=0, atol=1e-13)
    for held in (slice(0, 1), slice(1, 9)):
        residual = video[:, held] - decoded[:, held]
        assert abs((residual * decoded[:, held]).sum().item()) < 1e-10


def test_causal_and_first_frame_alone() -> None:
    video = random_video(13, 8, 8)
    codec = HaarCodec(16, dtype=torch.float64)
    latents = codec.encode(video)
    torch.testing.assert_close(codec.encode(video[:, :1])[:, 0], latents[:, 0], rtol=0, atol=1e-14)
    changed = video.clone()
    changed[:, 5:9] = -changed[:, 5:9]
    moved = (codec.encode(changed) - latents).abs().amax((0, 2, 3)) > 1e-9
    assert moved.tolist() == [False, False, True, False]


def test_bands_are_ordered_coarse_first_and_nested() -> None:
    bands = lowest_bands(ALL_BANDS)
    assert len(set(bands)) == ALL_BANDS
    assert bands[0] == (0, 0, 0, 0)
    assert lowest_bands(16) == bands[:16]
    for plane in range(3):
        levels = [band_level(*band[1:]) for band in bands if band[0] == plane]
        assert levels == sorted(levels)


def test_real_video_has_about_unit_variance_and_decodes_recognisably(real_clips: Path) -> None:
    codec = HaarCodec()
    spread = []
    for name, height, width in (("bigbuckbunny.mp4", 240, 416), ("bikes.mp4", 240, 416), ("carphone_pristine.mp4",
                                                                                        144, 176)):
        info = probe(real_clips / name)
        with FrameReader(real_clips / name, info, height, width) as reader:
            video = reader.read(range(20, 37))
        latents = codec.encode(video)
        spread.append(latents[:, 1:].square().mean((1, 2, 3)))
        error = (codec.decode(latents) - video).square().mean().item()
        assert 10 * math.log10(4 / error) > 20
        assert error < 0.1 * video.var().item()
    rms = torch.stack(spread).mean(0).sqrt()
    assert rms.min() > 1 / 4
    assert rms.max() < 4


def test_description_builds_the_same_codec() -> None:
    video = random_video(5, 8, 8)
    codec = HaarCodec(7)
    again = codec_from_description(codec.describe())
    assert torch.equal(again.encode(video), codec.encode(video))
    assert again.describe() == codec.describe()


@pytest.mark.parametrize(("frames", "valid"), [(0, 0), (1, 1), (4, 1), (5, 5), (80, 77), (81, 81)])
def test_valid_frames(frames: int, valid: int) -> None:
    assert HaarCodec().valid_frames(frames) == valid


@pytest.mark.parametrize(("call", "message"), [
    (lambda: HaarCodec(0), r"--codec-channels must be in 1\.\.768 for codec haar, got 0"),
    (lambda: HaarCodec().encode(torch.zeros(3, 4, 8, 8)), r"--frames must be 4k\+1 for codec haar, got 4; the nearest "
                                                          r"smaller one is 1"),
    (lambda: HaarCodec().latent_shape(5, 12, 8), "--height must be a positive multiple of 8 for codec haar, got 12; "
     "the nearest is 8 or 16$"),
    (lambda: HaarCodec().latent_shape(5, 8, 9), "--width must be a positive multiple of 8 for codec haar, got 9; "
     "the nearest is 8 or 16$"),
    (lambda: HaarCodec().latent_shape(5, 8, 3), "--width must be .*, got 3; the nearest is 8$"),
    (lambda: HaarCodec().encode(torch.zeros(1, 5, 8, 8)), r"video must be \[3, T, H, W\], got \[1, 5, 8, 8\]"),
    (lambda: HaarCodec().decode(torch.zeros(3, 1, 1, 1)), r"latents must be \[16, t, h, w\], got \[3, 1, 1, 1\]"),
    (lambda: build_codec("jpeg"), "--codec must be one of haar, diffusers, got jpeg"),
    (lambda: build_codec("haar", folder="x"), "--codec-folder must be left out for --codec haar"),
    (lambda: build_codec("diffusers"), "--codec-folder must name a folder with a VAE"),
    (lambda: build_codec("diffusers", folder="x", channels=4), "--codec-channels is set by the VAE"),
    (lambda: codec_from_description({"name": "haar", "version": 9}), "made by version 9 of codec haar"),
    (lambda: codec_from_description({"name": "jpeg"}), "the data set's codec must be one of haar, diffusers, got jpeg"),
])
def test_misuse_is_named(call, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        call()
