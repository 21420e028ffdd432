"""``--dry-run``: everything that a launch would refuse, and what it would cost, without ranks and without a GPU.

Flags, folders, data set and checkpoint, with its schedule and its place in the data, are looked at as a launch looks at
them; memory, time and plans come from the simulator, for every sequence length of the data set. What needs the model is
left to the launch: shapes, checksums and predictors of the checkpoint's tensors.
"""

from __future__ import annotations

import argparse
import math
import os
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from megatron_dsv.config import DSVConfig
from megatron_dsv.config_fields import from_args
from megatron_dsv.context_parallel import sparsity_traces
from megatron_dsv.context_parallel.geometry import Split
from megatron_dsv.context_parallel.job_layouts import Job, JobLayout
from megatron_dsv.context_parallel.job_memory import usable_bytes
from megatron_dsv.context_parallel.model_shape import ModelShape
from megatron_dsv.context_parallel.plan import Topology
from megatron_dsv.context_parallel.plan_modes import HEADS, SEQUENCE, uniform_plan
from megatron_dsv.context_parallel.plan_report import GIB, by_block, splits, summary
from megatron_dsv.context_parallel.simulator import Refusal, Simulation, Simulator
from megatron_dsv.context_parallel.statistics import BlockStats, modelled_coverage
from megatron_dsv.training import kernel_checks

FLAG = "--dry-run"
_ASSUMED = sparsity_traces.Trace()


def asked_for(argv: Sequence[str]) -> bool:
    """Whether a command line is to be tried only."""
    return FLAG in argv


def run(argv: Sequence[str]) -> None:
    """Prints what the launch would do.

    Raises:
        ValueError, NotImplementedError: the launch would end with this line.
    """
    from megatron_dsv.data.latent_dataset import LatentDataset
    from megatron_dsv.training import arguments, checkpoint_guard, host_checks, run_folders
    from megatron_dsv.training.run import TrainingRun

    args = arguments.dry_parse(argv, ranks_of(argv, os.environ), check_files=True)
    host_checks.check_folders(args)
    _check_gpus(args)
    run_folders.check(args)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        job = TrainingRun(args, LatentDataset(args.latent_data, text_length=args.dit_text_length))
    job.check_data()
    resumed = checkpoint_guard.check_before_build(args)
    _check_resume(args, job, resumed)
    print(f"{args.world_size} ranks = {layout_of(args)}, global batch {args.global_batch_size}, stage "
          f"{args.dsv_sparse_stage}")
    print(_checkpoint_line(args, resumed))
    lengths: dict[int, list[Any]] = {}
    for shape, records in job.latents.buckets.items():
        lengths.setdefault(job.layout(shape[1:]).padded_length, []).append((shape, len(records)))
    longest = max(lengths)
    worst: Refusal | None = None
    for tokens, shapes in sorted(lengths.items()):
        simulator = simulator_of(args, tokens, job.window_share_of_data(tokens, tokens))
        result = simulator.simulate(layout_of(args))
        print(f"{tokens:,} tokens: {sum(count for _, count in shapes)} samples of "
              + ", ".join("x".join(map(str, shape[1:])) for shape, _ in shapes)
              + f" latents (padding {padding(job, shapes, tokens):.1%})")
        if isinstance(result, Refusal):
            worst = result
            continue
        print(bucket_report(result, simulator, blocks=tokens == longest))
    if worst is not None:
        raise ValueError(f"{worst.layout} cannot run on {simulator.cluster.name}: {worst.reason}")
    print(f"the launch can run{_nothing_left(args, resumed)}")


def ranks_of(argv: Sequence[str], environment: Mapping[str, str]) -> int | None:
    """Ranks of the launch: of the flag, of torchrun, of Slurm; None leaves it to the configuration files.

    Raises:
        ValueError: a number that is none.
    """
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--dry-run-gpus", default=None)
    flag = parser.parse_known_args(list(argv))[0].dry_run_gpus
    sources = [("--dry-run-gpus", flag), ("WORLD_SIZE", environment.get("WORLD_SIZE"))]
    if "SLURM_JOB_NUM_NODES" in environment and "SLURM_GPUS_ON_NODE" in environment:
        sources += [("SLURM_JOB_NUM_NODES", environment["SLURM_JOB_NUM_NODES"]),
                    ("SLURM_GPUS_ON_NODE", environment["SLURM_GPUS_ON_NODE"])]
    found = {}
    for name, value in sources:
        if value is not None:
            if not value.isdecimal() or int(value) < 1:
                raise ValueError(f"{name} must be a whole number of at least 1, got {value!r}")
            found[name] = int(value)
    for name in ("--dry-run-gpus", "WORLD_SIZE"):
        if name in found:
            return found[name]
    return found["SLURM_JOB_NUM_NODES"] * found["SLURM_GPUS_ON_NODE"] if found else None


