"""The tables of docs/scaling.md, computed: validation, what the planner gains, projections.

``python benchmarks/bench_scaling.py`` prints them; ``--write docs/scaling.md`` puts them between the page's markers
(``--only`` one of them). No GPU is used: kernel times come from ``megatron_dsv/kernels/timings.py``.
"""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import yaml

from megatron_dsv import presets
from megatron_dsv.context_parallel import cluster as clusters
from megatron_dsv.context_parallel.cluster import Cluster
from megatron_dsv.context_parallel.geometry import Split
from megatron_dsv.context_parallel.job_layouts import Job, JobLayout
from megatron_dsv.context_parallel.kernel_rates import ARTIFACT, FittedKernels, KernelRates, MeasuredKernels
from megatron_dsv.context_parallel.model_shape import ModelShape
from megatron_dsv.context_parallel.plan import even_block
from megatron_dsv.context_parallel.planner import candidates, evaluate
from megatron_dsv.context_parallel.simulator import Refusal, Simulation, Simulator, dense_twin
from megatron_dsv.context_parallel.sparsity_traces import Trace

SIZES = [2**power for power in range(13)] + [3, 6, 12, 24]


@cache
def model(name: str) -> ModelShape:
    """A preset's shape."""
    return ModelShape.from_settings(name, yaml.safe_load(presets.path(f"model/{name}").read_text(encoding="utf-8")))


def simulator(name: str, tokens: int, batch: int, cluster: Cluster, kernels: KernelRates | None = None,
              trace: Trace | None = None, **job: object) -> Simulator:
    """A job with a built-in trace, on measured kernels unless others are given."""
    shape, trace = model(name), trace or Trace()
    made = Job(shape, tokens, batch, **job)  # type: ignore[arg-type]
    kernels = kernels or MeasuredKernels(cluster.gpu, made.q_block, made.kv_block, cluster.kernel_speed)

    @cache
    def stats(padded: int) -> list:
        return trace.stats(shape.layers, shape.heads, shape.groups, tokens=padded, q_block=made.q_block, sizes=SIZES)

    return Simulator(cluster, kernels, made, stats)


