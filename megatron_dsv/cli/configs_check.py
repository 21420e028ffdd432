"""``dsv configs-check``: every configuration file through the real parser, at the number of ranks that it is for."""

from __future__ import annotations

import argparse
import sys
import warnings

from megatron_dsv import presets
from megatron_dsv.context_parallel.cluster import load as load_cluster

_WITH = {
    # What completes a file of a group into a launch: (configs before it, flags, ranks).
    "model": ((), ["--micro-batch-size", "1", "--train-iters", "1", "--lr", "1e-4"], 1),
    "dsv": (("model/debug",), ["--micro-batch-size", "1", "--train-iters", "1", "--lr", "1e-4"], 1),
    "recipe": (("model/debug",), [], 1),
    "parallel": (("model/wan2.1-14b",), ["--micro-batch-size", "1", "--train-iters", "1", "--lr", "1e-4"], None),
    "experiments": ((), [], None),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Which files; default all packaged ones."""
    parser.add_argument("names", nargs="*", metavar="PRESET_OR_YAML",
                        help="complete launches to check instead of every packaged file")
    parser.add_argument("--ranks", type=int, default=None, help="number of ranks, instead of what the file says")


def run(args: argparse.Namespace) -> int:
    """Print a line per file; 1 if any is refused."""
    if args.ranks is not None and args.ranks < 1:
        raise ValueError(f"--ranks must be an integer of at least 1, got {args.ranks}; leave it out to take the `gpus` "
                         "of each file")
    warnings.simplefilter("ignore")
    failures = 0
    for name in args.names or presets.names():
        try:
            print(f"ok      {name}: {check(name, args.ranks, complete=bool(args.names))}")
        except (ValueError, NotImplementedError) as error:
            failures += 1
            print(f"refused {name}: {error}", file=sys.stderr)
    return 1 if failures else 0


def check(name: str, ranks: int | None = None, *, complete: bool = False) -> str:
    """Parse one file as its launch would.

    Args:
        name: a preset, or the path of a YAML file.
        ranks: number of ranks; None takes the ``gpus`` of the file.
        complete: whether the file is a whole launch by itself; otherwise its group says what completes it.

    Returns:
        The resulting layout, or the cluster, in words.

    Raises:
        ValueError, NotImplementedError: what a launch would say.
    """
    if not complete and name.startswith("cluster/"):
        cluster = load_cluster(name)
        return f"{cluster.nodes} nodes of {cluster.gpus_per_node} GPUs with {cluster.memory_gib:g} GiB"
    before, flags, default_ranks = ((), [], None) if complete else _WITH[name.split("/", 1)[0]]
    argv = ["--config", *before, name, *flags, "--latent-data", "not-checked"]
    from megatron_dsv.training.arguments import dry_parse

    parsed = dry_parse(argv, ranks or default_ranks)
    return (f"{parsed.num_layers} layers of {parsed.hidden_size}, {parsed.world_size} ranks = "
            f"TP {parsed.tensor_model_parallel_size} x PP {parsed.pipeline_model_parallel_size} x "
            f"CP {parsed.context_parallel_size} x DP {parsed.data_parallel_size}, "
            f"global batch {parsed.global_batch_size}, stage {parsed.dsv_sparse_stage}")
