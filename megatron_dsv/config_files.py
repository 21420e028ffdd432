"""``--config A.yaml [B.yaml ...]`` becomes flags, before the parser sees the command line.

A key is a flag without its dashes. Later files win over earlier ones, a file wins over what it includes, and the
command line wins over every file. Two keys are reserved: ``include`` (files or presets, relative to the file) and
``gpus`` (the number of ranks that the file is written for; informative, checked by ``dsv configs-check``).
"""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatron_dsv import presets
from megatron_dsv.suggestions import did_you_mean

RESERVED = ("include", "gpus")
_MAX_DEPTH = 20
_SHOWN = 200


@dataclass
class Expansion:
    """A command line with its configuration files turned into flags.

    Attributes:
        argv: flags of the files, then the rest of the command line.
        origins: option string -> the file that set it; flags of the command line have none.
        files: every file read, in the order of rising priority.
        gpus: what the last file with a ``gpus`` key says, or None.
    """

    argv: list[str]
    origins: dict[str, str] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    gpus: int | None = None


class _Number(str):
    """A number or a date as it is written: a flag reads it as from the command line, text keeps its zeros."""

    def __repr__(self) -> str:
        return str(self)


class _Loader(yaml.SafeLoader):
    """SafeLoader that leaves numbers as they are written, and refuses what YAML itself would resolve silently."""

    def construct_number(self, node: yaml.ScalarNode) -> _Number:
        return _Number(self.construct_scalar(node))

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            line = key_node.start_mark.line + 1
            if key_node.tag == "tag:yaml.org,2002:merge":
                raise ValueError(f"a key must be the name of a flag, got the merge key << (line {line}); use 'include' "
                                 "to take over another file")
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str) or isinstance(key, _Number):
                raise ValueError(f"a key must be text, the name of a flag, got {_short(key)} (line {line})")
            if key in seen:
                raise ValueError(f"key {key!r} is given twice (line {line})")
            seen.add(key)
        return super().construct_mapping(node, deep)


for _kind in ("int", "float", "timestamp"):
    _Loader.add_constructor(f"tag:yaml.org,2002:{_kind}", _Loader.construct_number)


def add_opposites(parser: argparse.ArgumentParser) -> None:
    """Give every switch its hidden opposite (``--x`` and ``--no-x``), so that a flag can undo what a file says."""
    options = parser._option_string_actions
    for action in list(parser._actions):
        turns_on = isinstance(action, argparse._StoreTrueAction)
        if not turns_on and not isinstance(action, argparse._StoreFalseAction):
            continue
        for option in action.option_strings:
            if option.startswith("--") and opposite(option) not in options:
                parser.add_argument(opposite(option), dest=action.dest, help=argparse.SUPPRESS,
                                    action="store_false" if turns_on else "store_true", default=argparse.SUPPRESS)


def opposite(option: str) -> str:
    """``--x`` for ``--no-x`` and the other way round."""
    return "--" + option[5:] if option.startswith("--no-") else "--no-" + option[2:]


def expand(argv: Sequence[str], parser: argparse.ArgumentParser, without: Collection[str] = ()) -> Expansion:
    """Replace every ``--config`` of ``argv`` with the flags that its files hold.

    Args:
        argv: the command line without the program's name.
        parser: the complete parser; it knows which flags there are and which take values.
        without: arguments that files do not set, by their names in the parsed result.

    Raises:
        ValueError: one line that names the file and the key: unknown key, wrong kind of value, cycle, no such file.
    """
    references, rest = _split(argv)
    expansion = Expansion(argv=[])
    settings: dict[str, tuple[list[str], str]] = {}
    for reference in references:
        _read(_resolve(reference, Path.cwd(), "--config"), parser, settings, expansion, ())
    options = parser._option_string_actions
    overridden = {options[token.split("=", 1)[0]].dest for token in rest if token.split("=", 1)[0] in options}
    for dest, (tokens, file) in settings.items():
        if dest in overridden or dest in without:
            continue
        expansion.argv += tokens
        expansion.origins[tokens[0].split("=", 1)[0]] = file
    expansion.argv += rest
    return expansion


def settings_of(argv: Sequence[str], parser: argparse.ArgumentParser) -> dict[str, Any]:
    """The last value of every flag of an expanded command line, by YAML key: what a file must say to repeat it."""
    merged: dict[str, tuple[str, list[str]]] = {}
    current: list[str] = []
    for token in argv:
        option, equals, value = token.partition("=")
        if option in parser._option_string_actions:
            current = [value] if equals else []
            merged[parser._option_string_actions[option].dest] = (option, current)
        else:
            current.append(token)
    result: dict[str, Any] = {}
    for option, values in merged.values():
        action = parser._option_string_actions[option]
        if action.nargs == 0:
            result[option.lstrip("-")] = True
        else:
            plain = [_plain(value) for value in values]
            result[option.lstrip("-")] = plain if action.nargs is not None else plain[0] if plain else ""
    return result


def read_mapping(path: Path) -> dict[str, Any]:
    """What one file says itself, by YAML key, without what it includes; numbers are text, as they are written.

    Raises:
        ValueError: as :func:`expand`.
    """
    try:
        content = yaml.load(path.read_text(encoding="utf-8"), Loader=_Loader)
    except OSError as error:
        raise ValueError(f"{path.name}: cannot be read: {error.strerror}") from None
    except RecursionError:
        raise ValueError(f"{path.name}: lists and mappings must be at most {_MAX_DEPTH} deep, got more") from None
    except yaml.YAMLError as error:
        raise ValueError(f"{path.name}: not valid YAML: {' '.join(str(error).split())}") from None
    except ValueError as error:
        raise ValueError(f"{path.name}: {error}") from None
    if content is not None and not isinstance(content, dict):
        raise ValueError(f"{path.name}: must be a mapping of flag names to values, got {type(content).__name__}")
    return content or {}


