"""Merges partial attention results over disjoint keys. Rows whose keys lie elsewhere have lse -inf and out 0.

Dims: s query tokens, b batch, h query heads, d head dim.
"""

from __future__ import annotations

import torch
from torch import Tensor


class RunningMerge:
    """Running softmax-weighted mean of partial results, in the dtype of lse.

    Merging in a fixed order gives fixed bits, head by head: which heads share a tensor changes nothing.
    """

    def __init__(self) -> None:
        self._out: Tensor | None = None
        self._lse: Tensor | None = None

    def add(self, out: Tensor, lse: Tensor) -> None:
        """Takes one partial result: out [s, b, h, d], lse [b, h, s]."""
        if self._lse is None or self._out is None:
            self._out, self._lse = out, lse
            return
        total = torch.logaddexp(self._lse, lse)
        # A row without any key so far: -inf minus -inf would be NaN.
        finite = total.masked_fill(total == -torch.inf, 0.0)
        old, new = ((part - finite).exp().permute(2, 0, 1)[..., None] for part in (self._lse, lse))
        self._out = self._out.to(lse.dtype) * old + out.to(lse.dtype) * new
        self._lse = total

    def result(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """out [s, b, h, d] in the dtype of ``like`` and lse [b, h, s]; zeros and -inf if nothing was added.

        Args:
            like: the queries [s, b, h, d].
        """
        if self._lse is None or self._out is None:
            s, b, h, _ = like.shape
            dtype = torch.float64 if like.dtype == torch.float64 else torch.float32
            return torch.zeros(like.shape, dtype=like.dtype, device=like.device), torch.full(
                (b, h, s), -torch.inf, dtype=dtype, device=like.device)
        return self._out.to(like.dtype), self._lse
