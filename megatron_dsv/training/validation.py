"""What a launch may ask for, checked on every rank before any of them builds anything."""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path
from typing import Any

from megatron_dsv.config import DSVConfig
from megatron_dsv.config_fields import flag_of, from_args
from megatron_dsv.data.config import DataConfig
from megatron_dsv.diffusion.config import FlowConfig
from megatron_dsv.models.config import VideoDiTConfig
from megatron_dsv.training.config import TrainingConfig
from megatron_dsv.training.flag_limits import check_limits, megatron_flag
from megatron_dsv.training.flag_relations import check_relations
from megatron_dsv.training.kernel_checks import check_kinds

CONFIGS: tuple[type[Any], ...] = (DSVConfig, VideoDiTConfig, FlowConfig, DataConfig, TrainingConfig)
"""The dataclasses whose fields are flags, in the order of the help text."""

_REQUIRED = {
    "num_layers": "use a preset such as --config model/debug",
    "hidden_size": "use a preset such as --config model/debug",
    "num_attention_heads": "use a preset such as --config model/debug",
    "micro_batch_size": "1 is usual for video",
    "lr": "1e-4 is usual for pretraining",
    "latent_data": "make a data set with `dsv prepare`",
}

_UNSUPPORTED: dict[str, tuple[Any, str]] = {
    # argument: (the supported value, way out)
    "cp_comm_type": (["p2p"], "leave it unset: --dsv-cp-plan says how context parallelism exchanges what"),
    "hierarchical_context_parallel_sizes": (None, "leave it unset: a plan splits every block on its own"),
    "tensor_parallel_num_weight_shards": (None, "use --use-distributed-optimizer"),
    "use_ring_exchange_p2p": (False, "leave it unset: it needs a torch of its own"),
    "hybrid_context_parallel": (False, "use --context-parallel-size"),
    "use_megatron_fsdp": (False, "use --use-distributed-optimizer"),
    "use_torch_fsdp2": (False, "use --use-distributed-optimizer"),
    "num_layers_per_virtual_pipeline_stage": (None, "use --pipeline-model-parallel-size alone"),
    "num_virtual_stages_per_pipeline_rank": (None, "use --pipeline-model-parallel-size alone"),
    "pipeline_model_parallel_layout": (None, "use --pipeline-model-parallel-size alone"),
    "account_for_embedding_in_pipeline_split": (False, "use --decoder-first-pipeline-num-layers"),
    "account_for_loss_in_pipeline_split": (False, "use --decoder-last-pipeline-num-layers"),
    "cuda_graph_impl": ("none", "leave it unset: selections change shape from step to step"),
    "enable_cuda_graph": (False, "leave it unset: selections change shape from step to step"),
    "optimizer_cuda_graph": (False, "leave it unset: steps that skip the optimizer change what runs"),
    "external_cuda_graph": (False, "leave it unset: selections change shape from step to step"),
    "fp8": (None, "use --bf16"),
    "fp4": (None, "use --bf16"),
    "num_experts": (None, "leave it unset: the model is dense in its feed-forward layers"),
    "expert_tensor_parallel_size": (None, "leave it unset: the model has no experts"),
    "expert_model_parallel_size": (1, "leave it unset: the model has no experts"),
    "multi_latent_attention": (False, "leave it unset"),
    "mtp_num_layers": (None, "leave it unset: a diffusion model predicts no tokens"),
    "hybrid_layer_pattern": (None, "use --num-layers"),
    "hybrid_override_pattern": (None, "use --num-layers"),
    "heterogeneous_layers_config_path": (None, "use --num-layers"),
    "heterogeneous_layers_config_encoded_json": (None, "use --num-layers"),
    "group_query_attention": (False, "leave it unset: a key/value head per query head"),
    "num_query_groups": (1, "leave it unset: a key/value head per query head"),
    "attention_dropout": (0.0, "leave it at 0: the attention kernels have no dropout"),
    "hidden_dropout": (0.0, "leave it at 0: the layers of a video DiT have no dropout"),
    "swiglu": (False, "use --dit-mlp"),
    "squared_relu": (False, "use --dit-mlp"),
    "quick_geglu": (False, "use --dit-mlp geglu"),
    "qk_layernorm": (False, "use --dit-qk-norm rms"),
    "layernorm_zero_centered_gamma": (False, "leave it unset: the norms learn their weight itself"),
    "apply_query_key_layer_scaling": (False, "leave it unset: scores are computed in fp32"),
    "fp32_residual_connection": (False, "leave it unset: gates and residuals are added in fp32 anyway"),
    "experimental_attention_variant": (None, "use --dsv-attention"),
    "window_size": (None, "use --dsv-attention window-1/3 or window-2/3"),
    "softmax_type": ("vanilla", "leave it at vanilla"),
    "spec": (None, "leave it unset: put get_dsv_layer_spec into a model of your own"),
    "recompute_modules": (["core_attn"], "use --recompute-granularity full to recompute more than the attention"),
    "cpu_offloading_num_layers": (0, "use --recompute-granularity full"),
    "tp_comm_overlap": (False, "use --sequence-parallel alone"),
    "init_model_with_meta_device": (False, "leave it unset: it only serves FSDP"),
    "optimizer_cpu_offload": (False, "use --use-distributed-optimizer"),
    "num_distributed_optimizer_instances": (1, "leave it at 1: the optimizer is sharded over all data-parallel ranks"),
    "rampup_batch_size": (None, "use --global-batch-size alone: the samples of a global batch share a shape"),
    "step_batch_size_schedule": (None, "use --global-batch-size alone: the samples of a global batch share a shape"),
    "dataloader_type": ("single", "leave it at single: the order of samples is the data set's own"),
    "multiple_validation_sets": (False, "leave it unset: --latent-valid-samples are the one validation set"),
    "full_validation": (False, "use --eval-iters"),
    "log_validation_ppl_to_tensorboard": (False, "leave it unset: a diffusion loss has no perplexity"),
    "use_checkpoint_args": (False, "repeat the run's own settings: --config <run folder>/config.yaml"),
    "rerun_mode": ("disabled", "leave it at disabled: a step that is not finite ends the run and names its rank"),
    # Megatron would load what lies there in place of the checkpoint that a launch is compared with.
    **dict.fromkeys(("non_persistent_ckpt_type", "non_persistent_save_interval", "non_persistent_global_ckpt_dir",
                     "non_persistent_local_ckpt_dir"), (None, "use --save-interval alone, with --save-retain-interval "
                                                              "to keep fewer of the checkpoints")),
    "ckpt_format": ("torch_dist", "use torch_dist, which reshards across layouts"),
    "ckpt_convert_format": (None, "use torch_dist, which reshards across layouts"),
    "checkpoint_activations": (False, "use --recompute-granularity full"),
    "lazy_mpu_init": (False, "leave it unset: a launcher starts the ranks"),
    "enable_ft_package": (False, "leave it unset: restart the job, it goes on from its last checkpoint"),
    "inprocess_restart": (False, "leave it unset: restart the job, it goes on from its last checkpoint"),
    "perform_rl_step": (False, "leave it unset: this program pretrains"),
    "phase_transition_iterations": (None, "leave it unset: the order of samples is the data set's own"),
    "fake_process_group": (False, "use --dry-run to try a layout without its ranks"),
    "adlr_autoresume": (False, "leave it unset: restart the job, it goes on from its last checkpoint"),
    "openai_gelu": (False, "use --dit-mlp gelu-tanh"),
    "qk_l2_norm": (False, "use --dit-qk-norm rms"),
    "qk_clip": (False, "use --dit-qk-norm rms"),
    "log_max_attention_logit": (False, "leave it unset: the attention kernels do not report it"),
    "attention_output_gate": (False, "leave it unset"),
    "use_mup": (False, "leave it unset"),
    "apply_residual_connection_post_layernorm": (False, "leave it unset: the layers of a video DiT are pre-norm"),
    "use_rotary_position_embeddings": (False, "use --dit-position rope"),
    "use_rope_scaling": (False, "use --dit-position rope"),
    "freeze_all_layers": (False, "leave it unset"),
}

