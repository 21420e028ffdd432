"""The demo empties nothing but what a demo made, and its launches take free ports."""

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).resolve().parents[3] / "scripts" / "demo.py"


@pytest.fixture
def demo():
    return runpy.run_path(str(DEMO))


def test_a_folder_that_no_demo_made_is_refused_and_kept(tmp_path):
    (tmp_path / "thesis.txt").write_text("years of work")
    done = subprocess.run([sys.executable, str(DEMO), "--folder", str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "--folder must be new, empty, or of an earlier demo" in done.stderr
    assert "name another folder, or remove this one yourself" in done.stderr
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("thesis.txt", "years of work")]


@pytest.mark.parametrize("name", ["new/deep", ""])
def test_an_earlier_demo_s_folder_is_emptied(demo, tmp_path, name):
    folder = tmp_path / name
    outside = tmp_path.parent / f"{tmp_path.name}-outside"
    outside.mkdir()
    (outside / "kept").touch()
    with demo["claim"](folder):
        (folder / "run").mkdir()
        (folder / "run" / "model.pt").touch()
        (folder / "train.log").touch()
        (folder / "link").symlink_to(outside)
    with demo["claim"](folder):
        assert [path.name for path in folder.iterdir()] == [demo["MARKER"]]
    assert (outside / "kept").exists()


def test_a_demo_that_is_running_keeps_its_folder(demo, tmp_path):
    with demo["claim"](tmp_path):
        (tmp_path / "train.log").touch()
        with pytest.raises(SystemExit, match="--folder must be one that no other demo is using"):
            demo["claim"](tmp_path)
        assert (tmp_path / "train.log").exists()


def test_a_file_is_no_folder(demo, tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(SystemExit, match="--folder cannot be used: File exists"):
        demo["claim"](tmp_path / "file")


def test_launches_of_two_demos_do_not_meet(demo, monkeypatch, tmp_path):
    commands = []
    monkeypatch.setattr(subprocess, "Popen", lambda command, **_: commands.append(command))
    demo["start"](tmp_path, "arm", 2, ["--lr", "1"])
    assert "--standalone" in commands[0]
    assert "--master-port" not in commands[0]


def test_layers_of_a_profile_are_read_before_and_after_their_recall_is_measured(demo):
    from megatron_dsv.training.dsv_controller import LayerReport
    from megatron_dsv.training.logging import _rows

    reports = [LayerReport(1, False, 0.5, 0.25, float("nan")), LayerReport(2, True, 0.5, 0.25, 0.9)]
    assert demo["layer_table"](f" profile at step 3:{_rows(reports)}\n") == [
        ("1", "dense", "0.500", "0.250", "not measured"), ("2", "sparse", "0.500", "0.250", "0.900")]
