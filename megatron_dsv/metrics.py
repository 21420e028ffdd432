"""Every logged metric in one table: name, unit, how values combine; and the recorder that combines them.

A metric that is not in the table cannot be recorded, so a name is spelled once.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from megatron_dsv.suggestions import did_you_mean

MEAN, SUM, LAST = "mean", "sum", "last"


@dataclass(frozen=True)
class Metric:
    """A row of the table.

    Attributes:
        unit: of the value; ``1`` for shares and losses.
        reduction: how the values of the steps since the last report combine: mean, sum, or last. A recorded value is
            already the whole model's, the same on every rank.
        help: what it says, for ``dsv report`` and the documentation.
        per_layer: whether it is also logged layer by layer, under the name that ``of_layer`` gives.
    """

    unit: str
    reduction: str
    help: str
    per_layer: bool = False


METRICS: dict[str, Metric] = {
    "dsv/sparsity": Metric("1", LAST, "share of keys outside the smallest set with theta of a query's mass", True),
    "dsv/recall": Metric("1", LAST, "share of a query group's true attention mass that its selection keeps", True),
    "dsv/keep_ratio": Metric("1", LAST, "share of key blocks that the budgets keep", True),
    "dsv/sparse": Metric("1", LAST, "1 if the layer attends sparsely, else 0", True),
    "dsv/sparse_layers": Metric("layers", LAST, "layers that attend sparsely"),
    "dsv/predictor_loss": Metric("1", MEAN, "mean predictor loss over layers"),
    "dsv/predictor_grad_norm": Metric("1", LAST, "gradient norm of all predictors, before clipping"),
    "dsv/predictor_skipped_layers": Metric("layers", SUM, "predictor updates dropped for a non-finite gradient"),
    "dsv/tokens_per_second": Metric("tokens/s", LAST, "latent tokens trained per second, over all ranks"),
    "dsv/tflops_dense": Metric("TFLOP/s/GPU", LAST, "arithmetic of the same step with full attention, per second"),
    "dsv/tflops_useful": Metric("TFLOP/s/GPU", LAST, "arithmetic that the kept keys need, per second"),
    "dsv/mfu": Metric("1", LAST, "useful arithmetic over the device's peak"),
    "dsv/cp_plan": Metric("plans", LAST, "version of the context-parallel plan in force"),
    "dsv/cp_predicted_ms": Metric("ms", LAST, "predicted time of all blocks' attention in the longest bucket"),
    "dsv/cp_measured_ms": Metric("ms", LAST, "attention of all blocks of a micro-batch in the last profiled step"),
}


def lookup(name: str) -> Metric:
    """The table's row of a metric; ValueError with the nearest name for one that it does not have."""
    if name not in METRICS:
        raise ValueError(f"metric must be in the table of metrics.py, got {name!r}{did_you_mean(name, METRICS)}")
    return METRICS[name]


def of_layer(name: str, layer: int) -> str:
    """``dsv/layer_003/recall``: the name of one layer's value of a metric.

    Raises:
        ValueError: an unknown name, or a metric that has no layers.
    """
    if not lookup(name).per_layer:
        raise ValueError(f"{name} is not logged by layer, got layer {layer}")
    return f"dsv/layer_{layer:03d}/{name.removeprefix('dsv/')}"


class Recorder:
    """Collects values between two reports; nothing waits for the device before ``report``."""

    def __init__(self) -> None:
        self._values: dict[str, list[Tensor]] = {}

    def record(self, name: str, value: float | Tensor) -> None:
        """Add a value.

        Args:
            name: a row of ``METRICS``; ValueError for any other.
            value: a number, or a tensor of one element on any device; detached here.
        """
        lookup(name)
        tensor = value.detach().reshape(()) if isinstance(value, Tensor) else torch.tensor(value)
        self._values.setdefault(name, []).append(tensor.double())

    def report(self) -> dict[str, float]:
        """Combine what was recorded since the last report, and start over: value by name."""
        result = {name: _combine(torch.stack([value.to(values[-1].device) for value in values]),
                                 METRICS[name].reduction)
                  for name, values in sorted(self._values.items())}
        self._values = {}
        return result


def _combine(values: Tensor, reduction: str) -> float:
    """[n] recorded values -> one number."""
    if reduction == LAST:
        return values[-1].item()
    return (values.mean() if reduction == MEAN else values.sum()).item()
