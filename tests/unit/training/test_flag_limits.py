"""Values and combinations of Megatron's flags that would crash, hang or mislead a launch are refused at its start."""

import argparse
import math

import pytest

from megatron_dsv.config import MASS_RULES, DSVConfig
from megatron_dsv.sparsity.selection_rules import RULES
from megatron_dsv.training import arguments, validation
from megatron_dsv.training.flag_limits import LIMITS, megatron_flag
from megatron_dsv.training.flag_relations import layers_per_stage, lost_evaluations
from megatron_dsv.training.host_checks import check_host


def test_every_limit_is_of_an_argument_and_its_default_passes(parsed):
    unknown = [name for name in LIMITS if not hasattr(parsed, name)]
    assert not unknown
    validation.validate(argparse.Namespace(**vars(parsed)), check_files=False)


@pytest.mark.parametrize("value", [math.nan, -1])
@pytest.mark.parametrize("name", LIMITS)
def test_no_limit_lets_nan_or_a_negative_number_through(refused, name, value):
    given = [value] if name in ("iterations_to_skip", "profile_ranks") else value
    flag = megatron_flag(name)
    assert refused(**{name: given}).startswith(f"{flag} must be {LIMITS[name].allowed}, got {value}")


@pytest.mark.parametrize("name", [
    "train_iters", "eval_interval", "log_interval", "tensorboard_log_interval", "seed", "ffn_hidden_size",
    "kv_channels", "init_method_std", "adam_eps", "lr", "lr_decay_iters", "global_batch_size", "save_interval",
    "ckpt_step"])
def test_zero_is_refused_where_it_divides_or_ends_everything(refused, name):
    assert f"--{name.replace('_', '-')} must be " in refused(**{name: 0})


@pytest.mark.parametrize(("name", "value"), [
    ("adam_beta1", 1.0), ("adam_beta2", 1.5), ("lr_warmup_fraction", 1.0), ("seed", 2**31), ("lr", math.inf)])
def test_upper_ends(refused, name, value):
    assert refused(**{name: value}).startswith(f"--{name.replace('_', '-')} must be ")


def test_numbers_without_a_limit_must_be_finite(refused):
    assert refused(decoupled_lr=math.nan) == "--decoupled-lr must be a finite number, got nan"


@pytest.mark.parametrize(("pp", "first", "last", "words"), [
    (2, 4, None, "--decoder-first-pipeline-num-layers 4 must leave each of the other 1 pipeline stages"),
    (2, 5, None, "at least 1, got -1 left of --num-layers 4"),
    (2, None, 4, "--decoder-last-pipeline-num-layers 4 must leave"),
    (2, 3, 2, "must add up to --num-layers 4, as there is no stage between, got 5"),
    (2, 1, 2, "must add up to --num-layers 4, as there is no stage between, got 3"),
    (4, 2, 2, "must leave each of the other 2 pipeline stages the same number of layers, at least 1, got 0"),
    (4, 2, None, "must leave each of the other 3 pipeline stages"),
    (2, 0, None, "--decoder-first-pipeline-num-layers must be an integer of at least 1, got 0"),
    (1, 2, None, "--decoder-first-pipeline-num-layers needs --pipeline-model-parallel-size above 1, got 1"),
    (8, None, None, "--pipeline-model-parallel-size must divide --num-layers 4, got 8"),
])
def test_layers_must_fill_the_pipeline_stages(refused, pp, first, last, words):
    assert words in refused(world_size=8, pipeline_model_parallel_size=pp, decoder_first_pipeline_num_layers=first,
                            decoder_last_pipeline_num_layers=last)


@pytest.mark.parametrize(("changes", "steps"), [
    ({"eval_iters": 0}, None), ({"start_eval_at_iter": 5}, None), ({}, "2, 4"), ({"eval_interval": 4}, "4"),
    ({"start_eval_at_iter": 4}, "4")])
def test_evaluations_due_on_skipped_steps_are_named(parsed, changes, steps):
    args = argparse.Namespace(**vars(parsed) | {"iterations_to_skip": [2, 3, 4], "eval_interval": 2} | changes)
    validation.validate(args, check_files=False)
    warning = lost_evaluations(args)
    assert warning is None if steps is None else f"no evaluation after step {steps}: --iterations-to-skip" in warning


