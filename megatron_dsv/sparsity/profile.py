"""The profile: how sparse attention truly is, what budget that needs, and how much a selection recalls.

Three numbers per query head, each a mean over what was sampled:
* ``sparsity``: per single query, the share of the keys outside its smallest set that reaches ``theta`` of the softmax
  mass. The paper's definition (DSV, section 1); reported, never used as a budget.
* ``block_fraction``: per query group, the share of the whole blocks, best first by the group's true mass, that reach
  ``budget_mass``. This is what a budget at that granularity needs; it is larger than 1 - sparsity.
* ``recall``: per query group, the share of its true mass that a given selection keeps.

Sums and counts are kept apart so that micro-batches add up and ranks can all-reduce them before any division.

Dims: s keys, n query groups, g tokens per group, b batch, h query heads, G key/value heads, d head size, Nk blocks.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dsv.kernels.attention_profile.api import block_mass, smallest_set
from megatron_dsv.kernels.lengths import Length, key_lengths

_ROW_ELEMENTS = 2**25
"""Attention probabilities of single queries held at once (128 MiB in fp32), or one query's of all heads."""

FIELDS = ("sparsity", "block_fraction", "recall")


@dataclass(frozen=True)
class GroupProfile:
    """Sums over the sample, per head.

    Attributes:
        sums: fp32 [3, h] (fp64 for fp64 inputs), rows in the order of ``FIELDS``.
        counts: like ``sums``: queries behind ``sparsity``, groups behind ``block_fraction`` and ``recall``.
    """

    sums: Tensor
    counts: Tensor

    def __add__(self, other: GroupProfile) -> GroupProfile:
        return GroupProfile(self.sums + other.sums, self.counts + other.counts)

    def stacked(self) -> Tensor:
        """[2, 3, h], sums and counts in one tensor for an all-reduce by addition."""
        return torch.stack((self.sums, self.counts))

    @staticmethod
    def from_stacked(stacked: Tensor) -> GroupProfile:
        """Inverse of ``stacked``."""
        return GroupProfile(stacked[0], stacked[1])

    def means(self) -> Tensor:
        """[3, h] in the order of ``FIELDS``; NaN where nothing was sampled (recall without a selection)."""
        return self.sums / self.counts


def update_running(running: Tensor, observed: Tensor, momentum: float = 0.9) -> Tensor:
    """``momentum * running + (1 - momentum) * observed``, entry by entry (DSV, section 2.3).

    The first observation of an entry is taken whole; a NaN observation leaves its entry as it was.

    Raises:
        ValueError: ``momentum`` outside [0, 1).
    """
    if not 0.0 <= momentum < 1.0:
        raise ValueError(f"--dsv-profile-momentum must be in [0, 1), got {momentum}")
    observed = observed.to(running.dtype)
    mixed = torch.where(running.isnan(), observed, momentum * running + (1.0 - momentum) * observed)
    return torch.where(observed.isnan(), running, mixed)


def gathered_rows(group_ids: Tensor, q_block_size: int) -> Tensor:
    """int64 [n*g]: sequence positions of the groups' tokens; a ragged last group runs past the end."""
    return (group_ids.long()[:, None] * q_block_size
            + torch.arange(q_block_size, device=group_ids.device)).reshape(-1)


