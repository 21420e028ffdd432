"""What a resume must share with the run that saved, beyond shapes."""

from argparse import Namespace

import pytest

from megatron_dsv.models.config import VideoDiTConfig
from megatron_dsv.training import model_identity

SAVED = Namespace(
    **vars(VideoDiTConfig()), num_attention_heads=4, layernorm_epsilon=1e-6, dsv_sparse_stage="auto",
    dsv_predictor_input="hidden", optimizer="adam", use_distributed_optimizer=False,
    use_precision_aware_optimizer=False, bf16=True, fp16=False, lr=1e-4, dsv_keep_ratio=0.1, flow_shift=3.0)


def _with(**changes) -> Namespace:
    return Namespace(**vars(SAVED) | changes)


def test_policy_objective_and_rate_may_change():
    args = _with(lr=2e-4, dsv_keep_ratio=None, flow_shift=5.0, dsv_sparse_stage="sparse")
    model_identity.check_model(SAVED, args, "run")
    model_identity.check_optimizer(SAVED, args, "run")


@pytest.mark.parametrize(("change", "shown"), [
    ({"dit_position": "sincos"}, "with --dit-position rope, this run has --dit-position sincos"),
    ({"dit_text_length": 256}, "with --dit-text-length 512, this run has --dit-text-length 256"),
    ({"dit_mlp": "gelu"}, "with --dit-mlp gelu-tanh, this run has --dit-mlp gelu;"),
    ({"dit_patch_size": "2x1x2"}, "with --dit-patch-size 1x2x2, this run has --dit-patch-size 2x1x2"),
    ({"dit_cross_attn_norm": False}, "with --dit-cross-attn-norm, this run has --no-dit-cross-attn-norm"),
    ({"layernorm_epsilon": 1e-5}, "with --norm-epsilon 1e-06, this run has --norm-epsilon 1e-05"),
    ({"num_attention_heads": 12}, "with --num-attention-heads 4, this run has"),
    ({"dsv_predictor_input": "qk"}, "with --dsv-predictor-input hidden, this run has --dsv-predictor-input qk"),
])
def test_another_function_of_the_same_weights(change, shown):
    with pytest.raises(ValueError, match=f"run is a checkpoint of another model: it was trained {shown}") as caught:
        model_identity.check_model(SAVED, _with(**change), "run")
    assert "--finetune" in str(caught.value)


@pytest.mark.parametrize("name", ["num_layers", "hidden_size", "ffn_hidden_size"])
def test_other_sizes_are_told_by_their_flags(name):
    sizes = {"num_layers": 4, "hidden_size": 64, "ffn_hidden_size": 256}
    saved, flag = _with(**sizes), f"--{name.replace('_', '-')}"
    model_identity.check_sizes(saved, _with(**sizes, lr=1.0), "run")
    model_identity.check_sizes(Namespace(), _with(**sizes), "run")
    with pytest.raises(ValueError, match=f"run is a checkpoint of another model: it was trained with {flag} "
                                         f"{sizes[name]}, this run has {flag} 7; use the flags it was trained with"):
        model_identity.check_sizes(saved, _with(**sizes | {name: 7}), "run")


def test_predictors_that_are_not_there_need_not_fit():
    dense = _with(dsv_sparse_stage="dense")
    model_identity.check_model(dense, _with(dsv_predictor_input="qk"), "run")
    model_identity.check_model(SAVED, _with(dsv_predictor_input="qk", dsv_sparse_stage="dense"), "run")


def test_what_an_older_checkpoint_did_not_store_is_not_compared():
    older = Namespace(dit_position="rope")
    model_identity.check_model(older, _with(dit_text_length=7), "run")
    with pytest.raises(ValueError, match="--dit-position rope"):
        model_identity.check_model(older, _with(dit_position="sincos"), "run")


@pytest.mark.parametrize(("change", "shown"), [
    ({"optimizer": "sgd"}, "saved with --optimizer adam, this run is with --optimizer sgd"),
    ({"use_distributed_optimizer": True}, "saved without --use-distributed-optimizer, this run is with --use-dist"),
    ({"bf16": False}, r"saved with --bf16, this run is in fp32 \(neither --bf16 nor --fp16\)"),
    ({"bf16": False, "fp16": True}, "saved with --bf16, this run is with --fp16"),
])
def test_another_optimizer(change, shown):
    with pytest.raises(ValueError, match=f"run was {shown}") as caught:
        model_identity.check_optimizer(SAVED, _with(**change), "run")
    assert "--no-load-optim" in str(caught.value)


SELECTIONS = {"block_fraction", "recall"}
MEASURED = {"dsv_q_block_size": 64, "dsv_kv_block_size": 64, "dsv_cube_size": None, "dsv_budget_mass": 0.95,
            "dsv_theta": 0.9}


@pytest.mark.parametrize(("change", "statistics", "words"), [
    ({"dsv_kv_block_size": 32}, SELECTIONS, "with --dsv-kv-block-size 64, this run has --dsv-kv-block-size 32"),
    ({"dsv_budget_mass": 0.9}, SELECTIONS, "with --dsv-budget-mass 0.95, this run has --dsv-budget-mass 0.9"),
    ({"dsv_cube_size": "1x8x8"}, SELECTIONS, "with --dsv-cube-size 4x4x4, this run has --dsv-cube-size 1x8x8"),
    ({"dsv_q_block_size": 32}, SELECTIONS, "with --dsv-q-block-size 64, --dsv-cube-size 4x4x4, this run has "
     "--dsv-q-block-size 32, --dsv-cube-size 2x4x4"),
    ({"dsv_theta": 0.8}, {"sparsity"}, "with --dsv-theta 0.9, this run has --dsv-theta 0.8"),
    ({"dsv_theta": 0.8, "dsv_budget_mass": 0.5}, SELECTIONS | {"sparsity"}, "with --dsv-budget-mass 0.95, --dsv-theta "
     "0.9, this run has --dsv-budget-mass 0.5, --dsv-theta 0.8"),
])
def test_statistics_of_another_measure_are_not_taken_over(change, statistics, words):
    found = model_identity.measured_otherwise(_with(**MEASURED), _with(**MEASURED | change))
    assert (found.statistics, found.words) == (statistics, words)


def test_statistics_of_the_same_measure_are_taken_over():
    args = _with(**MEASURED, lr=3e-4)
    for saved in (_with(**MEASURED), _with(**MEASURED | {"dsv_cube_size": "4x4x4"}), None, Namespace(lr=1)):
        assert model_identity.measured_otherwise(saved, args) is None
