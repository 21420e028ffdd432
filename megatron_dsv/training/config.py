"""TrainingConfig: knobs of the loop that Megatron does not have."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dsv.config_fields import check_fields, knob


@dataclass(frozen=True)
class TrainingConfig:
    """Weights average."""

    ema_decay: float = knob(
        0.0, "decay of the exponential moving average of the weights, kept in fp32 and saved with the checkpoint; 0 "
        "keeps none.", minimum=0, below=1)

    def validate(self) -> None:
        """Check every field; ValueError with one line that names the flag, what is allowed and what it got."""
        check_fields(self)
