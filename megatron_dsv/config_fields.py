"""One schema, three spellings: a dataclass field ``dsv_x`` is the flag ``--dsv-x`` and the YAML key ``dsv-x``.

A field declares its help text, its allowed values and its limits once, with :func:`knob`; the parser group, the checks
and the error messages all come from there.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Mapping, Sequence
from dataclasses import Field, field, fields
from types import UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from megatron_dsv.suggestions import did_you_mean


def knob(default: Any, help: str, *, choices: Sequence[str] | None = None, aliases: Mapping[str, str] | None = None,
         minimum: float | None = None, maximum: float | None = None, above: float | None = None,
         below: float | None = None, power_of_two: bool = False, sizes: int | None = None) -> Any:
    """A dataclass field that is also a flag.

    Args:
        default: value of the field; its annotation gives the type (bool, int, float, str, each may be ``| None``).
        help: the flag's help text.
        choices: the allowed words of a string field.
        aliases: other spellings of a choice, such as ``{"0": "dense"}``.
        minimum, maximum: inclusive limits of a number.
        above, below: exclusive limits of a number.
        power_of_two: the integer must be a power of two.
        sizes: the string is this many positive integers joined by ``x``, such as ``4x4x4``.
    """
    return field(default=default, metadata={
        "help": help, "choices": tuple(choices) if choices else None, "aliases": dict(aliases or {}),
        "minimum": minimum, "maximum": maximum, "above": above, "below": below, "power_of_two": power_of_two,
        "sizes": sizes,
    })


def flag_of(name: str) -> str:
    """The flag of a field: ``dsv_keep_ratio`` gives ``--dsv-keep-ratio``."""
    return "--" + name.replace("_", "-")


def add_dataclass_arguments(parser: argparse.ArgumentParser, cls: type) -> argparse.ArgumentParser:
    """Add one argument group with a flag for every field of ``cls``; booleans get ``--x`` and ``--no-x``."""
    group = parser.add_argument_group((cls.__doc__ or cls.__name__).splitlines()[0])
    types = get_type_hints(cls)
    for item in fields(cls):
        kind, _ = _kind(types[item.name])
        # argparse expands %-formats in help texts.
        text = f"{item.metadata['help']} (default: {_shown(item.default)})".replace("%", "%%")
        options: dict[str, Any] = {"dest": item.name, "default": item.default, "help": text}
        if kind is bool:
            options["action"] = argparse.BooleanOptionalAction
        else:
            options["type"] = _reader(item, kind)
            if item.metadata["choices"]:
                options["metavar"] = "{" + ",".join(item.metadata["choices"]) + "}"
        group.add_argument(flag_of(item.name), **options)
    return parser


def from_args[Config](cls: type[Config], args: argparse.Namespace) -> Config:
    """Build ``cls`` from the parsed arguments; its fields must have been added with :func:`add_dataclass_arguments`."""
    return cls(**{item.name: getattr(args, item.name) for item in fields(cls)})  # type: ignore[arg-type]


def check_fields(config: Any) -> None:
    """Check every field of a dataclass instance against what its :func:`knob` declares.

    Raises:
        ValueError: one line that names the flag, what is allowed and what it got.
    """
    types = get_type_hints(type(config))
    for item in fields(config):
        value = getattr(config, item.name)
        kind, optional = _kind(types[item.name])
        if value is None and optional:
            continue
        accepted = (int, float) if kind is float else kind
        right_type = isinstance(value, accepted) and (kind is bool or not isinstance(value, bool))
        if not right_type or not _allowed(item, value):
            raise ValueError(f"{flag_of(item.name)} must be {describe(item, kind)}, got {_shown(value)}"
                             f"{_suggestion(item, value)}")


def parse_sizes(text: str) -> tuple[int, ...]:
    """``"1x2x2"`` gives ``(1, 2, 2)``; ValueError unless all are positive integers."""
    parts = text.split("x")
    if not all(part.isdecimal() and int(part) > 0 for part in parts):
        raise ValueError(f"expected positive integers joined by x, got {text!r}")
    return tuple(int(part) for part in parts)


def describe(item: Field, kind: type) -> str:
    """What a field allows, in words: ``an integer of at least 1``, ``one of dense, sparse``."""
    meta = item.metadata
    if meta["choices"]:
        words = f"one of {', '.join(meta['choices'])}"
        return words + (f" (or {', '.join(meta['aliases'])})" if meta["aliases"] else "")
    if meta["sizes"]:
        return f"{meta['sizes']} positive integers joined by x, such as {'x'.join(['2'] * meta['sizes'])}"
    if kind is str:
        return "text"
    if kind is bool:
        return "true or false"
    noun = "a power of two" if meta["power_of_two"] else "an integer" if kind is int else "a number"
    limits = [f"{words} {meta[key]}" for key, words in
              (("minimum", "at least"), ("above", "above"), ("maximum", "at most"), ("below", "below"))
              if meta[key] is not None]
    return noun + (", " + " and ".join(limits) if limits else "")


def _allowed(item: Field, value: Any) -> bool:
    meta = item.metadata
    if meta["choices"]:
        return value in meta["choices"]
    if meta["sizes"]:
        try:
            return len(parse_sizes(value)) == meta["sizes"]
        except ValueError:
            return False
    if isinstance(value, str | bool):
        return True
    if isinstance(value, float) and not math.isfinite(value):
        return False
    within = ((meta["minimum"] is None or value >= meta["minimum"]) and
              (meta["maximum"] is None or value <= meta["maximum"]) and
              (meta["above"] is None or value > meta["above"]) and (meta["below"] is None or value < meta["below"]))
    return within and not (meta["power_of_two"] and (value < 1 or value & (value - 1)))


def _reader(item: Field, kind: type) -> Any:
    """The argparse type of a field: converts, maps aliases and refuses what the field does not allow."""
    def read(text: str) -> Any:
        text = item.metadata["aliases"].get(text, text)
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not _allowed(item, value):
            raise argparse.ArgumentTypeError(f"must be {describe(item, kind)}, got {text!r}{_suggestion(item, text)}")
        return value
    return read


def _kind(annotation: Any) -> tuple[type, bool]:
    """(type without None, whether None is allowed)."""
    if get_origin(annotation) in (Union, UnionType):
        rest = [part for part in get_args(annotation) if part is not type(None)]
        assert len(rest) == 1, f"a field has one type, possibly with None: {annotation}"
        return rest[0], True
    return annotation, False


def _suggestion(item: Field, value: Any) -> str:
    return did_you_mean(str(value), item.metadata["choices"] or ())


def _shown(value: Any) -> str:
    return repr(value) if isinstance(value, str) else "unset" if value is None else str(value)
