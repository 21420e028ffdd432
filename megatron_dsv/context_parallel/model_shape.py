"""A video DiT as a cost model sees it: sizes, parameters and operations.

Dims: S tokens, L text tokens, h hidden size, w heads x head dim, F feed-forward width.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class ModelShape:
    """Sizes of a model.

    Attributes:
        name: for messages.
        layers, hidden, heads, groups, head_dim, ffn: groups are key/value heads.
        matrices: of a feed-forward layer; 3 where it is gated.
        text_length, text_dim: of the text that cross-attention reads.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    groups: int
    head_dim: int
    ffn: int
    matrices: int
    text_length: int
    text_dim: int

    @classmethod
    def from_settings(cls, name: str, settings: Mapping[str, Any]) -> ModelShape:
        """From the flags of a model: the keys of its YAML file, or the attributes of parsed arguments.

        Raises:
            ValueError: names a flag that is missing.
        """
        known = {str(key).replace("-", "_"): value for key, value in settings.items()}

        def number(key: str, default: int | None = None) -> int:
            value = known.get(key)
            value = default if value is None else value
            if type(value) is not int or value < 1:
                raise ValueError(f"model {name}: {key.replace('_', '-')} must be a whole number of at least 1, "
                                 f"got {value!r}")
            return value

        hidden, heads = number("hidden_size"), number("num_attention_heads")
        return cls(name, number("num_layers"), hidden, heads, number("num_query_groups", heads),
                   number("kv_channels", hidden // heads), number("ffn_hidden_size"),
                   3 if known.get("dit_mlp") == "geglu" else 2, number("dit_text_length", 512),
                   number("dit_text_dim", 4096))

    @property
    def width(self) -> int:
        """w: query heads x head dim."""
        return self.heads * self.head_dim

    @property
    def layer_parameters(self) -> int:
        """Weights of the matrices of one layer; biases, norms and tables are below a thousandth."""
        kv = 2 * self.groups * self.head_dim
        return self.hidden * (2 * self.width + kv + 4 * self.width + self.matrices * self.ffn)

    @property
    def parameters(self) -> int:
        """All weights, with the embeddings and the one adaLN projection around the layers."""
        around = 8 * self.hidden**2 + (384 + self.text_dim) * self.hidden
        return self.layers * self.layer_parameters + around

    def linear_flops(self, tokens: int) -> float:
        """Operations of one layer's forward but for self-attention, of one sample; a multiply-add is two."""
        per_token = 2 * self.hidden * (self.layer_parameters / self.hidden - 2 * self.width) \
            + 4 * self.text_length * self.width
        return tokens * per_token + 4.0 * self.text_length * self.hidden * self.width

    def attention_flops(self, tokens: int) -> float:
        """Operations of one layer's dense self-attention, forward, of one sample."""
        return 4.0 * tokens * tokens * self.width
