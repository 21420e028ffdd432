"""``dsv bench``: measure the constants of the cost model on the GPUs at hand, alone or under torchrun."""

from __future__ import annotations

import argparse
import os
import time
from datetime import timedelta

import torch
import torch.distributed as dist

from megatron_dsv.cli.output_file import check_output_file
from megatron_dsv.cli.plan import load_model
from megatron_dsv.context_parallel import cluster as clusters
from megatron_dsv.context_parallel.calibration import Calibration
from megatron_dsv.context_parallel.microbenchmarks import Microbenchmarks, Sizes
from megatron_dsv.context_parallel.partial_attention import Kernels
from megatron_dsv.context_parallel.trial_block import TrialShape
from megatron_dsv.training.launcher import check_launcher

_DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What is measured, and where the constants go."""
    parser.add_argument("--calibrate", action="store_true",
                        help="measure attention and selection; on several ranks (torchrun -m megatron_dsv.cli.main "
                             "bench --calibrate) also exchanges and whole split blocks")
    parser.add_argument("--output", default="calibration.json", metavar="FILE",
                        help="where the constants go (default calibration.json)")
    parser.add_argument("--cluster", default="h200", metavar="NAME_OR_YAML",
                        help=f"what is not measured: one of {', '.join(clusters.names())}, or a file (default h200)")
    parser.add_argument("--model", default="model/dsv-2.7b", metavar="PRESET_OR_YAML",
                        help="whose heads are measured (default model/dsv-2.7b)")
    parser.add_argument("--tokens", type=int, nargs="+", default=None,
                        help="sequence lengths, two at least (default 32768 65536 on a GPU)")
    parser.add_argument("--density", type=float, nargs="+", default=[0.05, 0.2],
                        help="kept shares of the keys, two at least (default 0.05 0.2)")
    parser.add_argument("--payload-kib", type=int, nargs="+", default=[1024, 16384, 65536, 262144],
                        help="KiB that a rank sends in an all-to-all, two sizes at least (default 1024 ... 262144)")
    parser.add_argument("--q-block-size", type=int, default=64, help="tokens of a query group (default 64)")
    parser.add_argument("--kv-block-size", type=int, default=64, help="tokens of a key block (default 64)")
    parser.add_argument("--predictor-rank", type=int, default=16, help="width of a low-rank query (default 16)")
    parser.add_argument("--proxies", type=int, default=4, help="proxy queries of a query group (default 4)")
    parser.add_argument("--dtype", default=None, choices=tuple(_DTYPES),
                        help="of all tensors (default bf16 on a GPU, fp32 without one)")
    parser.add_argument("--dense-backend", default="auto", help="of dense attention (default auto)")
    parser.add_argument("--sparse-backend", default="auto", help="of sparse attention (default auto)")
    parser.add_argument("--seconds", type=float, default=0.4, help="work behind every number (default 0.4)")


def run(args: argparse.Namespace) -> int:
    """Measure, print the constants, write them."""
    if not args.calibrate:
        raise ValueError("dsv bench measures with --calibrate; got nothing to do")
    check_output_file("--output", args.output)
    if not args.seconds > 0:
        raise ValueError(f"--seconds must be above 0, got {args.seconds}")
    check_launcher(os.environ)
    cluster = clusters.load(args.cluster)
    on_gpu = torch.cuda.is_available()
    gpus, local_ranks = torch.cuda.device_count() if on_gpu else 0, int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    if on_gpu and gpus < local_ranks:
        raise ValueError(f"it needs {local_ranks} GPUs, one for each rank of this host, found {gpus}; start "
                         "fewer ranks")
    if args.tokens is None:
        if not on_gpu:
            raise ValueError("it needs 1 GPU for --tokens 32768 65536, the default, found 0; give short sequences, "
                             "such as --tokens 128 256, to try it on the CPU")
        args.tokens = [32768, 65536]
    dtype = _DTYPES[args.dtype or ("bf16" if on_gpu else "fp32")]
    sizes = Sizes(shape_of(args), tuple(args.tokens), tuple(args.density),
                  tuple(1024 * kib for kib in args.payload_kib), args.seconds, dtype)
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0"))) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
    ranks = int(os.environ.get("WORLD_SIZE", "1"))
    several = ranks > 1
    if several:
        dist.init_process_group("nccl" if on_gpu else "gloo", timeout=timedelta(minutes=5))
    try:
        started = time.monotonic()
        made = Microbenchmarks(sizes, device, cluster, dist.group.WORLD if several else None,
                               Kernels(args.dense_backend, args.sparse_backend),
                               int(os.environ.get("LOCAL_WORLD_SIZE", ranks))).calibrate()
        if not several or dist.get_rank() == 0:
            made.save(args.output)
            print(summary(made, sizes, several))
            print(f"wrote {args.output} (digest {made.digest}) after {time.monotonic() - started:.0f} s")
    finally:
        if several:
            dist.destroy_process_group()
    return 0


def shape_of(args: argparse.Namespace) -> TrialShape:
    """The block of the model and the flags."""
    model = load_model(args.model)
    if model.groups != model.heads:
        raise ValueError(f"--model {args.model} must have a key/value head per query head, got {model.groups} and "
                         f"{model.heads}")
    return TrialShape(max(args.tokens), model.heads, model.head_dim, model.hidden, args.q_block_size,
                      args.kv_block_size, args.predictor_rank, args.proxies)


def summary(made: Calibration, sizes: Sizes, several: bool) -> str:
    """The constants in a few lines."""
    tokens, shape, kernels = max(sizes.tokens), sizes.shape, made.kernels
    dense = sum(kernels.dense(tokens, tokens, shape.heads, shape.head_dim)) / 1e6
    lines = [f"{tokens:,} tokens, {shape.heads} heads of {shape.head_dim}, forward and backward:",
             f"  dense {dense:.2f} ms"]
    for density in sizes.densities:
        sparse = sum(kernels.sparse(tokens, tokens, shape.heads, shape.head_dim, density)) / 1e6
        select = kernels.select(tokens, tokens, shape.heads) / 1e6
        lines.append(f"  density {density:g}: {sparse:.2f} ms and {select:.2f} ms of selection, "
                     f"{dense / (sparse + select):.2f} times as fast")
    if not several:
        return "\n".join([*lines, f"one rank: links, overlap and communicators are those of {made.cluster.name}"])
    for name, link in (("node", made.cluster.node_link), ("network", made.cluster.network)):
        if name in made.links:
            lines.append(f"{name} link {link.gbps:.1f} GB/s and {link.latency_us:.0f} us, "
                         f"{made.cluster.overlap:.0%} hidden beside attention")
    explained = [row for row in made.measured["blocks"] if "explained_ms" in row]
    worst = max(row["ms"] - row["explained_ms"] for row in explained)
    lines.append(f"{made.cluster.communicator_mib} MiB a communicator; split blocks took up to {worst:.2f} ms more "
                 "than kernels and links explain, which became surcharges")
    return "\n".join(lines)