@pytest.mark.parametrize(("layers", "pp", "first", "last", "stages"), [
    (4, 2, None, None, [2, 2]), (4, 2, 3, None, [3, 1]), (4, 2, None, 3, [1, 3]), (4, 2, 1, 3, [1, 3]),
    (10, 4, 1, 3, [1, 3, 3, 3]), (10, 4, 1, None, [1, 3, 3, 3])])
def test_layers_of_each_stage(layers, pp, first, last, stages):
    assert layers_per_stage(argparse.Namespace(
        num_layers=layers, pipeline_model_parallel_size=pp, decoder_first_pipeline_num_layers=first,
        decoder_last_pipeline_num_layers=last)) == stages


@pytest.mark.parametrize(("changes", "words"), [
    ({"recompute_granularity": "full"}, "--recompute-granularity full needs --recompute-method, uniform or block"),
    ({"recompute_granularity": "full", "recompute_method": "uniform"},
     "--recompute-num-layers must be at most the 4 layers of a pipeline stage for --recompute-granularity full, "
     "got none"),
    ({"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 3,
      "pipeline_model_parallel_size": 2}, "must be at most the 2 layers of a pipeline stage"),
    ({"recompute_num_layers": 1}, "--recompute-num-layers needs --recompute-granularity full, got no granularity"),
    ({"recompute_method": "block", "recompute_granularity": "selective"},
     "--recompute-method needs --recompute-granularity full, got selective"),
    ({"train_samples": 4}, "--train-samples must be left out beside --train-iters 10, got 4"),
    ({"train_iters": None, "train_samples": 4, "lr_warmup_iters": 2},
     "--lr-warmup-iters must be left out beside --train-samples, got 2; use --lr-warmup-samples"),
    ({"lr_decay_samples": 5}, "--lr-decay-samples must be left out beside --train-iters, got 5"),
    ({"lr_warmup_iters": 10}, "--lr-warmup-iters must be below --train-iters 10, got 10"),
    ({"lr_warmup_iters": 5, "lr_decay_iters": 5, "lr_decay_style": "cosine"},
     "--lr-warmup-iters must be below --lr-decay-iters 5, got 5"),
    ({"lr_warmup_iters": 5, "lr_warmup_fraction": 0.1}, "--lr-warmup-fraction must be left out beside"),
    ({"lr_warmup_init": 1.0}, "--lr-warmup-init must be at most --lr 0.0001, got 1.0"),
    ({"lr_decay_style": "WSD"}, "--lr-decay-style WSD needs --lr-wsd-decay-iters of at most --train-iters 10"),
    ({"iterations_to_skip": [3, 8], "save": "runs/x", "save_interval": 4},
     "--iterations-to-skip must name no multiple of --save-interval 4, as a checkpoint due on a skipped step is left "
     "out, got 8; set --save-interval to a number that does not divide 8"),
    ({"iterations_to_skip": [10], "save": "runs/x", "save_interval": 10},
     "--iterations-to-skip must name no multiple of --save-interval 10"),
    ({"iterations_to_skip": [6], "exit_interval": 6},
     "--iterations-to-skip must name no multiple of --exit-interval 6, as the end of the launch due on a skipped step"),
    ({"start_weight_decay": 0.1}, "--start-weight-decay needs --weight-decay-incr-style linear or cosine"),
    ({"weight_decay_incr_style": "linear", "start_weight_decay": 0.2, "end_weight_decay": 0.1},
     "--weight-decay-incr-style linear needs --start-weight-decay and a --end-weight-decay that is not below it"),
    ({"latent_valid_samples": 0}, "--latent-valid-samples must be at least 1 to evaluate (--eval-iters 100), got 0; "
     "switch evaluation off with --eval-iters 0"),
    ({"wandb_project": "p"}, "--wandb-project needs --wandb-exp-name"),
    ({"wandb_project": "p", "wandb_exp_name": "e"}, "--wandb-project needs --wandb-save-dir or --save"),
    ({"wandb_exp_name": "e"}, "--wandb-exp-name needs --wandb-project, got none"),
    ({"num_query_groups": 3}, "--num-query-groups 3 is not supported"),
    ({"lazy_mpu_init": True}, "--lazy-mpu-init is not supported; "),
    ({"enable_ft_package": True}, "--enable-ft-package is not supported; "),
    ({"checkpoint_activations": True}, "--checkpoint-activations is not supported; use --recompute-granularity full"),
    ({"te_rng_tracker": True}, "--te-rng-tracker is not supported without Transformer Engine"),
    ({"expert_tensor_parallel_size": 3}, "--expert-tensor-parallel-size 3 is not supported"),
    ({"tensor_parallel_num_weight_shards": 2}, "--tensor-parallel-num-weight-shards 2 is not supported"),
    ({"use_ring_exchange_p2p": True}, "--use-ring-exchange-p2p is not supported"),
    *[({name: value}, f"{flag} {value} is not supported; use --save-interval alone") for name, flag, value in (
        ("non_persistent_ckpt_type", "--non-persistent-ckpt-type", "global"),
        ("non_persistent_save_interval", "--non-persistent-save-interval", 2),
        ("non_persistent_global_ckpt_dir", "--non-persistent-global-ckpt-dir", "runs/np"),
        ("non_persistent_local_ckpt_dir", "--non-persistent-local-ckpt-dir", "/tmp"))],
    ({"sft": True}, "--sft is for text; drop it, and use --latent-data"),
    ({"profile": True, "profile_step_start": 5, "profile_step_end": 5},
     "--profile-step-end must be above --profile-step-start 5, got 5"),
    ({"use_pytorch_profiler": True}, "--use-pytorch-profiler needs --profile"),
    ({"use_rotary_position_embeddings": True}, "is not supported; use --dit-position rope"),
    *[({"dsv_sparse_stage": stage, "dsv_selection_rule": rule, "dsv_score_reduction": "max"},
       f"--dsv-selection-rule {rule} sums scores, so it needs --dsv-score-reduction mass or lse, got max; ")
      for stage in ("dense", "auto", "sparse") for rule in MASS_RULES],
])
def test_combinations(refused, changes, words):
    assert words in refused(**changes)


