"""Nothing in the step or the profile reads a device value: the meta device has none to read, so it would raise."""

from __future__ import annotations

import pytest
import torch

from megatron_dsv.kernels.token_topk.api import token_topk
from megatron_dsv.sparsity.predictor_loss import predictor_loss
from megatron_dsv.sparsity.profile import update_running
from megatron_dsv.sparsity.selection_rules import RULES, select
from megatron_dsv.testing.profiles import profile_query_groups


@pytest.mark.parametrize("rule", sorted(RULES))
def test_selection_and_its_capacity_follow_from_shapes_and_budgets(rule):
    scores = torch.empty(2, 4, 6, 12, device="meta")
    selection = select(scores, rule=rule, num_kv_heads=2, num_queries=48, num_keys=48, q_block_size=8,
                       kv_block_size=4, head_budgets=[3, 12, 5, 3], kv_length=torch.empty(2, 2, device="meta").int(),
                       query_length=torch.empty(2, device="meta").int())
    capacity = {"all": 0, "topk": 2 * 6 * 11, "topk-mass": 2 * 6 * 23, "mass": 2 * 6 * 48}[rule]
    assert selection.kv_indices.shape == (capacity,)
    assert selection.row_count.shape == (2, 4, 6)


def test_token_selection_runs_without_values():
    q, k = torch.empty(12, 2, 4, 8, device="meta"), torch.empty(48, 2, 2, 8, device="meta")
    selection = token_topk(q, k, head_budgets=[3, 48, 20, 3], num_queries=48, q_block_size=8, proxies=2,
                           kv_length=torch.empty(2, 2, device="meta").int(),
                           query_length=torch.empty(2, device="meta").int())
    assert selection.kv_indices.shape == (2 * 6 * (8 + 20 + 8),)


def test_scores_that_read_the_device_would_be_caught():
    with pytest.raises((RuntimeError, NotImplementedError)):
        int(torch.empty(2, device="meta").max())


def test_profile_and_loss_run_without_values():
    q, k = torch.empty(48, 2, 4, 8, device="meta"), torch.empty(48, 2, 2, 8, device="meta")
    lengths = torch.empty(2, 2, device="meta").int()
    selection = select(torch.empty(2, 4, 6, 12, device="meta"), rule="topk", num_kv_heads=2, num_queries=48,
                       num_keys=48, q_block_size=8, kv_block_size=4, head_budgets=[3, 12, 5, 3], kv_length=lengths)
    profile = profile_query_groups(
        q, k, group_ids=torch.arange(2, device="meta"), q_block_size=8, kv_block_size=4, softmax_scale=1.0, theta=0.9,
        budget_mass=0.95, kv_length=lengths, query_length=torch.empty(2, device="meta").int(), selection=selection)
    assert update_running(torch.empty(3, 4, device="meta"), profile.means()).shape == (3, 4)

    q_lr, k_lr = q[:5].clone().requires_grad_(), k.clone().requires_grad_()
    predictor_loss(q_lr, k_lr, q[:5], k, softmax_scale=1.0, kv_length=lengths,
                   row_mask=torch.empty(5, 2, dtype=torch.bool, device="meta")).backward()
    assert k_lr.grad.shape == k.shape
