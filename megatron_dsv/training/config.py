"""TrainingConfig: knobs of the loop that Megatron does not have."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dsv.config_fields import check_fields, flag_of, knob


@dataclass(frozen=True)
class TrainingConfig:
    """Weights average, and trying a launch."""

    ema_decay: float = knob(
        0.0, "decay of the exponential moving average of the weights, kept in fp32 and saved with the checkpoint; 0 "
        "keeps none.", minimum=0, below=1)
    dry_run: bool = knob(
        False, "check this launch and print its layout, memory, plans and step time without starting ranks; status 2 "
        "if it cannot run. Needs no GPU; must stand on the command line.")
    dry_run_gpus: int | None = knob(
        None, "number of ranks that --dry-run is for; unset takes torchrun's, Slurm's, or the `gpus` of a "
        "configuration file.", minimum=1)
    dry_run_cluster: str | None = knob(
        None, "machines that --dry-run is for: a YAML file, or one of configs/cluster by its name; unset takes what "
        "context parallelism plans with, else what was measured on H200.")

    def validate(self) -> None:
        """Check every field; ValueError with one line that names the flag, what is allowed and what it got."""
        check_fields(self)
        for name in ("dry_run_gpus", "dry_run_cluster"):
            if getattr(self, name) is not None and not self.dry_run:
                raise ValueError(f"{flag_of(name)} needs --dry-run, got {getattr(self, name)} without it; add "
                                 "--dry-run to try this launch, or drop it to start the run")
