"""Per layer: does sparse attention pay at this budget, or is dense attention the faster way?

The answer is made on the host from the layer's kept share, so it costs nothing in the step, and it comes with its
reason, so that a run can say why a layer is dense.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

DEFAULT_DENSE_ABOVE = 0.5
"""Kept share up to which a layer is sparse where no cost was measured.

On one H200 (bf16, 65,536 tokens, 24 heads of 128, forward + backward) block-sparse attention with 128-token blocks
took 165.9 ms at density 0.5 against 289 ms dense with kernels of the same family, and costs grow linearly with
density; selection, list inversion and predictors come on top. Other kernels and shapes differ: measure them, or set
``--dsv-dense-above``.
"""


class Decision(NamedTuple):
    """Attributes: sparse, whether to attend sparsely; reason, one line for the log."""

    sparse: bool
    reason: str


class MeasuredCosts(Protocol):
    """Times of one attention layer, forward + backward in ms, on the device of the run; None where not measured."""

    def dense_ms(self, *, num_tokens: int, num_heads: int, head_dim: int) -> float | None:
        """Dense attention over ``num_tokens`` queries and keys."""

    def sparse_ms(self, *, num_tokens: int, num_heads: int, head_dim: int, keep_ratio: float, q_block_size: int,
                  kv_block_size: int) -> float | None:
        """Sparse attention, selection included, at a kept share of ``keep_ratio``."""


def use_sparse(keep_ratio: float, *, num_tokens: int, num_heads: int, head_dim: int, q_block_size: int,
               kv_block_size: int, dense_above: float | None = None,
               costs: MeasuredCosts | None = None) -> Decision:
    """Decide for one layer.

    A given ``dense_above`` decides alone. Without it, measured costs decide where both are known, else
    ``DEFAULT_DENSE_ABOVE``.

    Args:
        keep_ratio: kept share of the layer's blocks, mean over its heads, in (0, 1].
        num_tokens: tokens of the whole sequence.
        num_heads: query heads computed on one device.
        head_dim: size of a head.
        q_block_size: tokens per query group.
        kv_block_size: tokens per key/value block.
        dense_above: in [0, 1] (``--dsv-dense-above``); a layer that keeps more than this is dense. 1 makes every layer
            sparse, 0 none.
        costs: measured times for this device.

    Raises:
        ValueError: a share out of range.
    """
    if not 0.0 < keep_ratio <= 1.0:
        raise ValueError(f"keep_ratio must be in (0, 1], got {keep_ratio}")
    if dense_above is not None:
        if not 0.0 <= dense_above <= 1.0:
            raise ValueError(f"--dsv-dense-above must be in [0, 1], got {dense_above}")
        return _by_threshold(keep_ratio, dense_above, "--dsv-dense-above")
    if costs is not None:
        shape = {"num_tokens": num_tokens, "num_heads": num_heads, "head_dim": head_dim}
        dense = costs.dense_ms(**shape)
        sparse = costs.sparse_ms(**shape, keep_ratio=keep_ratio, q_block_size=q_block_size,
                                 kv_block_size=kv_block_size)
        if dense is not None and sparse is not None:
            faster = sparse < dense
            return Decision(faster, f"{'sparse' if faster else 'dense'}: measured {sparse:.3g} ms sparse at keep ratio "
                                    f"{keep_ratio:.3f}, {dense:.3g} ms dense")
    return _by_threshold(keep_ratio, DEFAULT_DENSE_ABOVE, "the default threshold (nothing measured for this shape)")


def _by_threshold(keep_ratio: float, threshold: float, source: str) -> Decision:
    if keep_ratio <= threshold:
        return Decision(True, f"sparse: keep ratio {keep_ratio:.3f} is within {threshold:.3f}, {source}")
    return Decision(False, f"dense: keep ratio {keep_ratio:.3f} is above {threshold:.3f}, {source}")
