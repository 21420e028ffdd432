"""FlowConfig: the ``--flow-*`` knobs of the training objective."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dsv.config_fields import check_fields, knob


@dataclass(frozen=True)
class FlowConfig:
    """Rectified flow (--flow-*)."""

    flow_timestep_sampling: str = knob(
        "logit-normal", "distribution of the training timestep in [0, 1] before the shift.",
        choices=("logit-normal", "uniform"))
    flow_logit_mean: float = knob(0.0, "mean of the normal behind logit-normal timesteps.")
    flow_logit_std: float = knob(1.0, "standard deviation of the normal behind logit-normal timesteps.", above=0)
    flow_shift: float = knob(
        1.0, "shift s of t' = s t / (1 + (s - 1) t); above 1 moves timesteps towards noise, as large frames need.",
        above=0)
    flow_uniform_mix: float = knob(
        0.0, "share of samples whose timestep is drawn uniformly, before the shift.", minimum=0, maximum=1)
    flow_text_drop: float = knob(
        0.1, "share of samples trained without their caption, for classifier-free guidance.", minimum=0, maximum=1)
    flow_loss_bins: int = knob(4, "equal timestep bins of the reported loss.", minimum=1)

    def validate(self) -> None:
        """Check every field; ValueError with one line that names the flag, what is allowed and what it got."""
        check_fields(self)
