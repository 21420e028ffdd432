"""Dense -> predictor -> sparse: which layers attend sparsely, and when that changes.

Stages are what the user asks for; a layer's state is what the gate has decided so far under ``auto``. Every rank must
advance with the same recall (reduce it first), so that all ranks decide alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

import torch
from torch import Tensor


class Stage(StrEnum):
    """Values of ``--dsv-sparse-stage``."""

    DENSE = "dense"
    PREDICTOR = "predictor"
    SPARSE = "sparse"
    AUTO = "auto"


@dataclass(frozen=True)
class LayerState:
    """Where the gate stands for one layer.

    Attributes:
        sparse: whether the layer has passed the gate.
        passes: profiles running at or above the gate, counted while dense.
        failures: profiles running below the rollback line, counted while sparse.
    """

    sparse: bool = False
    passes: int = 0
    failures: int = 0

    def __post_init__(self) -> None:
        if self.passes < 0 or self.failures < 0:
            raise ValueError(f"LayerState counts must be at least 0, got passes={self.passes}, "
                             f"failures={self.failures}")


def advance(state: LayerState, recall: float, *, gate_recall: float = 0.9, gate_passes: int = 2,
            rollback_recall: float | None = None, rollback_failures: int | None = None) -> LayerState:
    """The state after one more profile, under stage ``auto``.

    A dense layer goes sparse after ``gate_passes`` profiles running with recall >= ``gate_recall``; a sparse one falls
    back to dense after ``rollback_failures`` profiles running with recall < ``rollback_recall`` and then has to pass
    the gate anew. NaN passes nothing: it breaks a run of passes, and a sparse layer counts it as a failure.

    Args:
        state: the layer's state.
        recall: share of the true mass that the predicted selection keeps on held-out rows, mean over the heads.
        gate_recall: in (0, 1] (``--dsv-gate-recall``).
        gate_passes: at least 1 (``--dsv-gate-passes``).
        rollback_recall: in (0, ``gate_recall``]; default ``gate_recall``. A lower value keeps a layer on the line from
            going back and forth.
        rollback_failures: at least 1; default ``gate_passes``.

    Raises:
        ValueError: a threshold or count out of range.
    """
    rollback_recall = gate_recall if rollback_recall is None else rollback_recall
    rollback_failures = gate_passes if rollback_failures is None else rollback_failures
    if not 0.0 < gate_recall <= 1.0:
        raise ValueError(f"--dsv-gate-recall must be in (0, 1], got {gate_recall}")
    if gate_passes < 1 or rollback_failures < 1:
        raise ValueError("--dsv-gate-passes must be at least 1, as must rollback_failures, got "
                         f"{gate_passes} and {rollback_failures}")
    if not 0.0 < rollback_recall <= gate_recall:
        raise ValueError(f"rollback_recall must be in (0, gate_recall={gate_recall}], got {rollback_recall}")
    if state.sparse:
        failures = 0 if recall >= rollback_recall else state.failures + 1
        return LayerState() if failures >= rollback_failures else LayerState(sparse=True, failures=failures)
    passes = state.passes + 1 if recall >= gate_recall else 0
    return LayerState(sparse=True) if passes >= gate_passes else LayerState(passes=passes)


def attends_sparsely(stage: Stage, state: LayerState) -> bool:
    """Whether a layer uses its selection: never in dense and predictor, always in sparse, by its state in auto."""
    return stage is Stage.SPARSE or (stage is Stage.AUTO and state.sparse)


def encode_states(states: Sequence[LayerState]) -> Tensor:
    """int32 [layers, 3] on the CPU, for a checkpoint: sparse, passes, failures."""
    rows = [[int(state.sparse), state.passes, state.failures] for state in states]
    return torch.tensor(rows, dtype=torch.int32).reshape(len(rows), 3)


def decode_states(encoded: Tensor) -> list[LayerState]:
    """Inverse of ``encode_states``.

    Raises:
        ValueError: a tensor that ``encode_states`` cannot have made.
    """
    if encoded.dim() != 2 or encoded.shape[1] != 3 or encoded.dtype != torch.int32:
        raise ValueError("encoded layer states must be int32 [layers, 3], got "
                         f"{encoded.dtype} {tuple(encoded.shape)}")
    rows = encoded.tolist()
    if any(sparse not in (0, 1) for sparse, _, _ in rows):
        raise ValueError(f"encoded layer states must start with 0 or 1, got {[row[0] for row in rows]}")
    return [LayerState(bool(sparse), passes, failures) for sparse, passes, failures in rows]
