"""Dense -> predictor -> sparse: which layers attend sparsely, and when that changes.

Stages are what the user asks for; a layer's state is what the gate has decided so far under ``auto``. Every rank must
advance with the same recall (reduce it first), so that all ranks decide alike. What the gate goes by are profiles, and
where videos have several lengths, profiles of some lengths alone: a short sequence recalls everything in its few
blocks, and would speak for long ones.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
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


def profiled_lengths(samples: Mapping[int, int], *, span: float = 1.5) -> frozenset[int]:
    """The sequence lengths that are profiled: those that attention spends most on.

    From the longest down, a class holds the lengths within ``span`` of its longest. The class with most samples x
    tokens^2 is profiled, the longer one of two alike: images do not speak for videos, and the gate does not wait for
    one rare video that is longer than all others.

    Args:
        samples: of a training set, by tokens of a sample.
        span: at least 1.

    Raises:
        ValueError: no sample, or ``span`` below 1.
    """
    if not samples or span < 1.0:
        raise ValueError(f"profiled_lengths needs a sample and a span of at least 1, got {dict(samples)} and {span}")
    classes: list[list[int]] = []
    for tokens in sorted(samples, reverse=True):
        if classes and tokens * span >= classes[-1][0]:
            classes[-1].append(tokens)
        else:
            classes.append([tokens])
    return frozenset(max(classes, key=lambda lengths: sum(samples[tokens] * tokens**2 for tokens in lengths)))


def profile_due(step: int, interval: int, has_profiled_length: Callable[[int], bool]) -> bool:
    """Whether a step is profiled: the first one of a profiled length at or after a multiple of ``interval``.

    It follows from the steps' lengths alone, so that a resumed run profiles where the straight one would.

    Args:
        step: finished steps of the run.
        interval: at least 1 (``--dsv-profile-interval``).
        has_profiled_length: tells it of this step, and of up to ``interval`` before it.
    """
    if not has_profiled_length(step):
        return False
    while step % interval:
        step -= 1
        if has_profiled_length(step):
            return False
    return True


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
