"""Pretrained text encoders through transformers, from a local folder: UMT5EncoderModel and T5EncoderModel.

Dims: L tokens of one text (end token included), D = d_model of the encoder.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from megatron_dsv.data.fingerprints import folder_fingerprint

DEFAULT_MAX_TOKENS = 512


class TransformersTextEncoder:
    """A T5 or UMT5 encoder with its tokenizer; the class is chosen by ``model_type`` in the folder's config.json.

    The weights keep the data type that they are stored in; embeddings are returned in fp32, without the padding.

    Args:
        folder: a folder with config.json and weights; never downloaded.
        tokenizer_folder: a folder with the tokenizer's files; None means ``folder``.
        max_tokens: longest text in tokens, end token included; longer texts lose their end.
        device: where the encoder runs.

    Raises:
        ValueError: a folder is missing or unreadable, or ``max_tokens`` is below 1.
        NotImplementedError: the folder holds a model of another type.
    """

    name = "transformers"

    def __init__(self, folder: str | Path, tokenizer_folder: str | Path | None = None,
                 max_tokens: int = DEFAULT_MAX_TOKENS, device: str | torch.device = "cpu") -> None:
        if max_tokens < 1:
            raise ValueError(f"--text-max-tokens must be at least 1, got {max_tokens}")
        self.folder = Path(folder).resolve()
        self.tokenizer_folder = Path(tokenizer_folder or folder).resolve()
        self.max_tokens = max_tokens
        self._device = torch.device(device)
        self._model = _load_model(self.folder).to(self._device)
        self._tokenizer = _load_tokenizer(self.tokenizer_folder)
        self.dim = int(self._model.config.d_model)

    @torch.no_grad()
    def encode(self, texts: Sequence[str]) -> list[Tensor]:
        """Last hidden states fp32 [L_i, D] for each text; see ``TextEncoder.encode``."""
        if not texts:
            return []
        tokens = self._tokenizer(list(texts), padding=True, truncation=True, max_length=self.max_tokens,
                                 return_tensors="pt")
        mask = tokens.attention_mask.to(self._device)
        hidden = self._model(input_ids=tokens.input_ids.to(self._device), attention_mask=mask).last_hidden_state
        return [row[keep.bool()].float().cpu() for row, keep in zip(hidden, mask)]

    def is_truncated(self, text: str) -> bool:
        """Whether the tokenizer gives the text more than ``max_tokens`` tokens."""
        return len(self._tokenizer(text, verbose=False).input_ids) > self.max_tokens

    def describe(self) -> dict[str, Any]:
        """Name, width, longest text and content fingerprint of model and tokenizer, and their folders."""
        # Reading many gigabytes takes minutes; the tokenizer mostly lies with the weights.
        fingerprints = {folder: folder_fingerprint(folder) for folder in {self.folder, self.tokenizer_folder}}
        return {"name": self.name, "class": type(self._model).__name__, "dim": self.dim, "max_tokens": self.max_tokens,
                "folder": str(self.folder), "fingerprint": fingerprints[self.folder],
                "tokenizer_folder": str(self.tokenizer_folder),
                "tokenizer_fingerprint": fingerprints[self.tokenizer_folder]}

    @classmethod
    def from_description(cls, description: dict[str, Any], folder: str | Path | None = None,
                         tokenizer_folder: str | Path | None = None,
                         device: str | torch.device = "cpu") -> TransformersTextEncoder:
        """The encoder that ``describe()`` described, read from other folders if the files have moved.

        Raises:
            ValueError: a folder is missing or holds other files than the ones that made the embeddings.
        """
        moved = folder is not None and tokenizer_folder is None
        tokenizer_folder = folder if moved else tokenizer_folder or description["tokenizer_folder"]
        folder = folder or description["folder"]
        encoder = cls(folder, tokenizer_folder, int(description["max_tokens"]), device)
        found = encoder.describe()
        for flag, key in (("--text-folder", "fingerprint"), ("--text-tokenizer", "tokenizer_fingerprint")):
            if found[key] != description[key]:
                raise ValueError(f"{flag} must hold the files that made the embeddings (fingerprint "
                                 f"{description[key][:12]}), got fingerprint {found[key][:12]}")
        return encoder


def _load_model(folder: Path) -> Any:
    try:
        model_type = json.loads((folder / "config.json").read_text()).get("model_type")
    except (OSError, ValueError) as error:
        raise ValueError("--text-folder must be a folder with the config.json and weights of a UMT5 or T5 encoder, got "
                         f"{folder} ({type(error).__name__} on config.json)") from error
    try:
        from transformers import T5EncoderModel, UMT5EncoderModel
    except ImportError as error:
        raise ValueError("--text-encoder transformers needs the package transformers: "
                         "pip install megatron-dsv[vae]") from error
    classes: dict[str, Any] = {"t5": T5EncoderModel, "umt5": UMT5EncoderModel}
    if model_type not in classes:
        raise NotImplementedError(f"--text-folder holds a model of type {model_type}; supported are "
                                  f"{', '.join(classes)}. Another type needs a file of its own in "
                                  "megatron_dsv/data/text")
    try:
        model = classes[model_type].from_pretrained(folder, local_files_only=True, dtype="auto")
    except (OSError, ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f"--text-folder {folder} cannot be loaded as {model_type}: {reason}") from error
    return model.eval().requires_grad_(False)


def _load_tokenizer(folder: Path) -> Any:
    from transformers import AutoTokenizer
    try:
        return AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:
        # AutoTokenizer signals a missing or foreign folder with many types, ImportError of a converter among them.
        reason = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise ValueError(f"--text-tokenizer must be a folder with a tokenizer's files, got {folder}: {reason}"
                         ) from error
