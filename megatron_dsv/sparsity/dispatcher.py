"""Per layer: does sparse attention pay at this budget, or is dense attention the faster way?

The answer is made on the host from the layer's kept share, so it costs nothing in the step, and it comes with its
reason, so that a run can say why a layer is dense.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron_dsv.kernels import timings

DEFAULT_DENSE_ABOVE = 0.5
"""Kept share up to which a layer is sparse where its shape was not measured.

On one H200 (bf16, 65,536 tokens, 24 heads of 128, forward + backward) block-sparse attention with 128-token blocks
took 165.9 ms at density 0.5 against 289 ms dense with kernels of the same family, and costs grow linearly with
density; selection, list inversion and predictors come on top. Other kernels and shapes differ: measure them, or set
``--dsv-dense-above``.
"""

REQUIRED_SPEEDUP = 1.1
"""Dense over sparse kernel time that a layer must promise: the tables time the kernels alone, without selection, list
inversion and predictors, and some of their sparse rows come from short runs on a cool chip."""


class Decision(NamedTuple):
    """Attributes: sparse, whether to attend sparsely; reason, one line for the log."""

    sparse: bool
    reason: str


def use_sparse(keep_ratio: float, *, num_tokens: int, num_heads: int, head_dim: int, q_block_size: int,
               kv_block_size: int, dense_above: float | None = None, device: str | None = None) -> Decision:
    """Decide for one layer.

    A given ``dense_above`` decides alone. Without it, the times of ``kernels.timings`` decide where this device, head
    size, granularity and length were measured, else ``DEFAULT_DENSE_ABOVE``.

    Args:
        keep_ratio: kept share of the layer's blocks, mean over its heads, in (0, 1].
        num_tokens: tokens of the whole sequence.
        num_heads: query heads computed on one device.
        head_dim: size of a head.
        q_block_size: tokens per query group.
        kv_block_size: tokens per key/value block.
        dense_above: in [0, 1] (``--dsv-dense-above``); a layer that keeps more than this is dense. 1 makes every layer
            sparse, 0 none.
        device: name of the device as torch.cuda.get_device_name gives it; None for a CPU.

    Raises:
        ValueError: a share out of range.
    """
    if not 0.0 < keep_ratio <= 1.0:
        raise ValueError(f"keep_ratio must be in (0, 1], got {keep_ratio}")
    if dense_above is not None:
        if not 0.0 <= dense_above <= 1.0:
            raise ValueError(f"--dsv-dense-above must be in [0, 1], got {dense_above}")
        return _by_threshold(keep_ratio, dense_above, "--dsv-dense-above")
    if device is None or not _measured(device, num_tokens, head_dim, q_block_size, kv_block_size):
        return _by_threshold(keep_ratio, DEFAULT_DENSE_ABOVE, "the default where nothing was measured")
    dense = sum(timings.dense_ms(device, tokens=num_tokens, heads=num_heads, head_dim=head_dim))
    sparse = sum(timings.sparse_ms(device, tokens=num_tokens, heads=num_heads, head_dim=head_dim, density=keep_ratio,
                                   q_block_size=q_block_size, kv_block_size=kv_block_size))
    faster = sparse * REQUIRED_SPEEDUP <= dense
    return Decision(faster, f"{'sparse' if faster else 'dense'}: kernels on {device} take {sparse:.3g} ms sparse at "
                            f"keep ratio {keep_ratio:.3f}, {dense:.3g} ms dense")


def _measured(device: str, num_tokens: int, head_dim: int, q_block_size: int, kv_block_size: int) -> bool:
    """Whether the tables hold this case but for its length, and its length lies between two measured ones.

    The lookups take the nearest row however far it is: right for a rough plan, not for choosing between two kernels.
    """
    lengths = [row.tokens for row in timings.DENSE.get(device, ()) if row.head_dim == head_dim]
    sparse = any((row.head_dim, row.q_block_size, row.kv_block_size) == (head_dim, q_block_size, kv_block_size)
                 for row in timings.SPARSE.get(device, ()))
    return sparse and bool(lengths) and min(lengths) <= num_tokens <= max(lengths)


def _by_threshold(keep_ratio: float, threshold: float, source: str) -> Decision:
    if keep_ratio <= threshold:
        return Decision(True, f"sparse: keep ratio {keep_ratio:.3f} is within {threshold:.3f}, {source}")
    return Decision(False, f"dense: keep ratio {keep_ratio:.3f} is above {threshold:.3f}, {source}")
