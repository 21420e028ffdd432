"""The caption of each video: a row of a CSV file, a .txt file beside the video, or the video's own name."""

from __future__ import annotations

import csv
import re
from dataclasses import dataclass
from pathlib import Path

_COLUMNS = ("file", "caption")


@dataclass(frozen=True)
class Caption:
    """A caption's text and where it came from: ``csv``, ``txt`` or ``name``."""

    text: str
    origin: str


class Captions:
    """Captions of the videos under one folder.

    A row of the CSV comes first, then a .txt file with the video's name, then the name with separators as spaces.

    Args:
        folder: the folder of the videos.
        table: CSV file with the columns file (path relative to ``folder``, forward slashes) and caption, or None.

    Raises:
        ValueError: the table is missing, lacks a column, repeats a file, or is not UTF-8.
    """

    def __init__(self, folder: Path, table: Path | None) -> None:
        self._folder = folder
        self._rows = _read_table(table) if table else {}

    def of(self, path: Path) -> Caption:
        """Caption of a video under the folder.

        Raises:
            ValueError: its .txt file cannot be read as UTF-8; the message has no path.
        """
        source = path.relative_to(self._folder).as_posix()
        if source in self._rows:
            return Caption(self._rows[source], "csv")
        beside = path.with_suffix(".txt")
        if beside.is_file():
            try:
                return Caption(" ".join(beside.read_text(encoding="utf-8").split()), "txt")
            except (OSError, UnicodeDecodeError) as error:
                raise ValueError(f"its .txt file cannot be read as UTF-8 ({type(error).__name__})") from error
        return Caption(re.sub(r"[\W_]+", " ", path.stem).strip(), "name")

    def rows_without(self, sources: set[str]) -> list[str]:
        """Files that the table names and ``sources`` does not hold."""
        return sorted(self._rows.keys() - sources)


def _read_table(table: Path) -> dict[str, str]:
    try:
        with table.open(newline="", encoding="utf-8-sig") as stream:
            reader = csv.DictReader(stream)
            missing = [column for column in _COLUMNS if column not in (reader.fieldnames or [])]
            if missing:
                raise ValueError(f"--captions must be a CSV file with the columns file and caption, got {table} with "
                                 f"{', '.join(reader.fieldnames or ['no column'])}")
            rows: dict[str, str] = {}
            for row in reader:
                source = (row["file"] or "").strip().removeprefix("./")
                if source in rows:
                    raise ValueError(f"--captions must name each file once, got {source} again in line "
                                     f"{reader.line_num} of {table}")
                rows[source] = " ".join((row["caption"] or "").split())
            return rows
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"--captions must be a readable UTF-8 CSV file, got {table} ({type(error).__name__})"
                         ) from error
