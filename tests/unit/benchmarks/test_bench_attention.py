"""What the attention benchmark promises: lists as crafted, a gate that goes red, rows that merge."""

import dataclasses
import json

import bench_attention
import pytest
import torch
from attention import gate, inputs, report
from attention.cases import GRANULARITIES, Group, Point, Shape
from attention.pipeline import DenseRun, SparseRun

from megatron_dsv.kernels.sparse_attention import api as sparse_api

CPU = torch.device("cpu")
SMALL = Shape(256, heads=2, head_dim=16, hidden=96)
ROW_KEYS = {"case", "tokens", "heads", "head_dim", "keep_ratio", "granularity", "backend", "lists", "dense_flash4_ms",
            "dense_cudnn_ms", "selection_ms", "forward_ms", "backward_ms", "total_ms", "speedup_vs_flash4",
            "speedup_vs_cudnn", "peak_mib", "versions"}


def _run(shape, point):
    return SparseRun(shape, point, inputs.problem(shape, CPU, torch.float32),
                     inputs.hidden(shape, point, CPU, torch.float32), inputs.budgets(shape, point))


def _mask(shape, point):
    return _run(shape, point).select().block_mask()[0]


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_uniform_lists_are_even_and_differ_row_by_row(granularity):
    shape = Shape(8192, heads=2, head_dim=8, hidden=64)
    point = Point("x", granularity, "reference", keep_ratio=0.2)
    mask = _mask(shape, point)
    assert (mask.sum(-1) == inputs.budgets(shape, point)[0]).all()
    assert all(len(set(map(bytes, head.to(torch.uint8).numpy()))) == mask.shape[1] for head in mask)
    # Chance alone spreads a block's readers binomially.
    readers, groups = mask.sum(1).float(), mask.shape[1]
    assert readers.std() <= 2.5 * (groups * 0.2 * 0.8) ** 0.5


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_skewed_lists_hold_as_many_entries_with_hubs_neighbours_and_dense_heads(granularity):
    shape = Shape(8192, heads=4, head_dim=8, hidden=128)
    point = Point("x", granularity, "reference", "skewed", 0.55)
    mask = _mask(shape, point)
    even = inputs.budgets(shape, dataclasses.replace(point, lists="uniform"))
    groups, blocks = mask.shape[1:]
    assert mask.sum() == sum(even) * groups
    full = [bool(head.all()) for head in mask]
    assert sum(full) == 2
    ragged = mask[~torch.tensor(full)].float()
    readers = ragged.mean(1)
    assert readers.amax(1).min() >= 0.7
    assert readers.median() <= 0.2
    distance = (torch.arange(groups)[:, None] / groups - torch.arange(blocks) / blocks).abs() * shape.tokens
    near, far = (distance > 128) & (distance <= 384), distance > 2048
    assert ragged[:, near].mean() >= 2 * ragged[:, far].mean()


def test_a_rank_projects_its_tokens_for_every_head_and_gets_its_own_heads_of_all_tokens():
    whole = Shape(512, heads=2, head_dim=8, hidden=192)
    shard = dataclasses.replace(whole, shards=2)
    point = Point("x", "block-64", "reference")
    assert inputs.hidden(shard, point, CPU, torch.float32).x.shape == (256, 192)
    for mine, other in zip(_run(whole, point).low_rank(), _run(shard, point).low_rank()):
        torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def test_the_hidden_state_is_not_just_the_predictor_s_channels():
    x = inputs.hidden(SMALL, Point("x", "block-64", "reference"), CPU, torch.float32)
    outside = x.x - x.x @ x.weight.t() @ x.weight
    assert outside.std() > 0.1


@pytest.mark.parametrize("granularity", GRANULARITIES)
def test_the_gate_is_green_for_the_reference(granularity):
    shape = dataclasses.replace(SMALL, tokens=512)
    gate.check_sparse(Point("x", granularity, "reference", deterministic=True), shape, CPU, torch.float32)


def test_the_gate_is_green_for_torch_s_dense_kernel():
    gate.check_dense("sdpa", SMALL, CPU, torch.float32)


@pytest.mark.parametrize(("which", "broken"), [("dq", (1.01, 1, 1)), ("dk", (1, 1.01, 1)), ("dv", (1, 1, 1.01)),
                                               ("dk", (1, float("nan"), 1))])