def validation() -> Iterator[str]:
    """Measured and published against predicted."""
    yield "| what | measured or published | predicted | |"
    yield "|---|---|---|---|"
    artifact: dict[str, object] = {"q_block": 32, "kv_block": 1, "predictor_stride": 0, "recompute": "none",
                                   "optimizer": False, "ema": False}
    for name, sparse, measured in (("dense", False, 2649.0), ("sparse", True, 875.0)):
        sim = simulator("dsv-2.7b", 32768, 1, clusters.load("h100x4"), ARTIFACT, Trace(cap=0.99), sparse=sparse,
                        **artifact)
        sim.allowed = (Split(4, 1),)
        ours = _ran(sim, JobLayout(1, 1, 4, 1)).step_ms
        yield (f"| artifact, 4 H100, 2.7B, 32,768 tokens, CP 4 by heads, {name} | {measured:,.0f} ms | "
               f"{ours:,.0f} ms | "
               f"{ours / measured - 1:+.1%} |")
    h200, cudnn = clusters.load("h200"), FittedKernels(32760, 12, 128, (11.7, 31.5), (0.0, 1.0), (0.0, 1.0), 1.0)
    one = _ran(simulator("wan2.1-1.3b", 32760, 1, h200.with_gpus(1), cudnn, sparse=False, recompute="full", ema=False),
               JobLayout(1, 1, 1, 1))
    yield (f"| one H200, wan2.1-1.3b, 32,760 tokens, dense on cuDNN, a step | 2,489 ms | {one.step_ms:,.0f} ms | "
           f"{one.step_ms / 2489 - 1:+.1%} (fitted) |")
    gib = sum(size for part, size in one.memory.items() if part != "base") / 2**30
    yield f"| the same, peak of torch's memory | 30.23 GiB | {gib:.2f} GiB | {gib / 30.23 - 1:+.1%} (fitted) |"
    h800 = clusters.load("h800")
    for name, claim, low, high, cases in (
            ("dsv-2.7b", "2.1 to 3.02", 2.1, 3.02, ((131072, 32, 4), (262144, 64, 8), (524288, 128, 16))),
            ("dsv-30b", "2.06 to 2.53", 2.06, 2.53, ((32768, 32, 8), (65536, 64, 8), (122880, 96, 8)))):
        for tokens, gpus, cp in cases:
            machines = dataclasses.replace(h800.with_gpus(gpus), memory_gib=1000)
            layout = JobLayout(1, 1, cp, gpus // cp)
            found = []
            for cap in (0.93, 0.95):
                sim = simulator(name, tokens, layout.dp, machines, ARTIFACT, Trace(cap=cap), q_block=32, kv_block=1,
                                predictor_stride=0, recompute="full")
                found.append(_ran(dense_twin(sim), layout).step_ms / _ran(sim, layout).step_ms)
            inside = "inside" if all(low <= ratio <= high for ratio in found[1:]) else "outside"
            yield (f"| paper, {gpus} H800, {name}, {tokens:,} tokens, CP {cp}: dense over sparse | {claim} | "
                   f"{found[0]:.2f} (cap 0.93), {found[1]:.2f} (cap 0.95) | {inside} at 0.95 |")


def planner() -> Iterator[str]:
    """One block's sparse attention under plans of one kind each."""
    yield "| cluster | spread of heads | heads first, even | heads first, balanced | sequence only | planned | chosen |"
    yield "|---|---|---|---|---|---|---|"
    for name in ("h200", "h800"):
        for spread in (0.0, 0.35, 0.9):
            sim = simulator("dsv-2.7b", 262144, 1, clusters.load(name).with_gpus(16),
                            trace=Trace(cap=0.9, spread=spread))
            problem = sim.problem(JobLayout(1, 1, 16, 1), 2**62)
            stats = sim.stats(262144)[20]
            found = {c.plan.split: c for c in candidates(problem, 0, stats, True)}
            best = candidates(problem, 0, stats, True)[0]
            even = evaluate(problem, even_block(0, Split(16, 1), tp=1, units=16, sparse=True, kv_block=64), stats)
            hybrid = min((c for split, c in found.items() if split.g_h >= 8), key=lambda c: c.cost.total)
            yield (f"| 16 {name} | {spread} | {even.total / 1e6:.1f} | {hybrid.cost.total / 1e6:.1f} | "
                   f"{found[Split(1, 16)].cost.total / 1e6:.1f} | {best.cost.total / 1e6:.1f} | "
                   f"{best.plan.g_h} x {best.plan.g_s} {best.plan.layout}, {best.plan.kv_exchange} |")


def projection() -> Iterator[str]:
    """128 GPUs, every layout tried, one sample a GPU and step: sparse against the best dense kernel."""
    yield ("| model | GPUs | tokens | dense: layout | step s | cap | sparse: layout | step s | dense over sparse | "
           "dense-equivalent MFU |")
    yield "|---|---|---|---|---|---|---|---|---|---|"
    for name in ("dsv-2.7b", "dsv-30b"):
        for cluster in (clusters.load("h800"), clusters.load("h200")):
            for tokens in (131072, 262144, 524288):
                try:
                    dense = dense_twin(simulator(name, tokens, 128, cluster)).rank(1)[0][0]
                except ValueError as error:
                    yield f"| {name} | 128 {cluster.name} | {tokens:,} | {error} | | | | | | |"
                    continue
                for cap in (0.8, 0.9, 0.95):
                    ours = simulator(name, tokens, 128, cluster, trace=Trace(cap=cap)).rank(1)[0][0]
                    yield (f"| {name} | 128 {cluster.name} | {tokens:,} | {_layout(dense)} | "
                           f"{dense.step_ms / 1e3:.1f} | {cap} | {_layout(ours)} | {ours.step_ms / 1e3:.1f} | "
                           f"{dense.step_ms / ours.step_ms:.2f} | {ours.dense_mfu:.0%} |")


TABLES: dict[str, Callable[[], Iterator[str]]] = {
    "validation": validation, "planner": planner, "projection": projection}


def main() -> None:
    """Print the tables, or write them into a page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=tuple(TABLES), default=None)
    parser.add_argument("--write", metavar="PAGE", default=None)
    args = parser.parse_args()
    for name in [args.only] if args.only else TABLES:
        start, lines = time.process_time(), []
        for line in TABLES[name]():
            print(line, flush=True)
            lines.append(line)
        print(f"({name}: {time.process_time() - start:.1f} s of one core)\n", flush=True)
        if args.write:
            page = Path(args.write)
            before, rest = page.read_text(encoding="utf-8").split(f"<!-- {name}: begin -->\n")
            after = rest.split(f"<!-- {name}: end -->")[1]
            table = "\n".join(lines)
            page.write_text(f"{before}<!-- {name}: begin -->\n{table}\n<!-- {name}: end -->{after}", encoding="utf-8")


def _ran(sim: Simulator, layout: JobLayout) -> Simulation:
    result = sim.simulate(layout)
    if isinstance(result, Refusal):
        raise ValueError(f"{layout} cannot run: {result.reason}")
    return result


def _layout(result: Simulation) -> str:
    tp, pp, cp, dp = result.layout
    return f"TP {tp} PP {pp} CP {cp} DP {dp}" + (", recomputed" if result.recompute == "full" else "")


if __name__ == "__main__":
    main()
