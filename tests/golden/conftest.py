"""`--regenerate-golden` writes the stored curves anew; do it only for a change that is meant to move them."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate-golden", action="store_true", help="write tests/golden/*.json from this run")