@pytest.mark.parametrize("check", ["small", "samples"])
def test_the_gate_is_red_for_a_wrong_gradient(monkeypatch, check, which, broken):
    true = sparse_api.backward
    monkeypatch.setattr(sparse_api, "backward",
                        lambda *args, **kwargs: tuple(g * f for g, f in zip(true(*args, **kwargs), broken)))
    point = Point("x", "block-64", "reference", keep_ratio=0.5)
    checks = {"small": lambda: gate.check_sparse(point, SMALL, CPU, torch.float32),
              "samples": lambda: gate.check_samples(_run(SMALL, point))}
    with pytest.raises(gate.GateError, match=which):
        checks[check]()


def test_the_gate_is_red_for_a_wrong_output_and_for_repeats_that_differ(monkeypatch):
    true, calls = sparse_api.forward, []

    def drifting(*args, **kwargs):
        calls.append(None)
        out, lse = true(*args, **kwargs)
        return out * (1 + 1e-7 * (len(calls) - 1)), lse

    monkeypatch.setattr(sparse_api, "forward", drifting)
    with pytest.raises(gate.GateError, match="repeat differs"):
        gate.check_sparse(Point("x", "block-64", "reference", deterministic=True), SMALL, CPU, torch.float32)
    monkeypatch.setattr(sparse_api, "forward", lambda *args, **kwargs: (true(*args, **kwargs)[0] * 1.01, None))
    monkeypatch.setattr(sparse_api, "backward", lambda *args, **kwargs: args[1:4])
    with pytest.raises(gate.GateError, match="out: error"):
        gate.check_sparse(Point("x", "block-64", "reference"), SMALL, CPU, torch.float32)


def test_lists_that_differ_from_a_full_sort_are_red():
    run = _run(Shape(512, heads=1, head_dim=8, hidden=32), Point("x", "block-64", "reference", keep_ratio=0.5))
    mask, scores = run.select().block_mask(), run.scores()
    gate.check_lists(mask, scores, run.budgets, (64, 64), "lists")
    row = mask[0, 0, 3]
    kept, left = int(row.nonzero()[0 if int(row.nonzero()[0]) != 3 else 1]), int((~row).nonzero()[0])
    row[kept], row[left] = False, True
    with pytest.raises(gate.GateError, match="1 of 8 rows of head 0 differ from a full sort, the first is row 3"):
        gate.check_lists(mask, scores, run.budgets, (64, 64), "lists")


def test_ties_go_to_the_lower_number_behind_the_group_s_own_block():
    scores = torch.zeros(1, 1, 4, 4)
    expected = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 0, 1]], dtype=torch.bool)
    gate.check_lists(expected[None, None], scores, [2], (64, 64), "ties")
    with pytest.raises(gate.GateError, match="2 of 4 rows"):
        gate.check_lists(expected[[0, 1, 1, 1]][None, None], scores, [2], (64, 64), "ties")


def _row(case="64k", granularity="block-64", backend="triton", lists="uniform", keep_ratio=0.1, **changes):
    return {"case": case, "granularity": granularity, "backend": backend, "lists": lists, "keep_ratio": keep_ratio,
            "dense_flash4_ms": 80.0, "dense_cudnn_ms": 90.0, "selection_ms": 0.2, "forward_ms": 3.0,
            "backward_ms": 6.8, "total_ms": 10.0, "peak_mib": 101.0, "dense_peak_mib": 100.0, **changes}


def test_newer_rows_replace_those_of_their_key_alone(tmp_path):
    path = tmp_path / "results/attention.json"
    report.merge(path, [_row(), _row(keep_ratio=0.2), _row("dispatch-4k", keep_ratio=0.3)])
    report.merge(path, [_row(total_ms=9.0), _row("dispatch-4k", backend="dense flash4", lists="none", keep_ratio=None)])
    rows = report.load(path)
    assert {(row["case"], row["keep_ratio"]): row["total_ms"] for row in rows} == {
        ("64k", 0.1): 9.0, ("64k", 0.2): 10.0, ("dispatch-4k", None): 10.0}


def test_a_row_that_turned_red_takes_the_older_one_out_of_every_file(tmp_path):
    part, path = tmp_path / "part.json", tmp_path / "attention.json"
    report.merge(path, [_row(), _row(keep_ratio=0.2), _row("dispatch-4k", keep_ratio=0.3)])
    report.merge(part, [report.red(Point("64k", "block-64", "triton"), "dq: error 3 exceeds the budget 1"),
                        report.red(Point("dispatch-4k", "block-64", "auto"), "out: error")])
    assert bench_attention.main(["--output", str(path), "--merge", str(part)]) == 0
    assert [row["keep_ratio"] for row in report.load(path)] == [0.2]
    assert [row["red"] for row in report.read(path) if row["case"] == "64k" and "red" in row] == [
        "dq: error 3 exceeds the budget 1"]
    report.merge(path, [_row(total_ms=9.0)])
    assert [(row["keep_ratio"], row["total_ms"]) for row in report.load(path)] == [(0.1, 9.0), (0.2, 10.0)]


