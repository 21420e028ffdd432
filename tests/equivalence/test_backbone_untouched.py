"""Stage 1 trains predictors beside a backbone that is bit-identical to a dense run's, with gradient clipping active."""

import pytest
import torch

TP2, PP2 = "--tensor-model-parallel-size 2", "--pipeline-model-parallel-size 2"
LAYOUTS = {
    "one": (1, ""),
    "dp2": (2, ""),
    "dp2-distributed-optimizer": (2, "--use-distributed-optimizer"),
    "dp4-distributed-optimizer": (4, "--use-distributed-optimizer"),
    "tp2-sp": (2, f"{TP2} --sequence-parallel"),
    "pp2": (2, PP2),
    "recompute": (1, "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1"),
}


# (name, flags, weights of the predictors' loss, layouts that every run of the tests goes through)
CASES = [
    ("fp32", "", ("0", "1e5"), ("one", "dp2-distributed-optimizer", "tp2-sp", "pp2")),
    ("bf16", "--bf16", ("1e5",), ("one", "dp2", "pp2", "recompute")),
    ("fp32-weight-of-one", "", ("1",), ()),
    ("bf16-other-weights", "--bf16", ("0", "1"), ()),
]


@pytest.mark.parametrize(("layout", "precision", "weights"), [
    pytest.param(layout, precision, weights, id=f"{name}-{layout}",
                 marks=[] if layout in always else [pytest.mark.slow])
    for name, precision, weights, always in CASES for layout in LAYOUTS])
def test_backbone_is_bit_identical_to_a_dense_run(train, layout, precision, weights):
    ranks, flags = LAYOUTS[layout]
    flags = f"{flags} {precision} --num-layers 2 --eval-iters 0 --micro-batch-size {1 if ranks == 4 else 2}"
    dense = train(flags, ranks, steps=10, keep_state=True)
    assert min(norm for norm in dense.grad_norms if norm is not None) > 0.1, "clipping at 0.1 must be active"
    for weight in weights:
        log = train(f"{flags} --dsv-sparse-stage predictor --dsv-predictor-loss-weight {weight}", ranks, steps=10,
                    keep_state=True)
        assert log.loss("loss") == dense.loss("loss")
        assert log.grad_norms == dense.grad_norms
        moved = 0
        for state, dense_state in zip(log.states, dense.states, strict=True):
            predictors = {name for name in state if ".predictor." in name}
            assert predictors
            assert state.keys() - predictors == dense_state.keys()
            for name, value in dense_state.items():
                assert torch.equal(state[name], value), name
            moved += sum(bool(state[name].any()) for name in predictors if name.endswith("_bias"))
        assert (moved > 0) == (weight != "0"), "predictors must learn, unless their loss has no weight"


def test_a_non_finite_predictor_gradient_costs_only_its_update(train):
    dense = train("", 2, steps=4, keep_state=True)
    log = train("--dsv-sparse-stage predictor --dsv-predictor-loss-weight 1e38", 2, steps=4, keep_state=True)
    assert log.loss("loss") == dense.loss("loss")
    assert log.grad_norms == dense.grad_norms
    for state in log.states:
        assert all(bool(torch.isfinite(value).all()) for value in state.values())