def test_a_rank_is_even_where_predictors_are_rotated(refused, parsed):
    odd = {"dsv_predictor_rank": 7, "dsv_sparse_stage": "predictor"}
    assert refused(**odd) == ("--dsv-predictor-rank must be even with --dit-position rope, which rotates pairs of "
                              "channels, got 7; use 8, or --dsv-predictor-input qk")
    for free in ({"dsv_sparse_stage": "dense"}, {"dsv_predictor_input": "qk"}, {"dit_position": "sincos"}):
        validation.validate(argparse.Namespace(**vars(parsed) | odd | free), check_files=False)


def test_steps_between_checkpoints_may_be_skipped(parsed):
    """So may the last one, which the run saves at its end."""
    for changes in ({"save": "runs/x", "save_interval": 4, "exit_interval": 8}, {"save_interval": 5}):
        validation.validate(argparse.Namespace(**vars(parsed) | {"iterations_to_skip": [5, 10]} | changes),
                            check_files=False)


def test_wandb_must_be_installed(refused, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert refused(wandb_project="p", wandb_exp_name="e", save="runs/x", save_interval=1).startswith(
        "--wandb-project needs wandb, which is not installed")


def test_evaluation_alone_needs_no_schedule(parsed):
    validation.validate(argparse.Namespace(**vars(parsed) | {"skip_train": True, "train_iters": None,
                                                             "lr_warmup_iters": 5}), check_files=False)


def test_the_configuration_knows_which_rules_sum_scores():
    assert set(MASS_RULES) == {name for name, rule in RULES.items() if rule.by_mass}
    for rule in MASS_RULES:
        DSVConfig(dsv_selection_rule=rule, dsv_score_reduction="lse").validate()


@pytest.mark.parametrize(("changes", "words"), [
    ({"distributed_backend": "nccl"}, "--distributed-backend nccl needs CUDA, which this host does not have; use gloo"),
    ({"gpu_sniff_test_interval": 1}, "--gpu-sniff-test-interval needs CUDA, which this host does not have; drop it"),
    ({"profile": True}, "--profile needs CUDA, which this host does not have; add --use-pytorch-profiler"),
    ({"async_save": True}, "--async-save needs CUDA, which this host does not have; drop it"),
    ({"dsv_sparse_backend": "triton"}, "--dsv-sparse-backend triton needs CUDA, which this host does not have; use "),
])
def test_what_needs_a_gpu_is_refused_without_one(parsed, changes, words, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    plain = vars(parsed) | {"distributed_backend": "gloo"}
    check_host(argparse.Namespace(**plain))
    with pytest.raises((ValueError, NotImplementedError), match=words):
        check_host(argparse.Namespace(**plain | changes))
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    check_host(argparse.Namespace(**plain | changes))


def test_triton_runs_on_a_cpu_under_its_interpreter(parsed, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    check_host(argparse.Namespace(**vars(parsed) | {"distributed_backend": "gloo", "dsv_sparse_backend": "triton"}))


def test_files_that_are_read_must_exist(parsed, tmp_path):
    with pytest.raises(ValueError, match=r"--nccl-communicator-config-path must be a file, got .*none, which does not"):
        check_host(argparse.Namespace(**vars(parsed) | {"distributed_backend": "gloo",
                                                        "nccl_communicator_config_path": str(tmp_path / "none")}))


@pytest.mark.parametrize("name", ["save", "tensorboard_dir"])
def test_output_folders_must_be_writable_folders(parsed, name, tmp_path, monkeypatch):
    def check(folder):
        check_host(argparse.Namespace(**vars(parsed) | {"distributed_backend": "gloo", name: str(folder)}))

    flag = "--" + name.replace("_", "-")
    file = tmp_path / "file"
    file.write_text("")
    check(tmp_path / "new" / "deeper")
    with pytest.raises(ValueError, match=f"{flag} must be a folder, got .*file, which is a file"):
        check(file)
    with pytest.raises(ValueError, match=f"{flag} must be a folder, got .*, whose parent .*file is a file"):
        check(file / "below")
    with monkeypatch.context() as patch:
        patch.setattr("pathlib.Path.exists", lambda path: (_ for _ in ()).throw(OSError(116, "Stale file handle")))
        with pytest.raises(ValueError, match=f"{flag} must be a folder that this host can write, got .*: Stale f"):
            check(tmp_path / "new")
    monkeypatch.setattr("os.access", lambda path, mode: False)
    with pytest.raises(ValueError, match=f"{flag} must be a folder that this user may write"):
        check(tmp_path / "new")


@pytest.mark.parametrize(("flags", "words"), [
    ([""], "an argument is empty, got ''"),
    (["--save", ""], "--save must not be empty, got ''; leave the flag out"),
    (["--save="], "--save must not be empty, got ''"),
    (["--no-position-embedding"], "megatron-core refuses the arguments: --no-position-embedding is deprecated"),
    (["--attention-backend", "local"], "--attention-backend local is not supported; use --dsv-dense-backend"),
    (["--lr"], "--lr: expected one argument"),
    # Megatron refuses this one in the configuration of the model, which a launch builds once its ranks have met.
    (["--tensor-model-parallel-size", "2", "--sequence-parallel", "--distribute-saved-activations",
      "--recompute-granularity", "full", "--recompute-method", "uniform", "--recompute-num-layers", "1"],
     "megatron-core refuses the arguments: distribute_saved_activations: True must be false"),
    (["--log-memory-interval", "3", "--log-interval", "2"], "megatron-core refuses the arguments: "
     "args.log_memory_interval % args.log_interval == 0, got --log-memory-interval 3, --log-interval 2"),
])
def test_through_the_parser(base, flags, words):
    with pytest.raises((ValueError, NotImplementedError)) as caught:
        arguments.dry_parse([*base, *flags], 2)
    assert str(caught.value).startswith(words)
    assert "\n" not in str(caught.value)