_FOREIGN_DATA = ("data_path", "data_args_path", "train_data_path", "valid_data_path", "test_data_path",
                 "per_split_data_args_path")

_OF_TEXT = ("mock_data", "fim_data", "sft", "reset_position_ids", "reset_attention_mask", "eod_mask_loss",
            "untie_embeddings_and_output_weights")

_NEEDS_TE = {
    "use_precision_aware_optimizer": "whose Adam it is",
    "te_rng_tracker": "whose tracker it is",
}


def validate(args: argparse.Namespace, *, check_files: bool = True) -> None:
    """Check the parsed arguments before Megatron sees them.

    Args:
        args: parsed, with ``world_size`` set; not yet changed by Megatron's own validation.
        check_files: whether the data folder must exist; off in dry runs.

    Raises:
        ValueError: misuse; one line with the flag, what is allowed and what it got.
        NotImplementedError: unsupported; one line with the way out.
    """
    for cls in CONFIGS:
        from_args(cls, args).validate()
    _check_supported(args)
    check_limits(args)
    _check_required(args)
    _check_model(args)
    _check_layout(args)
    check_relations(args)
    check_kinds(args)
    _check_transformer_impl(args)
    if check_files:
        check_data_folder(args.latent_data)


def check_data_folder(folder: str) -> None:
    """Raise ValueError unless ``folder`` exists and holds what ``dsv prepare`` writes."""
    path = Path(folder)
    try:
        is_folder, is_prepared = path.is_dir(), (path / "dataset.json").is_file()
    except OSError as error:
        raise ValueError(f"--latent-data must be a folder that this host can read, got {folder}: {error.strerror}; "
                         "mend that, or point to another") from None
    if not is_folder:
        raise ValueError(f"--latent-data must be a folder written by `dsv prepare`, got {folder}, which "
                         f"{'is not a folder' if path.exists() else 'does not exist'}")
    if not is_prepared:
        raise ValueError(f"--latent-data must be a folder written by `dsv prepare`, got {folder}, which holds no "
                         "dataset.json; prepare it, or point to the folder that has one")


