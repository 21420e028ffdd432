"""The embedded text encoder: hashed n-grams. It needs no weights and gives the same bits on every machine.

Dims: L words of one text plus one end token, D = embedding width.
"""

from __future__ import annotations

import hashlib
import re
import unicodedata
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

DEFAULT_DIM = 256
DEFAULT_MAX_TOKENS = 64
_ENCODER_VERSION = 1
_WORD_WEIGHT = 2
_END = "\x03"


class HashTextEncoder:
    """Each word becomes one unit vector: the word itself, its pair with the word before, and its letter trigrams.

    An n-gram stands for a fixed pseudo-random vector of signs, taken from the bits of its SHAKE-256 digest. Sums of
    signs are integers, so nothing depends on the order of summation, the platform or the library version. The pair
    gives word order to a model that cross-attends without positions; trigrams make related words related vectors.

    Args:
        dim: width D of the vectors, a positive multiple of 8.
        max_tokens: longest text in tokens, end token included; longer texts lose their end.

    Raises:
        ValueError: ``dim`` or ``max_tokens`` is out of range.
    """

    name = "hash"

    def __init__(self, dim: int = DEFAULT_DIM, max_tokens: int = DEFAULT_MAX_TOKENS) -> None:
        if dim < 8 or dim % 8:
            raise ValueError(f"--text-dim must be a positive multiple of 8 for text encoder hash, got {dim}")
        if max_tokens < 1:
            raise ValueError(f"--text-max-tokens must be at least 1, got {max_tokens}")
        self.dim = dim
        self.max_tokens = max_tokens

    def encode(self, texts: Sequence[str]) -> list[Tensor]:
        """Unit vectors fp32 [L_i, D] for each text; see ``TextEncoder.encode``."""
        return [self._encode_one(text) for text in texts]

    def is_truncated(self, text: str) -> bool:
        """Whether the text has more words than fit beside the end token."""
        return len(_words(text)) + 1 > self.max_tokens

    def describe(self) -> dict[str, Any]:
        """Name, width, longest text and the version of the hashing."""
        return {"name": self.name, "dim": self.dim, "max_tokens": self.max_tokens, "version": _ENCODER_VERSION}

    @classmethod
    def from_description(cls, description: dict[str, Any]) -> HashTextEncoder:
        """The encoder that ``describe()`` described.

        Raises:
            ValueError: the description is of another version of the hashing.
        """
        if description.get("version") != _ENCODER_VERSION:
            raise ValueError(f"the captions were encoded by version {description.get('version')} of text encoder hash, "
                             f"this is version {_ENCODER_VERSION}; prepare the data set again")
        return cls(int(description["dim"]), int(description["max_tokens"]))

    def _encode_one(self, text: str) -> Tensor:
        tokens = [*_words(text)[:self.max_tokens - 1], _END]
        rows = np.empty((len(tokens), self.dim), dtype=np.float64)
        for row, (before, token) in enumerate(zip(["", *tokens], tokens)):
            total = _WORD_WEIGHT * _signs(f"word {token}", self.dim) + _signs(f"pair {before} {token}", self.dim)
            bounded = f"<{token}>"
            for start in range(len(bounded) - 2):
                total = total + _signs(f"part {bounded[start:start + 3]}", self.dim)
            # A sum of signs may cancel to zero, which has no direction; any other has a norm of at least 1.
            rows[row] = total / max(1.0, float(np.sqrt(float((total * total).sum()))))
        return torch.from_numpy(rows.astype(np.float32))


def _words(text: str) -> list[str]:
    """Lower-case words of a text, in any script; composed and decomposed accents are the same word."""
    return re.findall(r"\w+", unicodedata.normalize("NFKC", text).casefold())


@lru_cache(maxsize=4096)
def _signs(ngram: str, dim: int) -> np.ndarray:
    """Fixed pseudo-random signs of an n-gram, int64 [dim] of -1 and 1."""
    bits = np.unpackbits(np.frombuffer(hashlib.shake_256(ngram.encode()).digest(dim // 8), dtype=np.uint8))
    return bits.astype(np.int64) * 2 - 1
