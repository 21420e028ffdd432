"""VideoDiTConfig: the ``--dit-*`` knobs of the model; depth, width and heads are Megatron's own flags."""

from __future__ import annotations

from dataclasses import dataclass

from megatron_dsv.config_fields import check_fields, knob, parse_sizes


@dataclass(frozen=True)
class VideoDiTConfig:
    """Video diffusion transformer (--dit-*)."""

    dit_latent_channels: int = knob(16, "channels of a latent video.", minimum=1)
    dit_patch_size: str = knob(
        "1x2x2", "latent cells (frames x height x width) that make one token.", sizes=3)
    dit_text_dim: int = knob(4096, "width of a text embedding.", minimum=1)
    dit_text_length: int = knob(512, "text tokens that cross-attention sees, padded or truncated.", minimum=1)
    dit_position: str = knob(
        "rope", "rope: 3-D rotary embedding of query and key. sincos: fixed embedding added once to the tokens.",
        choices=("rope", "sincos"))
    dit_qk_norm: str = knob(
        "rms", "rms: RMS norm of query and key over the full width. none: no norm.", choices=("rms", "none"))
    dit_mlp: str = knob(
        "gelu-tanh", "activation of the feed-forward layer; geglu has a gate and a third matrix.",
        choices=("gelu-tanh", "gelu", "geglu"))
    dit_frequency_dim: int = knob(256, "width of the sinusoidal timestep embedding.", minimum=2)
    dit_cross_attn_norm: bool = knob(True, "normalise the input of cross-attention with a learned LayerNorm.")

    def validate(self) -> None:
        """Check every field; ValueError with one line that names the flag, what is allowed and what it got."""
        check_fields(self)
        if self.dit_frequency_dim % 2:
            raise ValueError(f"--dit-frequency-dim must be even (sine and cosine), got {self.dit_frequency_dim}")

    @property
    def patch(self) -> tuple[int, int, int]:
        """(frames, height, width) of a patch, in latent cells."""
        frames, height, width = parse_sizes(self.dit_patch_size)
        return frames, height, width
