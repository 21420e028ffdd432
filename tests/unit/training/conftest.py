"""Arguments of a small launch, as its checks get them."""

import argparse
import copy

import pytest

from megatron_dsv.training import arguments, validation

BASE = ["--config", "model/debug", "--micro-batch-size", "1", "--train-iters", "10", "--lr", "1e-4",
        "--latent-data", "x"]


@pytest.fixture(scope="session")
def base():
    """Flags that a launch cannot do without."""
    return BASE


@pytest.fixture(scope="session")
def parsed():
    """Parsed arguments as ``validate`` gets them."""
    seen = []
    check = arguments.validate
    arguments.validate = lambda args, **kwargs: seen.append(copy.deepcopy(args)) or check(args, **kwargs)
    try:
        arguments.dry_parse(BASE, 4)
    finally:
        arguments.validate = check
    return seen[0]


@pytest.fixture
def refused(parsed):
    """refused(argument=value, ...) -> the message."""
    def validate(**changes):
        args = argparse.Namespace(**vars(parsed) | changes)
        with pytest.raises((ValueError, NotImplementedError)) as caught:
            validation.validate(args, check_files=False)
        assert "\n" not in str(caught.value)
        return str(caught.value)
    return validate
