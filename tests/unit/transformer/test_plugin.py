"""DSV's attention inside a plain megatron.core TransformerBlock that this project did not write."""

import ast
import contextlib
import io
import re
import runpy
from pathlib import Path

import pytest
import torch

from megatron_dsv.config import DSVConfig
from megatron_dsv.sparsity.token_layout import TokenLayout
from megatron_dsv.testing.model_parallel import initialize, transformer_config
from megatron_dsv.testing.ranks import run_ranks
from megatron_dsv.transformer.rope3d import rope_tables

ROOT = Path(__file__).resolve().parents[3]
EXAMPLE = ROOT / "examples" / "plugin.py"
DSV = {"dsv_q_block_size": 16, "dsv_kv_block_size": 8, "dsv_predictor_rank": 4, "dsv_dense_above": 1.0}


def _block(groups, dsv, **fields):
    from megatron.core.transformer.transformer_block import TransformerBlock
    from megatron.core.transformer.transformer_config import TransformerConfig

    from megatron_dsv.transformer.layer_specs import get_dsv_layer_spec

    config = transformer_config(TransformerConfig, **fields)
    torch.manual_seed(3)
    return TransformerBlock(config, get_dsv_layer_spec(dsv), pg_collection=groups)


def _run(block, x):
    out = block(x, attention_mask=None)
    out.square().sum().backward()
    grads = {name: parameter.grad.clone() for name, parameter in block.named_parameters() if parameter.grad is not None}
    block.zero_grad()
    return out.detach(), grads


@pytest.mark.parametrize(("field", "value", "words"), [
    ("dsv_attention", "windw", "--dsv-attention must be one of predicted, window-1/3, window-2/3, got 'windw'"),
    ("dsv_sparse_stage", "spares", "--dsv-sparse-stage must be one of .*; did you mean sparse?"),
    ("dsv_sparse_backend", "triton9", "--dsv-sparse-backend must be one of .*; did you mean triton?"),
    ("dsv_keep_ratio", 1.5, "--dsv-keep-ratio must be a number, above 0 and at most 1, got 1.5"),
    ("dsv_q_block_size", -4, "--dsv-q-block-size must be a power of two, at least 1, got -4")])
def test_a_configuration_made_in_python_is_checked_like_flags(field, value, words):
    from megatron_dsv.transformer.layer_specs import get_dsv_layer_spec

    with pytest.raises(ValueError, match=f"^{words}"):
        get_dsv_layer_spec(DSVConfig(**{field: value}))


def _everything_selected_equals_dense(predictor_input):
    groups = initialize()
    dense = _block(groups, DSVConfig(**DSV)).double()
    sparse = _block(groups, DSVConfig(**DSV, dsv_sparse_stage="sparse", dsv_keep_ratio=1.0,
                                      dsv_predictor_input=predictor_input)).double()
    sparse.load_state_dict(dense.state_dict(), strict=False)
    # Rows that keep everything are marked dense; the whole-model test lists their blocks one by one.
    for layer in sparse.layers:
        select = layer.self_attention.selector
        layer.self_attention.selector.budgets = lambda blocks, select=select: [blocks] * len(select.query_heads)
    x = torch.randn(50, 2, 48, dtype=torch.float64, requires_grad=True)
    expected, expected_grads = _run(dense, x)
    got, grads = _run(sparse, x)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    assert grads.keys() == expected_grads.keys()
    for name, grad in grads.items():
        torch.testing.assert_close(grad, expected_grads[name], rtol=1e-9, atol=1e-11, msg=name)


@pytest.mark.parametrize("predictor_input", ["hidden", "qk"])
def test_everything_selected_equals_dense(predictor_input):
    run_ranks(_everything_selected_equals_dense, 1, predictor_input)


