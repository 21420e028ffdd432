"""Text encoders by name: captions to embeddings. A new encoder is one file here and one row in ``TEXT_ENCODERS``."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from megatron_dsv.data.text import hash as hashed
from megatron_dsv.data.text import transformers_t5
from megatron_dsv.data.text.base import TextEncoder
from megatron_dsv.data.text.hash import HashTextEncoder
from megatron_dsv.data.text.transformers_t5 import TransformersTextEncoder
from megatron_dsv.suggestions import did_you_mean

__all__ = ["TEXT_ENCODERS", "HashTextEncoder", "TextEncoder", "TextEncoderOptions", "TransformersTextEncoder",
           "build_text_encoder", "text_encoder_from_description"]


@dataclass(frozen=True)
class TextEncoderOptions:
    """Options of all text encoders; None is the encoder's own default.

    Attributes:
        dim: embedding width of ``hash``.
        max_tokens: longest text in tokens.
        folder: local folder of the model of ``transformers``.
        tokenizer_folder: local folder of its tokenizer, where it is not the same.
    """

    dim: int | None = None
    max_tokens: int | None = None
    folder: str | Path | None = None
    tokenizer_folder: str | Path | None = None


def _build_hash(options: TextEncoderOptions, device: str | torch.device) -> TextEncoder:
    for flag, value in (("--text-folder", options.folder), ("--text-tokenizer", options.tokenizer_folder)):
        if value is not None:
            raise ValueError(f"{flag} must be left out for --text-encoder hash, which needs no weights, got {value}")
    return HashTextEncoder(hashed.DEFAULT_DIM if options.dim is None else options.dim,
                           hashed.DEFAULT_MAX_TOKENS if options.max_tokens is None else options.max_tokens)


def _build_transformers(options: TextEncoderOptions, device: str | torch.device) -> TextEncoder:
    if options.folder is None:
        raise ValueError("--text-folder must name a folder with a model for --text-encoder transformers, got none")
    if options.dim is not None:
        raise ValueError("--text-dim is set by the model for --text-encoder transformers; leave it out, "
                         f"got {options.dim}")
    max_tokens = transformers_t5.DEFAULT_MAX_TOKENS if options.max_tokens is None else options.max_tokens
    return TransformersTextEncoder(options.folder, options.tokenizer_folder, max_tokens, device)


TEXT_ENCODERS: dict[str, Callable[[TextEncoderOptions, str | torch.device], TextEncoder]] = {
    "hash": _build_hash,
    "transformers": _build_transformers,
}


def build_text_encoder(name: str, options: TextEncoderOptions | None = None,
                       device: str | torch.device = "cpu") -> TextEncoder:
    """The text encoder called ``name``, a key of ``TEXT_ENCODERS``.

    Raises:
        ValueError: an unknown name, or an option that the encoder does not take.
    """
    if name not in TEXT_ENCODERS:
        raise ValueError(f"--text-encoder must be one of {', '.join(TEXT_ENCODERS)}, got {name}"
                         f"{did_you_mean(name, TEXT_ENCODERS)}")
    return TEXT_ENCODERS[name](options or TextEncoderOptions(), device)


def text_encoder_from_description(description: dict[str, Any], *, folder: str | Path | None = None,
                                  tokenizer_folder: str | Path | None = None,
                                  device: str | torch.device = "cpu") -> TextEncoder:
    """The encoder that made a data set's embeddings, from the description that the data set stores.

    Args:
        description: what ``TextEncoder.describe`` gave.
        folder: where a pretrained model lies now, if it has moved since.
        tokenizer_folder: where its tokenizer lies now; by default ``folder`` if that is given.
        device: where the encoder runs.

    Raises:
        ValueError: an unknown encoder, another version of it, or other weights.
    """
    name = description.get("name")
    if name == HashTextEncoder.name:
        return HashTextEncoder.from_description(description)
    if name == TransformersTextEncoder.name:
        return TransformersTextEncoder.from_description(description, folder, tokenizer_folder, device)
    raise ValueError(f"the data set's text encoder must be one of {', '.join(TEXT_ENCODERS)}, got {name}")
