"""Exponential moving average (EMA) of the weights, kept beside the optimizer's fp32 main parameters.

Dims: an EMA tensor has the shape of the main parameter that it follows: the parameter's own shape, or with the
distributed optimizer the flat slice [n] of it that this data-parallel rank owns. So it costs 4 bytes a parameter,
sharded as the optimizer's state is, and reshards with it: `optimizer.state.ema.<key of the weight>` in a checkpoint.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from megatron.core.dist_checkpointing.optimizer import get_param_id_to_sharded_param_map, make_sharded_optimizer_tensor
from megatron.core.optimizer import DistributedOptimizer, FP32Optimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params, MegatronOptimizer
from megatron.core.utils import unwrap_model
from megatron.training.utils import print_rank_0

# In a checkpoint's content metadata: it holds an EMA. Megatron hands the metadata to the optimizer at save and load.
METADATA_KEY = "weight_ema"
STATE_PREFIX = "optimizer.state.ema"


class WeightEma:
    """EMA of one Megatron optimizer's main parameters: ema <- d ema + (1 - d) param, d = min(decay, (1+n) / (10+n)).

    n counts the updates done before, so that early weights do not linger. A tensor is created from its parameter when
    it is first needed, after whatever loads the weights.

    Args:
        decay: in [0, 1).

    Raises:
        ValueError: decay is out of range.
    """

    def __init__(self, decay: float) -> None:
        if not 0.0 <= decay < 1.0:
            raise ValueError(f"--ema-decay must be in [0, 1), got {decay}")
        self.decay = decay
        self.updates = 0
        self.in_state_dict = False
        self._tensors: dict[torch.Tensor, torch.Tensor] = {}

    def of(self, main_param: torch.Tensor) -> torch.Tensor:
        """The fp32 EMA of a main parameter; a copy of it if there was none."""
        if main_param not in self._tensors:
            self._tensors[main_param] = main_param.detach().clone().float()
        return self._tensors[main_param]

    def reset(self) -> None:
        """Forget the EMA; it starts again from the weights at the next step."""
        self._tensors.clear()
        self.updates = 0

    @torch.no_grad()
    def update(self, main_params: list[torch.Tensor]) -> None:
        """Fold the current main parameters in."""
        if main_params:
            decay = min(self.decay, (1 + self.updates) / (10 + self.updates))
            current = [param.detach().float() for param in main_params]
            torch._foreach_lerp_([self.of(param) for param in main_params], current, 1.0 - decay)
        self.updates += 1

    @contextmanager
    def exposed(self, in_state_dict: bool) -> Iterator[None]:
        """Whether state dicts that are built inside contain the EMA."""
        before, self.in_state_dict = self.in_state_dict, in_state_dict
        try:
            yield
        finally:
            self.in_state_dict = before


class _EmaOptimizer(MegatronOptimizer):
    """What the three kinds of optimizer share; comes before the kind among the bases."""

    ema: WeightEma

    def step_with_ready_grads(self) -> bool:
        main_params = self.get_parameters()
        for param in main_params:
            self.ema.of(param)
        success = super().step_with_ready_grads()  # type: ignore[misc]
        if success:
            self.ema.update(main_params)
        return success

    def _wants_ema(self, is_loading: bool, metadata: dict[str, Any] | None) -> bool:
        wanted = bool((metadata or {}).get(METADATA_KEY, False))
        if is_loading and not wanted:
            print_rank_0("> the checkpoint has no EMA of the weights: it starts from the loaded weights")
        return wanted

    def _restore_updates(self, state_dict: dict[str, Any]) -> None:
        if "ema_updates" in state_dict:
            self.ema.updates = state_dict.pop("ema_updates")
        else:
            self.ema.reset()


class _EmaDistributedOptimizer(_EmaOptimizer, DistributedOptimizer):
    """The EMA joins the parameter state (`exp_avg`, ...) while it is collected, and only then.

    It is not kept in the inner optimizer's state: Transformer Engine's FusedAdam saves and loads its own keys alone.
    """

    @property
    def optimizer_state_keys(self) -> tuple[str, ...]:
        keys = super().optimizer_state_keys
        return (*keys, "ema") if self.ema.in_state_dict else keys

    def _main_param(self, model_param: torch.Tensor) -> torch.Tensor:
        group, order = self.model_param_group_index_map[model_param]
        return self.optimizer.param_groups[group]["params"][order]

    def _get_main_param_and_optimizer_states(self, model_param: torch.Tensor) -> dict[str, torch.Tensor]:
        tensors = super()._get_main_param_and_optimizer_states(model_param)
        if self.ema.in_state_dict:
            tensors["ema"] = self.ema.of(self._main_param(model_param))
        return tensors

    def _set_main_param_and_optimizer_states(self, model_param: torch.Tensor, tensors: dict[str, Any]) -> None:
        super()._set_main_param_and_optimizer_states(model_param, tensors)
        if "ema" in tensors:
            self.ema.of(self._main_param(model_param)).copy_(tensors["ema"])

    def sharded_state_dict(
        self,
        model_sharded_state_dict: dict[str, Any],
        is_loading: bool = False,
        sharding_type: str | None = None,
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        wanted = self._wants_ema(is_loading, metadata)
        kind = sharding_type or (metadata or {}).get("distrib_optim_sharding_type")
        if wanted and kind not in ("fully_reshardable", "dp_reshardable"):
            raise NotImplementedError(
                f"--ema-decay cannot be saved in the distributed optimizer's {kind} format: "
                "use --ckpt-format torch_dist with --dist-ckpt-optim-fully-reshardable"
            )
        with self.ema.exposed(wanted):
            return super().sharded_state_dict(model_sharded_state_dict, is_loading, sharding_type, metadata)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if self.ema.in_state_dict:
            state["ema_updates"] = self.ema.updates
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restore_updates(state_dict)
        with self.ema.exposed(False):
            super().load_state_dict(state_dict)


class _EmaModelShaped(_EmaOptimizer):
    """Optimizers whose main parameters have the shapes of the model's."""

    def _model_and_main_params(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        raise NotImplementedError

    def sharded_state_dict(
        self,
        model_sharded_state_dict: dict[str, Any],
        is_loading: bool = False,
        metadata: dict[str, Any] | None = None,
    ) -> dict[str, Any]:
        state = super().sharded_state_dict(model_sharded_state_dict, is_loading, metadata)  # type: ignore[safe-super]
        if self._wants_ema(is_loading, metadata):
            pairs = self._model_and_main_params()
            sharded = get_param_id_to_sharded_param_map(model_sharded_state_dict, (model for model, _ in pairs))
            state["ema"] = {
                index: make_sharded_optimizer_tensor(sharded[index], self.ema.of(main), prefix=STATE_PREFIX)
                for index, (_, main) in enumerate(pairs)
            }
            state["ema_updates"] = self.ema.updates
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        tensors = state_dict.pop("ema", {})
        self._restore_updates(state_dict)
        super().load_state_dict(state_dict)  # type: ignore[safe-super]
        for index, (_, main) in enumerate(self._model_and_main_params()):
            if index in tensors:
                self.ema.of(main).copy_(tensors[index])


class _EmaFloat16Optimizer(_EmaModelShaped, Float16OptimizerWithFloat16Params):
    def _model_and_main_params(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        half = zip(chain.from_iterable(self.float16_groups), chain.from_iterable(self.fp32_from_float16_groups))
        return [*half, *((param, param) for param in chain.from_iterable(self.fp32_from_fp32_groups))]


class _EmaFP32Optimizer(_EmaModelShaped, FP32Optimizer):
    def _model_and_main_params(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [(param, param) for param in self.get_parameters()]


_KINDS: dict[type, type] = {
    DistributedOptimizer: _EmaDistributedOptimizer,
    Float16OptimizerWithFloat16Params: _EmaFloat16Optimizer,
    FP32Optimizer: _EmaFP32Optimizer,
}


def enable(optimizer: MegatronOptimizer, decay: float) -> None:
    """Give an optimizer, and each one chained in it, an EMA of its parameters, updated after each successful step.

    Args:
        optimizer: from `get_megatron_optimizer`, before a checkpoint is loaded.
        decay: in [0, 1).

    Raises:
        ValueError: decay is out of range.
        NotImplementedError: an optimizer without fp32 main parameters of its own.
    """
    WeightEma(decay)
    for leaf in _leaves(optimizer):
        kind = _KINDS.get(type(leaf))
        if kind is None:
            raise NotImplementedError(f"--ema-decay is not supported with {type(leaf).__name__}: drop it")
        for flag in ("use_precision_aware_optimizer", "optimizer_cpu_offload"):
            if getattr(leaf.config, flag, False):
                raise NotImplementedError(f"--ema-decay is not supported with --{flag.replace('_', '-')}: drop one")
        if getattr(getattr(leaf, "ddp_config", None), "use_megatron_fsdp", False):
            raise NotImplementedError("--ema-decay is not supported with --use-megatron-fsdp: drop one")
        leaf.ema = WeightEma(decay)
        # Megatron builds the optimizer itself and takes no class for it.
        leaf.__class__ = kind


def install(decay: float) -> None:
    """Make Megatron's `pretrain()` keep an EMA: enable it on the optimizer it builds, and mark its checkpoints.

    Call it once, after `compat.apply()` and before `pretrain()`.
    """
    from megatron.training import checkpointing, training

    WeightEma(decay)
    build_optimizer, build_metadata = training.get_megatron_optimizer, checkpointing._build_sharded_state_dict_metadata
    training.get_megatron_optimizer = _with_ema(build_optimizer, decay)
    checkpointing._build_sharded_state_dict_metadata = _with_mark(build_metadata)


def _with_ema(build: Callable[..., Any], decay: float) -> Callable[..., Any]:
    def get_megatron_optimizer(*args: Any, **kwargs: Any) -> Any:
        optimizer = build(*args, **kwargs)
        enable(optimizer, decay)
        return optimizer

    return get_megatron_optimizer


def _with_mark(build: Callable[..., dict[str, Any]]) -> Callable[..., dict[str, Any]]:
    def build_sharded_state_dict_metadata(*args: Any, **kwargs: Any) -> dict[str, Any]:
        return build(*args, **kwargs) | {METADATA_KEY: True}

    return build_sharded_state_dict_metadata


def _leaves(optimizer: Any) -> list[Any]:
    chained = getattr(optimizer, "chained_optimizers", [optimizer])
    return [leaf for leaf in chained if not getattr(leaf, "is_stub_optimizer", False)]


def ema_shards(optimizer: MegatronOptimizer) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """(model parameter, this rank's EMA of it) for every parameter that this rank's optimizer updates.

    With the distributed optimizer an EMA is the flat slice that this rank owns. Empty without an EMA.
    """
    shards: list[tuple[torch.Tensor, torch.Tensor]] = []
    for leaf in _leaves(optimizer):
        if isinstance(leaf, _EmaDistributedOptimizer):
            shards += [(param, leaf.ema.of(leaf._main_param(param))) for param in leaf.model_param_group_index_map]
        elif isinstance(leaf, _EmaModelShaped):
            shards += [(param, leaf.ema.of(main)) for param, main in leaf._model_and_main_params()]
    return shards


def has_ema(checkpoint_dir: str) -> bool:
    """Whether one iteration's torch_dist folder holds an EMA of the weights."""
    keys = dist_checkpointing.load_tensors_metadata(checkpoint_dir).keys()
    return any(key.startswith(f"{STATE_PREFIX}.") for key in keys)


def load_ema_state(checkpoint_dir: str, model: Any) -> None:
    """Overwrite the trainable weights of a built model with a checkpoint's EMA, in any parallel layout.

    Weights that were frozen and buffers stay as they are: load the checkpoint's weights first.

    Args:
        checkpoint_dir: one iteration's torch_dist folder (`.../iter_0000100`).
        model: a Megatron module or a list of them, wrapped or not; all ranks of its layout call this.

    Raises:
        ValueError: not a torch_dist checkpoint, or one without an EMA of some trainable weight.
    """
    if not dist_checkpointing.check_is_distributed_checkpoint(checkpoint_dir):
        raise ValueError(f"{checkpoint_dir} is not a torch_dist checkpoint of one iteration (.../iter_0000100)")
    if not has_ema(checkpoint_dir):
        raise ValueError(f"{checkpoint_dir} holds no EMA of the weights: train with --ema-decay, or use the weights")
    metadata = dist_checkpointing.load_content_metadata(checkpoint_dir) or {}
    parameters: dict[str, torch.nn.Parameter] = {}
    request: dict[str, Any] = {}
    for index, module in enumerate(unwrap_model(model if isinstance(model, list) else [model])):
        group = module.pg_collection.dp_cp
        sharded = module.sharded_state_dict(metadata=metadata | {"dp_cp_group": group})
        for name, entry in sharded.items():
            parameter = getattr(entry, "data", None)
            if isinstance(parameter, torch.nn.Parameter) and parameter.requires_grad:
                parameters[f"{index}.{name}"] = parameter
                request[f"{index}.{name}"] = _ema_entry(entry, parameter)
    saved = dist_checkpointing.load_tensors_metadata(checkpoint_dir).keys()
    missing = sorted({entry.key for entry in request.values()} - set(saved))
    if missing:
        raise ValueError(f"{checkpoint_dir} holds no EMA of {len(missing)} weights of this model, first {missing[0]}")
    loaded = dist_checkpointing.load(request, checkpoint_dir)
    with torch.no_grad():
        for name, parameter in parameters.items():
            parameter.copy_(loaded[name])


def _ema_entry(
    entry: ShardedTensor | ShardedTensorFactory, parameter: torch.nn.Parameter
) -> ShardedTensor | ShardedTensorFactory:
    data = torch.empty_like(parameter, dtype=torch.float32, requires_grad=False)
    changes: dict[str, Any] = {"key": f"{STATE_PREFIX}.{entry.key}", "data": data}
    if isinstance(entry, ShardedTensor):
        changes["dtype"] = torch.float32
    return replace(entry, **changes)
