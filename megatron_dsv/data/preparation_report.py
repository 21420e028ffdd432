"""What a preparation did: counts, and everything that was dropped with the reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

MAX_LISTED = 20


@dataclass
class PreparationReport:
    """Outcome of ``prepare``; ``to_json()`` is the content of report.json.

    Attributes:
        videos: files that were looked at.
        reused_videos: of them, finished by an earlier run and unchanged since.
        samples: samples of the data set.
        buckets: samples by latent shape, as text.
        captions: videos by where their caption came from (csv, txt, name).
        dropped: one entry for each dropped video or clip: source, reason, detail.
        notes: videos by what was done to them that may matter (enlarged, frames_repeated, caption_truncated).
        ignored_files: files that are neither video nor image nor caption.
        unused_caption_rows: files that the caption table names and that are not there.
        removed_samples: sample files of videos that changed, became another's copy or were pruned since the last run.
        kept: videos that could not be seen, of which an earlier run's samples were kept: source, reason, samples.
    """

    videos: int = 0
    reused_videos: int = 0
    samples: int = 0
    buckets: dict[str, int] = field(default_factory=dict)
    captions: dict[str, int] = field(default_factory=dict)
    dropped: list[dict[str, Any]] = field(default_factory=list)
    notes: dict[str, int] = field(default_factory=dict)
    ignored_files: list[str] = field(default_factory=list)
    unused_caption_rows: list[str] = field(default_factory=list)
    removed_samples: int = 0
    kept: list[dict[str, Any]] = field(default_factory=list)

    @property
    def drop_counts(self) -> dict[str, int]:
        """Dropped videos and clips by reason, most frequent first."""
        return dict(Counter(drop["reason"] for drop in self.dropped).most_common())

    def to_json(self) -> dict[str, Any]:
        """JSON-ready content, reasons counted first."""
        return {"videos": self.videos, "reused_videos": self.reused_videos, "samples": self.samples,
                "buckets": self.buckets, "captions": self.captions, "drop_counts": self.drop_counts,
                "dropped": self.dropped, "notes": self.notes, "ignored_files": self.ignored_files,
                "unused_caption_rows": self.unused_caption_rows, "removed_samples": self.removed_samples,
                "kept": self.kept}

    def lines(self) -> list[str]:
        """The report for the terminal; long lists are cut, report.json has them whole."""
        lines = [f"{self.samples} samples from {self.videos} files"
                 + (f" ({self.reused_videos} unchanged since the last run)" if self.reused_videos else "")]
        lines += [f"  latents {shape}: {count}" for shape, count in self.buckets.items()]
        lines += ["captions: " + ", ".join(f"{count} from {origin}" for origin, count in self.captions.items())]
        for name, count in self.notes.items():
            lines.append(f"note: {count} x {name.replace('_', ' ')}")
        lines += _listed("ignored, neither video nor image", self.ignored_files)
        lines += _listed("caption rows without a file", self.unused_caption_rows)
        if self.removed_samples:
            lines.append(f"removed {self.removed_samples} samples of videos that changed or are gone")
        lines += _listed(f"kept {sum(video['samples'] for video in self.kept)} samples of videos that are missing or "
                         "cannot be read (--prune removes them)",
                         [f"{video['source']}: {video['reason']}, {video['samples']} samples" for video in self.kept])
        counts = ", ".join(f"{count} {reason}" for reason, count in self.drop_counts.items())
        lines += _listed(f"dropped ({counts})",
                         [f"{drop['source']}: {drop['reason']}, {drop['detail']}" for drop in self.dropped])
        return lines


def _listed(title: str, items: list[str]) -> list[str]:
    if not items:
        return []
    more = [f"  and {len(items) - MAX_LISTED} more, see report.json"] if len(items) > MAX_LISTED else []
    return [f"{title}: {len(items)}", *(f"  {item}" for item in items[:MAX_LISTED]), *more]
