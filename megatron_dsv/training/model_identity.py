"""Arguments by which a checkpoint's numbers mean something: a resume compares them with those of the run that saved.

Weights' shapes are compared elsewhere; here is what can differ with every shape the same, and the sizes that a flag
sets, which are known before there is a model. A run may change on its way
the --dsv-* policy of what to attend to, the --flow-* objective, batch sizes, data, layout. Of the policy, what the
statistics of layers were measured with is compared: what another run measured otherwise is measured anew.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from megatron_dsv.config_fields import flag_of, parse_sizes
from megatron_dsv.models.config import VideoDiTConfig
from megatron_dsv.sparsity.token_layout import default_cube
from megatron_dsv.training.checkpoint_files import CheckpointError

# Argument -> flag, where Megatron's name of the argument is another.
MODEL = {field.name: flag_of(field.name) for field in dataclasses.fields(VideoDiTConfig)} | {
    "num_attention_heads": "--num-attention-heads",
    "layernorm_epsilon": "--norm-epsilon",
}
"""What the backbone computes: every flag of the video DiT, and Megatron's that change its function."""

SIZES = {name: flag_of(name) for name in ("num_layers", "hidden_size", "ffn_hidden_size")}
"""Shapes of the backbone's weights, told by flags before a model is built; no run takes over weights of others."""

PREDICTOR = {"dsv_predictor_input": "--dsv-predictor-input"}
"""What the predictors compute; compared where both runs have predictors."""

OPTIMIZER = {"optimizer": "--optimizer", "use_distributed_optimizer": "--use-distributed-optimizer",
             "use_precision_aware_optimizer": "--use-precision-aware-optimizer"}
"""What the optimizer's state is made of, with the precision of the weights."""


OF_SELECTIONS = frozenset(("block_fraction", "recall"))
MEASURED_WITH = {"dsv_q_block_size": OF_SELECTIONS, "dsv_kv_block_size": OF_SELECTIONS, "dsv_cube_size": OF_SELECTIONS,
                 "dsv_budget_mass": OF_SELECTIONS, "dsv_theta": frozenset(("sparsity",))}
"""Argument -> statistics of layers that mean something for its value alone."""


@dataclass(frozen=True)
class MeasuredOtherwise:
    """Statistics of a checkpoint that this run cannot take over.

    Attributes:
        statistics: which of them.
        words: with which flags they were measured, and which this run has.
    """

    statistics: frozenset[str]
    words: str


def measured_otherwise(saved: Any, args: argparse.Namespace) -> MeasuredOtherwise | None:
    """What the layers of a checkpoint measured of other query groups, key blocks or masses; None if nothing.

    Args:
        saved: arguments stored in the checkpoint, None without one; what is not among them is not compared.
        args: of this run.
    """
    there, here = _measures(saved), _measures(args)
    changed = [name for name in MEASURED_WITH if name in there and there[name] != here[name]]
    if not changed:
        return None
    flags = [", ".join(f"{flag_of(name)} {values[name]}" for name in changed) for values in (there, here)]
    return MeasuredOtherwise(frozenset().union(*(MEASURED_WITH[name] for name in changed)),
                             f"with {flags[0]}, this run has {flags[1]}")


def _measures(args: Any) -> dict[str, Any]:
    """Arguments of ``MEASURED_WITH`` by name, with the cube that an unset one stands for."""
    values = {name: getattr(args, name) for name in MEASURED_WITH if hasattr(args, name)}
    if "dsv_cube_size" in values and "dsv_q_block_size" in values:
        cube = values["dsv_cube_size"]
        values["dsv_cube_size"] = "x".join(map(str, parse_sizes(cube) if cube else
                                               default_cube(values["dsv_q_block_size"])))
    return values


def check_model(saved: Any, args: argparse.Namespace, source: str) -> None:
    """Raises CheckpointError if the weights were trained as another function than the one that ``args`` describe.

    Args:
        saved: arguments stored in the checkpoint; one that is not among them, as in an older one, is not compared.
        args: of this run.
        source: the checkpoint, as the message names it.
    """
    has_predictors = "dense" not in (getattr(saved, "dsv_sparse_stage", "dense"), args.dsv_sparse_stage)
    for flag, there, here in _differences(MODEL | (PREDICTOR if has_predictors else {}), saved, args):
        raise CheckpointError(
            f"{source} is a checkpoint of another model: it was trained with {_shown(flag, there)}, this run has "
            f"{_shown(flag, here)}; use the flags it was trained with (config.yaml in its folder), or --finetune to "
            "begin a new run with its weights")


def check_sizes(saved: Any, args: argparse.Namespace, source: str) -> None:
    """Raises CheckpointError if the weights have other shapes than those of ``args``, also as a new run's first.

    Args:
        saved, args, source: as for :func:`check_model`.
    """
    for flag, there, here in _differences(SIZES, saved, args):
        raise CheckpointError(
            f"{source} is a checkpoint of another model: it was trained with {flag} {there}, this run has {flag} "
            f"{here}; use the flags it was trained with (config.yaml in its folder)")


def check_optimizer(saved: Any, args: argparse.Namespace, source: str) -> None:
    """Raises CheckpointError if the optimizer's state is another kind's: Megatron converts none.

    Args:
        saved, args, source: as for :func:`check_model`.
    """
    found = list(_differences(OPTIMIZER, saved, args))
    precisions = _precision(saved), _precision(args)
    if precisions[0] != precisions[1]:
        found.append(("", *precisions))
    for flag, there, here in found:
        raise CheckpointError(
            f"{source} was saved {_used(flag, there)}, this run is {_used(flag, here)}: the optimizer's state does not "
            "fit; use the same, or --no-load-optim for the weights alone")


def _differences(names: dict[str, str], saved: Any, args: argparse.Namespace) -> Iterator[tuple[str, Any, Any]]:
    for name, flag in names.items():
        here = getattr(args, name)
        there = getattr(saved, name, here)
        if there != here:
            yield flag, there, here


def _precision(args: Any) -> str:
    return next((f"--{name}" for name in ("bf16", "fp16") if getattr(args, name, False)), "fp32")


def _shown(flag: str, value: Any) -> str:
    if isinstance(value, bool):
        return flag if value else flag.replace("--", "--no-", 1)
    return f"{flag} {value}"


def _used(flag: str, value: Any) -> str:
    if isinstance(value, bool):
        return f"{'with' if value else 'without'} {flag}"
    return "in fp32 (neither --bf16 nor --fp16)" if value == "fp32" else f"with {flag} {value}".replace("  ", " ")
