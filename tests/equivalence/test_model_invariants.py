"""What the whole model must not depend on: full lists instead of dense attention, padding, token order.

In fp64, also where the model asks for fp32, on a VideoDiT with random weights in its head, which training starts at
zero.
"""

import pytest
import torch

from megatron_dsv.config import DSVConfig
from megatron_dsv.context_parallel import local
from megatron_dsv.context_parallel.local import Pending
from megatron_dsv.kernels.selection import from_block_mask
from megatron_dsv.testing.model_parallel import initialize, transformer_config
from megatron_dsv.testing.ranks import run_ranks

FLOAT = torch.Tensor.float
SHAPE = (3, 5, 10)
ODD_SHAPES = [(1, 7, 9), (5, 13, 3), (2, 2, 2), (1, 1, 1)]


@pytest.fixture
def exact(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "float", torch.Tensor.double)


def _model(groups, dsv=None, like=None, **dit):
    """A VideoDiT in fp64, with the weights of ``like``."""
    from megatron_dsv.models.config import VideoDiTConfig
    from megatron_dsv.models.video_dit import VideoDiT
    from megatron_dsv.transformer.layer_specs import get_dit_layer_spec
    from megatron_dsv.transformer.transformer_config import DiTTransformerConfig

    dsv = DSVConfig(**(dsv or {}))
    dsv.validate()
    options = VideoDiTConfig(**({"dit_latent_channels": 4, "dit_text_dim": 8, "dit_text_length": 5,
                                 "dit_frequency_dim": 16} | dit))
    config = transformer_config(DiTTransformerConfig, dsv=dsv)
    spec = get_dit_layer_spec(dsv, implementation="local", qk_norm=options.dit_qk_norm == "rms",
                              cross_attn_norm=options.dit_cross_attn_norm, seed=1)
    model = VideoDiT(config, options, spec, pg_collection=groups).double()
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64) * 0.2)
    if like is not None:
        model.load_state_dict(like.state_dict(), strict=False)
    return model


def _inputs(shape, batch=2):
    generator = torch.Generator().manual_seed(7)
    return {"latents": torch.randn(batch, 4, *shape, generator=generator, dtype=torch.float64),
            "timesteps": torch.rand(batch, generator=generator),
            "text": torch.randn(batch, 5, 8, generator=generator, dtype=torch.float64)}


def _run(model, inputs):
    """The prediction, and the gradients of a linear function of it."""
    out = model(**inputs)
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9), dtype=torch.float64)
    (out * weights).sum().backward()
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    return out.detach(), grads


def _assert_same(got, expected, name=""):
    assert expected[0].dtype == torch.float64
    _assert_close(got[0], expected[0], f"{name} forward")
    assert got[1].keys() == expected[1].keys()
    for key, grad in expected[1].items():
        _assert_close(got[1][key], grad, f"{name} gradient of {key}")


def _assert_close(got, expected, name):
    """To the rounding of fp64 sums, relative to the largest element."""
    error = (got - expected).abs().max().item()
    assert error <= 1e-12 * max(expected.abs().max().item(), 1.0), f"{name}: {error:.1e}"


class _ListingScheme:
    """Selects what the given scheme selects, with each row's blocks listed; dense rows and all."""

    def __init__(self, inner, seen):
        self.attend, self.gather_rows, self.reduce_rows = inner.attend, inner.gather_rows, inner.reduce_rows
        self.own_length, self.by_heads = inner.own_length, inner.by_heads
        self._begin = inner.begin
        self._seen = seen

    def begin(self, *args):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.Tensor, "float", FLOAT)  # scores must be fp32
            chosen = self._begin(*args).selection
        listed = from_block_mask(chosen.block_mask(), chosen.kv_length, num_queries=chosen.num_queries,
                                 num_keys=chosen.num_keys, q_block_size=chosen.q_block_size,
                                 kv_block_size=chosen.kv_block_size)
        self._seen.append(listed)
        return Pending(listed)


def _list_everything(model):
    """Every block in every row's list, and no row marked dense: the sparse path in full. Returns what is selected."""
    seen = []
    for layer in model.decoder.layers:
        core = layer.self_attention.core_attention
        core.scheme = _ListingScheme(core.scheme, seen)
    return seen


