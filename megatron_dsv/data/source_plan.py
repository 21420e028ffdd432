"""Which files of the input folder are to be prepared, which are done, and which cannot be used."""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatron_dsv.data import dataset_folder, video_io
from megatron_dsv.data.captions import Caption, Captions
from megatron_dsv.data.fingerprints import file_sha256

_CAPTION_SUFFIXES = frozenset({".txt", ".csv"})
MISSING, UNREADABLE, UNREADABLE_CAPTION = "missing", "unreadable", "unreadable_caption"


@dataclass(frozen=True)
class KeptVideo:
    """What an earlier run made of a video that this one cannot see.

    Attributes:
        entry: its journal entry.
        samples: of them, those whose files are there; not empty.
        reason: missing, unreadable or unreadable_caption.
    """

    entry: dict[str, Any]
    samples: list[dict[str, Any]]
    reason: str


@dataclass
class SourcePlan:
    """The sources of a run.

    Attributes:
        todo: videos to prepare, with their captions.
        finished: journal entries of videos that an earlier run finished and that have not changed.
        dropped: videos that cannot be used: source, reason (name_not_utf8, duplicate, unreadable_caption,
            empty_caption), detail.
        kept: videos of earlier runs that are missing, or whose caption cannot be read.
        fallback: by source, what is kept of a video to prepare if it turns out to be unreadable.
        checksums: by source, sha256 of its sample files, by file, as earlier runs wrote them down.
    """

    todo: list[tuple[Path, Caption]] = field(default_factory=list)
    finished: list[dict[str, Any]] = field(default_factory=list)
    dropped: list[dict[str, Any]] = field(default_factory=list)
    kept: list[KeptVideo] = field(default_factory=list)
    fallback: dict[str, KeptVideo] = field(default_factory=dict)
    checksums: dict[str, dict[str, str]] = field(default_factory=dict)

    def keep_if_unreadable(self, entry: dict[str, Any]) -> bool:
        """Whether a new journal entry says that nothing of a video could be read, and an earlier run's is kept."""
        unreadable = not entry["samples"] and any(drop["reason"] == UNREADABLE for drop in entry["dropped"])
        if not unreadable or entry["source"] not in self.fallback:
            return False
        self.kept.append(self.fallback[entry["source"]])
        self.dropped += entry["dropped"]
        return True


def scan(folder: Path, output: Path) -> tuple[list[Path], list[str]]:
    """Videos and images under a folder in order, and the names of files of no use, printable; hidden files and the
    output are not looked at.

    Raises:
        ValueError: there is no video and no image.
    """
    output = output.resolve()
    sources, ignored = [], []
    for path in _files(folder):
        suffix = path.suffix.lower()
        if output in path.resolve().parents:
            continue
        if suffix in video_io.VIDEO_SUFFIXES | video_io.IMAGE_SUFFIXES:
            sources.append(path)
        elif suffix not in _CAPTION_SUFFIXES:
            ignored.append(dataset_folder.printable(source_name(folder, path)))
    if not sources:
        raise ValueError(f"--input must hold videos or images ({', '.join(sorted(video_io.VIDEO_SUFFIXES))}, "
                         f"{', '.join(sorted(video_io.IMAGE_SUFFIXES))}), got {folder}, which has none")
    return sources, ignored


def _files(folder: Path) -> list[Path]:
    """All files under a folder that are not hidden, in order; linked folders are entered, each once."""
    found, entered = [], {folder.resolve()}
    for parent, folders, names in os.walk(folder, onerror=_refuse, followlinks=True):
        found += [Path(parent, name) for name in names if not name.startswith(".")]
        real = {name: Path(parent, name).resolve() for name in sorted(folders) if not name.startswith(".")}
        folders[:] = [name for name, path in real.items() if path not in entered]
        entered.update(real.values())
    return sorted(found)


def _refuse(error: OSError) -> None:
    raise ValueError(f"--input must be readable throughout, got {error.filename} ({error.strerror})") from error


def source_name(folder: Path, path: Path) -> str:
    """Name of a source in the data set: its path under the input folder, with forward slashes."""
    return path.relative_to(folder).as_posix()


