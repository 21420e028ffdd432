"""The wheel carries the presets, and they load from it."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

import megatron_dsv
from megatron_dsv import presets

REPOSITORY = Path(megatron_dsv.__file__).parent.parent


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy, so that no build folder is left behind."""
    import shutil

    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("megatron_dsv", "configs"):
        shutil.copytree(REPOSITORY / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("pyproject.toml", "setup.py", "README.md", "LICENSE", "MANIFEST.in"):
        shutil.copy(REPOSITORY / name, source / name)
    code = f"from setuptools import build_meta; build_meta.build_wheel({str(out)!r})"
    subprocess.run([sys.executable, "-c", code], cwd=source, capture_output=True, check=True)
    return next(out.glob("*.whl"))


def test_the_wheel_holds_every_preset_module_and_the_licence(wheel):
    inside = set(zipfile.ZipFile(wheel).namelist())
    assert {f"megatron_dsv/configs/{name}.yaml" for name in presets.names()} <= inside
    modules = {path.relative_to(REPOSITORY).as_posix() for path in (REPOSITORY / "megatron_dsv").rglob("*.py")}
    assert modules <= inside
    assert any(name.endswith("licenses/LICENSE") for name in inside)
    assert not any(name.startswith(("tests/", "configs/")) for name in inside)


def test_presets_load_from_the_wheel(wheel, tmp_path):
    zipfile.ZipFile(wheel).extractall(tmp_path)
    code = ("from megatron_dsv import presets; assert presets.root().parts[-2:] == ('megatron_dsv', 'configs'); "
            "print(presets.path('wan2.1-1.3b').read_text())")
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True,
                          env={"PYTHONPATH": str(tmp_path)})
    assert "num-layers: 30" in done.stdout
