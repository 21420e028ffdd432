"""Which attention a sample uses: what the run's own gate decided, or dense."""

import argparse
import importlib.util

import pytest

from megatron_dsv.testing.latents import write_latents

RUN = {"num-layers": 2, "hidden-size": 48, "num-attention-heads": 4, "micro-batch-size": 1, "lr": 1e-3,
       "train-iters": 1, "dit-text-dim": 64, "tensor-model-parallel-size": 2, "sequence-parallel": True,
       "context-parallel-size": 2, "dsv-cp-plan": "random"}
SEVERAL_RANKS = {"dsv-cp-plan": "planned", "dsv-cp-cluster": "h200", "dsv-cp-replan-interval": 5,
                 "pipeline-model-parallel-size": 2, "decoder-first-pipeline-num-layers": 1}


@pytest.mark.parametrize(("trained", "attention", "stage"), [
    ("auto", "sparse", "auto"), ("sparse", "sparse", "sparse"), ("predictor", "sparse", "sparse"),
    ("auto", "dense", "dense")])
def test_a_sample_respects_the_gate(tmp_path, trained, attention, stage):
    import yaml

    from megatron_dsv.training.sampling import run_arguments

    data = write_latents(tmp_path / "data", [(1, 4, 4)])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(RUN | {"latent-data": str(data), "dsv-sparse-stage": trained}))
    options = argparse.Namespace(attention=attention, keep_ratio=None, latent_data=None)
    args = run_arguments(tmp_path, options)
    assert (args.dsv_sparse_stage, args.tensor_model_parallel_size, args.sequence_parallel) == (stage, 1, False)


@pytest.mark.parametrize("attention", ["sparse", "dense"])
@pytest.mark.parametrize(("text", "words"), [
    ("save: [1", "not valid YAML"), ("- save", "must be a mapping of flag names to values, got list"),
    ("save: '\\xff", "not valid YAML")])
def test_a_configuration_that_is_none_is_told_in_one_line(tmp_path, attention, text, words):
    from megatron_dsv.training.sampling import run_arguments

    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ValueError, match=rf"^config\.yaml: {words}") as caught:
        run_arguments(tmp_path, argparse.Namespace(attention=attention, keep_ratio=None, latent_data=None))
    assert "\n" not in str(caught.value)


def test_a_sample_needs_nothing_of_what_only_several_ranks_may_set(tmp_path):
    import yaml

    from megatron_dsv.training.sampling import run_arguments

    data = write_latents(tmp_path / "data", [(1, 4, 4)])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(RUN | SEVERAL_RANKS | {"latent-data": str(data)}))
    args = run_arguments(tmp_path, argparse.Namespace(attention="dense", keep_ratio=None, latent_data=None))
    assert (args.context_parallel_size, args.pipeline_model_parallel_size) == (1, 1)
    assert (args.dsv_cp_replan_interval, args.decoder_first_pipeline_num_layers) == (None,) * 2


OF_TRAINING = {"distribute-saved-activations": True, "recompute-granularity": "full", "recompute-method": "uniform",
               "recompute-num-layers": 1, "sequence-parallel": False, "overlap-p2p-communication-warmup-flush": True,
               "bf16": True, "dsv-sparse-backend": "cudnn", "dsv-dense-backend": "flash4", "dsv-deterministic": True,
               "dsv-sparse-stage": "dense", "wandb-project": "p", "wandb-exp-name": "e", "wandb-save-dir": "w",
               "use-distributed-optimizer": True, "use-precision-aware-optimizer": True}


def test_a_sample_needs_nothing_of_what_only_training_reads(tmp_path, monkeypatch):
    """Nor the packages that it needs: the video may be drawn on another host."""
    import yaml

    from megatron_dsv.training.sampling import run_arguments

    data = write_latents(tmp_path / "data", [(1, 4, 4)])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(RUN | OF_TRAINING | {"latent-data": str(data)}))
    find = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name in (
        "wandb", "transformer_engine") else find(name))
    for attention in ("dense", "sparse"):
        args = run_arguments(tmp_path, argparse.Namespace(attention=attention, keep_ratio=None, latent_data=None))
        assert (args.dsv_sparse_backend, args.dsv_dense_backend, args.wandb_project) == ("auto", "auto", None)
        assert args.recompute_granularity == "full"


def test_a_share_may_be_below_the_floor_of_the_run(tmp_path):
    import yaml

    from megatron_dsv.training.sampling import run_arguments

    data = write_latents(tmp_path / "data", [(1, 4, 4)])
    run = RUN | {"latent-data": str(data), "dsv-sparse-stage": "auto", "dsv-min-keep-ratio": 0.05}
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(run))
    options = argparse.Namespace(attention="sparse", keep_ratio=0.01, latent_data=None)
    args = run_arguments(tmp_path, options)
    assert (args.dsv_keep_ratio, args.dsv_sparse_stage) == (0.01, "sparse")
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(run | {"dsv-selection-rule": "mass"}))
    with pytest.raises(ValueError, match="--keep-ratio needs a run with --dsv-selection-rule topk or topk-mass, got "):
        run_arguments(tmp_path, options)


@pytest.mark.parametrize("keep_ratio", [None, 0.5])
def test_a_run_of_windows_keeps_them_and_predicts_nothing(tmp_path, keep_ratio):
    import yaml

    from megatron_dsv.training.sampling import run_arguments

    data = write_latents(tmp_path / "data", [(1, 4, 4)])
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(
        RUN | {"latent-data": str(data), "dsv-sparse-stage": "dense", "dsv-attention": "window-1/3"}))
    with pytest.raises(ValueError, match="--attention sparse needs a run with predictors, got --dsv-attention "
                                         "window-1/3: the run attends to windows; --attention dense keeps them"):
        run_arguments(tmp_path, argparse.Namespace(attention="sparse", keep_ratio=keep_ratio, latent_data=None))
    args = run_arguments(tmp_path, argparse.Namespace(attention="dense", keep_ratio=None, latent_data=None))
    assert (args.dsv_attention, args.dsv_sparse_stage) == ("window-1/3", "dense")
