"""Whether a data set is what its preparation wrote."""

from __future__ import annotations

from pathlib import Path

from megatron_dsv.data import dataset_folder
from megatron_dsv.data.fingerprints import file_sha256


def verify(root: Path) -> list[str]:
    """Compares every file of a data set with its checksum.

    Returns:
        one line for each problem; none if the data set is intact.

    Raises:
        ValueError: the folder is no data set.
    """
    manifest = dataset_folder.read_dataset_json(root, "--verify")
    index = root / dataset_folder.INDEX_FILE
    if not manifest.get("index_sha256"):
        return [f"{root}: the preparation has not finished"]
    problems = []
    for path, wanted in ((index, manifest["index_sha256"]),
                         (root / dataset_folder.NULL_TEXT_FILE, manifest["null_text_sha256"])):
        problems += _check(path, wanted)
    listed = dataset_folder.read_lines(index)
    for line in listed:
        problems += _check(root / line["file"], line["sha256"])
    stray = dataset_folder.listed_sample_files(root) - {line["file"] for line in listed}
    return problems + [f"{root / file}: not in the index" for file in sorted(stray)]


def _check(path: Path, wanted: str) -> list[str]:
    try:
        return [] if file_sha256(path) == wanted else [f"{path}: content differs from its checksum"]
    except OSError as error:
        return [f"{path}: {error.strerror}"]