def _split(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """(the values of every --config, everything else)."""
    references: list[str] = []
    rest: list[str] = []
    tokens = list(argv)
    while tokens:
        token = tokens.pop(0)
        if token.startswith("--config="):
            references.append(token.removeprefix("--config="))
        elif token == "--config":
            if not tokens or tokens[0].startswith("-"):
                raise ValueError("--config needs at least one YAML file or preset name, got none")
            while tokens and not tokens[0].startswith("-"):
                references.append(tokens.pop(0))
        else:
            rest.append(token)
    return references, rest


def _resolve(reference: str, folder: Path, asked_by: str) -> Path:
    """A reference that ends in .yaml or .yml is a file, anything else a preset."""
    if reference.endswith((".yaml", ".yml")):
        path = (folder / reference).resolve()
        if not path.is_file():
            raise ValueError(f"{asked_by}: no such file {path}")
        return path
    try:
        return presets.path(reference)
    except ValueError as error:
        raise ValueError(f"{asked_by}: {error}") from None


def _read(path: Path, parser: argparse.ArgumentParser, settings: dict[str, tuple[list[str], str]],
          expansion: Expansion, parents: tuple[Path, ...]) -> None:
    """Merge a file and what it includes into ``settings`` (dest -> flag tokens, file)."""
    if path in parents:
        chain = " -> ".join(entry.name for entry in (*parents[parents.index(path):], path))
        raise ValueError(f"{path.name}: include makes a cycle: {chain}")
    if len(parents) > _MAX_DEPTH:
        raise ValueError(f"{path.name}: files must include each other at most {_MAX_DEPTH} deep, got more, from "
                         f"{parents[0].name} on")
    content = read_mapping(path)
    include = content.pop("include", None) or []
    references = include if isinstance(include, list) else [include]
    for reference in references:
        if not isinstance(reference, str) or isinstance(reference, _Number):
            raise ValueError(f"{path.name}: include must be a file or preset, or a list of them, got "
                             f"{_short(reference)}")
        _read(_resolve(reference, path.parent, f"{path.name}: include"), parser, settings, expansion,
              (*parents, path))
    gpus = content.pop("gpus", None)
    if gpus is not None:
        if not isinstance(gpus, _Number) or not gpus.isdecimal() or int(gpus) < 1:
            raise ValueError(f"{path.name}: gpus must be an integer of at least 1, got {_short(gpus)}")
        expansion.gpus = int(gpus)
    set_by: dict[str, str] = {}
    for key, value in content.items():
        dest, tokens = _tokens(key, value, parser, path.name)
        other = set_by.setdefault(dest, key)
        if other != key:
            raise ValueError(f"{path.name}: {other!r} and {key!r} set the same thing; keep one of them")
        # Popped first, so that the merged order is the order of the deciding files.
        settings.pop(dest, None)
        if tokens:
            settings[dest] = (tokens, path.name)
    expansion.files.append(str(path))


def _tokens(key: str, value: Any, parser: argparse.ArgumentParser, file: str) -> tuple[str, list[str]]:
    """(dest, flag tokens) of one YAML entry; no tokens for null, which unsets."""
    options = parser._option_string_actions
    option = "--" + key
    if key in ("config", "help"):
        raise ValueError(f"{file}: {key!r} belongs on the command line; a file refers to others with 'include'")
    if option not in options:
        known = [name[2:] for name in options if name.startswith("--")]
        raise ValueError(f"{file}: unknown key {key!r}{did_you_mean(key, [*known, *RESERVED])}")
    action = options[option]
    if value is None:
        return action.dest, []
    if action.nargs == 0:
        if not isinstance(value, bool):
            raise ValueError(f"{file}: {key} must be true or false, got {_short(value)}")
        return action.dest, [option if value else opposite(option)]
    if isinstance(value, bool | dict | set | bytes):
        raise ValueError(f"{file}: {key} takes a value, got {_short(value)}; quote it if it is text")
    if isinstance(value, list):
        if action.nargs is None:
            raise ValueError(f"{file}: {key} takes one value, got a list: {_short(value)}")
        entries = [str(entry) for entry in _flatten(value, f"{file}: {key}")]
        flag = next((entry for entry in entries if entry.split("=", 1)[0] in options), None)
        if flag is not None:
            raise ValueError(f"{file}: {key} takes values, got the flag {flag} among them; give it a key of its own")
        return action.dest, [option, *entries]
    # One token, so that a value may begin with a dash.
    return action.dest, [f"{option}={value}"]


def _flatten(value: list[Any], where: str, depth: int = 1) -> list[Any]:
    # An alias may put a list into itself.
    if depth > _MAX_DEPTH:
        raise ValueError(f"{where} must be a list at most {_MAX_DEPTH} deep, got more")
    leaves: list[Any] = []
    for entry in value:
        if isinstance(entry, bool | dict | set | bytes) or entry is None:
            raise ValueError(f"{where} must be a list of values, got {_short(entry)} in it; quote it if it is text")
        leaves += _flatten(entry, where, depth + 1) if isinstance(entry, list) else [entry]
    return leaves


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "..."


def _plain(text: str) -> Any:
    """A number as a number when it reads back as the same text."""
    for kind in (int, float):
        try:
            if str(kind(text)) == text:
                return kind(text)
        except ValueError:
            continue
    return text
