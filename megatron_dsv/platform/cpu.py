"""Megatron's own `pretrain()` on a host without CUDA, over gloo.

`enable()` replaces what Megatron takes from CUDA: device arguments are rewritten to the CPU, `torch.cuda` answers with
stand-ins, CUDA's random generator is the CPU's. Where CUDA is available it does nothing. `torch.cuda.is_available()`
stays False, so code that asks it takes its own CPU path.
"""

import functools
import logging
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from megatron_dsv.platform import child_processes

_CPU = torch.device("cpu")
_active: "_CudaOnCpu | None" = None


def enable() -> None:
    """Let Megatron train on the CPU in this process; idempotent, and without effect where CUDA is available.

    Call it on the main thread before Megatron is imported: then nothing is compiled by `torch.compile` at all.
    """
    global _active
    if torch.cuda.is_available() or _active is not None:
        return
    # Megatron checks for Hopper's launch order when TP > 1; there is no GPU whose order could matter.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    _silence()
    _replace_torch_cuda()
    preload()
    if sys.modules["megatron.core.jit"].jit_fuser is not _identity_compile:
        # Megatron was imported before: its functions are compiled ones, so tell torch.compile to run them eagerly.
        torch.compiler.set_stance("force_eager")
    _replace_rng()
    _allow_no_cuda()
    # Megatron spawns the process that collects a save's results, to keep a CUDA context whole; a fork takes no time.
    child_processes.install_save_queue("fork")
    _refuse_async_save()
    _active = _CudaOnCpu()
    _active.__enter__()


def current_device() -> torch.device:
    """Where this process computes: its GPU, or the CPU on a host without."""
    return torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else _CPU


def defaults() -> dict[str, Any]:
    """Parser defaults (argparse `dest` -> value) that Megatron needs without CUDA; empty where CUDA is available.

    For `parser.set_defaults(**defaults())` inside the extra-arguments provider, so that flags still win.
    """
    if torch.cuda.is_available():
        return {}
    return {
        "distributed_backend": "gloo",
        "transformer_impl": "local",
        "gradient_accumulation_fusion": False,
        "masked_softmax_fusion": False,
        "bias_gelu_fusion": False,
        "bias_swiglu_fusion": False,
        "bias_dropout_fusion": False,
        "apply_rope_fusion": False,
        "no_persist_layer_norm": True,
    }


class _CudaOnCpu(TorchFunctionMode):
    """Rewrites CUDA devices to the CPU, and gives tensors the type names that Megatron's optimizers compare."""

    def __torch_function__(self, func: Callable, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        kwargs = kwargs or {}
        if func in _IDENTITY:
            return args[0]
        if func is torch.Tensor.type:
            result = func(*args, **kwargs)
            return result.replace("torch.", "torch.cuda.", 1) if isinstance(result, str) else result
        if "device" in kwargs and _is_cuda(kwargs["device"]):
            kwargs["device"] = _CPU
        if func is torch.Tensor.to and len(args) > 1 and _is_cuda(args[1]):
            args = (args[0], _CPU, *args[2:])
        return func(*args, **kwargs)


_IDENTITY = frozenset({torch.Tensor.cuda, torch.Tensor.pin_memory})


def _is_cuda(device: Any) -> bool:
    if isinstance(device, str):
        return device.startswith("cuda")
    return isinstance(device, torch.device) and device.type == "cuda"


class _Stream:
    """A stream of a device that executes at once: nothing to wait for."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.cuda_stream = 0
        self.device = _CPU

    def __enter__(self) -> "_Stream":
        return self

    def __exit__(self, *exc: Any) -> None:
        return None

    def wait_stream(self, stream: Any) -> None: ...

    def wait_event(self, event: Any) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def record_event(self, event: "_Event | None" = None) -> "_Event":
        event = event or _Event()
        event.record()
        return event

    @staticmethod
    def priority_range() -> tuple[int, int]:
        return (0, 0)


class _Event:
    """An event that is complete when recorded; `elapsed_time` in ms of wall clock."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._time = 0.0

    def record(self, stream: Any = None) -> None:
        self._time = time.perf_counter()

    def wait(self, stream: Any = None) -> None: ...

    def synchronize(self) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, end: "_Event") -> float:
        return (end._time - self._time) * 1e3


class _Generators:
    """Stands for `torch.cuda.default_generators`: whatever the index, the CPU's."""

    def __getitem__(self, index: Any) -> torch.Generator:
        return torch.default_generator


@contextmanager
def _stream_context(stream: Any) -> Iterator[None]:
    yield


def _returns(value: Any) -> Callable[..., Any]:
    """A new function each time: torch.compile's tables reject one function under several names."""
    return lambda *args, **kwargs: value


