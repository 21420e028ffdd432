"""What the whole model must not depend on: full lists instead of dense attention, padding, token order.

In fp64, on a VideoDiT with random weights in its head, which training starts at zero.
"""

import pytest
import torch

from megatron_dsv.config import DSVConfig
from megatron_dsv.testing.model_parallel import initialize, transformer_config
from megatron_dsv.testing.ranks import run_ranks

SHAPE = (3, 7, 10)
ODD_SHAPES = [(1, 7, 9), (5, 13, 3), (2, 2, 2), (1, 1, 1)]


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
    """Patches before they become fp32, and the gradients of a linear function of the prediction."""
    patches = []
    hook = model.head.register_forward_hook(lambda module, args, out: patches.append(out.detach()))
    out = model(**inputs)
    hook.remove()
    weights = torch.randn(out.shape, generator=torch.Generator().manual_seed(9))
    (out * weights).sum().backward()
    grads = {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}
    model.zero_grad()
    layout = model.layout(tuple(inputs["latents"].shape[2:]))
    return layout.to_raster_order(patches[0]), grads, out.detach()


def _assert_same(got, expected, name=""):
    torch.testing.assert_close(got[0], expected[0], rtol=1e-11, atol=1e-11, msg=lambda text: f"{name} forward: {text}")
    assert got[1].keys() == expected[1].keys()
    for key, grad in expected[1].items():
        scale = grad.abs().max().item()
        torch.testing.assert_close(got[1][key], grad, rtol=1e-9, atol=1e-10 * max(scale, 1.0),
                                   msg=lambda text, key=key: f"{name} gradient of {key}: {text}")
    torch.testing.assert_close(got[2], expected[2], rtol=1e-6, atol=1e-6)


class _RecordingScheme:
    def __init__(self, inner, seen):
        self.attend = inner.attend
        self._begin = inner.begin
        self._seen = seen

    def begin(self, *args):
        pending = self._begin(*args)
        self._seen.append(pending.selection)
        return pending


def _list_everything(model):
    """Every block in every row's list, and no row marked dense: the sparse path in full. Returns what is selected."""
    seen = []
    for layer in model.decoder.layers:
        attention = layer.self_attention
        heads = len(attention.selector.query_heads)
        attention.selector.budgets = lambda blocks, heads=heads: [blocks] * heads
        attention.core_attention.scheme = _RecordingScheme(attention.core_attention.scheme, seen)
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
    lengths = {base.padded_length(SHAPE)}
    for name, dsv in LAYOUTS.items():
        other = _model(groups, dsv, like=base)
        _assert_same(_run(other, inputs), expected, name)
        lengths.add(other.padded_length(SHAPE))
    assert len(lengths) == 3, "the layouts must differ in padding"


def test_padding_and_token_order_change_no_prediction_of_a_dense_model():
    run_ranks(_token_order_changes_nothing, 1)


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
            _, grads, out = _run(model, inputs)
            assert out.shape == inputs["latents"].shape
            assert out.dtype == torch.float32
            assert bool(torch.isfinite(out).all()), (stage, shape)
            assert all(bool(torch.isfinite(grad).all()) for grad in grads.values()), (stage, shape)
            assert all(grad.any() for grad in grads.values()), (stage, shape)


def test_odd_shapes_are_finite():
    run_ranks(_odd_shapes_are_finite, 1)
