"""What a checkpoint holds, read without Megatron."""

import io
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata


def contents(folder: Path, step: int) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
    """(tensors by key, common state) of the checkpoint of ``step`` in a run's folder."""
    path = folder / f"iter_{step:07d}"
    state: dict[str, Any] = {}
    for key, entry in FileSystemReader(path).read_metadata().state_dict_metadata.items():
        if isinstance(entry, TensorStorageMetadata):
            state[key] = torch.empty(entry.size, dtype=entry.properties.dtype)
        elif key.startswith("common_state/"):
            state[key] = io.BytesIO()
    dcp.load(state, checkpoint_id=path, no_dist=True)
    (common,) = state.pop("common_state/shard_0_1")
    return state, common