def layout_of(args: argparse.Namespace) -> JobLayout:
    """Sizes of the launch."""
    tp, pp, cp = (getattr(args, f"{name}_parallel_size") for name in ("tensor_model", "pipeline_model", "context"))
    return JobLayout(tp, pp, cp, args.world_size // (tp * pp * cp))


def simulator_of(args: argparse.Namespace, tokens: int, window_share: float | None) -> Simulator:
    """The launch at one sequence length, padding included, on the machines that its flags name.

    ``window_share`` is what the window baseline keeps of videos of that length; None without windows.
    """
    from megatron_dsv.training.cp_costs import costs_of, low_rank_width
    from megatron_dsv.training.flag_relations import layers_per_stage

    dsv = from_args(DSVConfig, args)
    # Without grouped queries, which are refused, Megatron's default of one group means nothing.
    model = ModelShape.from_settings("of the flags", {**vars(args), "num_query_groups": args.num_attention_heads})
    window = dsv.window_fraction is not None
    job = Job(model, tokens, args.global_batch_size, args.micro_batch_size, dsv.dsv_q_block_size,
              dsv.dsv_kv_block_size, sparse=window or (dsv.has_predictor and dsv.dsv_sparse_stage != "predictor"),
              dispatches=not window, predictors=dsv.has_predictor,
              predictor_rank=low_rank_width(dsv), proxies=dsv.dsv_predictor_proxies,
              predictor_reads_hidden=dsv.dsv_predictor_input == "hidden",
              predictor_stride=dsv.dsv_predictor_query_stride, stages=tuple(layers_per_stage(args)),
              recompute="full" if args.recompute_granularity == "full" else "none",
              recompute_method=args.recompute_method or "uniform", recompute_layers=args.recompute_num_layers or 1,
              ema=args.ema_decay > 0,
              sharded_optimizer=bool(args.use_distributed_optimizer), max_padding=math.inf)
    if args.dry_run_cluster is not None:
        dsv = replace(dsv, dsv_cp_cluster=args.dry_run_cluster, dsv_cp_calibration=None)
    try:
        costs = costs_of(dsv, device=None, head_dim=model.head_dim)
    except ValueError as error:
        flag = "--dsv-cp-cluster" if args.dry_run_cluster is None else "--dry-run-cluster"
        raise ValueError(str(error).replace("--dsv-cp-cluster", flag, 1)) from None
    try:
        cluster = costs.model.cluster.with_gpus(args.world_size)
    except ValueError as error:
        raise ValueError(f"{FLAG} on {costs.model.cluster.name}: {error}; name machines that the ranks fill with "
                         "--dry-run-cluster") from None
    return Simulator(cluster, costs.model.kernels, job, lambda padded: _stats(dsv, model, args, padded, window_share),
                     _allowed(dsv, args), costs.model.handling)


def _stats(dsv: DSVConfig, model: ModelShape, args: argparse.Namespace, tokens: int,
           window_share: float | None) -> list[BlockStats]:
    """What blocks keep: the forced share, a window's, or what a trained model of the same depth was measured to."""
    sizes = [size for size in range(1, args.context_parallel_size + 1) if args.context_parallel_size % size == 0]
    fixed, pattern = dsv.dsv_keep_ratio, _ASSUMED.pattern
    if window_share is not None:
        fixed, pattern = window_share, "local"
    if fixed is None:
        return _ASSUMED.stats(model.layers, model.heads, model.groups, tokens=tokens, q_block=dsv.dsv_q_block_size,
                              sizes=sizes)
    kept = (fixed,) * model.heads
    covered = modelled_coverage(kept, model.heads // model.groups, tokens=tokens, q_block=dsv.dsv_q_block_size,
                                pattern=pattern, sizes=sizes)
    return [BlockStats(kept, covered)] * model.layers


def _allowed(dsv: DSVConfig, args: argparse.Namespace) -> tuple[Split, ...]:
    """The splits that the run's plans may use; empty for all."""
    if dsv.dsv_cp_plan not in (SEQUENCE, HEADS):
        return ()
    topo = Topology(args.context_parallel_size, args.tensor_model_parallel_size)
    return uniform_plan(dsv.dsv_cp_plan, topo, layers=1, units=args.num_attention_heads // topo.tp, buckets=((1, 1),),
                        sparse=False, kv_block=1).splits()


def padding(job: Any, shapes: Sequence[tuple[Any, int]], tokens: int) -> float:
    """Share of the slots that hold no token."""
    real = sum(job.num_tokens(shape[1:]) * count for shape, count in shapes)
    return 1 - real / (tokens * sum(count for _, count in shapes))


def bucket_report(result: Simulation, simulator: Simulator, *, blocks: bool) -> str:
    """Time and memory of one sequence length, with the plan of every block where asked for."""
    used, limit = sum(result.memory.values()), usable_bytes(simulator.cluster)
    lines = [f"  step {result.step_ms / 1e3:.3f} s, {result.tokens_per_s:,.0f} tokens/s, MFU {result.mfu:.1%}, memory "
             f"{used / GIB:.1f} of {limit / GIB:.1f} GiB a GPU, recompute {result.recompute}, {splits(result)} "
             f"(predicted for {simulator.cluster.name} in bf16)"]
    if blocks:
        lines += [summary(result), by_block(result, simulator.stats(simulator.job.padded_tokens(result.layout)))]
    return "\n".join(lines)


def _check_gpus(args: argparse.Namespace) -> None:
    """What GPUs refuse of kernels: those of the named machines, else this host's; without either, none are known."""
    if args.dry_run_cluster is not None or args.dsv_cp_cluster is not None:
        kernel_checks.check_gpu(args, None)
    elif torch.cuda.is_available():
        kernel_checks.check_gpu(args, torch.device("cuda", 0))


def _check_resume(args: argparse.Namespace, job: Any, saved: argparse.Namespace | None) -> None:
    """What a launch refuses of a resumed run's schedule and place in the data, once its model is built."""
    from megatron_dsv.data.holdout import split_buckets
    from megatron_dsv.platform import resume_schedule
    from megatron_dsv.training.checkpoint_files import common_state
    from megatron_dsv.training.checkpoint_guard import found
    from megatron_dsv.training.datasets import check_order

    _, folder = found(args)
    if saved is None or folder is None:
        return
    if not args.no_load_optim:
        resume_schedule.continued(args, resume_schedule.of_flags(args), common_state(folder))
    train, _ = split_buckets(job.latents.buckets, job.latents.checksums, args.latent_valid_samples)
    check_order(args, len(train), getattr(saved, "consumed_train_samples", 0))


def _nothing_left(args: argparse.Namespace, saved: argparse.Namespace | None) -> str:
    """What the launch says of a resumed run that is over, as the end of a sentence; nothing of others."""
    from megatron_dsv.platform import resume_schedule
    from megatron_dsv.training.checkpoint_files import common_state
    from megatron_dsv.training.checkpoint_guard import found

    _, folder = found(args)
    if saved is None or folder is None or args.skip_train:
        return ""
    iteration, last = common_state(folder).get("iteration", 0), args.train_iters
    if args.train_samples is not None:
        last = resume_schedule.last_iteration(argparse.Namespace(
            train_samples=args.train_samples, global_batch_size=args.global_batch_size,
            consumed_train_samples=getattr(saved, "consumed_train_samples", 0)), iteration)
    return "" if iteration < last else (f", but nothing is left to train: the checkpoint holds iteration {iteration}, "
                                        f"and the last one is {last}; raise --train-iters or --train-samples")


def _checkpoint_line(args: argparse.Namespace, resumed: Any) -> str:
    """What was found, and whether it was compared: ``resumed`` are the arguments that it was compared with, or None."""
    from megatron_dsv.training.checkpoint_guard import begins_run, found

    flag, folder = found(args)
    if folder is None:
        return "checkpoint: none, the run starts from scratch"
    if resumed is not None:
        return (f"checkpoint: {folder} of {flag}, of this model (left to the launch: shapes, checksums and predictors "
                "of its tensors)")
    compared = "compared with this model in its sizes alone, as its weights begin a run of their own" if \
        begins_run(args, flag) else "not compared with this model, as it does not say its flags"
    return (f"checkpoint: {folder} of {flag}, {compared} (left to the launch: shapes, checksums and predictors of its "
            "tensors)")
