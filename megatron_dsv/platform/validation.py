"""Validation losses to stdout, TensorBoard and wandb; takes the place of Megatron's `evaluate_and_print_results`."""

import math
from collections.abc import Callable
from typing import Any

# Leading parameters of the two functions of megatron.training.training that this file stands beside.
PARAMETERS = ("prefix", "forward_step_func", "data_iterator", "model", "iteration", "process_non_loss_data_func",
              "config", "verbose", "write_to_tensorboard", "non_loss_data_func")
EVALUATE_PARAMETERS = ("forward_step_func", "data_iterator", "model", "process_non_loss_data_func", "config",
                       "verbose", "non_loss_data_func", "eval_iters")


def evaluate_and_report(
    prefix: str,
    forward_step_func: Callable[..., Any],
    data_iterator: Any,
    model: list[Any],
    iteration: int,
    process_non_loss_data_func: Callable[..., Any] | None,
    config: Any,
    verbose: bool = False,
    write_to_tensorboard: bool = True,
    non_loss_data_func: Callable[..., Any] | None = None,
    pg_collection: Any = None,
    p2p_communicator: Any = None,
) -> None:
    """Evaluate the validation set and report its losses, one line and one scalar per name.

    Same parameters as Megatron's function. Scalars are called "<name> validation", as Megatron's are, and "... vs
    samples" over consumed samples (TensorBoard only). A time limit that is hit on the way ends it silently; Megatron
    prints that itself. Several validation sets, whole ones and perplexities are refused when flags are checked.
    """
    from megatron.training import get_args, get_tensorboard_writer, get_wandb_writer, training

    args = get_args()
    writer = get_tensorboard_writer() if write_to_tensorboard else None
    losses, non_loss_data, out_of_time = training.evaluate(
        forward_step_func, data_iterator, model, process_non_loss_data_func, config, verbose, non_loss_data_func,
        eval_iters=args.eval_iters, pg_collection=pg_collection, p2p_communicator=p2p_communicator)
    if out_of_time:
        return
    # A timestep bin that the evaluation never hit is 0 / 0.
    found = {name: float(loss) for name, loss in losses.items()}
    values = {name: value for name, value in found.items() if name == "loss" or not math.isnan(value)}
    _write(values, iteration, args.consumed_train_samples, writer, get_wandb_writer())
    if process_non_loss_data_func is not None and writer and training.is_last_rank():
        process_non_loss_data_func(non_loss_data, iteration, writer)
    line = f" validation loss at {prefix} | "
    line += "".join(f"{name} value: {value:.6E} | " for name, value in values.items())
    rule = "-" * len(line)
    training.print_rank_last(f"{rule}\n{line}\n{rule}")


def _write(values: dict[str, float], iteration: int, samples: int, writer: Any, wandb: Any) -> None:
    for name, value in values.items():
        if writer:
            writer.add_scalar(f"{name} validation", value, iteration)
            writer.add_scalar(f"{name} validation vs samples", value, samples)
        if wandb:
            wandb.log({f"{name} validation": value}, iteration)
