"""The controller on two ranks that measure differently: every rank of a layer takes the same decision."""

import math

import pytest
import torch

from megatron_dsv.config import DSVConfig
from megatron_dsv.metrics import Recorder
from megatron_dsv.testing.model_parallel import initialize, transformer_config
from megatron_dsv.testing.ranks import run_ranks

DSV = {"dsv_sparse_stage": "auto", "dsv_q_block_size": 16, "dsv_kv_block_size": 8, "dsv_predictor_rank": 4,
       "dsv_gate_passes": 1}


def _controller(tensor_parallel, profile_steps=None):
    groups = initialize(tensor_parallel=tensor_parallel)
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_dsv.training.dsv_controller import DSVController, DSVGroups
    from megatron_dsv.transformer.layer_specs import get_dsv_layer_spec

    dsv = DSVConfig(**DSV)
    block = TransformerBlock(transformer_config(TransformerConfig, tensor_parallel=tensor_parallel),
                             get_dsv_layer_spec(dsv), pg_collection=groups)
    return DSVController([block], dsv, DSVGroups(groups.dp_cp, groups.tp, groups.pp, groups.mp), 2, Recorder(),
                         profile_steps)


def _decide(tensor_parallel, recalls):
    """A step in which each rank measured its own recall; the states that follow, and the budgets."""
    from megatron_dsv.sparsity.profile import GroupProfile

    controller = _controller(tensor_parallel)
    rank = torch.distributed.get_rank()
    controller.begin_run()
    controller.begin_micro_batch(0, 64)
    for attention in controller.attentions.values():
        heads = len(attention.selector.query_heads)
        sums = torch.tensor([0.5, 0.25, recalls[rank]])[:, None].expand(3, heads).clone()
        attention.statistics.add(GroupProfile(sums, torch.ones(3, heads)))
    controller.end_step()
    return [(attention.statistics.state().sparse, attention.statistics.layer_means()["recall"])
            for attention in controller.attentions.values()]


@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize(("recalls", "sparse"), [((0.99, 0.85), True), ((0.99, 0.5), False), ((0.99, math.nan), False)])
def test_ranks_that_measure_differently_decide_alike(tensor_parallel, recalls, sparse):
    first, second = run_ranks(_decide, 2, tensor_parallel, recalls)
    assert [state for state, _ in first] == [state for state, _ in second] == [sparse, sparse]
    if not math.isnan(sum(recalls)):
        assert [recall for _, recall in first] == [recall for _, recall in second]
        assert first[0][1] == pytest.approx(sum(recalls) / 2, abs=1e-6)


def _bad_gradient_on_one_rank():
    controller = _controller(1)
    first, second = (attention.predictor for attention in controller.attentions.values())
    before = [[weight.clone() for weight in predictor.weights()] for predictor in (first, second)]
    controller.begin_micro_batch(0, 64)
    for predictor in (first, second):
        predictor.accumulate(torch.tensor(1.0), [torch.ones_like(grad) for grad in predictor.grads()], 1.0)
    if torch.distributed.get_rank() == 1:
        first.grads()[0][0, 0, 0] = math.inf
    controller.end_step()
    kept = all(torch.equal(weight, old) for weight, old in zip(first.weights(), before[0], strict=True))
    moved = not any(torch.equal(weight, old) for weight, old in zip(second.weights(), before[1], strict=True))
    skipped = controller.recorder.report()["dsv/predictor_skipped_layers"]
    return kept, moved, skipped, [weight.sum().item() for weight in second.weights()]


def test_a_bad_gradient_on_one_rank_costs_every_rank_the_same_update():
    first, second = run_ranks(_bad_gradient_on_one_rank, 2)
    assert first == second
    assert first[0], "the layer with the bad gradient must keep its weights on both ranks"
    assert first[1], "the other layer must learn"
    assert first[2] == 1


