"""Packaged configuration files: ``model/wan2.1-1.3b`` is ``configs/model/wan2.1-1.3b.yaml``."""

from __future__ import annotations

import difflib
from pathlib import Path


def root() -> Path:
    """The folder of the configuration files: inside the package of a wheel, beside it in a source checkout."""
    package = Path(__file__).resolve().parent
    packaged = package / "configs"
    return packaged if packaged.is_dir() else package.parent / "configs"


def names() -> list[str]:
    """Every preset as ``group/name``, sorted."""
    folder = root()
    return sorted(path.relative_to(folder).with_suffix("").as_posix() for path in folder.glob("*/*.yaml"))


def path(name: str) -> Path:
    """The file of a preset, given as ``group/name`` or as a name that only one group has.

    Raises:
        ValueError: unknown or ambiguous; lists what there is.
    """
    known = names()
    matches = [entry for entry in known if name in (entry, entry.split("/", 1)[1])]
    if len(matches) == 1:
        # with_suffix would cut at the dot of a name such as wan2.1-1.3b.
        return root() / f"{matches[0]}.yaml"
    if matches:
        raise ValueError(f"preset {name!r} is ambiguous: {', '.join(matches)}; write the group too")
    close = difflib.get_close_matches(name, [*known, *(entry.split("/", 1)[1] for entry in known)], n=1)
    hint = f"did you mean {close[0]}? " if close else ""
    raise ValueError(f"no preset {name!r}; {hint}presets: {', '.join(known)}; a file needs its .yaml ending")
