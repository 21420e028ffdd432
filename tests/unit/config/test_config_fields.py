import argparse
import dataclasses

import pytest

from megatron_dsv.config import DSVConfig
from megatron_dsv.config_fields import add_dataclass_arguments, check_fields, flag_of, from_args, knob, parse_sizes
from megatron_dsv.data.config import DataConfig
from megatron_dsv.diffusion.config import FlowConfig
from megatron_dsv.models.config import VideoDiTConfig
from megatron_dsv.training.config import TrainingConfig

CONFIGS = [DSVConfig, VideoDiTConfig, FlowConfig, DataConfig, TrainingConfig]


def parser_of(*configs):
    parser = argparse.ArgumentParser(allow_abbrev=False, exit_on_error=False)
    for cls in configs:
        add_dataclass_arguments(parser, cls)
    return parser


@pytest.mark.parametrize("cls", CONFIGS)
def test_defaults_survive_the_parser_and_are_valid(cls):
    config = from_args(cls, parser_of(cls).parse_args([]))
    assert config == cls()
    config.validate()


def test_every_field_is_a_flag_with_help_and_no_two_classes_share_one():
    parser = parser_of(*CONFIGS)  # argparse refuses a flag given twice
    for cls in CONFIGS:
        for item in dataclasses.fields(cls):
            action = parser._option_string_actions[flag_of(item.name)]
            assert action.dest == item.name
            assert len(item.metadata["help"]) > 10
    assert "--dsv-predictor-rank" in parser.format_help()


def test_flags_set_fields_with_their_types():
    args = parser_of(DSVConfig).parse_args(
        ["--dsv-sparse-stage", "2", "--dsv-predictor-rank", "8", "--dsv-keep-ratio", "0.25", "--no-dsv-keep-own-block",
         "--dsv-deterministic", "--dsv-cube-size", "2x4x8"])
    config = from_args(DSVConfig, args)
    assert config == dataclasses.replace(
        DSVConfig(), dsv_sparse_stage="sparse", dsv_predictor_rank=8, dsv_keep_ratio=0.25, dsv_keep_own_block=False,
        dsv_deterministic=True, dsv_cube_size="2x4x8")
    assert config.cube == (2, 4, 8)
    config.validate()


@pytest.mark.parametrize(("alias", "stage"), [("0", "dense"), ("1", "predictor"), ("2", "sparse"), ("auto", "auto")])
def test_stage_aliases(alias, stage):
    args = parser_of(DSVConfig).parse_args(["--dsv-sparse-stage", alias])
    assert from_args(DSVConfig, args).dsv_sparse_stage == stage


@pytest.mark.parametrize(("flags", "words"), [
    (["--dsv-predictor-rank", "0"], "must be an integer, at least 1 and at most 256, got '0'"),
    (["--dsv-predictor-rank", "4.5"], "must be an integer, at least 1 and at most 256, got '4.5'"),
    (["--dsv-sparse-stage", "spars"], "got 'spars'; did you mean sparse?"),
    (["--dsv-q-block-size", "48"], "must be a power of two, at least 1, got '48'"),
    (["--dsv-keep-ratio", "0"], "must be a number, above 0 and at most 1, got '0'"),
    (["--dsv-keep-ratio", "nan"], "got 'nan'"),
    (["--dsv-cube-size", "4x4"], "must be 3 positive integers joined by x"),
    (["--dsv-cube-size", "4x0x4"], "must be 3 positive integers joined by x"),
])
def test_the_parser_refuses_what_a_field_does_not_allow(flags, words):
    with pytest.raises(argparse.ArgumentError, match=flags[0]) as caught:
        parser_of(DSVConfig).parse_args(flags)
    assert words in str(caught.value)


@pytest.mark.parametrize(("changes", "words"), [
    ({"dsv_predictor_rank": 0}, "--dsv-predictor-rank must be an integer, at least 1 and at most 256, got 0"),
    ({"dsv_predictor_rank": True}, "--dsv-predictor-rank must be an integer"),
    ({"dsv_predictor_lr": "fast"}, "--dsv-predictor-lr must be a number, at least 0, got 'fast'"),
    ({"dsv_deterministic": 1}, "--dsv-deterministic must be true or false, got 1"),
    ({"dsv_theta": None}, "--dsv-theta must be a number, above 0 and at most 1, got unset"),
    ({"dsv_profile_momentum": 1.0}, "--dsv-profile-momentum must be a number, at least 0 and below 1, got 1.0"),
    ({"dsv_attention": "window-1/3", "dsv_sparse_stage": "auto"},
     "--dsv-attention window-1/3 needs --dsv-sparse-stage dense, got auto"),
    ({"dsv_predictor_proxies": 3}, "--dsv-predictor-proxies must divide --dsv-q-block-size 64, got 3"),
    ({"dsv_cube_size": "4x4x8"}, "--dsv-cube-size must hold --dsv-q-block-size 64 tokens, got 4x4x8 (128 tokens)"),
    ({"dsv_predictor_cosine_weight": 0.0, "dsv_predictor_norm_weight": 0.0}, "--dsv-predictor-cosine-weight"),
    ({"dsv_keep_ratio": 0.01}, "--dsv-keep-ratio must be at least --dsv-min-keep-ratio 0.02, got 0.01"),
    ({"dsv_keep_ratio": 0.2, "dsv_selection_rule": "mass"}, "--dsv-keep-ratio needs --dsv-selection-rule topk"),
])
def test_validate_names_flag_allowed_and_got_in_one_line(changes, words):
    with pytest.raises(ValueError, match="--dsv") as caught:
        DSVConfig(**changes).validate()
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("config", "words"), [
    (VideoDiTConfig(dit_frequency_dim=7), "--dit-frequency-dim must be even"),
    (VideoDiTConfig(dit_mlp="swiglu"), "--dit-mlp must be one of gelu-tanh, gelu, geglu, got 'swiglu'"),
    (FlowConfig(flow_shift=0.0), "--flow-shift must be a number, above 0, got 0.0"),
    (FlowConfig(flow_logit_mean=float("inf")), "--flow-logit-mean must be a number, got inf"),
    (DataConfig(latent_valid_samples=-1), "--latent-valid-samples must be an integer, at least 0, got -1"),
    (TrainingConfig(ema_decay=1.0), "--ema-decay must be a number, at least 0 and below 1, got 1.0"),
])
def test_the_other_configs_check_too(config, words):
    with pytest.raises(ValueError, match="--") as caught:
        config.validate()
    assert words in str(caught.value)


def test_windows_and_predictors():
    assert DSVConfig(dsv_attention="window-2/3").window_fraction == 2 / 3
    assert DSVConfig().window_fraction is None
    assert [DSVConfig(dsv_sparse_stage=stage).has_predictor for stage in ("dense", "predictor", "sparse", "auto")] == \
        [False, True, True, True]


def test_sizes():
    assert parse_sizes("1x2x16") == (1, 2, 16)
    for text in ("", "1x", "-1x2", "1,2", "1x2.0"):
        with pytest.raises(ValueError, match="positive integers joined by x"):
            parse_sizes(text)


def test_percent_signs_in_help_do_not_break_the_parser():
    @dataclasses.dataclass
    class Odd:
        """Odd."""
        odd_share: int = knob(90, "a share of 90% of all.")

    assert "90%" in parser_of(Odd).format_help()
    with pytest.raises(ValueError, match="--odd-share must be an integer, got 'x'"):
        check_fields(Odd(odd_share="x"))