def _recompute_attends_the_same(recompute):
    groups = initialize()
    dsv = DSVConfig(**DSV, dsv_sparse_stage="sparse", dsv_keep_ratio=0.3)
    straight = _block(groups, dsv)
    recomputed = _block(groups, dsv, **recompute)
    recomputed.load_state_dict(straight.state_dict())
    seen = []
    for block in (straight, recomputed):
        for layer in block.layers:
            attention = layer.self_attention
            attend = attention.core_attention.scheme.attend

            def recording(q, k, v, pending, *, softmax_scale, attend=attend, number=layer.layer_number):
                seen.append((number, pending.selection.block_mask()))
                return attend(q, k, v, pending, softmax_scale=softmax_scale)

            attention.core_attention.scheme = _Scheme(attention.core_attention.scheme, recording)
    x = torch.randn(64, 2, 48, requires_grad=True)
    straight_out, straight_grads = _run(straight, x)
    count = len(seen)
    # A predictor that changes between forward and recomputation must not change what is attended.
    out = recomputed(x, attention_mask=None)
    for layer in recomputed.layers:
        for weight in layer.self_attention.predictor.weights():
            weight.add_(torch.randn_like(weight))
    out.square().sum().backward()
    torch.testing.assert_close(out, straight_out, rtol=0, atol=0)
    for name, parameter in recomputed.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(parameter.grad, straight_grads[name], rtol=0, atol=0, msg=name)
    assert len(seen) == 3 * count
    assert all(layer.self_attention.cache.clear() == 0 for layer in recomputed.layers)


class _Scheme:
    def __init__(self, inner, attend):
        self.begin, self.attend = inner.begin, attend
        self.gather_rows, self.reduce_rows = inner.gather_rows, inner.reduce_rows
        self.own_length, self.by_heads = inner.own_length, inner.by_heads


@pytest.mark.parametrize("recompute", [
    {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1},
    {"recompute_granularity": "selective", "recompute_modules": ["core_attn"]},
])
def test_recompute_attends_the_same(recompute):
    run_ranks(_recompute_attends_the_same, 1, recompute)


def _windows_are_selected_once():
    """The second forward of a recomputed layer attends what the first one did: nothing is exchanged for it again."""
    groups = initialize()
    attention = _block(groups, DSVConfig(**DSV, dsv_sparse_stage="dense", dsv_attention="window-1/3")
                       ).layers[0].self_attention
    scheme, begun = attention.core_attention.scheme, []
    attention.core_attention.scheme = counting = _Scheme(scheme, scheme.attend)
    counting.begin = lambda *args: begun.append(1) or scheme.begin(*args)
    layout, x = TokenLayout((4, 4, 4), (2, 2, 4)), torch.randn(64, 2, 48)
    with torch.no_grad():
        first = [attention(part, layout=layout)[0] for part in (x, -x)]
    again = [attention(part, layout=layout)[0] for part in (x, -x)]
    assert all(torch.equal(a, b) for a, b in zip(first, again))
    assert len(begun) == 2
    assert attention.cache.clear() == 0
    attention.eval()
    with torch.no_grad():
        attention(x, layout=layout)
    assert attention.cache.clear() == 0, "evaluation recomputes nothing"


def test_windows_are_selected_once():
    run_ranks(_windows_are_selected_once, 1)


def _predictor_learns_without_touching_the_backbone():
    groups = initialize()
    x = torch.randn(64, 2, 48)
    dense = _block(groups, DSVConfig(**DSV))
    learner = _block(groups, DSVConfig(**DSV, dsv_sparse_stage="predictor", dsv_predictor_query_stride=4))
    learner.load_state_dict(dense.state_dict(), strict=False)
    expected = _run(dense, x)
    got = _run(learner, x)
    assert torch.equal(got[0], expected[0])
    assert got[1].keys() == expected[1].keys()
    assert all(torch.equal(got[1][name], grad) for name, grad in expected[1].items())
    for layer in learner.layers:
        predictor = layer.self_attention.predictor
        assert predictor.loss_count == 1
        assert all(grad.abs().sum() > 0 for grad in predictor.grads())


def test_predictor_learns_without_touching_the_backbone():
    run_ranks(_predictor_learns_without_touching_the_backbone, 1)


