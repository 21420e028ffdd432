"""What a launcher tells each process of a run, by environment variables: looked at before ranks wait for each other."""

from __future__ import annotations

from collections.abc import Mapping

_LEAST = {"WORLD_SIZE": 1, "RANK": 0, "LOCAL_WORLD_SIZE": 1, "LOCAL_RANK": 0, "MASTER_PORT": 0}
_WAY_OUT = "start ranks with torchrun, or unset it for a run of one"


class LauncherError(ValueError):
    """Misuse by which a process does not know its rank."""


def check_launcher(environment: Mapping[str, str]) -> None:
    """Check the variables that torchrun sets; without any of them a process is a run of its own.

    Raises:
        LauncherError: one line with the variable, what is allowed, what it got and the way out.
    """
    for name, least in _LEAST.items():
        value = environment.get(name)
        if value is not None and not (value.isdecimal() and int(value) >= least):
            raise LauncherError(f"{name} must be a whole number of at least {least}, got {value!r}; {_WAY_OUT}")
    for rank, size in (("RANK", "WORLD_SIZE"), ("LOCAL_RANK", "LOCAL_WORLD_SIZE")):
        if size == "LOCAL_WORLD_SIZE" and size not in environment:
            continue
        if int(environment.get(rank, 0)) >= int(environment.get(size, 1)):
            raise LauncherError(f"{rank} must be below {size}, {environment.get(size, 'which is not set')}, got "
                                f"{environment[rank]}; {_WAY_OUT}")
    if int(environment.get("WORLD_SIZE", 1)) > 1:
        for name in ("RANK", "MASTER_ADDR", "MASTER_PORT"):
            if not environment.get(name):
                raise LauncherError(f"WORLD_SIZE {environment['WORLD_SIZE']} needs {name}, got none; {_WAY_OUT}")
