"""What ``dsv plan`` prints and writes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from megatron_dsv.context_parallel.job_layouts import topology
from megatron_dsv.context_parallel.plan import CPPlan
from megatron_dsv.context_parallel.simulator import Simulation, Simulator
from megatron_dsv.context_parallel.statistics import BlockStats, digest

GIB = 2**30


def ranking(simulator: Simulator, found: Sequence[Simulation], refused: int, dense: Simulation | None) -> str:
    """The layouts found, fastest first, and the best dense one."""
    job, cluster = simulator.job, simulator.cluster
    lines = [f"{job.model.name}, {job.tokens:,} tokens, global batch {job.global_batch}, {cluster.gpus} GPUs of "
             f"{cluster.name}; {refused} layouts cannot run",
             f"{'layout':32} {'step s':>9} {'tokens/s':>11} {'MFU':>6} {'dense-eq':>8} {'GiB':>6}  recompute  splits"]
    rows = [("", result) for result in found] + ([("dense: ", dense)] if dense else [])
    for prefix, result in rows:
        lines.append(f"{prefix + str(result.layout):32} {result.step_ms / 1e3:9.3f} {result.tokens_per_s:11,.0f} "
                     f"{result.mfu:6.1%} {result.dense_mfu:8.1%} {sum(result.memory.values()) / GIB:6.1f}  "
                     f"{result.recompute:9}  {splits(result)}")
    if dense:
        lines.append(f"{dense.step_ms / found[0].step_ms:.2f} times as fast as the best dense layout")
    return "\n".join(lines)


def splits(result: Simulation) -> str:
    """How many blocks take which split, and how many are dense."""
    counts: dict[str, int] = {}
    for block in result.blocks:
        text = f"{block.g_h}x{block.g_s}" + (" s-inner" if block.layout == "s_inner" else "")
        counts[text] = counts.get(text, 0) + 1
    dense = sum(not block.sparse for block in result.blocks)
    return ", ".join(f"{count} of {text}" for text, count in counts.items()) + f"; {dense} dense"


def summary(result: Simulation) -> str:
    """Where the time and the memory of a step go."""
    times = sorted(result.times._asdict().items(), key=lambda row: -row[1])
    memory = sorted(result.memory.items(), key=lambda row: -row[1])
    return "\n".join((
        "  time, ms: " + ", ".join(f"{name.replace('_', ' ')} {ms:,.1f}" for name, ms in times if ms >= 0.05),
        "  memory, GiB: " + ", ".join(f"{name} {size / GIB:.1f}" for name, size in memory if size >= GIB / 20)))


def by_block(result: Simulation, stats: Sequence[BlockStats]) -> str:
    """The plan of every block: equal neighbours on one line."""
    lines = [f"  {'blocks':9} {'split':16} {'attention':9} {'kept':>6} {'exchange':10} {'stages':>6} "
             f"{'units a rank':16} {'ms':>8}"]
    rows: list[tuple[list[int], str]] = []
    for block, cost in zip(result.blocks, result.costs):
        kept = sum(stats[block.layer].density) / len(stats[block.layer].density) if block.sparse else 1.0
        sizes = sorted(count for row in block.unit_splits for count in row)
        units = f"{sizes[0]}" if sizes[0] == sizes[-1] else f"{sizes[0]}..{sizes[-1]}"
        text = (f"{f'{block.g_h} x {block.g_s} {block.layout}':16} {'sparse' if block.sparse else 'dense':9} "
                f"{kept:6.3f} {block.kv_exchange:10} {block.stages:6} {units:16} {cost.total / 1e6:8.2f}")
        if rows and rows[-1][1] == text:
            rows[-1][0][1] = block.layer
        else:
            rows.append(([block.layer, block.layer], text))
    lines += [f"  {f'{first}' if first == last else f'{first}-{last}':9} {text}" for (first, last), text in rows]
    return "\n".join(lines)


def as_data(simulator: Simulator, found: Sequence[Simulation], dense: Simulation | None) -> dict[str, Any]:
    """Everything as JSON's types; the fastest layout's plan as ``CPPlan`` reads it."""
    job, best = simulator.job, found[0]
    plan = CPPlan(0, 0, topology(best.layout, simulator.cluster), ((1, job.padded_tokens(best.layout)),),
                  (best.blocks,), digest(simulator.stats(job.padded_tokens(best.layout))), "",
                  (sum(cost.total for cost in best.costs),))
    return {"model": job.model.name, "tokens": job.tokens, "global_batch": job.global_batch,
            "cluster": simulator.cluster.name, "gpus": simulator.cluster.gpus, "plan": plan.to_json(),
            "layouts": [_row(result) for result in found], "dense": _row(dense) if dense else None}


def _row(result: Simulation) -> dict[str, Any]:
    return {"layout": result.layout._asdict(), "recompute": result.recompute, "step_ms": result.step_ms,
            "times_ms": result.times._asdict(), "memory_bytes": result.memory, "mfu": result.mfu,
            "dense_mfu": result.dense_mfu, "tokens_per_s": result.tokens_per_s}
