"""One video to its samples: the part of the preparation that runs in worker processes.

Dims: C latent channels, T latent frames, H x W latent positions; L text tokens, D text width.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import threading
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dsv.data import dataset_folder, video_io
from megatron_dsv.data.clip_plan import PixelBucket, choose_bucket, clip_starts
from megatron_dsv.data.codecs import VideoCodec, codec_from_description
from megatron_dsv.data.fingerprints import file_sha256, json_sha256


@dataclass(frozen=True)
class VideoJob:
    """What a worker needs to prepare one video.

    Attributes:
        root: the data set.
        path: the video; ``source`` is the same relative to the input folder.
        caption: text and where it came from.
        text: embedding fp32 [L, D] of the caption.
        buckets, fps, stride, clips_per_video, latent_dtype: see ``PrepareOptions``.
        settings_sha256: of all settings that change a sample's bytes.
        checksums: sha256 of the video's sample files, by file, as earlier runs wrote them down.
    """

    root: Path
    path: Path
    source: str
    caption: str
    caption_origin: str
    text: Tensor
    buckets: tuple[PixelBucket, ...]
    fps: float | None
    stride: int | None
    clips_per_video: int | None
    latent_dtype: str
    settings_sha256: str
    checksums: dict[str, str]


def prepare_video(job: VideoJob, codec: VideoCodec) -> dict[str, Any]:
    """Writes the samples of one video and gives its journal entry.

    Samples that are already there as they were written are kept. What cannot be used is not an error: it is listed
    under ``dropped`` with ``reason`` (unreadable, timestamps_jump, too_short, non_finite_latents) and ``detail``.
    """
    entry: dict[str, Any] = {"source": job.source, "caption": job.caption, "caption_origin": job.caption_origin,
                             "samples": [], "dropped": [], "notes": []}

    def drop(reason: str, detail: str) -> None:
        entry["dropped"].append({"source": job.source, "reason": reason, "detail": detail})

    try:
        stat = job.path.stat()
        entry.update(bytes=stat.st_size, mtime_ns=stat.st_mtime_ns, sha256=file_sha256(job.path))
        info = video_io.probe(job.path)
    except OSError as error:
        drop("unreadable", error.strerror or type(error).__name__)
        return entry
    except video_io.UnreadableVideoError as error:
        drop("unreadable", str(error))
        return entry
    try:
        frames = video_io.resampled_frames(info.times, job.fps)
    except video_io.TimestampJumpError as error:
        drop("timestamps_jump", str(error))
        return entry
    bucket = choose_bucket(job.buckets, info.height, info.width, len(frames))
    if bucket is None:
        drop("too_short", _too_short(len(frames), job))
        return entry
    if bucket.height > info.height or bucket.width > info.width:
        entry["notes"].append("enlarged")
    if len(frames) > len(info.times):
        entry["notes"].append("frames_repeated")
    shared = {"shape": list(codec.latent_shape(bucket.frames, bucket.height, bucket.width)), "caption": job.caption,
              "source": job.source, "source_sha256": entry["sha256"], "pixels": str(bucket),
              "text_tokens": job.text.shape[0]}
    with video_io.FrameReader(job.path, info, bucket.height, bucket.width) as reader:
        for start in clip_starts(len(frames), bucket.frames, job.stride, job.clips_per_video):
            chosen = frames[start:start + bucket.frames]
            facts = {**shared, "start_frame": start, "start_seconds": round(info.times[chosen[0]], 6)}
            try:
                sample = _prepare_clip(job, codec, reader, chosen, facts)
            except video_io.UnreadableVideoError as error:
                drop("unreadable", str(error))
                continue
            if sample is None:
                drop("non_finite_latents", f"clip at {info.times[chosen[0]]:.2f} s")
            else:
                entry["samples"].append(sample)
    return entry


def _prepare_clip(job: VideoJob, codec: VideoCodec, reader: video_io.FrameReader, chosen: list[int],
                  facts: dict[str, Any]) -> dict[str, Any] | None:
    """Index line of one clip, written now or before; None if its latents are not finite."""
    key = json_sha256([facts, job.settings_sha256])[:32]
    known = dataset_folder.recover_sample(job.root, key, job.checksums.get(dataset_folder.sample_file(key)))
    if known is not None:
        return known
    latents = codec.encode(reader.read(chosen))
    stored = latents.to(dataset_folder.LATENT_DTYPES[job.latent_dtype])
    if not torch.isfinite(stored).all():
        return None
    return dataset_folder.write_sample(job.root, key, stored, job.text, facts)


def _too_short(frames: int, job: VideoJob) -> str:
    needed = min((bucket.frames for bucket in job.buckets if bucket.frames > 1 or frames == 1), default=1)
    way_out = "; for still images add --bucket HEIGHTxWIDTHx1" if frames == 1 else ""
    return f"{frames} frames{f' at {job.fps:g} frames a second' if job.fps else ''}, needs {needed}{way_out}"


def prepare_in_worker(job: VideoJob, codec_description: str, device: str) -> dict[str, Any]:
    """``prepare_video`` in a worker process, which builds its codec once, from its description as JSON."""
    return prepare_video(job, _worker_codec(codec_description, device))


def start_worker() -> None:
    """Initialises a worker process: one arithmetic thread, and an end when the parent ends, however that happened."""
    torch.set_num_threads(1)
    parent = multiprocessing.parent_process()
    if parent is not None:
        threading.Thread(target=_end_with, args=(parent.sentinel,), daemon=True).start()


def _end_with(sentinel: int) -> None:
    multiprocessing.connection.wait([sentinel])
    os._exit(1)


@lru_cache(maxsize=1)
def _worker_codec(description: str, device: str) -> VideoCodec:
    return codec_from_description(json.loads(description), device=device)
