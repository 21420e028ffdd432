"""DataConfig: the ``--latent-*`` knobs of the prepared data set."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dsv.config_fields import check_fields, knob


@dataclass(frozen=True)
class DataConfig:
    """Latent data set (--latent-*)."""

    latent_data: str | None = knob(None, "folder that `dsv prepare` wrote; required for training.")
    latent_valid_samples: int = knob(16, "samples held out for validation, the same ones in every run; 0 "
                                      "holds none out and needs --eval-iters 0.", minimum=0)

    def validate(self) -> None:
        """Check every field; ValueError with one line that names the flag, what is allowed and what it got."""
        check_fields(self)
