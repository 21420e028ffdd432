import csv
import json

import pytest

from megatron_dsv.cli.main import main
from megatron_dsv.cli.report import read, table


@pytest.fixture
def run_folder(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path / "run" / "tensorboard") as writer:
        for step in range(1, 6):
            writer.add_scalar("dsv/recall", 0.1 * step, step)
            writer.add_scalar("dsv/layer_003/recall", 0.2, step)
            writer.add_scalar("lm loss", 2.0 / step, step)
            writer.add_scalar("lm loss vs samples", 2.0 / step, 4 * step)
    return tmp_path / "run"


def test_every_point_is_read(run_folder):
    series = read(str(run_folder))
    assert dict(series["lm loss"]) == pytest.approx({step: 2.0 / step for step in range(1, 6)})
    assert [step for step, _ in series["dsv/recall"]] == [1, 2, 3, 4, 5]


def test_the_table_gives_first_last_and_range(run_folder):
    text = table({"lm loss": [(1, 4.0), (2, 1.0), (3, float("nan")), (7, 2.0)], "dsv/mfu": [(7, 0.5)]})
    loss, mfu = (line.split() for line in text.splitlines()[1:])
    assert loss == ["lm", "loss", "1-7", "4", "2", "1", "4"]
    assert mfu == ["dsv/mfu", "7-7", "0.5", "0.5", "0.5", "0.5", "1"]


def test_only_what_was_not_measured_is_left_out_of_the_table():
    nan = float("nan")
    text = table({"dsv/layer_003/recall": [(1, nan), (2, 0.5)], "lm loss": [(1, 4.0), (2, nan)]})
    recall, loss = (line.split() for line in text.splitlines()[1:])
    assert recall[2:6] == ["-", "0.5", "0.5", "0.5"]
    assert loss[3:5] == ["4", "nan"]


def test_csv_plot_and_layers(run_folder, tmp_path, capsys):
    assert main(["report", str(run_folder), "--csv", str(tmp_path / "a.csv"), "--plot", str(tmp_path / "a.png")]) == 0
    out = capsys.readouterr().out
    assert "dsv/recall" in out
    assert "layer_003" not in out
    assert out.count("lm loss") == 1
    rows = list(csv.DictReader((tmp_path / "a.csv").open()))
    assert len(rows) == 10
    assert {row["name"] for row in rows} == {"dsv/recall", "lm loss"}
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    assert main(["report", str(run_folder), "--layers", "--match", "layer_003"]) == 0
    assert "dsv/layer_003/recall" in capsys.readouterr().out


def test_metrics_over_samples_are_listed_when_asked_for(run_folder, capsys):
    assert main(["report", str(run_folder), "--match", "loss vs samples"]) == 0
    assert "lm loss vs samples" in capsys.readouterr().out


def test_misuse(run_folder, tmp_path, capsys):
    (tmp_path / "empty").mkdir()
    assert main(["report", str(tmp_path / "empty")]) == 2
    assert "must hold TensorBoard event files" in capsys.readouterr().err
    assert main(["report", str(run_folder), "--match", "nothing"]) == 2
    error = capsys.readouterr().err
    assert "--match must be a part of one of the 4 metrics in " in error
    assert "such as dsv/layer_003/recall, got 'nothing' (metrics of single layers are listed with --layers)" in error


def test_a_run_that_has_written_nothing_yet(tmp_path, capsys):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(tmp_path / "run") as writer:
        writer.add_text("flags", "none")
    assert main(["report", str(tmp_path / "run")]) == 2
    assert "the folder must hold scalars in its event files, got " in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--csv", "--plot"])
def test_output_files_are_checked_before_anything_is_read(run_folder, tmp_path, capsys, flag):
    for file, words in ((tmp_path / "none" / "a.png", f"{flag} must lie in a folder that exists, got "),
                        (tmp_path, f"{flag} must be a file, got {tmp_path}, which is a folder")):
        assert main(["report", str(run_folder), flag, str(file)]) == 2
        captured = capsys.readouterr()
        assert words in captured.err
        assert captured.err.count("\n") == 1
        assert not captured.out


def test_plans_over_time_follow_the_metrics(run_folder, capsys):
    lines = [
        {"step": 0, "event": "committed", "version": 1, "splits": "1 x 2 in 4 blocks", "changed": 4, "seconds": 0.1,
         "predicted_ms": [0.0, 44.25]},
        {"step": 50, "event": "refused", "version": 1, "splits": "1 x 2 in 4 blocks", "refused": 2, "by": 3,
         "reason": "rank 3 says why"},
        {"step": 100, "event": "committed", "version": 2, "splits": "2 x 1 in 3 blocks, 1 x 2 in 1", "changed": 3,
         "seconds": 0.1, "predicted_ms": [44.25, 12.5]}]
    (run_folder / "plans.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert main(["report", str(run_folder)]) == 0
    shown = capsys.readouterr().out.split("\n\n")[1].splitlines()
    assert [line.split()[:3] for line in shown[1:]] == [
        ["0", "1", "committed"], ["50", "2", "refused"], ["100", "2", "committed"]]
    assert shown[1].endswith("1 x 2 in 4 blocks  44.25 ms")
    assert shown[2].endswith("rank 3 says why")
    assert shown[3].endswith("2 x 1 in 3 blocks, 1 x 2 in 1  44.25 -> 12.5 ms")
    assert main(["report", str(run_folder), "--match", "loss"]) == 0
    assert "plan" not in capsys.readouterr().out
    (run_folder / "plans.jsonl").write_text('{"step": 1}\n')
    assert main(["report", str(run_folder)]) == 2
    assert "plans.jsonl, line 1: must be what a run wrote: 'event'" in capsys.readouterr().err


def test_lines_of_plans_that_were_cut_short_are_counted(run_folder, capsys):
    row = json.dumps({"step": 7, "event": "failed", "version": 1, "splits": "1 x 2 in 4 blocks", "reason": "why"})
    (run_folder / "plans.jsonl").write_text(f"{row[:20]}\n{row}\n{row[:-1]}")
    assert main(["report", str(run_folder)]) == 0
    captured = capsys.readouterr()
    assert captured.err == f"{run_folder / 'plans.jsonl'}: 2 lines cut short and left out\n"
    assert captured.out.split("\n\n")[1].count("failed") == 1
