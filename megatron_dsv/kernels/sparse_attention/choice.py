"""Which backend serves a request of sparse attention: what each can do, and the fastest that was measured.

Forward and backward are chosen apart: out and lse mean the same on every backend.
"""

from __future__ import annotations

import functools
import logging
import math
from typing import Any

import torch
from torch import Tensor

from megatron_dsv.kernels import timings
from megatron_dsv.kernels.launching import MAX_WIDTH
from megatron_dsv.kernels.library import device_name
from megatron_dsv.kernels.selection import KVSelection
from megatron_dsv.kernels.sparse_attention import cudnn, flash4

logger = logging.getLogger(__name__)

BACKENDS = ("auto", "reference", "triton", "flash4", "cudnn")
_LIBRARIES = ("flash4", "cudnn")
_BY_MEMORY = ("triton", "flash4", "cudnn")
"""From none to one to three fp32 copies of q in the backward."""


def limit_of_kind(backend: str, *, dtype: torch.dtype, heads: int, kv_heads: int, head_dim: int, q_block_size: int,
                  kv_block_size: int, deterministic: bool) -> str | None:
    """What keeps a backend from serving any request of this kind, on the devices that it is for, or None."""
    kind: dict[str, Any] = {"dtype": dtype, "head_dim": head_dim, "q_block_size": q_block_size,
                            "kv_block_size": kv_block_size, "deterministic": deterministic}
    match backend:
        case "flash4":
            return flash4.limit_of_kind(**kind)
        case "cudnn":
            return cudnn.limit_of_kind(**kind, heads=heads, kv_heads=kv_heads)
        case "triton" if head_dim > MAX_WIDTH:
            return f"takes head dims up to {MAX_WIDTH}, got {head_dim}"
        case _:
            return None


def serves_kind(backend: str, **kind: Any) -> bool:
    """Whether a backend serves requests of this kind, on the devices that it is for; as ``limit_of_kind``."""
    return limit_of_kind(backend, **kind) is None


def check_limits(backend: str, q: Tensor, k: Tensor, v: Tensor, selection: KVSelection, deterministic: bool) -> None:
    """Raises NotImplementedError where a library backend cannot serve the request; others check their own limits."""
    if backend in _LIBRARIES and (reason := _limit(backend, q, k, v, selection, deterministic)):
        raise NotImplementedError(f"backend={backend!r} {reason}; use backend='triton'")


def choose(pass_name: str, q: Tensor, k: Tensor, v: Tensor, selection: KVSelection, deterministic: bool) -> str:
    """The backend that ``auto`` means for a pass, "forward" or "backward"; logged once for each kind of request."""
    if not q.is_cuda:
        _log_choice(pass_name, "reference", f"the tensors lie on a {q.device.type} device")
        return "reference"
    from megatron_dsv.kernels.sparse_attention.triton import launch
    if (kept := launch.limit(q, k)) is not None:
        # The libraries serve a part of what triton does.
        _log_choice(pass_name, "reference", f"triton {kept.partition(';')[0]}")
        return "reference"
    able = ("triton", *(name for name in _LIBRARIES
                        if _limit(name, q, k, v, selection, deterministic) is None))
    density = min(1.0, selection.entries_bound / max(1, selection.row_start.numel() * selection.num_kv_blocks))
    return _fastest(pass_name, able, device_name(q.device), max(q.shape[0], k.shape[0]),
                    q.shape[1] * q.shape[2], q.shape[3], density, selection.q_block_size, selection.kv_block_size)


def _limit(backend: str, q: Tensor, k: Tensor, v: Tensor, selection: KVSelection, deterministic: bool) -> str | None:
    if backend == "flash4":
        return flash4.limit(q, selection, deterministic=deterministic)
    return cudnn.limit(q, k, v, selection, deterministic=deterministic)


@functools.lru_cache(maxsize=4096)
def _fastest(pass_name: str, able: tuple[str, ...], device: str, tokens: int, heads: int, head_dim: int, density: float,
             q_block_size: int, kv_block_size: int) -> str:
    costs = timings.sparse_costs(device, tokens=tokens, heads=heads, head_dim=head_dim, density=density,
                                 q_block_size=q_block_size, kv_block_size=kv_block_size, backends=able)
    if costs:
        times = {name: getattr(cost, pass_name) for name, cost in costs.items()}
        # Within measurement error, the one that needs the least memory.
        chosen = next(name for name in _BY_MEMORY if times.get(name, math.inf) <= 1.02 * min(times.values()))
        why = ", ".join(f"{name} {ms:.3g} ms" for name, ms in times.items())
        _log_choice(pass_name, chosen, f"of the measured backends that can serve {q_block_size} x {kv_block_size} "
                                       f"blocks and head dim {head_dim} on {device} it is the fastest", why)
        return chosen
    _log_choice(pass_name, "triton", f"nothing was measured for {q_block_size} x {kv_block_size} blocks on {device}")
    return "triton"


_logged: set[tuple[str, str, str]] = set()


def _log_choice(pass_name: str, chosen: str, reason: str, numbers: str = "") -> None:
    if (pass_name, chosen, reason) not in _logged:
        _logged.add((pass_name, chosen, reason))
        logger.info("sparse_attention: backend='auto' took %r for the %s because %s%s", chosen, pass_name, reason,
                    f" ({numbers})" if numbers else "")
