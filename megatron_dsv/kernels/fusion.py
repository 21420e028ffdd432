"""Pointwise fusion: torch.compile on CUDA, plain eager elsewhere (compiling on a CPU costs more than it saves)."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch


def fused_on_cuda[**P, R](function: Callable[P, R]) -> Callable[P, R]:
    """Compiles ``function`` at its first call with CUDA tensors; its first argument decides."""
    compiled: Callable[P, R] | None = None

    @functools.wraps(function)
    def call(*args: P.args, **kwargs: P.kwargs) -> R:
        nonlocal compiled
        first = args[0]
        if not isinstance(first, torch.Tensor) or first.device.type != "cuda":
            return function(*args, **kwargs)
        if compiled is None:
            compiled = torch.compile(function)
        return compiled(*args, **kwargs)

    return call