def _everything_selected_equals_dense(dit):
    groups = initialize()
    blocks = {"dsv_q_block_size": 16, "dsv_kv_block_size": 4, "dsv_dense_above": 1.0}
    dense = _model(groups, blocks, **dit)
    sparse = _model(groups, blocks | {"dsv_sparse_stage": "sparse", "dsv_keep_ratio": 1.0}, like=dense, **dit)
    seen = _list_everything(sparse)
    inputs = _inputs(SHAPE)
    _assert_same(_run(sparse, inputs), _run(dense, inputs))
    assert len(seen) == 2
    for selection in seen:
        assert bool((selection.row_start >= 0).all()), "no row may be marked dense"
        valid = -(-int(selection.kv_length.max()) // selection.kv_block_size)
        assert bool(selection.block_mask()[..., :valid].all())


@pytest.mark.parametrize("dit", [{}, {"dit_position": "sincos", "dit_qk_norm": "none", "dit_cross_attn_norm": False}],
                         ids=["wan", "paper"])
@pytest.mark.usefixtures("exact")
def test_everything_selected_equals_dense(dit):
    run_ranks(_everything_selected_equals_dense, 1, dit)


LAYOUTS = {
    "larger-groups-more-padding": {"dsv_q_block_size": 64},
    "raster-order": {"dsv_q_block_size": 16, "dsv_cube_size": "1x1x16"},
    "long-cubes": {"dsv_q_block_size": 16, "dsv_cube_size": "8x1x2"},
    "no-padding": {"dsv_q_block_size": 1, "dsv_predictor_proxies": 1},
}


def _token_order_changes_nothing():
    groups = initialize()
    base = _model(groups, {"dsv_q_block_size": 16})
    inputs = _inputs(SHAPE)
    expected = _run(base, inputs)
    lengths = {base.layout(SHAPE).padded_length}
    for name, dsv in LAYOUTS.items():
        other = _model(groups, dsv, like=base)
        _assert_same(_run(other, inputs), expected, name)
        lengths.add(other.layout(SHAPE).padded_length)
    assert len(lengths) == 3, "the layouts must differ in padding"


@pytest.mark.usefixtures("exact")
def test_padding_and_token_order_change_no_prediction_of_a_dense_model():
    run_ranks(_token_order_changes_nothing, 1)


def _an_odd_rank_that_nothing_rotates():
    groups = initialize()
    base = _model(groups, {"dsv_q_block_size": 16})
    inputs = _inputs(SHAPE)
    expected = _run(base, inputs)
    for dsv in ({}, {"dsv_sparse_stage": "predictor", "dsv_predictor_input": "qk"}):
        other = _model(groups, {"dsv_q_block_size": 16, "dsv_predictor_rank": 7} | dsv, like=base)
        _assert_same(_run(other, inputs), expected, str(dsv))


@pytest.mark.usefixtures("exact")
def test_a_rank_is_free_where_no_predictor_is_rotated():
    run_ranks(_an_odd_rank_that_nothing_rotates, 1)


def _odd_shapes_are_finite():
    groups = initialize()
    stages = {"dense": {}, "predictor": {}, "sparse": {"dsv_keep_ratio": 0.4}, "auto": {}}
    for stage, more in stages.items():
        model = _model(groups, {"dsv_sparse_stage": stage, "dsv_q_block_size": 16, "dsv_kv_block_size": 4,
                                "dsv_predictor_query_stride": 4, "dsv_dense_above": 1.0} | more)
        for shape in ODD_SHAPES:
            inputs = _inputs(shape)
            for layer in model.decoder.layers:
                layer.self_attention.begin_step(0, profiles=stage != "dense")
            out, grads = _run(model, inputs)
            assert out.shape == inputs["latents"].shape
            assert bool(torch.isfinite(out).all()), (stage, shape)
            assert all(bool(torch.isfinite(grad).all()) for grad in grads.values()), (stage, shape)
            assert all(grad.any() for grad in grads.values()), (stage, shape)


def test_odd_shapes_are_finite():
    run_ranks(_odd_shapes_are_finite, 1)


def _every_dense_attention_is_told():
    from megatron_dsv.kernels.dense_attention import api
    from megatron_dsv.transformer import cross_attention

    asked = []

    def spy(*tensors, deterministic=False, **named):
        asked.append((tensors[0].shape[0] == tensors[1].shape[0], deterministic))
        return api.dense_attention(*tensors, **named)

    local.dense_attention = cross_attention.dense_attention = spy
    groups = initialize()
    for deterministic in (False, True):
        asked.clear()
        _model(groups, {"dsv_q_block_size": 16, "dsv_deterministic": deterministic})(**_inputs(SHAPE))
        # Of each layer, self-attention and cross-attention.
        assert asked == [(True, deterministic), (False, deterministic)] * 2


def test_deterministic_reaches_self_and_cross_attention():
    run_ranks(_every_dense_attention_is_told, 1)
