"""Patches look before they replace, and importing them loads nothing."""

import subprocess
import sys
from types import SimpleNamespace

import pytest

from megatron_dsv.platform import compat


def test_a_patch_refuses_another_megatron():
    def evaluate(model, steps):
        return None

    owner = SimpleNamespace(__name__="training", evaluate=evaluate)
    assert compat._current(owner, "evaluate", ("model", "steps")) is evaluate
    with pytest.raises(RuntimeError, match=r"training.evaluate takes \('model',\), .* needs megatron-core==0.19.2"):
        compat._current(owner, "evaluate", ("steps",))
    with pytest.raises(RuntimeError, match=r"training.train does not exist: .* needs megatron-core==0.19.2"):
        compat._current(owner, "train", ())


def test_the_pin_is_the_installed_version():
    from importlib.metadata import version

    assert version("megatron-core") == compat.PIN


def test_import_loads_nothing_heavy():
    code = (
        "import sys, megatron_dsv.platform.compat, megatron_dsv.platform.cpu\n"
        "print([m for m in ('megatron', 'triton', 'transformer_engine', 'wandb') if m in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