def _looking_for_bad_gradients():
    """(layers found, operations taken) for each kind of number in one gradient of the second layer."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counts(TorchDispatchMode):
        number = 0

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.number += 1
            return function(*args, **(kwargs or {}))

    optimizer, found = _controller(1).optimizer, []
    for value in (1.0, 3e38, math.inf, -math.inf, math.nan):
        optimizer.predictors[2].grads()[2][0, 0] = value
        with Counts() as counts:
            found.append((optimizer._non_finite_layers([1, 2]), counts.number))
    return found


def test_every_kind_of_bad_number_is_found_in_a_launch_a_gradient():
    (found,) = run_ranks(_looking_for_bad_gradients, 1)
    assert [layers for layers, _ in found] == [[], [], [2], [2], [2]]
    # Two layers of four gradients, and what joins and reduces their norms.
    assert all(number <= 8 + 16 for _, number in found)


def _bad_gradient_of_one_stage():
    """Two ranks as two pipeline stages, the first with a bad gradient in both of its layers."""
    from megatron_dsv.training.dsv_controller import DSVController, DSVGroups

    rank, world = torch.distributed.get_rank(), torch.distributed.group.WORLD
    block = _controller(1)
    alone = [torch.distributed.new_group([stage]) for stage in range(2)][rank]
    controller = DSVController(block.attentions.values(), block.dsv, DSVGroups(alone, alone, world, world), 2,
                               Recorder())
    controller.begin_micro_batch(0, 64)
    if rank == 0:
        for attention in controller.attentions.values():
            attention.predictor.grads()[0].fill_(math.nan)
    controller.end_step()
    return controller.recorder.report()["dsv/predictor_skipped_layers"]


def test_every_rank_counts_the_skipped_layers_of_all_stages():
    assert run_ranks(_bad_gradient_of_one_stage, 2) == [2, 2]


def _steps_of_two_lengths():
    """An image, a video, an image, a video: what is profiled, and what the reports speak of."""
    from types import SimpleNamespace

    from megatron_dsv.sparsity.profile import GroupProfile

    lengths = [16, 64, 16, 64]
    steps = SimpleNamespace(longest=64, words=None, may_profile=lambda step: lengths[step] == 64)
    controller = _controller(1, steps)
    for attention in controller.attentions.values():
        attention.selector.attends_sparsely = lambda tokens: tokens == 64
    controller.begin_run()
    seen = []
    for step, tokens in enumerate(lengths):
        controller.begin_micro_batch(step, tokens)
        if controller.profiles_now:
            for attention in controller.attentions.values():
                heads = len(attention.selector.query_heads)
                attention.statistics.add(GroupProfile(torch.full((3, heads), 0.5), torch.ones(3, heads)))
        controller.end_step()
        seen.append((controller.profiled_at, controller.layer_reports[0].sparse, controller.step_reports[0].sparse))
        assert controller._learning_rate(attention) == pytest.approx(1e-4 * 0.1), "the layer is sparse where it counts"
    return seen


def test_profiles_and_reports_are_of_the_long_videos():
    """The one due in step 0 waits for step 1; between profiles, kept shares are of the step's own length."""
    assert run_ranks(_steps_of_two_lengths, 1) == [[(None, True, False), (1, True, True), (1, True, False),
                                                    (1, True, True)]]


def _resumed_with(statistics):
    """Layers that passed the gate, resumed at step 7 by a run that measures some of their statistics otherwise."""
    from megatron_dsv.sparsity.schedule import LayerState
    from megatron_dsv.training.model_identity import MeasuredOtherwise

    controller = _controller(1)
    for attention in controller.attentions.values():
        heads = len(attention.selector.query_heads)
        attention.statistics.update(torch.full((3, heads), 0.25), torch.full((3,), 0.25), LayerState(sparse=True))
        assert attention.selector.attends_sparsely(64)
    # The second rank alone knows: all must follow.
    rank = torch.distributed.get_rank()
    controller.begin_run(MeasuredOtherwise(frozenset(statistics), "otherwise") if rank == 1 else None)
    controller.begin_micro_batch(7, 64)
    (first, *_) = controller.attentions.values()
    return ({name for name, mean in first.statistics.layer_means().items() if math.isnan(mean)},
            first.selector.budgets(8) is None, first.selector.attends_sparsely(64), controller.profiles_now)


@pytest.mark.parametrize(("statistics", "expected"), [
    ((), (False, True, False)),
    (("sparsity",), (False, True, True)),
    (("block_fraction", "recall"), (True, False, True)),
])
def test_what_was_measured_otherwise_is_forgotten_by_all_and_measured_at_once(statistics, expected):
    assert run_ranks(_resumed_with, 2, statistics) == [(set(statistics), *expected)] * 2


def _decisions():
    """What each rank says of its second layer as its budget and its gate change."""
    from megatron_dsv.sparsity.schedule import LayerState

    controller = _controller(1)
    controller.profiled_tokens = 64
    attention, said = controller.attentions[2], []
    for passed, keep in ((False, 0.9), (True, 0.9), (True, 0.8), (True, 0.25), (True, 0.3), (False, 0.3)):
        heads = len(attention.selector.query_heads)
        attention.statistics.update(torch.full((3, heads), keep), torch.full((3,), keep), LayerState(sparse=passed))
        said.append(controller.changed_decisions())
    return said


def test_a_layer_says_once_why_it_is_dense_or_sparse():
    source = "0.500, the default where nothing was measured"
    assert run_ranks(_decisions, 2) == [[
        [], [f"layer 2 at 64 tokens is dense: keep ratio 0.900 is above {source}"], [],
        [f"layer 2 at 64 tokens is sparse: keep ratio 0.250 is within {source}"], [],
        ["layer 2 at 64 tokens is dense: it has not passed the gate"]], [[]] * 6]