def _reached(name, rows):
    goal = next(goal for goal in report.GOALS if goal.name.startswith(name))
    return goal.reached(rows), goal.met(rows)


def test_goals_are_held_against_the_fastest_dense_kernel_and_the_best_backend():
    rows = [_row(), _row(backend="cudnn", total_ms=12.5), _row(granularity="token-128", total_ms=20.0)]
    assert _reached("64k, 90% sparse", rows) == (8.0, True)
    assert _reached("64k, single tokens", rows) == (4.0, False)
    assert _reached("128k", rows) == (None, None)
    assert _reached("64k, 90% sparse", [_row(dense_flash4_ms=None, total_ms=10.0)]) == (9.0, True)
    assert "| 64k, 90% sparse, block mode, best backend | >= 8.00x | 8.00x | met |" in report.goal_table(rows)
    assert "| 128k, block mode, best backend | >= 8.00x | not measured |  |" in report.goal_table(rows)


def test_goals_without_a_choice_take_the_worst_row():
    rows = [_row("dispatch-4k", total_ms=70.0), _row("dispatch-8k", total_ms=88.0)]
    assert _reached("the dispatcher's way", rows) == (pytest.approx(1.1), False)
    rows = [_row(), _row(lists="skewed", total_ms=10.5),
            _row(granularity="token-128"), _row(granularity="token-128", lists="skewed", total_ms=11.5)]
    assert _reached("skewed lists", rows) == (pytest.approx(1.15), False)
    rows = [_row(), _row("64k-deterministic", forward_ms=3.0, backward_ms=7.8)]
    assert _reached("deterministic over free, forward + backward, blocks", rows) == (
        pytest.approx(10.8 / 9.8), True)
    assert _reached("selection of the total, blocks of 64", [_row(), _row("256k", selection_ms=0.5)]) == (5.0, False)
    assert _reached("peak memory over dense, 256k, 24 heads, blocks of 64", [_row("256k")])[1] is True


def test_tables_go_between_their_markers(tmp_path):
    page = tmp_path / "kernels.md"
    marks = "".join(f"<!-- attention {name}: begin -->\nold\n<!-- attention {name}: end -->\n"
                    for name in ("goals", "rows"))
    page.write_text(f"before\n{marks}after\n")
    report.write_tables(page, [_row()])
    text = page.read_text()
    assert (text[:7], text[-6:], "old" in text) == ("before\n", "after\n", False)
    assert "| 64k | block-64 | triton | uniform | 0.1 | 80.00 | 90.00 |" in text
    page.write_text("no markers")
    with pytest.raises(ValueError, match="--report needs the markers"):
        report.write_tables(page, [])


def test_the_document_shows_the_committed_results():
    page = bench_attention.ROOT / "docs/kernels.md"
    rows = report.load(bench_attention.RESULTS)
    assert report.goal_table(rows) in page.read_text()
    assert report.row_table(rows) in page.read_text()


def _tiny(monkeypatch, backend="reference"):
    group = Group(SMALL, (Point("tiny", "block-64", backend, keep_ratio=0.5),), dispatch=("block-64",),
                  dense=("sdpa",))
    monkeypatch.setattr(bench_attention, "suite", lambda name: [group])


def test_a_run_writes_a_row_for_every_point(monkeypatch, tmp_path, capsys):
    _tiny(monkeypatch)
    output = tmp_path / "rows.json"
    assert bench_attention.main(["--seconds", "0.01", "--output", str(output)]) == 0
    rows = json.loads(output.read_text())
    assert [row["case"] for row in rows] == ["dispatch-256", "tiny"]
    assert all(row.keys() >= ROW_KEYS for row in rows)
    tiny = rows[1]
    parts = tiny["selection_ms"] + tiny["forward_ms"] + tiny["backward_ms"]
    assert 0.5 * parts < tiny["total_ms"] < 2 * parts
    assert tiny["density"] == 0.5
    printed = capsys.readouterr().out
    assert printed.startswith("# no GPU was found, and this is the smoke suite: ")
    assert "| tiny | block-64 | reference | uniform | 0.5 |" in printed
    assert "| goal |" not in printed, "tiny shapes are held against no goal"


