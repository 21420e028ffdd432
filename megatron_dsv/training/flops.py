"""Floating-point operations of a video DiT, counted dense and counted as done.

A multiply-add is two operations; a training step is three forwards. Recomputation is not counted (model FLOPs).

Dims: S tokens of a video, L text tokens, H hidden, w = heads x head dim, F feed-forward width.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

PEAK_TFLOPS = {"H100": 989.0, "H200": 989.0, "H800": 989.0, "A100": 312.0}
"""Dense bf16 peak by a word of the device's name (vendor data sheets)."""


def forward_flops(args: argparse.Namespace, num_tokens: int, keep_ratios: Sequence[float] | None = None) -> float:
    """Operations of one sample's forward.

    Args:
        args: parsed arguments.
        num_tokens: S, without padding.
        keep_ratios: share of key blocks that each layer's self-attention reads; None counts it dense.
    """
    hidden, layers, text = args.hidden_size, args.num_layers, args.dit_text_length
    width = (args.kv_channels or hidden // args.num_attention_heads) * args.num_attention_heads
    matrices = 3 if args.dit_mlp == "geglu" else 2
    linear = 2 * num_tokens * hidden * (6 * width + matrices * args.ffn_hidden_size) + 4 * text * hidden * width
    cross = 4 * num_tokens * text * width
    kept = layers if keep_ratios is None else sum(keep_ratios)
    return layers * (linear + cross) + kept * 4.0 * num_tokens**2 * width


def peak_tflops(device_name: str) -> float | None:
    """Dense bf16 peak of a device in TFLOP/s, None if it is not in the table."""
    return next((peak for word, peak in PEAK_TFLOPS.items() if word in device_name), None)
