"""Pretrained VAE codecs on tiny, randomly initialised models of the real classes, saved to disk and read back."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

diffusers = pytest.importorskip("diffusers")

from megatron_dsv.cli.main import main  # noqa: E402
from megatron_dsv.data.codecs import DiffusersCodec, build_codec, codec_from_description  # noqa: E402
from megatron_dsv.data.latent_dataset import LatentDataset  # noqa: E402
from megatron_dsv.data.video_io import FrameReader, probe  # noqa: E402


@pytest.fixture(scope="module")
def wan_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("wan")
    diffusers.AutoencoderKLWan(
        base_dim=4, z_dim=4, dim_mult=[1, 1, 2, 2], num_res_blocks=1, latents_mean=[0.1, -0.2, 0.3, 0.0],
        latents_std=[1.5, 0.5, 2.0, 1.0]).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def image_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("kl")
    diffusers.AutoencoderKL(
        block_out_channels=(8, 8), down_block_types=("DownEncoderBlock2D",) * 2, up_block_types=("UpDecoderBlock2D",) *
        2, latent_channels=4, norm_num_groups=4, scaling_factor=0.5, shift_factor=0.25).save_pretrained(folder)
    return folder


def video_of(frames: int, size: int) -> torch.Tensor:
    return torch.rand(3, frames, size, size, generator=torch.Generator().manual_seed(2)) * 2 - 1


def test_wan_matches_the_class_and_normalises_both_ways(wan_folder: Path) -> None:
    video = video_of(5, 16)
    codec = build_codec("diffusers", folder=wan_folder)
    vae = diffusers.AutoencoderKLWan.from_pretrained(wan_folder, local_files_only=True)
    with torch.no_grad():
        mean = vae.encode(video[None]).latent_dist.mean[0]
        latents = codec.encode(video)
        for channel, (shift, scale) in enumerate(zip([0.1, -0.2, 0.3, 0.0], [1.5, 0.5, 2.0, 1.0])):
            torch.testing.assert_close(latents[channel], (mean[channel] - shift) / scale)
        torch.testing.assert_close(codec.decode(latents), vae.decode(mean[None]).sample[0].clamp(-1, 1),
                                   rtol=1e-4, atol=1e-5)
    assert tuple(latents.shape) == codec.latent_shape(5, 16, 16) == (4, 2, 2, 2)
    assert codec.decode(latents).shape == video.shape
    assert [codec.valid_frames(n) for n in (0, 4, 8, 81)] == [0, 1, 5, 81]


def test_image_vae_runs_frame_by_frame(image_folder: Path) -> None:
    video = video_of(3, 8)
    codec = build_codec("diffusers", folder=image_folder)
    vae = diffusers.AutoencoderKL.from_pretrained(image_folder, local_files_only=True)
    latents = codec.encode(video)
    with torch.no_grad():
        for frame in range(3):
            mean = vae.encode(video[:, frame][None]).latent_dist.mean
            torch.testing.assert_close(latents[:, frame], (mean[0] - 0.25) * 0.5)
            decoded = vae.decode(mean).sample[0].clamp(-1, 1)
            torch.testing.assert_close(codec.decode(latents)[:, frame], decoded, rtol=1e-4, atol=1e-5)
    assert tuple(latents.shape) == codec.latent_shape(3, 8, 8) == (4, 3, 4, 4)
    assert codec.valid_frames(6) == 6


def test_a_data_set_is_prepared_with_it_and_decodes_again(wan_folder: Path, tmp_path: Path, make_video: Callable[
        ..., Path]) -> None:
    videos = tmp_path / "videos"
    videos.mkdir()
    path = make_video(videos / "a.mp4", 5)
    assert main(["prepare", "--input", str(videos), "--output", str(tmp_path / "set"), "--bucket", "16x16x5",
                 "--codec", "diffusers", "--codec-folder", str(wan_folder), "--latent-dtype", "fp32"]) == 0
    data = LatentDataset(tmp_path / "set")
    codec = codec_from_description(data.codec_description)
    with FrameReader(path, probe(path), 16, 16) as reader:
        latents = codec.encode(reader.read(range(5)))
    assert torch.equal(data[0]["latents"], latents)
    assert codec.decode(latents).shape == (3, 5, 16, 16)


def test_description_finds_the_weights_and_notices_others(wan_folder: Path, image_folder: Path, tmp_path: Path) -> None:
    codec = DiffusersCodec(wan_folder)
    description = json.loads(json.dumps(codec.describe()))
    again = codec_from_description(description)
    assert torch.equal(again.encode(video_of(1, 8)), codec.encode(video_of(1, 8)))
    with pytest.raises(ValueError, match="--codec-folder must hold the weights that made the latents"):
        codec_from_description(description, folder=image_folder)
    with pytest.raises(ValueError, match=r"--codec-folder must be a folder with the config\.json"):
        codec_from_description(description, folder=tmp_path / "moved")


@pytest.mark.parametrize(("config", "error", "message"), [
    (None, ValueError, "--codec-folder must be a folder with the config.json and weights"),
    ("not json", ValueError, r"JSONDecodeError on config\.json"),
    ('{"_class_name": "AutoencoderDC"}', NotImplementedError, "--codec-folder holds a AutoencoderDC; supported are"),
    ('{"_class_name": "AutoencoderKL"}', ValueError, "cannot be loaded as AutoencoderKL: "),
])
def test_unusable_folders_are_named(tmp_path: Path, config: str | None, error: type, message: str) -> None:
    if config is not None:
        (tmp_path / "config.json").write_text(config)
    with pytest.raises(error, match=message):
        build_codec("diffusers", folder=tmp_path)


def test_shapes_that_do_not_fit_are_refused(wan_folder: Path) -> None:
    codec = DiffusersCodec(wan_folder)
    with pytest.raises(ValueError, match=r"--frames must be 4k\+1 for codec diffusers, got 6; the nearest smaller"):
        codec.encode(video_of(6, 8))
    with pytest.raises(ValueError, match="--height must be a positive multiple of 8 for codec diffusers, got 12"):
        codec.encode(video_of(5, 12))