def _check_supported(args: argparse.Namespace) -> None:
    for name, (supported, way_out) in _UNSUPPORTED.items():
        got = getattr(args, name, supported)
        if got != supported and got is not None and not (supported is None and got is False):
            flag = megatron_flag(name)
            shown = "" if got is True else f" {' '.join(map(str, got)) if isinstance(got, list) else got}"
            raise NotImplementedError(f"{flag}{shown} is not supported; {way_out}")
    if args.optimizer not in ("adam", "sgd"):
        raise NotImplementedError(f"--optimizer {args.optimizer} is not supported; use adam")
    if args.attention_backend.name != "auto":
        raise NotImplementedError(f"--attention-backend {args.attention_backend.name} is not supported; use "
                                  "--dsv-dense-backend and --dsv-sparse-backend")
    for name, why in _NEEDS_TE.items():
        if getattr(args, name) and importlib.util.find_spec("transformer_engine") is None:
            raise NotImplementedError(f"{flag_of(name)} is not supported without Transformer Engine, {why}; install "
                                      "the extra `te`, or drop it")
    for name in _FOREIGN_DATA:
        if getattr(args, name, None):
            raise ValueError(f"--{name.replace('_', '-')} is for text, got {getattr(args, name)}; use --latent-data")
    for name in _OF_TEXT:
        if getattr(args, name):
            raise ValueError(f"{flag_of(name)} is for text; drop it, and use --latent-data")
    if not args.calculate_per_token_loss:
        raise ValueError("--no-calculate-per-token-loss is not allowed: the loss is a sum over valid tokens, divided "
                         "by their global count")
    if args.position_embedding_type != "none":
        raise ValueError(f"--position-embedding-type must be none, got {args.position_embedding_type}; positions of a "
                         "video are set with --dit-position")


