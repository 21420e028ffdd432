"""Per-head low-rank predictors of attention scores (DSV section 4; arXiv 2502.07590).

A predictor guesses ``q k^T`` from ``q_lr k_lr^T`` with ``r`` channels a head. Its parameters are invisible to
Megatron's data-parallel wrapper and optimizer (``requires_grad`` is False): they share no bucket, buffer, gradient norm
or optimizer state with the backbone, so training them cannot change one bit of it. Their gradients are taken where the
loss is computed, and ``training/predictor_optimizer.py`` reduces and applies them.

Dims: s tokens, b batch, H hidden, h local query heads, G local key/value heads, d head dim, r rank.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from megatron_dsv.transformer.fp32 import KeepsPrecision

PARAMETER_NAMES = ("query_weight", "query_bias", "key_weight", "key_bias")
MOMENT_NAMES = ("exp_avg", "exp_avg_sq")


class LowRankPredictor(KeepsPrecision):
    """Projections to low-rank queries and keys, fp32, with their gradient accumulators and Adam moments.

    Parameters: ``query_weight`` [h, r, c], ``query_bias`` [h, r], ``key_weight`` [G, r, c], ``key_bias`` [G, r], with
    c = H for input ``hidden`` and c = d for input ``qk`` (each head then reads its own query or key). The moments are
    buffers of the same shapes, so Megatron's distributed checkpoint reshards them with the weights.

    Args:
        layer_number: global, from 1; with the global head number it keys the initialisation.
        query_heads: global numbers of the local query heads.
        key_heads: global numbers of the local key/value heads.
        channels: c.
        rank: r.
        input_kind: ``hidden`` or ``qk``.
        seed: of the run.
        tp_group: tensor-parallel group, for checkpoints.
    """

    loss_sum: Tensor
    head_axes = tuple(name + suffix for name in PARAMETER_NAMES for suffix in ("", *(f"_{m}" for m in MOMENT_NAMES)))

    def __init__(self, *, layer_number: int, query_heads: range, key_heads: range, channels: int, rank: int,
                 input_kind: str, seed: int, tp_group: torch.distributed.ProcessGroup | None) -> None:
        super().__init__()
        if input_kind not in ("hidden", "qk"):
            raise ValueError(f"--dsv-predictor-input must be hidden or qk, got {input_kind!r}")
        self.rank = rank
        self.input_kind = input_kind
        self.tp_group = tp_group
        for side, heads in (("query", query_heads), ("key", key_heads)):
            weight = torch.stack([_initial_weight(seed, layer_number, side, head, rank, channels) for head in heads])
            self.register_parameter(f"{side}_weight", nn.Parameter(weight, requires_grad=False))
            self.register_parameter(f"{side}_bias", nn.Parameter(torch.zeros(len(heads), rank), requires_grad=False))
        for name in PARAMETER_NAMES:
            shape = self.get_parameter(name).shape
            for moment in MOMENT_NAMES:
                self.register_buffer(f"{name}_{moment}", torch.zeros(shape))
            self.register_buffer(f"{name}_grad", torch.zeros(shape), persistent=False)
        self.register_buffer("adam_step", torch.zeros(1))
        self.register_buffer("loss_sum", torch.zeros(1, dtype=torch.float64), persistent=False)
        self.loss_count = 0

    def weights(self) -> list[Tensor]:
        """The four parameters, in the order of ``PARAMETER_NAMES``."""
        return [self.get_parameter(name) for name in PARAMETER_NAMES]

    def grads(self) -> list[Tensor]:
        """The four gradient accumulators, in the order of ``PARAMETER_NAMES``: sums over micro-batches."""
        return [self.get_buffer(f"{name}_grad") for name in PARAMETER_NAMES]

    def moments(self, which: str) -> list[Tensor]:
        """``exp_avg`` or ``exp_avg_sq`` of the four parameters."""
        return [self.get_buffer(f"{name}_{which}") for name in PARAMETER_NAMES]

    def project_queries(self, x: Tensor, weights: Sequence[Tensor] | None = None) -> Tensor:
        """Low-rank queries [s, b, h, r] from x: the hidden state [s, b, H], or queries [s, b, h, d]."""
        weight, bias = (self.weights() if weights is None else weights)[:2]
        return _project(x, weight, bias)

    def project_keys(self, x: Tensor, weights: Sequence[Tensor] | None = None) -> Tensor:
        """Low-rank keys [s, b, G, r] from x: the hidden state [s, b, H], or keys [s, b, G, d]."""
        weight, bias = (self.weights() if weights is None else weights)[2:]
        return _project(x, weight, bias)

    @torch.no_grad()
    def accumulate(self, loss: Tensor, grads: Sequence[Tensor], weight: float) -> None:
        """Adds one micro-batch's gradients, times the loss weight."""
        for total, grad in zip(self.grads(), grads, strict=True):
            total.add_(grad, alpha=weight)
        self.loss_sum.add_(loss.double())
        self.loss_count += 1

    def clear(self) -> None:
        """Forgets gradients and loss, once they are applied."""
        for grad in self.grads():
            grad.zero_()
        self.loss_sum.zero_()
        self.loss_count = 0


def _project(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
    """x [s, b, c] with one weight [n, r, c] for all, or x [s, b, n, c] head by head -> [s, b, n, r] in x's dtype."""
    weight, bias = weight.to(x.dtype), bias.to(x.dtype)
    if x.dim() == 3:
        return torch.einsum("sbc,nrc->sbnr", x, weight) + bias
    return torch.einsum("sbnc,nrc->sbnr", x, weight) + bias


def _initial_weight(seed: int, layer: int, side: str, head: int, rank: int, channels: int) -> Tensor:
    """Kaiming-normal weight [r, c] from a generator of its own: no global random state is read or moved."""
    digest = hashlib.sha256(f"predictor/{seed}/{layer}/{side}/{head}".encode()).digest()
    generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
    return torch.randn(rank, channels, generator=generator) * math.sqrt(2.0 / channels)