def _replace_torch_cuda() -> None:
    cuda = torch.cuda
    cpu = SimpleNamespace(
        name="cpu", major=9, minor=0, multi_processor_count=os.cpu_count() or 1, total_memory=0, warp_size=32
    )
    stand_ins: dict[str, Any] = {
        "Stream": _Stream,
        "Event": _Event,
        "stream": _stream_context,
        "default_generators": _Generators(),
        "get_rng_state": lambda device=None: torch.get_rng_state(),
        "set_rng_state": lambda state, device=None: torch.set_rng_state(state),
        "manual_seed": lambda seed: torch.default_generator.manual_seed(seed),
        "manual_seed_all": lambda seed: torch.default_generator.manual_seed(seed),
        "current_device": _returns(_CPU),
        # One device a process: Megatron skips its set-up of process groups when it counts none.
        "device_count": _returns(1),
        "get_device_properties": _returns(cpu),
        "get_device_name": _returns("cpu"),
        "get_device_capability": _returns((9, 0)),
        "current_stream": lambda device=None: _Stream(),
        "default_stream": lambda device=None: _Stream(),
        "memory_stats": lambda device=None: _ZeroStats(),
        "mem_get_info": _returns((0, 0)),
    }
    for name in ("set_device", "set_stream", "synchronize", "empty_cache", "ipc_collect", "reset_peak_memory_stats"):
        stand_ins[name] = _returns(None)
    for name in ("memory_allocated", "max_memory_allocated", "memory_reserved", "max_memory_reserved",
                 "device_memory_used"):
        stand_ins[name] = _returns(0)
    stand_ins["is_current_stream_capturing"] = _returns(False)
    for name, value in stand_ins.items():
        setattr(cuda, name, value)
    for name in ("get_rng_state", "set_rng_state", "manual_seed"):
        setattr(cuda.random, name, stand_ins[name])
    for name in ("range_push", "range_pop", "mark"):
        setattr(cuda.nvtx, name, _returns(None))


class _ZeroStats(dict):
    """Memory statistics of a device that has no allocator: every counter is 0."""

    def __missing__(self, key: str) -> int:
        return 0


def preload() -> None:
    """Import Megatron as `enable()` would, and change nothing else: for a process that forks ranks.

    `torch.compile` is the identity while Megatron is imported, so that its jit_fuser functions stay eager.
    """
    jit = sys.modules.get("megatron.core.jit")
    if torch.cuda.is_available() or jit is not None:
        return
    # It warns that there is no CUDA, which is the point.
    logging.getLogger("torch.utils.cpp_extension").setLevel(logging.ERROR)
    compile_function = torch.compile
    torch.compile = _identity_compile  # type: ignore[assignment]
    try:
        with optional_packages():
            import megatron.core.jit
            import megatron.training.training  # noqa: F401
    finally:
        torch.compile = compile_function


@contextmanager
def optional_packages() -> Iterator[None]:
    """For imports of Megatron: no warnings that Transformer Engine and Apex are absent, `dsv doctor` reports it once.

    Raises:
        ImportError: Megatron cannot load the Transformer Engine that is installed, whoever's layers are asked for.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*(Transformer Engine|transformer-engine|Apex).*")
        try:
            yield
        except ImportError as error:
            if "transformer_engine" not in str(error):
                raise
            raise ImportError("megatron-core cannot load the Transformer Engine installed here: install one that it "
                              f"supports (extra `te`), or uninstall it; {error}") from error


def _silence() -> None:
    """Drop what is said for want of a GPU: its generator is the CPU's by intent, and no memory needs pinning."""
    logging.getLogger("megatron.core.tensor_parallel.random").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", message="'pin_memory' argument is set as true")


def _identity_compile(model: Callable | None = None, **options: Any) -> Callable:
    return (lambda function: function) if model is None else model


def _replace_rng() -> None:
    """Megatron reads and sets CUDA's generator through private functions that queue the call until CUDA exists."""
    from megatron.core.tensor_parallel import random as megatron_random

    def get_state(device: Any = "cuda", clone: bool = False, graph_safe: bool = False) -> torch.Tensor:
        return torch.get_rng_state()

    def set_state(new_state: torch.Tensor, device: Any = -1, graph_safe: bool = False) -> None:
        torch.set_rng_state(new_state)

    megatron_random._get_cuda_rng_state = get_state
    megatron_random._set_cuda_rng_state = set_state


def _allow_no_cuda() -> None:
    """`pretrain()` does not pass on `allow_no_cuda`, which `initialize_megatron` has."""
    from megatron.training import initialize, training

    allowed = functools.partial(initialize.initialize_megatron, allow_no_cuda=True)
    initialize.initialize_megatron = allowed
    training.initialize_megatron = allowed


def _refuse_async_save() -> None:
    """On a GPU the worker gets a copy of the tensors in host memory; here it would write those being trained."""
    from megatron.training import initialize

    def refuse(rank: int, mp_mode: str = "spawn") -> None:
        raise NotImplementedError("--async-save needs CUDA: drop it on a host without")

    initialize.init_persistent_async_worker = refuse
