"""``dsv plan``: predict a training step before a job is submitted: layouts, time, memory, context-parallel plans."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import yaml

from megatron_dsv import presets
from megatron_dsv.cli.output_file import check_output_file
from megatron_dsv.context_parallel import cluster as clusters
from megatron_dsv.context_parallel import sparsity_traces
from megatron_dsv.context_parallel.calibration import Calibration
from megatron_dsv.context_parallel.job_layouts import Job, JobLayout
from megatron_dsv.context_parallel.kernel_rates import measured_kernels
from megatron_dsv.context_parallel.model_shape import ModelShape
from megatron_dsv.context_parallel.plan_report import as_data, by_block, ranking, summary
from megatron_dsv.context_parallel.simulator import Refusal, Simulation, Simulator, dense_twin
from megatron_dsv.context_parallel.statistics import PATTERNS, BlockStats

_LARGEST = 4096


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is trained, where, and what to print."""
    parser.add_argument("--model", required=True, metavar="PRESET_OR_YAML",
                        help="such as model/dsv-2.7b, or a file of its keys")
    parser.add_argument("--cluster", default="h200", metavar="NAME_OR_YAML",
                        help=f"one of {', '.join(clusters.names())}, or a file with the same keys (default h200)")
    parser.add_argument("--calibration", default=None, metavar="FILE",
                        help="constants of `dsv bench --calibrate` in place of the cluster's links and the measured "
                             "kernels of its GPU")
    parser.add_argument("--gpus", type=int, default=None, help="GPUs of it, up to 4096 (default all)")
    parser.add_argument("--tokens", type=int, nargs="+", required=True, help="sequence lengths, one job each")
    parser.add_argument("--global-batch-size", type=int, default=None, help="samples of a step (default one a GPU)")
    parser.add_argument("--micro-batch-size", type=int, default=1, help="samples of one pass (default 1)")
    parser.add_argument("--layout", default=None, metavar="TPxPPxCPxDP", help="one layout, instead of all of them")
    parser.add_argument("--sparsity", default="dsv-2.7b", metavar="NAME_OR_JSON",
                        help=f"{' or '.join(sparsity_traces.BUILT_IN)}, or what a run recorded: sparsity.jsonl in its "
                             "folder, of which the last profile of the nearest length counts (default dsv-2.7b)")
    parser.add_argument("--sparsity-cap", type=float, default=0.95,
                        help="largest sparsity of a block that is believed (default 0.95)")
    parser.add_argument("--head-spread", type=float, default=0.5, help="spread of log density over heads (default 0.5)")
    parser.add_argument("--coverage", default="clustered", choices=tuple(PATTERNS),
                        help="how alike query groups select, where no trace recorded it (default clustered)")
    parser.add_argument("--q-block-size", type=int, default=64, help="tokens of a query group (default 64)")
    parser.add_argument("--kv-block-size", type=int, default=64, help="tokens of a key block (default 64)")
    parser.add_argument("--recompute", default="auto", choices=("auto", "full", "none"),
                        help="activation recomputation; auto takes none where it fits (default)")
    parser.add_argument("--dense", action="store_true", help="dense attention everywhere")
    parser.add_argument("--top", type=int, default=5, help="layouts to list (default 5)")
    parser.add_argument("--blocks", action="store_true", help="print the plan of every block of the fastest layout")
    parser.add_argument("--json", default=None, metavar="FILE", help="write everything that is printed, and the plans")
    parser.add_argument("--plot", default=None, metavar="FILE", help="plot times and plans (matplotlib)")


def run(args: argparse.Namespace) -> int:
    """Print a table per sequence length; write what else was asked for."""
    for flag, file in (("--json", args.json), ("--plot", args.plot)):
        if file is not None:
            check_output_file(flag, file)
    if args.top < 1:
        raise ValueError(f"--top must be at least 1, got {args.top}")
    cluster = clusters.load(args.cluster)
    if args.gpus is not None:
        if not 1 <= args.gpus <= _LARGEST:
            raise ValueError(f"--gpus must be between 1 and {_LARGEST}, got {args.gpus}")
        cluster = cluster.with_gpus(args.gpus)
    model = load_model(args.model)
    results = []
    for tokens in args.tokens:
        simulator = build(args, model, cluster, tokens)
        found, refused = _simulate(simulator, args.layout, args.top)
        dense = None
        if simulator.job.sparse:
            dense = _best_dense(simulator, args.layout)
        print(ranking(simulator, found, len(refused), dense))
        print(summary(found[0]))
        if args.blocks:
            print(by_block(found[0], simulator.stats(simulator.job.padded_tokens(found[0].layout))))
        results.append((simulator, found, dense))
    if args.json:
        Path(args.json).write_text(json.dumps([as_data(*row) for row in results], indent=1) + "\n", encoding="utf-8")
        print(f"wrote {args.json}")
    if args.plot:
        from megatron_dsv.cli.plan_plot import plot

        plot(results, args.plot)
        print(f"wrote {args.plot}")
    return 0


