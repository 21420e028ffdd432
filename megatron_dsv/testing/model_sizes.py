"""Parameters of the model presets, counted on models that are built but never allocated.

``python -m megatron_dsv.testing.model_sizes`` prints the table of docs/models.md.
"""

from __future__ import annotations

from dataclasses import dataclass
from unittest import mock

import torch

from megatron_dsv import presets
from megatron_dsv.platform import compat, cpu
from megatron_dsv.testing.model_parallel import initialize
from megatron_dsv.testing.ranks import run_ranks


@dataclass(frozen=True)
class ModelSize:
    """A preset's shape and parameters (of the whole model, predictors left out).

    Attributes:
        name: the preset, without its group.
        layers, hidden, heads, ffn: layers, hidden size, attention heads, width of the feed-forward layer.
        mlp: activation of the feed-forward layer.
        parameters: all of them.
        per_layer: parameters of one layer.
        predictors: parameters of the predictors that ``--dsv-sparse-stage`` other than dense adds at rank 16.
    """

    name: str
    layers: int
    hidden: int
    heads: int
    ffn: int
    mlp: str
    parameters: int
    per_layer: int
    predictors: int


def model_sizes(names: tuple[str, ...] | None = None, *flags: str) -> list[ModelSize]:
    """Sizes of model presets, by building each on the meta device on one forked rank.

    Args:
        names: presets without their group; default all of them.
        flags: further flags of the command line.
    """
    if names is None:
        names = tuple(name.removeprefix("model/") for name in presets.names() if name.startswith("model/"))
    return run_ranks(_count, 1, names, flags)[0]


def markdown(sizes: list[ModelSize]) -> str:
    """The sizes as a table, ascending."""
    rows = ["| preset | layers | hidden | heads | feed-forward | parameters | per layer | predictors |",
            "|---|---|---|---|---|---|---|---|"]
    rows += [f"| {size.name} | {size.layers} | {size.hidden:,} | {size.heads} x {size.hidden // size.heads} | "
             f"{size.ffn:,} {size.mlp} | {size.parameters:,} | {size.per_layer:,} | {size.predictors:,} |"
             for size in sorted(sizes, key=lambda size: size.parameters)]
    return "\n".join(rows)


def _count(names: tuple[str, ...], flags: tuple[str, ...]) -> list[ModelSize]:
    cpu.enable()
    compat.apply()
    groups = initialize()
    from megatron_dsv.models.video_dit import VideoDiT
    from megatron_dsv.training.arguments import dry_parse
    from megatron_dsv.training.builders import build_model

    sizes = []
    for name in names:
        args = dry_parse(["--config", f"model/{name}", "--micro-batch-size", "1", "--train-iters", "1", "--lr", "1e-4",
                          "--latent-data", "not-read", "--use-cpu-initialization", "--no-initialization", *flags], 1)
        args.latent_shapes = []
        # What is drawn on the CPU cannot be copied to the meta device, and is not needed to count.
        with torch.device("meta"), mock.patch.object(VideoDiT, "_initialise"):
            model = build_model(args, pg_collection=groups)
        assert all(parameter.is_meta for parameter in model.parameters())
        # Query and key side, a weight and a bias each, of every head.
        predictors = args.num_layers * 2 * args.num_attention_heads * args.dsv_predictor_rank * (args.hidden_size + 1)
        sizes.append(ModelSize(
            name=name, layers=args.num_layers, hidden=args.hidden_size,
            heads=args.num_attention_heads, ffn=args.ffn_hidden_size, mlp=args.dit_mlp,
            parameters=sum(parameter.numel() for parameter in model.parameters()),
            per_layer=sum(parameter.numel() for parameter in model.decoder.layers[0].parameters()),
            predictors=predictors))
    return sizes


if __name__ == "__main__":
    print(markdown(model_sizes()))
