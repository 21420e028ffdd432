"""Run a whole `pretrain()` on forked CPU ranks and get its numbers at full precision."""

import functools
import importlib
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from megatron_dsv.platform import cpu
from megatron_dsv.testing.ranks import run_ranks

ENTRY = "megatron_dsv.training.main:main"


@dataclass
class RunLog:
    """What a run computed. Losses come from the last pipeline stage, as Python floats of fp32 values.

    `losses[i]` and `grad_norms[i]` belong to `iterations[i]`; a skipped iteration has its entry, too. `validation`
    holds (iterations done before it, {name: value}) per evaluation. `states` and `ema` hold, for each rank, its own
    parameters and its own shard of the EMA by parameter name; empty unless they were asked for.
    """

    iterations: list[int] = field(default_factory=list)
    losses: list[dict[str, float]] = field(default_factory=list)
    grad_norms: list[float | None] = field(default_factory=list)
    validation: list[tuple[int, dict[str, float]]] = field(default_factory=list)
    states: list[dict[str, torch.Tensor]] = field(default_factory=list)
    ema: list[dict[str, torch.Tensor]] = field(default_factory=list)
    output: list[str] = field(default_factory=list)

    def loss(self, name: str) -> list[float]:
        """The named loss per iteration."""
        return [losses[name] for losses in self.losses]


def run_pretrain(
    argv: list[str],
    world_size: int = 1,
    *,
    main: Callable[[list[str]], None] | str = ENTRY,
    timeout: float = 120.0,
    keep_state: bool = False,
) -> RunLog:
    """Run `main(argv)`, which calls Megatron's `pretrain()`, on `world_size` forked gloo ranks.

    Args:
        argv: the command line, without the program's name.
        main: the entry function, or "module:function".
        timeout: seconds for the whole run.
        keep_state: also return every rank's final parameters and EMA shards.

    Returns:
        RunLog: `output[rank]` is the text that the rank printed.

    Raises:
        RankError: a rank failed; the message has its traceback.
    """
    cpu.preload()
    # torch's optimizers import it at their first use, which would be once per rank instead of once.
    importlib.import_module("torch._dynamo")
    if isinstance(main, str):
        module, _, function = main.partition(":")
        main = getattr(importlib.import_module(module), function)
    with tempfile.TemporaryDirectory(prefix="pretrain-") as folder:
        logs = run_ranks(_run, world_size, main, argv, keep_state, timeout=timeout, output=Path(folder))
        output = [(Path(folder) / f"rank{rank}.txt").read_text() for rank in range(world_size)]
    log: RunLog = logs[-1]
    log.states = [rank_log.states[0] for rank_log in logs if rank_log.states]
    log.ema = [rank_log.ema[0] for rank_log in logs if rank_log.ema]
    log.output = output
    return log


def _run(main: Callable[[list[str]], None], argv: list[str], keep_state: bool) -> RunLog:
    log = RunLog()
    cpu.enable()
    _record(log, keep_state)
    try:
        main(argv)
    except SystemExit as stop:
        # --exit-interval and its like leave pretrain() this way.
        if stop.code:
            raise
    return log


def _record(log: RunLog, keep_state: bool) -> None:
    """Wrap the functions of Megatron's loop that see the numbers before they are averaged and printed."""
    from megatron.training import training

    training_log, evaluate, train = training.training_log, training.evaluate, training.train

    @functools.wraps(training_log)
    def recording_training_log(loss_dict: Any, total_loss_dict: Any, learning_rate: Any, iteration: int,
                               loss_scale: Any, report_memory_flag: Any, skipped_iter: Any, grad_norm: Any,
                               *args: Any, **kwargs: Any) -> Any:
        log.iterations.append(iteration)
        log.losses.append({name: float(value) for name, value in loss_dict.items()})
        log.grad_norms.append(None if grad_norm is None else float(grad_norm))
        return training_log(loss_dict, total_loss_dict, learning_rate, iteration, loss_scale, report_memory_flag,
                            skipped_iter, grad_norm, *args, **kwargs)

    @functools.wraps(evaluate)
    def recording_evaluate(*args: Any, **kwargs: Any) -> Any:
        result = evaluate(*args, **kwargs)
        if result[0]:
            done = log.iterations[-1] if log.iterations else 0
            log.validation.append((done, {name: float(value) for name, value in result[0].items()}))
        return result

    @functools.wraps(train)
    def recording_train(forward_step_func: Any, model: list[Any], optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        result = train(forward_step_func, model, optimizer, *args, **kwargs)
        if keep_state:
            log.states.append({name: parameter.detach().clone() for parameter, name in _names(model).items()})
            log.ema.append(_ema(model, optimizer))
        return result

    training.training_log = recording_training_log
    training.evaluate = recording_evaluate
    training.train = recording_train


def _names(model: list[Any]) -> dict[torch.Tensor, str]:
    from megatron.core.utils import unwrap_model

    return {
        parameter: f"{chunk}.{name}" if len(model) > 1 else name
        for chunk, module in enumerate(unwrap_model(model))
        for name, parameter in module.named_parameters()
    }


def _ema(model: list[Any], optimizer: Any) -> dict[str, torch.Tensor]:
    from megatron_dsv.training.ema import ema_shards

    names = _names(model)
    return {names[parameter]: shard.clone() for parameter, shard in ema_shards(optimizer)}
