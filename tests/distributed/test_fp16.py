"""`--fp16` through the whole program: Megatron's loss scaling around a model whose predictors are not scaled."""

import pytest
import torch

from megatron_dsv.testing.latents import write_latents
from megatron_dsv.testing.pretrain import run_pretrain

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="a CPU test")


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    folder = write_latents(tmp_path_factory.mktemp("latents"), [(3, 4, 6)] * 6)
    flags = (f"--config model/debug --latent-data {folder} --latent-valid-samples 2 --eval-iters 0 "
             "--micro-batch-size 1 --global-batch-size 2 --train-iters 3 --lr 2e-3 "
             "--lr-decay-style constant --log-interval 1 --num-workers 0 --dsv-q-block-size 16 --dsv-kv-block-size 16 "
             "--dsv-predictor-query-stride 4")
    return lambda more, ranks=1: run_pretrain([*flags.split(), *more.split()], ranks, keep_state=True)


def test_three_steps_follow_fp32_to_the_rounding_of_fp16(train):
    half, single = train("--fp16 --initial-loss-scale 1024"), train("")
    assert half.loss("loss") == pytest.approx(single.loss("loss"), rel=torch.finfo(torch.float16).eps)
    assert half.grad_norms == pytest.approx(single.grad_norms, rel=5e-3)
    assert half.loss("loss") != single.loss("loss")


def test_an_overflow_skips_the_step_and_the_backbone_ignores_predictors(train):
    """A first loss scale of 2^32 overflows fp16 gradients, so the first step changes nothing but the scale."""
    flags = "--fp16 --use-distributed-optimizer --hysteresis 1"
    dense, predictor = train(flags, 2), train(f"{flags} --dsv-sparse-stage predictor", 2)
    assert dense.grad_norms[0] is None
    assert dense.loss("loss") == predictor.loss("loss")
    for name, value in dense.states[0].items():
        assert torch.equal(predictor.states[0][name], value), name
    learned = [value for name, value in predictor.states[0].items() if name.endswith("query_bias")]
    assert learned
    assert all(bool(torch.isfinite(value).all()) for value in learned)