def _learning_gathers_once(predictor_input):
    groups = initialize()
    dsv = DSVConfig(**DSV, dsv_sparse_stage="predictor", dsv_predictor_query_stride=4,
                    dsv_predictor_input=predictor_input)
    attention = _block(groups, dsv).layers[0].self_attention
    scheme, calls = attention.core_attention.scheme, []
    attention.core_attention.scheme = counting = _Scheme(scheme, scheme.attend)
    counting.gather_rows = lambda tensors, rows: calls.append(len(tensors)) or scheme.gather_rows(tensors, rows)
    positions = torch.arange(64)[:, None].expand(64, 3)
    attention(torch.randn(64, 2, 48), rope=rope_tables(positions, attention.config.kv_channels, 4))
    assert calls == [2 if predictor_input == "hidden" else 1]


@pytest.mark.parametrize("predictor_input", ["hidden", "qk"])
def test_learning_gathers_rows_in_one_call(predictor_input):
    """Every call is an all-reduce under context parallelism, for each layer and micro-batch."""
    run_ranks(_learning_gathers_once, 1, predictor_input)


def _padding_is_never_attended(stage):
    groups = initialize()
    block = _block(groups, DSVConfig(**DSV, dsv_sparse_stage=stage, dsv_keep_ratio=0.4 if stage == "sparse" else None))
    attention = block.layers[0].self_attention
    x = torch.randn(64, 2, 48)
    length = torch.full((2,), 41, dtype=torch.int32)
    expected, _ = attention(x, kv_length=length)
    poisoned = x.clone()
    poisoned[41:] = 1e4
    got, _ = attention(poisoned, kv_length=length)
    assert torch.equal(got[:41], expected[:41])


@pytest.mark.parametrize("stage", ["dense", "sparse"])
def test_padding_is_never_attended(stage):
    run_ranks(_padding_is_never_attended, 1, stage)


def _masks_are_refused():
    groups = initialize()
    attention = _block(groups, DSVConfig(**DSV)).layers[0].self_attention
    with pytest.raises(NotImplementedError, match="attention_mask must be None"):
        attention(torch.randn(16, 1, 48), attention_mask=torch.ones(1))


def test_masks_are_refused():
    run_ranks(_masks_are_refused, 1)


def _dropout_is_refused():
    groups = initialize()
    with pytest.raises(NotImplementedError, match=r"--attention-dropout must be 0, got 0.1;.*attention_dropout=0\.0\)"):
        _block(groups, DSVConfig(**DSV), attention_dropout=0.1)


def test_dropout_is_refused():
    run_ranks(_dropout_is_refused, 1)


def _example():
    torch.distributed.destroy_process_group()
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        names = runpy.run_path(str(EXAMPLE))
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    losses = [float(value) for value in re.findall(r"loss ([\d.]+)", printed.getvalue())]
    assert len(losses) == 6
    assert losses == sorted(losses, reverse=True)
    assert names["controller"].profiled_at == 4
    assert all(report.sparse and 0 < report.recall <= 1 for report in names["controller"].layer_reports)


def test_the_example_silences_megatron_s_warnings_of_optional_packages():
    """They are raised where a module is first imported, so in a fresh process: seconds of it, hence read off here."""
    program = ast.parse(EXAMPLE.read_text())
    outside = [name for node in program.body if isinstance(node, ast.Import | ast.ImportFrom)
               for name in [getattr(node, "module", None) or node.names[0].name]]
    assert not [name for name in outside if name.split(".")[0] == "megatron"]
    assert not set(outside) & {"megatron_dsv.training.dsv_controller", "megatron_dsv.transformer.layer_specs"}
    steps = [ast.unparse(node) for node in program.body if isinstance(node, ast.Expr | ast.With)]
    inside = next(index for index, step in enumerate(steps) if step.startswith("with cpu.optional_packages():"))
    assert steps.index("cpu.enable()") < inside


def test_the_example_of_the_readme_runs():
    assert str(EXAMPLE.relative_to(ROOT)) in (ROOT / "README.md").read_text()
    run_ranks(_example, 1)
