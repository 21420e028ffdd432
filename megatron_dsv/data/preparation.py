"""A folder of videos and captions to a latent data set: resumable, checked, and accounting for everything it drops.

A run may stop at any moment. Samples and index appear whole or not at all; a journal keeps a line for each finished
video, and the next run with the same settings goes on from there. Videos that changed since are prepared again. What
was made of videos that are missing or cannot be read this time is kept, unless the run is told to prune.
"""

from __future__ import annotations

import fcntl
import json
import math
import multiprocessing
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from megatron_dsv.data import dataset_folder
from megatron_dsv.data.captions import Caption, Captions
from megatron_dsv.data.clip_plan import PixelBucket
from megatron_dsv.data.codecs import VideoCodec
from megatron_dsv.data.fingerprints import file_sha256, json_sha256
from megatron_dsv.data.preparation_report import PreparationReport
from megatron_dsv.data.source_plan import KeptVideo, SourcePlan, plan_sources, scan, source_name
from megatron_dsv.data.text import TextEncoder
from megatron_dsv.data.video_preparation import VideoJob, prepare_in_worker, prepare_video, start_worker
from megatron_dsv.suggestions import did_you_mean

_LOCK_FILE = ".lock"


@dataclass(frozen=True)
class PrepareOptions:
    """What to prepare and how.

    Attributes:
        input: folder of videos and images, searched recursively.
        output: folder of the data set; made if it is not there.
        buckets: shapes of the clips.
        fps: frames a second that videos are resampled to; None keeps each video's own rate.
        clips_per_video: clips of each video, spread evenly; None takes all.
        stride: frames from one clip's start to the next; None puts clips end to end.
        captions: CSV file of captions, or None.
        latent_dtype: ``bf16`` or ``fp32``, how latents and text are stored.
        workers: processes that prepare videos; 0 works in this one.
        device: where workers run the codec.
        prune: remove the samples of videos that are missing or cannot be read.
    """

    input: Path
    output: Path
    buckets: tuple[PixelBucket, ...]
    fps: float | None = None
    clips_per_video: int | None = None
    stride: int | None = None
    captions: Path | None = None
    latent_dtype: str = "bf16"
    workers: int = 0
    device: str = "cpu"
    prune: bool = False


def prepare(options: PrepareOptions, codec: VideoCodec, text_encoder: TextEncoder,
            progress: Callable[[int, int, int], None] = lambda done, total, samples: None) -> PreparationReport:
    """Prepares, or goes on preparing, a data set.

    Args:
        options: what and how.
        codec: pixels to latents.
        text_encoder: captions to embeddings.
        progress: called with (finished videos, all videos, samples so far).

    Returns:
        the report, which is also in report.json; without a sample, a new data set leaves nothing in the output.

    Raises:
        ValueError: a flag does not fit, the output was prepared with other settings, another preparation is writing
            to it, or the input has no video. The message names the flag.
        RuntimeError: a worker process died; the message names the videos that it may have died of.
    """
    settings = _settings(options, codec, text_encoder)
    captions = Captions(options.input, options.captions)
    if options.output.is_dir():
        _refuse_foreign(options.output)
    sources, ignored = scan(options.input, options.output)
    made = not options.output.is_dir()
    _make_folder(options.output)
    with _locked(options.output):
        new = not (options.output / dataset_folder.DATASET_FILE).exists()
        null_text = _open_output(options.output, settings, text_encoder)
        report = PreparationReport(videos=len(sources), ignored_files=ignored)
        report.unused_caption_rows = captions.rows_without({source_name(options.input, path) for path in sources})
        plan = plan_sources(options.input, options.output, sources, captions, prune=options.prune)
        report.reused_videos = len(plan.finished)
        entries = plan.finished
        done, samples = len(sources) - len(plan.todo), sum(len(entry["samples"]) for entry in entries)
        progress(done, len(sources), samples)
        identity = json_sha256(_comparable(settings))
        jobs = (_job(options, path, caption, text_encoder, identity, plan) for path, caption in plan.todo)
        with (options.output / dataset_folder.JOURNAL_FILE).open("ab") as journal:
            for entry in _run(jobs, options, codec, settings["codec"]):
                if not plan.keep_if_unreadable(entry):
                    journal.write(dataset_folder.lines_to_bytes([entry]))
                    journal.flush()
                    entries.append(entry)
                done, samples = done + 1, samples + len(entry["samples"])
                progress(done, len(sources), samples)
        report.dropped += plan.dropped
        # A video that was moved has its samples under the new name.
        contents = {entry["sha256"] for entry in entries if entry["samples"]}
        kept = [video for video in plan.kept if video.entry["sha256"] not in contents]
        journaled = sorted([*entries, *(video.entry for video in kept)], key=lambda entry: entry["source"])
        entries = sorted([*entries, *map(_as_entry, kept)], key=lambda entry: entry["source"])
        report.kept = sorted(({"source": video.entry["source"], "reason": video.reason, "samples": len(video.samples)}
                              for video in kept), key=lambda video: video["source"])
        _account(report, entries, text_encoder)
        _finish(options.output, settings, null_text, entries, journaled, report)
        if new and not report.samples:
            _remove_empty(options.output, made)
    return report


