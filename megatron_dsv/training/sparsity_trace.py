"""``sparsity.jsonl`` in a run's folder: what every head kept, profile by profile; ``dsv plan --sparsity`` reads it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import torch
from torch.distributed import ProcessGroup

from megatron_dsv.context_parallel import sparsity_traces
from megatron_dsv.context_parallel.statistics import BlockStats
from megatron_dsv.training import head_shares
from megatron_dsv.transformer.self_attention import DSVSelfAttention

FILE = "sparsity.jsonl"

Coverage = Mapping[int, Mapping[int, list[float]]]


class SparsityTrace:
    """Writes the trace on the first rank; every rank calls it alike.

    Args:
        folder: of the run.
        attentions: of this rank, by global layer number from 1.
        layers, heads: of the whole model.
        model_group: all ranks of one model (tensor x pipeline).
        device: of the group's backend.
    """

    def __init__(self, folder: Path, attentions: Mapping[int, DSVSelfAttention], *, layers: int, heads: int,
                 model_group: ProcessGroup, device: torch.device) -> None:
        self._path, self._attentions = folder / FILE, attentions
        self._layers, self._heads, self._group, self._device = layers, heads, model_group, device
        self._writes = True

    def add(self, step: int, tokens: int, coverage: Coverage) -> None:
        """One profile.

        Args:
            step: finished steps of the run.
            tokens: real tokens of the samples that were profiled.
            coverage: layer from 0 -> sequence ranks -> coverage of every key/value head; empty where none is known.
        """
        shares = head_shares.gather(self._attentions, [tokens], layers=self._layers, heads=self._heads,
                                    model_group=self._group, device=self._device)
        if torch.distributed.get_rank() == 0:
            rows = [sorted(coverage.get(layer, {}).items()) for layer in range(self._layers)]
            stats = [BlockStats(kept, tuple((ranks, tuple(row)) for ranks, row in known))
                     for kept, known in zip(shares.kept[0], rows)]
            self._write(stats, step, tokens)

    def _write(self, stats: list[BlockStats], step: int, tokens: int) -> None:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            sparsity_traces.append(self._path, stats, step=step, tokens=tokens)
        except OSError as error:
            # The other ranks would wait for this one.
            if self._writes:
                print(f" {self._path} cannot be written: {error.strerror}; the run goes on without its lines",
                      flush=True)
            self._writes = False
