import pytest

from megatron_dsv import presets
from megatron_dsv.cli.configs_check import check
from megatron_dsv.cli.main import main


@pytest.mark.parametrize("name", presets.names())
def test_every_packaged_file_is_a_launch(name):
    words = check(name)
    if name.startswith("experiments/") and name != "experiments/demo":
        assert "128 ranks" in words


def test_a_bad_file_is_refused_by_name(tmp_path, capsys):
    bad = tmp_path / "bad.yaml"
    bad.write_text("include: experiments/wan2.1-14b-480p\ntensor-model-parallel-size: 16\n")
    assert main(["configs-check", str(bad)]) == 1
    assert "--tensor-model-parallel-size must divide --num-attention-heads 40, got 16" in capsys.readouterr().err
    assert main(["configs-check", "experiments/wan2.1-14b-480p", "--ranks", "64"]) == 0
    assert "64 ranks = TP 1 x PP 2 x CP 4 x DP 8" in capsys.readouterr().out


def test_the_number_of_ranks_must_be_known(tmp_path, capsys):
    path = tmp_path / "mine.yaml"
    path.write_text("include: model/debug\nmicro-batch-size: 1\ntrain-iters: 1\nlr: 0.1\n")
    assert main(["configs-check", str(path)]) == 1
    assert "a `gpus` key is required" in capsys.readouterr().err


def test_ranks_must_be_a_number_of_ranks(capsys):
    assert main(["configs-check", "experiments/demo", "--ranks", "0"]) == 2
    assert "--ranks must be an integer of at least 1, got 0; leave it out" in capsys.readouterr().err
