"""Reduces and applies the predictors' gradients: AdamW of its own, apart from the backbone's optimizer.

The functional AdamW is torch's; its moments live in the predictors as buffers, so they reshard with the weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp
from torch.optim.adamw import adamw

from megatron_dsv.transformer.predictor import LowRankPredictor


@dataclass(frozen=True)
class PredictorStep:
    """What one update did, over the predictors of the whole model: mean loss, gradient norm, and the number of layers
    left out for a non-finite gradient."""

    loss: Tensor
    grad_norm: Tensor
    skipped_layers: Tensor


class PredictorOptimizer:
    """AdamW over the predictors of this pipeline stage.

    Args:
        predictors: by layer number; every rank of a data-parallel and tensor-parallel group holds the same layers.
        data_group: ranks that hold the same predictor parameters; gradients are averaged over their samples.
        tensor_group: ranks that hold other heads of the same layers.
        model_group: all ranks that together hold one model; the gradient norm is taken over it.
        context_size: ranks of ``data_group`` that share each sample: their gradients add up to its, and each has its
            loss.
        weight_decay, clip_grad: see DSVConfig; 0 switches either off.
        betas, eps: AdamW's.
    """

    def __init__(self, predictors: dict[int, LowRankPredictor], *, data_group: ProcessGroup,
                 tensor_group: ProcessGroup, model_group: ProcessGroup, weight_decay: float, clip_grad: float,
                 context_size: int = 1, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8) -> None:
        self.predictors = predictors
        self.data_group = data_group
        self.tensor_group = tensor_group
        self.model_group = model_group
        self.context_size = context_size
        self.weight_decay = weight_decay
        self.clip_grad = clip_grad
        self.betas = betas
        self.eps = eps

    @torch.no_grad()
    def step(self, learning_rates: dict[int, float]) -> PredictorStep:
        """Averages the accumulated gradients, clips them by their own norm, applies them and clears them.

        A layer with a non-finite gradient on any rank is zeroed on all of them before the reduction and keeps its
        weights and moments: the backbone never notices.

        Args:
            learning_rates: by layer number.
        """
        layers = list(self.predictors)
        bad = self._non_finite_layers(layers)
        for layer in bad:
            self.predictors[layer].clear()
        grads = [grad for layer in layers for grad in self.predictors[layer].grads()]
        losses, counts = self._reduce(layers, grads)
        for layer, count in zip(layers, counts, strict=True):
            # A rank's loss is the mean over its own heads, the layer's the mean over all of them.
            torch._foreach_div_(self.predictors[layer].grads(), float(max(count, 1) * self.tensor_group.size()))
        norm = self._norm(grads)
        if self.clip_grad > 0:
            scale = (self.clip_grad / (norm + 1e-6)).clamp_max(1.0)
            torch._foreach_mul_(list(grads), scale.to(grads[0].dtype))
        for layer in layers:
            if layer not in bad:
                self._apply(self.predictors[layer], learning_rates[layer])
            self.predictors[layer].clear()
        means = losses / losses.new_tensor([max(count, 1) for count in counts])
        used = float(sum(count > 0 for count in counts))
        totals = torch.cat([means.sum()[None], losses.new_tensor([used, float(len(bad))])])
        torch.distributed.all_reduce(totals, group=self.model_group)
        # Each tensor-parallel rank has counted the layers of its stage.
        return PredictorStep(totals[0] / totals[1].clamp_min(1), norm, totals[2] / self.tensor_group.size())

    def _non_finite_layers(self, layers: Sequence[int]) -> list[int]:
        """Layers with a NaN or infinite gradient on some rank of the data- or tensor-parallel group."""
        # The device has nothing else to do here, so launches count: one a gradient, where isfinite and all take six.
        largest = torch.stack([torch.linalg.vector_norm(grad, float("inf"))
                               for layer in layers for grad in self.predictors[layer].grads()])
        flags = (~torch.isfinite(largest)).view(len(layers), -1).any(-1).to(torch.int32)
        for group in (self.data_group, self.tensor_group):
            torch.distributed.all_reduce(flags, op=ReduceOp.MAX, group=group)
        return [layer for layer, flag in zip(layers, flags.tolist(), strict=True) if flag]

    def _reduce(self, layers: Sequence[int], grads: Sequence[Tensor]) -> tuple[Tensor, list[int]]:
        """Sums gradients and losses over the data-parallel group in one buffer.

        Returns:
            loss sums [layers], fp64, averaged over tensor-parallel ranks (which hold other heads of the same layers),
            and the samples' micro-batches behind each: every data-parallel rank has run as many.
        """
        predictors = [self.predictors[layer] for layer in layers]
        flat = torch.cat([grad.reshape(-1) for grad in grads])
        torch.distributed.all_reduce(flat, group=self.data_group)
        sizes = [grad.numel() for grad in grads]
        torch._foreach_copy_(list(grads), [total.view_as(grad) for grad, total in
                                           zip(grads, flat.split(sizes), strict=True)])
        losses = torch.cat([predictor.get_buffer("loss_sum") for predictor in predictors])
        torch.distributed.all_reduce(losses, group=self.data_group)
        torch.distributed.all_reduce(losses, group=self.tensor_group)
        counts = [predictor.loss_count * self.data_group.size() // self.context_size for predictor in predictors]
        return losses / (self.tensor_group.size() * self.context_size), counts

    def _norm(self, grads: Sequence[Tensor]) -> Tensor:
        total = torch.stack([grad.double().square().sum() for grad in grads]).sum()
        torch.distributed.all_reduce(total, group=self.model_group)
        return total.sqrt()

    def _apply(self, predictor: LowRankPredictor, learning_rate: float) -> None:
        step = predictor.get_buffer("adam_step")
        weights = predictor.weights()
        adamw(weights, predictor.grads(), predictor.moments("exp_avg"), predictor.moments("exp_avg_sq"), [],
              [step.clone() for _ in weights], foreach=True, capturable=step.is_cuda, amsgrad=False,
              beta1=self.betas[0], beta2=self.betas[1], lr=learning_rate, weight_decay=self.weight_decay,
              eps=self.eps, maximize=False)
        step.add_(1)
