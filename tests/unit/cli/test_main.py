import importlib
import re
import sys

import pytest

from megatron_dsv.cli import doctor
from megatron_dsv.cli.main import COMMANDS, main


def test_a_command_is_imported_only_when_asked_for(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.startswith("megatron_dsv.cli.") and not name.endswith("main")]:
        monkeypatch.delitem(sys.modules, name)
    with pytest.raises(SystemExit) as caught:
        main(["--help"])
    assert caught.value.code == 0
    out = capsys.readouterr().out
    assert all(name in out for name in COMMANDS)
    assert not [f"megatron_dsv.cli.{module}" for module, _ in COMMANDS.values()
                if f"megatron_dsv.cli.{module}" in sys.modules]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_its_two_functions(name, capsys):
    module = importlib.import_module(f"megatron_dsv.cli.{COMMANDS[name][0]}")
    assert callable(module.add_arguments)
    assert callable(module.run)
    with pytest.raises(SystemExit) as caught:
        main([name, "--help"])
    assert caught.value.code == 0


def test_misuse_is_one_line_and_status_2(capsys):
    assert main(["report", "no-such-folder"]) == 2
    error = capsys.readouterr().err
    assert error == ("dsv report: error: the folder must be one that --tensorboard-dir named, got no-such-folder, "
                     "which does not exist\n")


@pytest.mark.parametrize(("arguments", "words"), [
    (["configs-chek"], "invalid choice: 'configs-chek' (choose from X); did you mean configs-check?"),
    (["prepare", "--outptu", "X"], "dsv prepare: error: unknown flag --outptu; did you mean --output?"),
    (["sample", "--promt=a street"], "dsv sample: error: unknown flag --promt; did you mean --prompt?"),
    (["prepare", "--qqqqqqqq"], "dsv prepare: error: unknown flag --qqqqqqqq\n"),
    (["prepare", "--codec", "difusers"], "--codec must be one of haar, diffusers, got difusers; did you mean diffus"),
    (["prepare", "--text-encoder", "transformer"], "got transformer; did you mean transformers?"),
    (["prepare", "--latent-dtype", "bf61"], "--latent-dtype must be one of bf16, fp32, got bf61; did you mean bf16?"),
])
def test_a_misspelling_is_answered_with_what_was_meant(arguments, words, tmp_path, capsys):
    if arguments[1:2] and arguments[1].split("=")[0] in ("--codec", "--text-encoder", "--latent-dtype"):
        arguments = [*arguments, "--input", str(tmp_path), "--output", str(tmp_path / "out"), "--bucket", "32x48x5"]
    try:
        status = main(arguments)
    except SystemExit as exit_:
        status = exit_.code
    assert status == 2
    assert words in re.sub(r"choose from [^)]*", "choose from X", capsys.readouterr().err)


def test_beginnings_of_flags_and_texts_that_look_like_one_are_taken(capsys):
    """As argparse does."""
    for arguments in (["prepare", "--frame", "x"], ["prepare", "--input", "x", "--frames=x"]):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
        assert "argument --frames: invalid int value: 'x'" in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        main(["sample", "--prompt", "--what is this", "--steps", "x"])
    assert "argument --steps: invalid int value" in capsys.readouterr().err


def test_doctor_passes_where_the_tests_run(capsys):
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "megatron-core" in out
    assert "Training can run on this host." in out


def test_doctor_says_what_is_wrong(monkeypatch, capsys):
    versions = {"megatron-core": "0.18.2"}
    monkeypatch.setattr(doctor, "_version", lambda package: versions.get(package))
    monkeypatch.setattr(doctor, "CHECKS", (doctor._megatron, doctor._psutil))
    assert main(["doctor"]) == 1
    out = capsys.readouterr().out
    assert "0.18.2; its internals are extended for ==0.19.2" in out
    assert "Training cannot run: mend megatron-core, psutil." in out


def test_doctor_tells_the_unrelated_apex(monkeypatch, tmp_path):
    (tmp_path / "apex").mkdir()
    (tmp_path / "apex" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert doctor._apex().state == "broken"
    assert "unrelated package" in doctor._apex().detail
    (tmp_path / "apex" / "optimizers.py").write_text("")
    importlib.invalidate_caches()
    assert doctor._apex().state == "ok"


def test_the_pin_is_read_from_the_metadata():
    assert doctor.pinned("megatron-core") == "==0.19.2"
    assert doctor.pinned("torch").startswith("<2.15")
    assert doctor.pinned("no-such-package") == ""


def test_what_the_system_refuses_is_one_line(monkeypatch, capsys):
    from megatron_dsv.cli import report

    def fail(folder):
        raise OSError(28, "No space left on device", "/full/file")

    monkeypatch.setattr(report, "read", fail)
    assert main(["report", "folder"]) == 1
    assert capsys.readouterr().err == "dsv report: error: No space left on device (/full/file)\n"
