"""Per layer: does sparse attention pay at this budget, or is dense attention the faster way?

The answer is made on the host from the layer's kept share, so it costs nothing in the step, and it comes with its
reason, so that a run can say why a layer is dense.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import NamedTuple

import torch

from megatron_dsv.kernels import timings
from megatron_dsv.kernels.library import installed
from megatron_dsv.kernels.sparse_attention.choice import serves_kind

DEFAULT_DENSE_ABOVE = 0.5
"""Kept share up to which a layer is sparse where its shape was not measured.

On one H200 (bf16, 65,536 tokens, 24 heads of 128, forward + backward) block-sparse attention with 128-token blocks
took 165.9 ms at density 0.5 against 289 ms dense with kernels of the same family, and costs grow linearly with
density; selection, list inversion and predictors come on top. Other kernels and shapes differ: measure them, or set
``--dsv-dense-above``.
"""

REQUIRED_SPEEDUP = 1.1
"""Dense time over selection and sparse attention that a layer must promise: real lists are skewed where the measured
ones were uniform, which may cost a tenth."""

ORDERED_TOKENS_BACKWARD = 1.44
"""Backward of single tokens that repeats bitwise over the one measured, which adds with atomics: 72.1 ms against 50.1
on one H200 (bf16, 65,536 tokens, 24 heads of 128, groups of 128 queries, a tenth of the keys)."""


class Decision(NamedTuple):
    """Attributes: sparse, whether to attend sparsely; reason, one line for the log."""

    sparse: bool
    reason: str


def use_sparse(keep_ratio: float, *, num_tokens: int, num_heads: int, head_dim: int, q_block_size: int,
               kv_block_size: int, num_kv_heads: int | None = None, dtype: torch.dtype = torch.bfloat16,
               deterministic: bool = False, dense_above: float | None = None, device: str | None = None,
               sparse_backend: str = "auto", dense_backend: str = "auto") -> Decision:
    """Decide for one layer. A layer that is sparse at a kept share is so at every smaller one.

    A given ``dense_above`` decides alone. Without it, the times of ``kernels.timings``, selection included, decide
    where this device and length were measured, else ``DEFAULT_DENSE_ABOVE``. A granularity that was not measured is
    taken to cost no more than a finer one, and than a coarser one times the pieces that it cuts that one's blocks into.

    Args:
        keep_ratio: kept share of the layer's blocks, mean over its heads, in (0, 1].
        num_tokens: tokens of the whole sequence.
        num_heads: query heads computed on one device.
        head_dim: size of a head.
        q_block_size: tokens per query group.
        kv_block_size: tokens per key/value block.
        num_kv_heads: key/value heads computed on one device; default ``num_heads``.
        dtype: of queries, keys and values.
        deterministic: gradients must repeat bitwise.
        dense_above: in [0, 1] (``--dsv-dense-above``); a layer that keeps more than this is dense. 1 makes every layer
            sparse, 0 none.
        device: name of the device as torch.cuda.get_device_name gives it; None for a CPU.
        sparse_backend, dense_backend: what the layer will run on; "auto" is the fastest whose package is installed.

    Raises:
        ValueError: a share out of range; a size below 1.
    """
    sizes = {"num_tokens": num_tokens, "num_heads": num_heads, "head_dim": head_dim, "q_block_size": q_block_size,
             "kv_block_size": kv_block_size, "num_kv_heads": num_heads if num_kv_heads is None else num_kv_heads}
    for name, size in sizes.items():
        if size < 1:
            raise ValueError(f"{name} must be at least 1, got {size}")
    if not 0.0 < keep_ratio <= 1.0:
        raise ValueError(f"keep_ratio must be in (0, 1], got {keep_ratio}")
    if dense_above is not None:
        if not 0.0 <= dense_above <= 1.0:
            raise ValueError(f"--dsv-dense-above must be in [0, 1], got {dense_above}")
        return _by_threshold(keep_ratio, dense_above, "--dsv-dense-above")
    if device is None:
        return _by_threshold(keep_ratio, DEFAULT_DENSE_ABOVE, "the default where nothing was measured")
    return _by_cost(keep_ratio, **sizes, dtype=dtype, deterministic=deterministic, device=device,
                    sparse_backend=sparse_backend, dense_backend=dense_backend)


@functools.lru_cache(maxsize=4096)
def _by_cost(keep_ratio: float, *, num_tokens: int, num_heads: int, num_kv_heads: int, head_dim: int,
             q_block_size: int, kv_block_size: int, dtype: torch.dtype, deterministic: bool, device: str,
             sparse_backend: str, dense_backend: str) -> Decision:
    shape = {"tokens": num_tokens, "heads": num_heads, "head_dim": head_dim}
    dense = timings.dense_costs(device, **shape, backends=_usable(timings.DENSE, device, dense_backend))
    usable = [name for name in _usable(timings.SPARSE, device, sparse_backend)
              if serves_kind(name, dtype=dtype, heads=num_heads, kv_heads=num_kv_heads, head_dim=head_dim,
                             q_block_size=q_block_size, kv_block_size=kv_block_size, deterministic=deterministic)]
    ordered_tokens = ORDERED_TOKENS_BACKWARD if deterministic and kv_block_size == 1 else 1.0
    sparse = []
    blocks = ((row.q_block_size, row.kv_block_size) for row in timings.SPARSE.get(device, ()) if row.backend in usable)
    for (q_block, kv_block), pieces in _bounds(blocks, q_block_size, kv_block_size):
        costs = timings.sparse_costs(device, **shape, density=keep_ratio, q_block_size=q_block, kv_block_size=kv_block,
                                     backends=usable, most_below=True).values()
        sparse.append(pieces * (min(cost.forward for cost in costs)
                                + ordered_tokens * min(cost.backward for cost in costs)))
    selected = ((row.q_block_size, row.kv_block_size) for row in timings.SELECTION.get(device, ()))
    selection = [pieces * timings.selection_ms(device, tokens=num_tokens, heads=num_heads, q_block_size=q_block,
                                               kv_block_size=kv_block)
                 for (q_block, kv_block), pieces in _bounds(selected, q_block_size, kv_block_size)]
    lengths = [row.tokens for row in timings.DENSE.get(device, ())]
    if not dense or not sparse or not selection or num_tokens > max(lengths):
        return _by_threshold(keep_ratio, DEFAULT_DENSE_ABOVE, "the default where nothing was measured")
    if num_tokens < min(lengths):
        return Decision(False, f"dense: {num_tokens} tokens are fewer than were measured, {min(lengths)}")
    # Dense attention takes one backend for both passes; sparse attention chooses for each.
    dense_ms = min(map(sum, dense.values()))
    sparse_ms, selection_ms = min(sparse), min(selection)
    launches_ms = timings.LAUNCH_ALLOWANCE_MS.get(device, 0.0)
    faster = max(sparse_ms + selection_ms, launches_ms) * REQUIRED_SPEEDUP <= dense_ms
    launched = f" ({launches_ms:.3g} ms allowed for launches)" if launches_ms > sparse_ms + selection_ms else ""
    return Decision(faster, f"{'sparse' if faster else 'dense'}: {device} takes {sparse_ms:.3g} ms sparse at keep "
                            f"ratio {keep_ratio:.3f} and {selection_ms:.3g} ms to select{launched}, {dense_ms:.3g} ms "
                            "dense")


def _bounds(measured: Iterable[tuple[int, int]], q_block_size: int,
            kv_block_size: int) -> list[tuple[tuple[int, int], float]]:
    """Measured granularities whose cost bounds that of another, with the factor by which: itself alone if measured."""
    known = set(measured)
    if (q_block_size, kv_block_size) in known:
        return [((q_block_size, kv_block_size), 1.0)]
    return [((q, kv), max(1.0, q / q_block_size) * max(1.0, kv / kv_block_size)) for q, kv in known]


def _usable(table: dict, device: str, backend: str) -> tuple[str, ...]:
    """Backends of a table that ``backend`` can mean on this host."""
    names = dict.fromkeys(row.backend for row in table.get(device, ()))
    return tuple(name for name in names if (installed(name) if backend == "auto" else name == backend))


def _by_threshold(keep_ratio: float, threshold: float, source: str) -> Decision:
    if keep_ratio <= threshold:
        return Decision(True, f"sparse: keep ratio {keep_ratio:.3f} is within {threshold:.3f}, {source}")
    return Decision(False, f"dense: keep ratio {keep_ratio:.3f} is above {threshold:.3f}, {source}")