def _check_required(args: argparse.Namespace) -> None:
    for name, way_out in _REQUIRED.items():
        if getattr(args, name) is None:
            raise ValueError(f"--{name.replace('_', '-')} is required, got nothing; {way_out}")
    if args.train_iters is None and args.train_samples is None and not args.skip_train:
        raise ValueError("--train-iters or --train-samples is required, got neither")
    if args.save is not None and args.save_interval is None:
        raise ValueError("--save needs --save-interval (steps between checkpoints), got none")


def _check_model(args: argparse.Namespace) -> None:
    heads = args.num_attention_heads
    if args.kv_channels is None and args.hidden_size % heads:
        raise ValueError(f"--hidden-size must be a multiple of --num-attention-heads {heads}, got {args.hidden_size}")
    head_dim = args.kv_channels or args.hidden_size // heads
    if args.dit_position == "rope" and head_dim % 2:
        raise ValueError(f"--dit-position rope needs an even head size, got {head_dim} (--hidden-size / "
                         "--num-attention-heads); use --dit-position sincos")
    if args.dit_position == "rope" and head_dim < 6:
        raise ValueError(f"--dit-position rope needs a head size of at least 6, two channels for each of the three "
                         f"axes, got {head_dim}; use --dit-position sincos")
    rotated = args.dit_position == "rope" and from_args(DSVConfig, args).has_predictor and \
        args.dsv_predictor_input == "hidden"
    if rotated and args.dsv_predictor_rank % 2:
        raise ValueError("--dsv-predictor-rank must be even with --dit-position rope, which rotates pairs of channels, "
                         f"got {args.dsv_predictor_rank}; use {args.dsv_predictor_rank + 1}, or --dsv-predictor-input "
                         "qk")
    if args.dit_position == "sincos" and args.hidden_size < 6:
        raise ValueError(f"--dit-position sincos needs --hidden-size of at least 6, got {args.hidden_size}")


def _check_layout(args: argparse.Namespace) -> None:
    tp, pp, cp = args.tensor_model_parallel_size, args.pipeline_model_parallel_size, args.context_parallel_size
    for name in ("num_attention_heads", "hidden_size", "ffn_hidden_size"):
        value = getattr(args, name)
        if value is not None and value % tp:
            raise ValueError(f"--tensor-model-parallel-size must divide --{name.replace('_', '-')} {value}, got {tp}")
    if args.world_size % (tp * pp * cp):
        raise ValueError("--tensor-model-parallel-size x --pipeline-model-parallel-size x --context-parallel-size must "
                         f"divide the number of ranks {args.world_size}, got {tp} x {pp} x {cp}")
    if cp == 1 and args.dsv_cp_plan != "planned":
        raise ValueError(f"--dsv-cp-plan {args.dsv_cp_plan} needs --context-parallel-size above 1, got 1; drop the "
                         "flag")
    data_parallel = args.world_size // (tp * pp * cp)
    if args.global_batch_size is not None and args.global_batch_size % (args.micro_batch_size * data_parallel):
        raise ValueError("--global-batch-size must be a multiple of --micro-batch-size x data-parallel ranks "
                         f"({args.micro_batch_size} x {data_parallel}), got {args.global_batch_size}")
    if args.sequence_parallel and tp == 1:
        raise ValueError("--sequence-parallel needs --tensor-model-parallel-size above 1, got 1; drop the flag")


def _check_transformer_impl(args: argparse.Namespace) -> None:
    if args.transformer_impl not in ("local", "transformer_engine"):
        raise NotImplementedError(f"--transformer-impl {args.transformer_impl} is not supported; use local or "
                                  "transformer_engine")
    if args.transformer_impl != "transformer_engine":
        return
    if importlib.util.find_spec("transformer_engine") is None:
        raise ValueError("--transformer-impl transformer_engine needs Transformer Engine, which is not installed; "
                         "install the extra `te` or use --transformer-impl local")
    from megatron.core.extensions.transformer_engine import HAVE_TE
    from megatron.core.utils import get_te_version

    if not HAVE_TE:
        raise ValueError("--transformer-impl transformer_engine needs a Transformer Engine that megatron-core can "
                         f"load, got {get_te_version()}; install the extra `te` or use --transformer-impl local")