def plan_sources(folder: Path, output: Path, sources: list[Path], captions: Captions, *, prune: bool) -> SourcePlan:
    """Sorts sources into finished, to do, and dropped (copies of another, no usable caption).

    A folder may be unmounted, a file unreadable for a moment: unless ``prune``, what earlier runs made of them is kept.
    """
    plan = SourcePlan()
    journal = {entry["source"]: entry for entry in dataset_folder.read_lines(output / dataset_folder.JOURNAL_FILE)}
    named = []
    for path in sources:
        shown = dataset_folder.printable(source_name(folder, path))
        if shown == source_name(folder, path):
            named.append(path)
        else:
            plan.dropped.append({"source": shown, "reason": "name_not_utf8", "detail": "rename it"})
    copies = _copies(named)

    def keep(source: str, reason: str) -> list[KeptVideo]:
        entry = journal.get(source)
        samples = [] if entry is None or prune else [sample for sample in entry["samples"] if _is_whole(output, sample)]
        return [KeptVideo(entry, samples, reason)] if entry is not None and samples else []

    for path in named:
        source = source_name(folder, path)
        if path in copies:
            plan.dropped.append({"source": source, "reason": "duplicate",
                                 "detail": f"same content as {source_name(folder, copies[path])}"})
            continue
        try:
            caption = captions.of(path)
        except ValueError as error:
            plan.dropped.append({"source": source, "reason": UNREADABLE_CAPTION, "detail": str(error)})
            plan.kept += keep(source, UNREADABLE_CAPTION)
            continue
        if not caption.text:
            plan.dropped.append({"source": source, "reason": "empty_caption", "detail": f"from {caption.origin}"})
            continue
        entry = journal.get(source)
        if entry is not None and _still_valid(output, entry, path, caption):
            plan.finished.append(entry)
        else:
            plan.todo.append((path, caption))
            plan.fallback.update((source, video) for video in keep(source, UNREADABLE))
    for source in journal.keys() - {source_name(folder, path) for path in sources}:
        plan.kept += keep(source, MISSING)
    if plan.todo:
        plan.checksums = _checksums(output, journal.values())
    return plan


def _checksums(output: Path, journal: Iterable[dict[str, Any]]) -> dict[str, dict[str, str]]:
    """By source, sha256 of its sample files, by file. The journal may be lost, or be newer than the index."""
    index = dataset_folder.read_lines(output / dataset_folder.INDEX_FILE)
    found: dict[str, dict[str, str]] = defaultdict(dict)
    for line in [*index, *(sample for entry in journal for sample in entry["samples"])]:
        if line.keys() >= {"source", "file", "sha256"}:  # an index may be damaged and still parse
            found[line["source"]][line["file"]] = line["sha256"]
    return found


def _copies(sources: list[Path]) -> dict[Path, Path]:
    """Each file whose content an earlier one has, with that one. Only files of equal size are read."""
    by_size: dict[int, list[Path]] = defaultdict(list)
    for path in sources:
        # A broken link is reported as unreadable where it is decoded.
        if path.exists():
            by_size[path.stat().st_size].append(path)
    copies: dict[Path, Path] = {}
    for group in by_size.values():
        first: dict[str, Path] = {}
        for path in group if len(group) > 1 else []:
            try:
                original = first.setdefault(file_sha256(path), path)
            except OSError:
                # It is reported as unreadable where it is decoded.
                continue
            if original != path:
                copies[path] = original
    return copies


def _still_valid(root: Path, entry: dict[str, Any], path: Path, caption: Caption) -> bool:
    """Whether a journal entry still describes the video, its caption and its files. Drops are always tried again."""
    if entry["dropped"] or not path.exists():
        return False
    stat = path.stat()
    if (entry["bytes"], entry["mtime_ns"]) != (stat.st_size, stat.st_mtime_ns) or \
            (entry["caption"], entry["caption_origin"]) != (caption.text, caption.origin):
        return False
    return all(_is_whole(root, sample) for sample in entry["samples"])


def _is_whole(root: Path, sample: dict[str, Any]) -> bool:
    file = root / sample["file"]
    return file.is_file() and file.stat().st_size == sample["bytes"]