@torch.no_grad()
def profile_gathered_groups(q_groups: Tensor, k: Tensor, *, valid_rows: Tensor, q_block_size: int, kv_block_size: int,
                            softmax_scale: float, theta: float, budget_mass: float, kv_length: Length = None,
                            kept_blocks: Tensor | None = None, sparsity_stride: int = 1,
                            backend: str = "auto") -> GroupProfile:
    """Profile query groups that were gathered from wherever they live.

    In fp32, or in fp64 for fp64 inputs. Padded queries and keys take no part. Nothing waits for the device. NaN inputs
    make NaN results.

    Args:
        q_groups: [n*g, b, h, d], group after group.
        k: [s, b, G, d], every key of the sequence.
        valid_rows: bool [n*g, b]; False for queries that are padding.
        q_block_size: g.
        kv_block_size: tokens per block of the selection to be budgeted; 1 for single tokens.
        softmax_scale: factor on q k^T.
        theta: mass of a query's critical keys, in (0, 1]; the key that crosses it is critical.
        budget_mass: mass that a group's budget must hold, in (0, 1].
        kv_length: real keys: None for all, an int, or [b] or [b, G].
        kept_blocks: bool [b, h, n, Nk], what a selection keeps of each group; None leaves ``recall`` without a count.
        sparsity_stride: measure ``sparsity`` on every such query of a group only; it holds all keys of each of them.
        backend: of ``kernels.attention_profile``.

    Returns:
        Sums and counts per head, on the device of ``k``.

    Raises:
        ValueError: shapes that do not fit, or a mass outside (0, 1].
        NotImplementedError: an explicit backend cannot serve the request.
    """
    n, _ = _check(q_groups, k, valid_rows, q_block_size, kv_block_size, theta, budget_mass, kept_blocks,
                  sparsity_stride)
    s, b, g_kv, _ = k.shape
    h = q_groups.shape[2]
    lengths = key_lengths(kv_length, batch=b, num_kv_heads=g_kv, num_keys=s, device=k.device)
    mass_of = functools.partial(block_mass, k=k, kv_length=lengths, softmax_scale=softmax_scale, backend=backend)
    # Per query head: [b, h, 1].
    length = lengths.repeat_interleave(h // g_kv, 1)[..., None]

    sampled = torch.arange(n * q_block_size, device=k.device).reshape(n, q_block_size)[:, ::sparsity_stride].reshape(-1)
    queries = valid_rows[sampled].T[:, None] & (length > 0)
    step = max(1, _ROW_ELEMENTS // max(1, b * h * s))
    critical = torch.cat([
        smallest_set(mass_of(q_groups[rows], valid_rows=valid_rows[rows], q_block_size=1, kv_block_size=1), theta,
                     backend=backend)
        for rows in sampled.split(step)], -1)
    sparsity = 1.0 - critical / length

    groups = valid_rows.reshape(n, q_block_size, b).any(1).T[:, None] & (length > 0)
    blocks = mass_of(q_groups, valid_rows=valid_rows, q_block_size=q_block_size, kv_block_size=kv_block_size)
    fraction = smallest_set(blocks, budget_mass, backend=backend) / ((length + kv_block_size - 1) // kv_block_size)
    recall, recalls = torch.zeros_like(fraction), torch.zeros_like(groups)
    if kept_blocks is not None:
        recall, recalls = blocks.masked_fill(~kept_blocks, 0.0).sum(-1) / blocks.sum(-1), groups
    parts = ((sparsity, queries), (fraction, groups), (recall, recalls))
    return GroupProfile(torch.stack([value.masked_fill(~real, 0.0).sum((0, 2)) for value, real in parts]),
                        torch.stack([real.sum((0, 2)) for _, real in parts]).to(blocks.dtype))


def _check(q_groups: Tensor, k: Tensor, valid_rows: Tensor, q_block_size: int, kv_block_size: int, theta: float,
           budget_mass: float, kept_blocks: Tensor | None, sparsity_stride: int) -> tuple[int, int]:
    for name, value in (("--dsv-theta", theta), ("--dsv-budget-mass", budget_mass)):
        if not 0.0 < value <= 1.0:
            raise ValueError(f"{name} must be in (0, 1], got {value}")
    if sparsity_stride < 1:
        raise ValueError(f"sparsity_stride must be at least 1, got {sparsity_stride}")
    if q_groups.dim() != 4 or q_groups.shape[0] % q_block_size:
        raise ValueError(f"q_groups must be [n * {q_block_size}, b, h, d], got {tuple(q_groups.shape)}")
    if k.dim() != 4 or k.shape[1] != q_groups.shape[1] or k.shape[3] != q_groups.shape[3] \
            or q_groups.shape[2] % k.shape[2]:
        raise ValueError(f"k must be [s, b, G, d] with h a multiple of G for q {tuple(q_groups.shape)}, "
                         f"got {tuple(k.shape)}")
    if valid_rows.shape != q_groups.shape[:2] or valid_rows.dtype != torch.bool:
        raise ValueError(f"valid_rows must be bool {tuple(q_groups.shape[:2])}, "
                         f"got {valid_rows.dtype} {tuple(valid_rows.shape)}")
    n, nk = q_groups.shape[0] // q_block_size, -(-k.shape[0] // kv_block_size)
    expected = (q_groups.shape[1], q_groups.shape[2], n, nk)
    if kept_blocks is not None and tuple(kept_blocks.shape) != expected:
        raise ValueError(f"kept_blocks must be [b, h, n, Nk] = {list(expected)}, got {list(kept_blocks.shape)}")
    return n, nk
