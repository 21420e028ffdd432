"""What the component benchmark promises: parts merge within one set of versions, and nothing wrong is timed."""

import argparse
import json

import bench_components
import pytest
import torch

FACTS = {"tokens": 64, "versions": {"torch": "1"}}
ROWS = [{"what": "dense attention forward", "ms": 1}, {"what": "select top-k", "ms": 2},
        {"what": "predictor loss and gradients, 128 rows", "ms": 3}, {"what": "profile of 8 query groups", "ms": 4}]


def test_rows_of_parts_that_are_not_timed_stay(tmp_path):
    path = tmp_path / "components.json"
    assert bench_components.rows_of_other_parts(path, ["dense"], FACTS) == []
    path.write_text(json.dumps({**FACTS, "rows": ROWS}))
    assert bench_components.rows_of_other_parts(path, ["predictor"], FACTS) == ROWS[:2]
    assert bench_components.rows_of_other_parts(path, ["dense", "sparse"], FACTS) == ROWS[2:]
    assert bench_components.rows_of_other_parts(path, list(bench_components.PARTS), {"tokens": 1}) == []
    with pytest.raises(ValueError, match="name another --output or time all parts"):
        bench_components.rows_of_other_parts(path, ["dense"], {**FACTS, "tokens": 65})


@pytest.mark.parametrize("factor", [1.0, 1.1, float("nan")])
def test_a_wrong_loss_is_not_timed(monkeypatch, factor):
    right = bench_components.predictor_loss_and_grads

    def loss_and_grads(*tensors, **options):
        loss, dq, dk = right(*tensors, **options)
        return loss, dq, dk if tensors[0].dtype == torch.float64 else dk * factor

    monkeypatch.setattr(bench_components, "predictor_loss_and_grads", loss_and_grads)
    tensors = [torch.randn(shape, 1, 3, width) for shape, width in ((5, 4), (40, 4), (5, 8), (40, 8))]
    if factor == 1.0:
        bench_components.gate(*tensors, 0.3)
    else:
        with pytest.raises(ValueError, match="nothing to time"):
            bench_components.gate(*tensors, 0.3)


def test_what_is_timed_of_a_predictor_runs():
    """On the CPU, at a small shape: the objects fit together."""
    args = argparse.Namespace(tokens=256, heads=2, head_dim=16, rank=4)
    q, k = torch.randn(2, 256, 1, 2, 16).bfloat16()
    learning, profile = bench_components.learning_and_profile(args, q, k)
    learning()
    profile()


def test_rows_before_a_failure_are_kept_beside_the_last_whole_run(tmp_path):
    path = tmp_path / "new" / "components.json"
    bench_components.write_as_they_come(path, FACTS, ROWS[:1], iter(ROWS[1:2]))
    assert json.loads(path.read_text()) == {**FACTS, "rows": ROWS[:2]}

    def failing():
        yield ROWS[2]
        raise RuntimeError("out of memory")

    with pytest.raises(RuntimeError, match="out of memory"):
        bench_components.write_as_they_come(path, FACTS, [], failing())
    assert json.loads(path.read_text())["rows"] == ROWS[:2]
    assert json.loads((path.parent / "components.json.partial").read_text())["rows"] == ROWS[2:3]
    bench_components.write_as_they_come(path, FACTS, [], iter(ROWS))
    assert [file.name for file in path.parent.iterdir()] == ["components.json"]
