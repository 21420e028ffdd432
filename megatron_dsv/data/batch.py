"""Samples to a batch.

Dims: b samples, C latent channels, T latent frames, H x W latent positions, L text tokens, D text width.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def collate(samples: Sequence[dict[str, Any]]) -> dict[str, Tensor]:
    """Batch of the samples of one micro-batch, in their order.

    Args:
        samples: items of a ``LatentDataset``; tensors and integers.

    Returns:
        the same keys with a leading batch dimension: latents fp32 [b, C, T, H, W], text fp32 [b, L, D],
        text_length int64 [b], record int64 [b].

    Raises:
        ValueError: no sample, other keys, or samples of more than one shape.
    """
    if not samples:
        raise ValueError("a batch must have at least one sample, got none")
    keys = samples[0].keys()
    if any(sample.keys() != keys for sample in samples):
        raise ValueError(f"all samples of a batch must have the keys {sorted(keys)}, got "
                         f"{[sorted(sample) for sample in samples]}")
    batch = {}
    for key in keys:
        values = [sample[key] for sample in samples]
        if not isinstance(values[0], Tensor):
            batch[key] = torch.tensor(values, dtype=torch.int64)
            continue
        shapes = sorted({tuple(value.shape) for value in values})
        if len(shapes) > 1:
            raise ValueError(f"all samples of a batch must come from one shape bucket, got {key} of shapes "
                             f"{', '.join(str(list(shape)) for shape in shapes)}; the group size of the sample order "
                             "must be the global batch size")
        batch[key] = torch.stack(values)
    return batch
