"""FusedAdam against torch's AdamW and Adam, and its state against what Megatron reads."""

import copy

import pytest
import torch

from megatron_dsv.platform.fused_adam import FusedAdam

SHAPES = [(7, 5), (33,), (1,)]
OPTIONS = {"lr": 3e-3, "betas": (0.9, 0.95), "eps": 1e-8, "weight_decay": 0.1}


def problem() -> list[torch.nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


def run(optimizer: torch.optim.Optimizer, params: list[torch.nn.Parameter], steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for param in params:
            param.grad = torch.randn(param.shape, generator=generator)
        optimizer.step()


@pytest.mark.parametrize(("oracle", "decoupled"), [(torch.optim.AdamW, True), (torch.optim.Adam, False)])
def test_same_trajectory_as_torch(oracle, decoupled):
    ours, theirs = problem(), problem()
    run(FusedAdam(ours, adam_w_mode=decoupled, **OPTIONS), ours, 20, seed=1)
    run(oracle(theirs, foreach=False, **OPTIONS), theirs, 20, seed=1)
    for left, right in zip(ours, theirs):
        torch.testing.assert_close(left, right, rtol=1e-6, atol=1e-7)


def test_an_update_does_not_depend_on_the_sharding():
    whole, halves = torch.nn.Parameter(torch.randn(101)), []
    halves = [torch.nn.Parameter(part.clone()) for part in whole.detach().split(37)]
    one, many = FusedAdam([whole], **OPTIONS), FusedAdam(halves, **OPTIONS)
    for step in range(5):
        whole.grad = torch.randn(101, generator=torch.Generator().manual_seed(step))
        for half, part in zip(halves, whole.grad.split(37)):
            half.grad = part.clone()
        one.step()
        many.step()
    assert torch.equal(whole.detach(), torch.cat([half.detach() for half in halves]))


def test_state_survives_a_save_and_the_step_is_in_the_group():
    straight, resumed = problem(), problem()
    optimizer = FusedAdam(straight, **OPTIONS)
    run(optimizer, straight, 3, seed=2)
    state = copy.deepcopy(optimizer.state_dict())
    assert [group["step"] for group in state["param_groups"]] == [3]
    assert all(entry.keys() == {"exp_avg", "exp_avg_sq"} for entry in state["state"].values())
    for target, source in zip(resumed, straight):
        target.data.copy_(source.data)
    fresh = FusedAdam(resumed, **OPTIONS)
    fresh.load_state_dict(state)
    run(optimizer, straight, 3, seed=3)
    run(fresh, resumed, 3, seed=3)
    assert all(torch.equal(left, right) for left, right in zip(straight, resumed))


def test_moments_are_fp32_and_missing_or_empty_gradients_are_skipped():
    half = torch.nn.Parameter(torch.randn(4, dtype=torch.bfloat16))
    untouched, empty = torch.nn.Parameter(torch.ones(3)), torch.nn.Parameter(torch.ones(0))
    optimizer = FusedAdam([untouched, empty], **OPTIONS)
    empty.grad = torch.ones(0)
    optimizer.step()
    assert torch.equal(untouched.detach(), torch.ones(3))
    assert optimizer._state_of(half)["exp_avg"].dtype == torch.float32


def test_capture_is_refused():
    with pytest.raises(NotImplementedError, match="--optimizer-cuda-graph needs a FusedAdam that can be captured"):
        FusedAdam(problem(), capturable=True)