def _as_entry(video: KeptVideo) -> dict[str, Any]:
    """What a kept video adds to the data set; what was dropped of it was reported when it was prepared."""
    return {**video.entry, "samples": video.samples, "dropped": []}


def _settings(options: PrepareOptions, codec: VideoCodec, text_encoder: TextEncoder) -> dict[str, Any]:
    """All settings that change the data set, JSON-ready; also checks them."""
    if not options.input.is_dir():
        raise ValueError(f"--input must be a folder of videos, got {options.input}, which "
                         f"{'is not a folder' if options.input.exists() else 'does not exist'}")
    if options.latent_dtype not in dataset_folder.LATENT_DTYPES:
        hint = did_you_mean(options.latent_dtype, dataset_folder.LATENT_DTYPES)
        raise ValueError(f"--latent-dtype must be one of {', '.join(dataset_folder.LATENT_DTYPES)}, "
                         f"got {options.latent_dtype}{hint}")
    for flag, value in (("--fps", options.fps), ("--stride", options.stride),
                        ("--clips-per-video", options.clips_per_video)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{flag} must be above 0, got {value}")
    if options.workers < 0:
        raise ValueError(f"--workers must be at least 0, got {options.workers}")
    for bucket in options.buckets:
        for flag, size in (("--frames", bucket.frames), ("--height", bucket.height), ("--width", bucket.width)):
            if size < 1:
                raise ValueError(f"{flag} must be at least 1, got {size}")
        try:
            codec.latent_shape(bucket.frames, bucket.height, bucket.width)
        except ValueError as error:
            raise ValueError(f"{error} (clips of {bucket})") from error
    settings = {"codec": codec.describe(), "text_encoder": text_encoder.describe(),
                "buckets": sorted(str(bucket) for bucket in options.buckets), "fps": options.fps,
                "clips_per_video": options.clips_per_video, "stride": options.stride,
                "latent_dtype": options.latent_dtype, "input": str(options.input.resolve())}
    for name, part in settings.items():
        text = json.dumps(part, ensure_ascii=False)
        if dataset_folder.printable(text) != text:
            raise ValueError(f"{_FLAG_OF_SETTING[name]} must take folders whose names are UTF-8, got "
                             f"{dataset_folder.printable(text)}; rename the folder")
    return settings


_FLAG_OF_SETTING = {"codec": "--codec", "text_encoder": "--text-encoder", "buckets": "--height, --width, --frames or "
                    "--bucket", "fps": "--fps", "clips_per_video": "--clips-per-video", "stride": "--stride",
                    "latent_dtype": "--latent-dtype", "input": "--input"}


def _comparable(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings that must agree between runs: weights count by their content, not by their folder."""
    plain = dict(settings)
    for part in ("codec", "text_encoder"):
        plain[part] = {key: value for key, value in settings[part].items() if not key.endswith("folder")}
    return plain


def _make_folder(root: Path) -> None:
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--output must be a folder that can be made and written, got {root} ({error.strerror})"
                         ) from error
    if not os.access(root, os.W_OK | os.X_OK):
        raise ValueError(f"--output must be a folder that this user may write, got {root}")


def _remove_empty(root: Path, made: bool) -> None:
    """Takes away a data set that got no sample: it would refuse the next try, with other settings, at this folder."""
    for name in (dataset_folder.INDEX_FILE, dataset_folder.JOURNAL_FILE, dataset_folder.REPORT_FILE,
                 dataset_folder.NULL_TEXT_FILE, dataset_folder.DATASET_FILE, _LOCK_FILE):
        (root / name).unlink(missing_ok=True)
    if made and not any(root.iterdir()):
        root.rmdir()


def _refuse_foreign(root: Path) -> None:
    if (root / dataset_folder.DATASET_FILE).exists():
        return
    foreign = sorted(path.name for path in root.iterdir() if not path.name.startswith("."))
    if foreign and foreign != [dataset_folder.NULL_TEXT_FILE]:
        raise ValueError(f"--output must be an empty or new folder, or a data set, got {root}, which holds "
                         f"{foreign[0]}")


def _open_output(root: Path, settings: dict[str, Any], text_encoder: TextEncoder) -> str:
    """Starts a data set, or checks that the one there has the same settings; clears what a stopped run left.

    Returns:
        checksum of the embedding of the empty caption, which is there and whole from now on.
    """
    if (root / dataset_folder.DATASET_FILE).exists():
        manifest = dataset_folder.read_dataset_json(root, "--output")
        before, now = _comparable(manifest["settings"]), _comparable(settings)
        changed = [name for name in now if before.get(name) != now[name]]
        if changed:
            name = changed[0]
            raise ValueError(f"{_FLAG_OF_SETTING[name]} must be as it was when {root} was prepared "
                             f"({json.dumps(before.get(name))}), got {json.dumps(now[name])}; "
                             "for other settings use another --output")
        null_text = _whole_null_text(root, manifest.get("null_text_sha256"), text_encoder)
    else:
        _refuse_foreign(root)
        null_text = _whole_null_text(root, None, text_encoder)
        dataset_folder.write_json(root / dataset_folder.DATASET_FILE, {
            "format": dataset_folder.FORMAT, "version": dataset_folder.FORMAT_VERSION, "settings": settings})
    for partial in [*root.glob(".*.tmp"), *root.glob(f"{dataset_folder.SAMPLES_FOLDER}/*/.*.tmp")]:
        partial.unlink(missing_ok=True)
    journal = root / dataset_folder.JOURNAL_FILE
    dataset_folder.write_atomically(journal, dataset_folder.lines_to_bytes(dataset_folder.read_lines(journal)))
    return null_text


def _whole_null_text(root: Path, known: str | None, text_encoder: TextEncoder) -> str:
    """Checksum of the embedding of the empty caption, written anew unless it is there with the known checksum."""
    with suppress(OSError):
        if known is not None and file_sha256(root / dataset_folder.NULL_TEXT_FILE) == known:
            return known
    return dataset_folder.write_null_text(root, text_encoder.encode([""])[0])


@contextmanager
def _locked(root: Path) -> Iterator[None]:
    """Holds the data set for one writer; the system lets go of it however the process ends."""
    with (root / _LOCK_FILE).open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ValueError(f"--output must not be in use, got {root}, which another `dsv prepare` is writing to"
                             ) from error
        yield


def _job(options: PrepareOptions, path: Path, caption: Caption, text_encoder: TextEncoder, identity: str,
         plan: SourcePlan) -> VideoJob:
    source = source_name(options.input, path)
    return VideoJob(options.output, path, source, caption.text, caption.origin, text_encoder.encode([caption.text])[0],
                    options.buckets, options.fps, options.stride, options.clips_per_video, options.latent_dtype,
                    identity, plan.checksums.get(source, {}))


def _run(jobs: Iterable[VideoJob], options: PrepareOptions, codec: VideoCodec,
         described: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Journal entries as the videos get finished; ``described`` is the codec's description."""
    if options.workers == 0:
        for job in jobs:
            yield prepare_video(job, codec)
        return
    description = json.dumps(described)
    pool = ProcessPoolExecutor(options.workers, multiprocessing.get_context("spawn"), start_worker)
    running: dict[Future[dict[str, Any]], str] = {}
    try:
        for job in jobs:
            running[pool.submit(prepare_in_worker, job, description, options.device)] = job.source
            # Few jobs in flight: they hold embeddings, and they are named if a worker dies.
            if len(running) >= 2 * options.workers:
                yield from _collect(running)
        while running:
            yield from _collect(running)
    finally:
        pool.shutdown(cancel_futures=True)


def _collect(running: dict[Future[dict[str, Any]], str]) -> Iterator[dict[str, Any]]:
    for future in wait(running, return_when=FIRST_COMPLETED).done:
        try:
            entry = future.result()
        except BrokenProcessPool as error:
            raise RuntimeError("a worker process died (out of memory, or a file that crashes the decoder) while these "
                               f"were in work: {', '.join(sorted(running.values()))}; lower --workers or move the file "
                               "away, then run the same command again, it goes on from here") from error
        del running[future]
        yield entry


def _account(report: PreparationReport, entries: list[dict[str, Any]], text_encoder: TextEncoder) -> None:
    report.samples = sum(len(entry["samples"]) for entry in entries)
    report.dropped = sorted([*report.dropped, *(drop for entry in entries for drop in entry["dropped"])],
                            key=lambda drop: (drop["source"], drop["detail"]))
    report.captions = dict(Counter(entry["caption_origin"] for entry in entries))
    shapes = Counter(str(sample["shape"]) for entry in entries for sample in entry["samples"])
    report.buckets = dict(sorted(shapes.items()))
    notes = Counter(note for entry in entries for note in entry["notes"])
    notes["caption_truncated"] = sum(text_encoder.is_truncated(entry["caption"]) for entry in entries)
    report.notes = {note: count for note, count in sorted(notes.items()) if count}


def _finish(root: Path, settings: dict[str, Any], null_text: str, entries: list[dict[str, Any]],
            journaled: list[dict[str, Any]], report: PreparationReport) -> None:
    """Writes index, dataset.json, the compacted journal and the report; removes samples that nothing refers to."""
    lines = [sample for entry in entries for sample in entry["samples"]]
    index = root / dataset_folder.INDEX_FILE
    if lines:
        dataset_folder.write_atomically(index, dataset_folder.lines_to_bytes(lines))
        dataset_folder.write_json(root / dataset_folder.DATASET_FILE, {
            "format": dataset_folder.FORMAT, "version": dataset_folder.FORMAT_VERSION, "settings": settings,
            "num_samples": len(lines), "index_sha256": file_sha256(index),
            "null_text": dataset_folder.NULL_TEXT_FILE, "null_text_sha256": null_text})
        stale = dataset_folder.listed_sample_files(root) - {line["file"] for line in lines}
        for file in stale:
            (root / file).unlink()
        report.removed_samples = len(stale)
    dataset_folder.write_atomically(root / dataset_folder.JOURNAL_FILE, dataset_folder.lines_to_bytes(journaled))
    dataset_folder.write_json(root / dataset_folder.REPORT_FILE, report.to_json())
