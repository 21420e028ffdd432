"""AdamW with the interface of Apex's and Transformer Engine's FusedAdam, on torch's own kernels."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.optim.adam import adam


class FusedAdam(torch.optim.Optimizer):
    """Adam whose step count lives in the param group, as Megatron's distributed optimizer saves and restores it.

    torch.optim.AdamW keeps one `step` tensor per parameter, which `DistributedOptimizer.state_dict()` cannot read on a
    fresh optimizer: without Transformer Engine and Apex no run with `--use-distributed-optimizer` can resume.

    State per parameter: `exp_avg`, `exp_avg_sq`, of the parameter's shape, in fp32. On CUDA the update is torch's fused
    kernel, elsewhere its foreach form, whose result for an element does not depend on how parameters are sharded.

    Args:
        params, lr, betas, eps, weight_decay: as torch.optim.AdamW.
        adam_w_mode: True decouples the weight decay (AdamW); False adds it to the gradient (Adam, L2).
        capturable: must be False.

    Raises:
        NotImplementedError: capturable (`--optimizer-cuda-graph`).
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        capturable: bool = False,
    ) -> None:
        if capturable:
            raise NotImplementedError(
                "--optimizer-cuda-graph needs a FusedAdam that can be captured: install transformer-engine or drop it"
            )
        self.adam_w_mode = adam_w_mode
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every parameter that has a gradient; returns the closure's value, if there is one."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            if group["params"]:
                group["step"] = group.get("step", 0) + 1
                self._update(group)
        return loss

    def _update(self, group: dict[str, Any]) -> None:
        params = [param for param in group["params"] if param.grad is not None and param.numel() > 0]
        if not params:
            return
        states = [self._state_of(param) for param in params]
        device = params[0].device
        # torch's functions count the steps up themselves, one tensor per parameter.
        steps = torch.full((len(params),), float(group["step"] - 1), dtype=torch.float32, device=device).unbind()
        beta1, beta2 = group["betas"]
        fused = device.type == "cuda"
        adam(
            params,
            [param.grad for param in params],
            [state["exp_avg"] for state in states],
            [state["exp_avg_sq"] for state in states],
            [],
            list(steps),
            foreach=not fused,
            fused=fused,
            amsgrad=False,
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=False,
            decoupled_weight_decay=self.adam_w_mode,
        )

    def _state_of(self, param: torch.Tensor) -> dict[str, torch.Tensor]:
        state = self.state[param]
        for key in ("exp_avg", "exp_avg_sq"):
            if key not in state:
                state[key] = torch.zeros_like(param, dtype=torch.float32, memory_format=torch.preserve_format)
        return state
