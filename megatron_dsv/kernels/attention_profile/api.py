"""How true attention mass spreads over keys: what a profile of sparsity and recall is made of.

Backends of both ops: ``reference`` (torch, any dtype and device), ``triton`` (``block_mass``: bf16, fp16, fp32, head
dims up to 256; ``smallest_set``: fp32; CUDA, or TRITON_INTERPRET=1 on the CPU), ``auto`` (on CUDA triton where it can
serve the request, reference elsewhere; logged once).

Dims: n query groups of g tokens, s keys, b batch, h query heads, G key/value heads (h % G == 0), d head dim, Nk key
blocks.
"""

from __future__ import annotations

from types import ModuleType

import torch
from torch import Tensor

from megatron_dsv.kernels.attention_profile import reference
from megatron_dsv.kernels.launching import choose_or_log

BACKENDS = ("auto", "reference", "triton")


@torch.no_grad()
def block_mass(q: Tensor, k: Tensor, *, valid_rows: Tensor, kv_length: Tensor, q_block_size: int, kv_block_size: int,
               softmax_scale: float, backend: str = "auto") -> Tensor:
    """Softmax mass of every key block, summed over the valid queries of each group: p = softmax(softmax_scale q k^T).

    Args:
        q: [n * g, b, h, d], group after group.
        k: [s, b, G, d], same dtype.
        valid_rows: bool [n * g, b]; False for queries that are padding, whatever they hold.
        kv_length: int32 [b, G]; keys at or after it are padding, whatever they hold.
        q_block_size: g; 1 gives single queries.
        kv_block_size: keys per block, the last may be ragged; 1 gives single keys.
        softmax_scale: factor on q k^T.
        backend: one of ``BACKENDS``.

    Returns:
        fp32 [b, h, n, Nk] (fp64 for fp64 inputs); a row sums to the number of its valid queries, or to 0 where no key
        is real. Nothing waits for the device.

    Raises:
        ValueError: shapes or backend do not fit.
        NotImplementedError: ``triton`` cannot serve the request; the message names the way out.
    """
    if q_block_size < 1 or kv_block_size < 1:
        raise ValueError(f"q_block_size and kv_block_size must be at least 1, got {q_block_size} and {kv_block_size}")
    if q.dim() != 4 or q.shape[0] % q_block_size:
        raise ValueError(f"q must be [n * {q_block_size}, b, h, d], got {tuple(q.shape)}")
    if k.dim() != 4 or k.shape[1] != q.shape[1] or k.shape[3] != q.shape[3] or k.shape[2] == 0 \
            or q.shape[2] % k.shape[2]:
        raise ValueError(f"k must be [s, b, G, d] with h a multiple of G for q {tuple(q.shape)}, got {tuple(k.shape)}")
    if valid_rows.shape != q.shape[:2] or valid_rows.dtype != torch.bool:
        raise ValueError(f"valid_rows must be bool {tuple(q.shape[:2])}, got {valid_rows.dtype} "
                         f"{tuple(valid_rows.shape)}")
    if kv_length.shape != k.shape[1:3] or kv_length.dtype != torch.int32:
        raise ValueError(f"kv_length must be int32 [b, G] = {list(k.shape[1:3])}, got {kv_length.dtype} "
                         f"{list(kv_length.shape)}")
    match choose_or_log("block_mass", backend, k.device, lambda: _triton().mass_limit(q, k, kv_block_size)):
        case "reference":
            return reference.block_mass(q, k, valid_rows, kv_length, q_block_size=q_block_size,
                                        kv_block_size=kv_block_size, softmax_scale=softmax_scale)
        case "triton":
            return _triton().block_mass(q, k, valid_rows, kv_length, q_block_size=q_block_size,
                                        kv_block_size=kv_block_size, softmax_scale=softmax_scale)
        case _:
            raise ValueError(f"backend of block_mass must be one of {', '.join(BACKENDS)}, got {backend!r}")


@torch.no_grad()
def smallest_set(mass: Tensor, target: float, *, backend: str = "auto") -> Tensor:
    """Size of the smallest set of entries whose share of their row's mass reaches ``target``.

    Sums are rounded, so a set counts as reaching its target from 2^-20 of the row's mass below it, and may be asked
    for up to 2^-20 more: the size is exact but for entries that lie within that.

    Args:
        mass: [..., width], floating, nothing negative, width at least 1.
        target: in (0, 1].
        backend: one of ``BACKENDS``. ``reference`` sorts; ``triton`` bisects the value of the smallest entry needed.

    Returns:
        [...] in the dtype of ``mass``, at least 1; NaN where a row holds NaN.

    Raises:
        ValueError: width, target or backend do not fit.
        NotImplementedError: ``triton`` cannot serve the request; the message names the way out.
    """
    if mass.dim() == 0 or mass.shape[-1] == 0:
        raise ValueError(f"mass must be [..., width] with a width of at least 1, got {list(mass.shape)}")
    if not 0.0 < target <= 1.0:
        raise ValueError(f"target must be in (0, 1], got {target}")
    match choose_or_log("smallest_set", backend, mass.device, lambda: _triton().set_limit(mass)):
        case "reference":
            return reference.smallest_set(mass, target)
        case "triton":
            return _triton().smallest_set(mass, target)
        case _:
            raise ValueError(f"backend of smallest_set must be one of {', '.join(BACKENDS)}, got {backend!r}")


def _triton() -> ModuleType:
    from megatron_dsv.kernels.attention_profile.triton import launch
    return launch
