"""Small latent data sets for tests, written through the same functions as `dsv prepare`'s.

Dims: C latent channels, T, Y, X latent frames, rows, columns; D text width.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path

import torch

from megatron_dsv.data import dataset_folder
from megatron_dsv.data.codecs import build_codec
from megatron_dsv.data.text import HashTextEncoder


def write_latents(folder: Path, shapes: Sequence[tuple[int, int, int]], *, channels: int = 16, text_dim: int = 64,
                  seed: int = 0) -> Path:
    """A data set with one sample of smooth random motion for each (T, Y, X) of ``shapes``; returns ``folder``."""
    encoder = HashTextEncoder(dim=text_dim, max_tokens=16)
    generator = torch.Generator().manual_seed(seed)
    folder.mkdir(parents=True, exist_ok=True)
    lines = []
    for number, shape in enumerate(shapes):
        key = hashlib.sha256(f"{seed}/{number}".encode()).hexdigest()
        coarse = torch.randn(1, channels, *(max(1, size // 2) for size in shape), generator=generator)
        latents = torch.nn.functional.interpolate(coarse, shape, mode="trilinear")[0]
        caption = f"moving texture number {number}"
        text = encoder.encode([caption])[0]
        facts = {"shape": list(latents.shape), "caption": caption, "source": f"{number}.mp4",
                 "text_tokens": text.shape[0]}
        lines.append(dataset_folder.write_sample(folder, key, latents.float(), text, facts))
    null_text = dataset_folder.write_null_text(folder, encoder.encode([""])[0])
    index = dataset_folder.lines_to_bytes(lines)
    dataset_folder.write_atomically(folder / dataset_folder.INDEX_FILE, index)
    dataset_folder.write_json(folder / dataset_folder.DATASET_FILE, {
        "format": dataset_folder.FORMAT, "version": dataset_folder.FORMAT_VERSION,
        "index_sha256": hashlib.sha256(index).hexdigest(), "null_text_sha256": null_text,
        "settings": {"codec": build_codec("haar", channels=channels).describe(),
                     "text_encoder": encoder.describe()}})
    return folder
