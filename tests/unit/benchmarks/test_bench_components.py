"""What the component benchmark promises: parts merge within one set of versions, and nothing wrong is timed."""

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