def test_a_red_gate_prints_no_number_and_fails(monkeypatch, tmp_path, capsys):
    _tiny(monkeypatch)
    true = sparse_api.backward
    monkeypatch.setattr(sparse_api, "backward", lambda *args, **kwargs: tuple(1.1 * g for g in true(*args, **kwargs)))
    output = tmp_path / "rows.json"
    report.merge(output, [_row("tiny", backend="reference", keep_ratio=0.5), _row("dispatch-256"), _row("16k")])
    assert bench_attention.main(["--seconds", "0.01", "--output", str(output)]) == 1
    printed = capsys.readouterr()
    assert [row["case"] for row in report.load(output)] == ["16k"]
    assert {row["case"] for row in report.read(output) if "exceeds the budget" in row.get("red", "")} == {
        "dispatch-256", "tiny"}
    assert "| tiny |" not in printed.out
    assert "exceeds the budget" in printed.err


def test_a_backend_that_cannot_serve_fails_and_spares_the_rest(monkeypatch, tmp_path):
    _tiny(monkeypatch, backend="triton")
    output = tmp_path / "rows.json"
    assert bench_attention.main(["--seconds", "0.01", "--output", str(output)]) == 1
    assert [row["case"] for row in report.load(output)] == ["dispatch-256"]


def test_nothing_is_held_against_a_red_dense_kernel(monkeypatch, tmp_path):
    _tiny(monkeypatch)
    true = DenseRun.backward
    monkeypatch.setattr(DenseRun, "backward", lambda self, *args: tuple(1.1 * g for g in true(self, *args)))
    output = tmp_path / "rows.json"
    report.merge(output, [_row("tiny", backend="reference", keep_ratio=0.5), _row("dispatch-256")])
    assert bench_attention.main(["--seconds", "0.01", "--output", str(output)]) == 1
    assert report.load(output) == []
    assert all("dense sdpa is red" in row["red"] for row in report.read(output))


def test_what_would_pass_the_deadline_is_left_out_and_said(monkeypatch, tmp_path, capsys):
    _tiny(monkeypatch)
    output = tmp_path / "rows.json"
    assert bench_attention.main(["--seconds", "0.01", "--output", str(output), "--deadline", "1"]) == 1
    assert not output.exists()
    assert "tiny: left out" in capsys.readouterr().err


def test_parts_that_ran_side_by_side_are_merged(tmp_path):
    parts = [tmp_path / "1.json", tmp_path / "2.json"]
    report.merge(parts[0], [_row(total_ms=5.0)])
    report.merge(parts[1], [_row("128k")])
    output = tmp_path / "all.json"
    report.merge(output, [_row(), _row("16k")])
    assert bench_attention.main(["--output", str(output), "--merge", *map(str, parts)]) == 0
    assert {row["case"]: row["total_ms"] for row in report.load(output)} == {"64k": 5.0, "128k": 10.0, "16k": 10.0}


def test_of_parts_that_overlap_the_last_row_stays(tmp_path):
    parts = [tmp_path / "1.json", tmp_path / "2.json"]
    report.merge(parts[0], [_row(total_ms=5.0), _row("dispatch-4k", keep_ratio=0.3)])
    report.merge(parts[1], [_row(total_ms=6.0), _row("dispatch-4k", keep_ratio=0.1)])
    output = tmp_path / "all.json"
    for _ in range(2):
        assert bench_attention.main(["--output", str(output), "--merge", *map(str, parts)]) == 0
        assert [(row["case"], row["total_ms"], row["keep_ratio"]) for row in report.load(output)] == [
            ("64k", 6.0, 0.1), ("dispatch-4k", 10.0, 0.1)]


@pytest.mark.parametrize(("flags", "words"), [
    (["--seconds", "0"], "--seconds must be positive, got 0"),
    (["--seconds", "nan"], "--seconds must be positive, got nan"),
    (["--part", "1"], "--part must be i/n, such as 1/2, got '1'"),
    (["--part", "a/b"], "--part must be i/n, such as 1/2, got 'a/b'"),
    (["--part", "3/2"], "--part must be i/n with 1 <= i <= n, got 3/2"),
    (["--output", "/no/all.json", "--merge", "/no/such.json"], "--merge needs a file of rows, found none at /no/such"),
    (["--output", "/no/such.json", "--report"], "--report needs a file of rows, found none at /no/such.json"),
])
def test_flags_that_ask_for_nothing_are_refused(flags, words, capsys):
    with pytest.raises(SystemExit, match="2"):
        bench_attention.main(flags)
    assert words in capsys.readouterr().err
