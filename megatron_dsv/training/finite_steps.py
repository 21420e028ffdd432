"""A loss or a gradient that is not finite ends the run before the step changes anything, on all ranks together.

Megatron's own check raises on the one rank that sees it, while the others wait in a collective, or it runs the step
again and saves. Here every rank learns of it after the gradients' reduction: one small all-reduce a step.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from megatron_dsv.platform import cpu


class NotFiniteError(RuntimeError):
    """Numbers of a step that cannot be trained on, in one line."""


class FiniteSteps:
    """Watches the losses and gradients of a run.

    Args:
        losses: watch the losses.
        gradients: watch the gradients too; not under a dynamic loss scale, which lets them overflow.
    """

    def __init__(self, *, losses: bool, gradients: bool) -> None:
        self._losses, self._gradients = losses, gradients
        self._bad_loss: Tensor | None = None

    @classmethod
    def of(cls, args: argparse.Namespace) -> FiniteSteps:
        """What ``--no-check-for-nan-in-loss-and-grad`` leaves to watch; Megatron sets it itself under --fp16."""
        unwatched = "no-check-for-nan-in-loss-and-grad" in args.launch_settings
        return cls(losses=not unwatched, gradients=args.check_for_nan_in_loss_and_grad)

    def see(self, loss: Tensor) -> None:
        """Takes note of a micro-batch's loss []; nothing waits for the device."""
        bad = ~torch.isfinite(loss.detach())
        self._bad_loss = bad if self._bad_loss is None else self._bad_loss | bad

    def check(self, chunks: Iterable[Any], iteration: int) -> None:
        """To be called by every rank once a step, when gradients are reduced and before the optimizer.

        Args:
            chunks: the rank's model chunks, wrapped for data parallelism.
            iteration: the step's number, from 1.

        Raises:
            NotFiniteError: on every rank, if a loss or a gradient of any of them is not finite.
        """
        if not self._losses:
            return
        gradients = [buffer.grad_data for chunk in chunks for buffer in chunk.buffers + chunk.expert_parallel_buffers]
        rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        # [ranks] whose loss is bad, then one count of ranks whose gradients are.
        bad = torch.zeros(world + 1, dtype=torch.int32, device=gradients[0].device)
        if self._bad_loss is not None:
            bad[rank] = self._bad_loss
            self._bad_loss = None
        if self._gradients:
            largest = torch.stack([torch.linalg.vector_norm(gradient, float("inf")) for gradient in gradients])
            bad[world] = ~torch.isfinite(largest).all()
        torch.distributed.all_reduce(bad)
        counts = bad.tolist()
        if any(counts):
            raise NotFiniteError(_message(iteration, [number for number in range(world) if counts[number]]))

    def finalize_with(self, finalize: Callable[..., Any], iteration: Callable[[], int]) -> Callable[..., Any]:
        """Megatron's ``finalize_model_grads_func`` with the check after it."""

        @functools.wraps(finalize)
        def finalize_and_check(model: Any, *args: Any, **kwargs: Any) -> Any:
            result = finalize(model, *args, **kwargs)
            self.check(model, iteration())
            return result

        return finalize_and_check


def install(watched: FiniteSteps) -> None:
    """Leaves the check of gradients to ``watched``, and lets no weights be saved that are not finite.

    A step whose loss and gradients were finite can still overflow the weights; that is looked at once a save.
    """
    from megatron.core.distributed.param_and_grad_buffer import _ParamAndGradBucketGroup
    from megatron.training import training

    check_grads, save = _ParamAndGradBucketGroup.check_grads, training.save_checkpoint

    def check_large_grads(self: Any, check_for_nan_or_inf: bool, check_for_large: bool) -> None:
        if check_for_large:
            check_grads(self, False, check_for_large)

    @functools.wraps(save)
    def save_if_finite(iteration: int, model: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        if watched._losses and optimizer is not None:
            _check_weights(iteration, optimizer.get_parameters())
        return save(iteration, model, optimizer, *args, **kwargs)

    _ParamAndGradBucketGroup.check_grads = check_large_grads
    training.save_checkpoint = save_if_finite


def _check_weights(iteration: int, weights: list[Tensor]) -> None:
    bad = torch.zeros((), dtype=torch.int32, device=cpu.current_device())
    for weight in weights:
        bad += ~torch.isfinite(torch.linalg.vector_norm(weight.detach(), float("inf"), dtype=torch.float32))
    torch.distributed.all_reduce(bad)
    if bad.item():
        raise NotFiniteError(f"iteration {iteration}: weights are not finite, so no checkpoint was written; resume "
                             "from the last one with a lower --lr or --clip-grad")


def _message(iteration: int, ranks: list[int]) -> str:
    if ranks:
        shown = ", ".join(map(str, ranks[:8])) + (", ..." if len(ranks) > 8 else "")
        cause = f"the loss is not finite on rank{'s' if len(ranks) > 1 else ''} {shown}"
        data = "; `dsv prepare --verify DATA` tells whether the data set is damaged"
    else:
        cause, data = "the losses are finite, but a gradient is not", ""
    return (f"iteration {iteration}: {cause}; the step was not taken and nothing was saved. Resume from the last "
            f"checkpoint with a lower --lr or --clip-grad, or with --iterations-to-skip {iteration}{data}")
