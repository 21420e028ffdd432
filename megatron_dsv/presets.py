"""Packaged configuration files: ``model/wan2.1-1.3b`` is ``configs/model/wan2.1-1.3b.yaml``."""

from __future__ import annotations

from pathlib import Path

from megatron_dsv.suggestions import did_you_mean


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
    hint = did_you_mean(name, [*known, *(entry.split("/", 1)[1] for entry in known)])
    raise ValueError(f"no preset {name!r}{hint or ';'} presets: {', '.join(known)}; a file needs its .yaml ending")
