"""What every text encoder offers.

Dims: L tokens of one text (at least 1: every text ends with an end token), D = embedding width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor


class TextEncoder(Protocol):
    """Turns captions into token embeddings; deterministic and stateless between calls.

    The text that replaces a dropped caption (classifier-free guidance) is the empty one.
    """

    name: str
    dim: int
    max_tokens: int

    def encode(self, texts: Sequence[str]) -> list[Tensor]:
        """Embeddings fp32 [L_i, D], on the CPU, one a text, unpadded, 1 <= L_i <= ``max_tokens``."""
        ...

    def is_truncated(self, text: str) -> bool:
        """Whether ``text`` has more tokens than ``max_tokens``, so that its end is lost."""
        ...

    def describe(self) -> dict[str, Any]:
        """JSON-ready description; equal descriptions mean equal embeddings."""
        ...
