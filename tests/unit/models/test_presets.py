"""Parameters of the presets: Wan 2.1's equal diffusers' model, DSV's lie near the published sizes."""

from pathlib import Path

import pytest
import torch

import megatron_dsv
from megatron_dsv.testing.model_sizes import markdown, model_sizes
from megatron_dsv.transformer.predictor import LowRankPredictor

MODELS_PAGE = Path(megatron_dsv.__file__).parent.parent / "docs" / "models.md"


@pytest.fixture(scope="module")
def sizes():
    return {size.name: size for size in model_sizes()}


@pytest.mark.parametrize(("name", "layers", "heads", "ffn"), [
    ("wan2.1-1.3b", 30, 12, 8960),
    ("wan2.1-14b", 40, 40, 13824),
])
def test_wan_has_exactly_the_parameters_of_diffusers_model(sizes, name, layers, heads, ffn):
    """The public configuration of Wan-AI's text-to-video models, built by diffusers without memory."""
    diffusers = pytest.importorskip("diffusers")
    with torch.device("meta"):
        theirs = diffusers.WanTransformer3DModel(
            patch_size=(1, 2, 2), num_attention_heads=heads, attention_head_dim=128, in_channels=16, out_channels=16,
            text_dim=4096, freq_dim=256, ffn_dim=ffn, num_layers=layers, cross_attn_norm=True,
            qk_norm="rms_norm_across_heads", eps=1e-6)
    assert sizes[name].parameters == sum(parameter.numel() for parameter in theirs.parameters())
    assert sizes[name].per_layer == sum(parameter.numel() for parameter in theirs.blocks[0].parameters())


@pytest.mark.parametrize(("name", "published"), [("dsv-0.8b", 0.8e9), ("dsv-2.7b", 2.7e9), ("dsv-30b", 30e9)])
def test_dsv_presets_are_within_a_tenth_of_the_published_sizes(sizes, name, published):
    assert sizes[name].parameters == pytest.approx(published, rel=0.1)


@pytest.mark.parametrize("name", ["dsv-0.8b", "dsv-2.7b", "dsv-30b"])
def test_the_arithmetic_of_the_models_page(sizes, name):
    """Weights of the matrices, as docs/models.md counts them; biases, norms and tables are below a thousandth."""
    size = sizes[name]
    h, f = size.hidden, size.ffn
    layer = 8 * h * h + (3 if size.mlp == "geglu" else 2) * h * f
    assert size.per_layer == pytest.approx(layer, rel=2e-3)
    around = 8 * h * h + (256 + 4096 + 64 + 64) * h
    assert size.parameters - size.layers * size.per_layer == pytest.approx(around, rel=2e-3)


def test_other_readings_of_the_30b_model_are_further_from_30b(sizes):
    chosen = abs(sizes["dsv-30b"].parameters - 30e9)
    for flags, billions in ((("--ffn-hidden-size", "24576"), 25.70),
                            (("--ffn-hidden-size", "24576", "--dit-mlp", "geglu"), 32.04)):
        (reading,) = model_sizes(("dsv-30b",), *flags)
        assert reading.parameters / 1e9 == pytest.approx(billions, abs=0.01)
        assert abs(reading.parameters - 30e9) > chosen


def test_predictors_are_counted_as_they_are_built(sizes):
    size = sizes["debug"]
    predictor = LowRankPredictor(layer_number=1, query_heads=range(size.heads), key_heads=range(size.heads),
                                 channels=size.hidden, rank=16, input_kind="hidden", seed=1, tp_group=None)
    assert size.predictors == size.layers * sum(parameter.numel() for parameter in predictor.parameters())


def test_the_page_shows_what_is_counted(sizes):
    assert markdown(list(sizes.values())) in MODELS_PAGE.read_text(encoding="utf-8")