def build(args: argparse.Namespace, model: ModelShape, cluster: clusters.Cluster, tokens: int) -> Simulator:
    """The simulator that the flags ask for, at one sequence length."""
    batch = args.global_batch_size if args.global_batch_size is not None else cluster.gpus * args.micro_batch_size
    job = Job(model, tokens, batch, args.micro_batch_size, args.q_block_size, args.kv_block_size,
              sparse=not args.dense, recompute=args.recompute)
    if args.calibration is not None:
        measured = Calibration.load(args.calibration)
        measured.check(q_block=args.q_block_size, kv_block=args.kv_block_size, head_dim=model.head_dim)
        return Simulator(measured.applied_to(cluster), measured.kernels, job, statistics_of(args, model, tokens),
                         handling=measured.handling)
    kernels = measured_kernels(cluster, args.q_block_size, args.kv_block_size)
    return Simulator(cluster, kernels, job, statistics_of(args, model, tokens))


def statistics_of(args: argparse.Namespace, model: ModelShape,
                  tokens: int) -> Callable[[int], Sequence[BlockStats]]:
    """Padded tokens -> statistics of every block, recorded or built in, for sequences of about ``tokens``."""
    if args.sparsity.endswith((".json", ".jsonl")):
        recorded = sparsity_traces.load(args.sparsity, heads=model.heads, groups=model.groups, tokens=tokens)
        if len(recorded.blocks) != model.layers:
            raise ValueError(f"--sparsity {args.sparsity} must have the model's {model.layers} layers, "
                             f"got {len(recorded.blocks)}")
        if recorded.tokens not in (None, tokens):
            print(f"--sparsity {args.sparsity}: the nearest profile is of {recorded.tokens} tokens; its shares are "
                  f"taken for {tokens}")
        return lambda tokens: recorded.blocks
    trace = sparsity_traces.Trace(args.sparsity, args.sparsity_cap, args.head_spread, args.coverage)
    sizes = [size for size in range(1, _LARGEST + 1) if _LARGEST % size == 0 or size <= 16]
    made: dict[int, list[BlockStats]] = {}

    def of(tokens: int) -> list[BlockStats]:
        if tokens not in made:
            made[tokens] = trace.stats(model.layers, model.heads, model.groups, tokens=tokens,
                                       q_block=args.q_block_size, sizes=sizes)
        return made[tokens]

    return of


def load_model(reference: str) -> ModelShape:
    """The shape of a preset or of a YAML file with a model's keys; raises ValueError in one line."""
    path = Path(reference) if reference.endswith((".yaml", ".yml")) else \
        presets.path(reference if "/" in reference else f"model/{reference}")
    try:
        content: Any = yaml.safe_load(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"--model {reference}: cannot be read: {error.strerror}") from None
    except yaml.YAMLError as error:
        raise ValueError(f"--model {reference}: not valid YAML: {' '.join(str(error).split())}") from None
    if not isinstance(content, dict):
        raise ValueError(f"--model {reference}: must be a mapping of flags to values, got {type(content).__name__}")
    return ModelShape.from_settings(path.stem if path.suffix == ".yaml" else path.name, content)


def parse_layout(text: str) -> JobLayout:
    """``8x2x4x2`` -> TP 8, PP 2, CP 4, DP 2; raises ValueError for anything else."""
    parts = text.split("x")
    if len(parts) != 4 or not all(part.isdigit() and int(part) > 0 for part in parts):
        raise ValueError(f"--layout must be four sizes, TPxPPxCPxDP such as 8x2x4x2, got {text!r}")
    return JobLayout(*map(int, parts))


def _simulate(simulator: Simulator, layout: str | None, keep: int) -> tuple[list[Simulation], list[Refusal]]:
    if layout is None:
        return simulator.rank(keep)
    result = simulator.simulate(parse_layout(layout))
    if isinstance(result, Refusal):
        raise ValueError(f"--layout {layout} cannot run: {result.reason}")
    return [result], []


def _best_dense(simulator: Simulator, layout: str | None) -> Simulation | None:
    """The same job with dense attention; None where it cannot run at all."""
    try:
        return _simulate(dense_twin(simulator), layout, 1)[0][0]
    except ValueError:
        return None
