"""One attention block over all ranks, every way to split it, predicted and then measured.

An arm is one way to compute the block of one sparsity: on one GPU, or over all ranks under a plan. What it takes is
predicted from statistics and a calibration at other lengths before any arm runs.
"""

from __future__ import annotations

import functools
import gc
import json
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cp.gate import GateError, Reference, check_lists, whole_mask
from cp.replay import Tape, TapedManager
from megatron_dsv.context_parallel.calibration import Calibration
from megatron_dsv.context_parallel.geometry import Split
from megatron_dsv.context_parallel.groups import CPGroupManager
from megatron_dsv.context_parallel.hybrid_cp import HybridScheme
from megatron_dsv.context_parallel.local import LocalScheme
from megatron_dsv.context_parallel.microbenchmarks import HEAD_SPREAD
from megatron_dsv.context_parallel.partial_attention import Kernels
from megatron_dsv.context_parallel.plan import BlockPlan, Topology, even_block
from megatron_dsv.context_parallel.planner import candidates
from megatron_dsv.context_parallel.sparsity_traces import spread_heads
from megatron_dsv.context_parallel.statistics import BlockStats
from megatron_dsv.context_parallel.stopwatch import Mark, Program, Stopwatch, Times
from megatron_dsv.context_parallel.trial_block import (
    TrialBlock,
    TrialInputs,
    TrialShape,
    make_inputs,
)
from megatron_dsv.context_parallel.trial_predictions import (
    alone_ns,
    mean_coverage,
    predicted_ns,
    problem,
    stats_of,
)

ALONE = "one GPU"
PLANNED = "planned"
LIMIT = 0.15
"""Largest share by which a measured time may miss its prediction."""
_ANY_MEMORY = 2**62


@dataclass
class Arm:
    """One way to compute one block.

    Attributes:
        name: "one GPU", "(1, 2)", ..., "planned".
        sparsity: mean over heads; None for dense attention.
        plan: None on one GPU.
        block: what runs.
        tape: of its exchanges; None on one GPU.
        predicted_ms: before anything ran.
        facts: what checks and counts found.
    """

    name: str
    sparsity: float | None
    plan: BlockPlan | None
    block: TrialBlock
    tape: Tape | None
    predicted_ms: float
    facts: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        kind = "dense" if self.sparsity is None else f"sparsity {self.sparsity:g}"
        return f"{kind}, {self.name}"

    @property
    def plan_text(self) -> str:
        """The plan in a few words."""
        if self.plan is None:
            return self.name
        text = f"({self.plan.g_h}, {self.plan.g_s}) {self.plan.kv_exchange}"
        if self.name == PLANNED:
            text = f"{PLANNED} {text} heads {[list(row) for row in self.plan.loads(0)]}"
        return text

    def live(self, mark: Mark) -> None:
        """One iteration with its exchanges."""
        if self.tape is not None:
            self.tape.live()
        self.block.iterate(mark)

    def replayed(self, mark: Mark) -> None:
        """One iteration whose exchanges are local copies."""
        assert self.tape is not None
        self.tape.replay()
        self.block.iterate(mark)


@dataclass
class BlockBench:
    """The benchmark on one rank; all ranks run it together.

    Args:
        shape: of the block.
        calibration: measured at other lengths.
        group: all ranks.
        device: of this rank.
        dtype: of all tensors.
        kernels: backends.
        seconds: of work for every timed program.
        say: prints, on one rank.
    """

    shape: TrialShape
    calibration: Calibration
    group: dist.ProcessGroup
    device: torch.device
    dtype: torch.dtype
    kernels: Kernels
    seconds: float
    say: Callable[[str], None]
    failures: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.ranks, self.rank = self.group.size(), self.group.rank()
        self.topo = Topology(self.ranks, domain=self.ranks)
        self.watch = Stopwatch(self.device, self.group)
        self.model = self.calibration.cost_model(_ANY_MEMORY)
        whole = make_inputs(self.shape, self.device, self.dtype)
        for x in (whole.x, whole.weight, whole.q, whole.k, whole.v, whole.dout):
            # Ranks must agree to the last bit, whatever their devices drew.
            dist.broadcast(x.detach(), dist.get_process_group_ranks(self.group)[0], group=self.group)
        self.whole, self.mine = whole, whole.share(self.rank, self.ranks)
        self.splits = [Split(1, self.ranks), Split(self.ranks, 1)]
        self.manager = CPGroupManager(self.group, node_ranks=self.ranks, device=self.device)
        self.manager.prepare(self.splits)

    def arms(self, sparsity: float | None) -> list[Arm]:
        """All arms of one sparsity with their predictions. Nothing is timed."""
        shape, sparse = self.shape, sparsity is not None
        budgets = shape.budgets(spread_heads(1 - sparsity, shape.heads, HEAD_SPREAD)) if sparse else None
        shares = [budget / shape.blocks for budget in budgets] if budgets else [1.0] * shape.heads
        plans = {f"({split.g_h}, {split.g_s})": even_block(0, split, tp=1, units=shape.heads, sparse=sparse,
                                                            kv_block=shape.kv_block) for split in self.splits}
        scheme = HybridScheme(self.manager, range(shape.heads), tp_rank=0, proxies=shape.proxies, kernels=self.kernels)
        along = TrialBlock(shape, self.mine, scheme, budgets, plans[f"(1, {self.ranks})"])
        stats = stats_of(shares, along if sparse else None, self.manager)
        if sparse:
            # Dense heads are alike: a plan can only be one of the splits above.
            plans[PLANNED] = candidates(problem(self.model, shape, self.topo), 0, stats, sparse)[0].plan
        alone = LocalScheme(range(shape.heads), shape.proxies, self.kernels)
        arms = [Arm(ALONE, sparsity, None, TrialBlock(shape, self.whole, alone, budgets), None,
                    alone_ns(self.calibration.kernels, shape, shares if sparse else None) / 1e6)]
        arms += [self._arm(name, sparsity, plan, budgets, stats) for name, plan in plans.items()]
        for arm in arms:
            arm.facts["density"] = round(sum(shares) / shape.heads, 5)
            arm.facts["coverage"] = round(mean_coverage(stats, self.ranks), 4)
        return arms

    def _arm(self, name: str, sparsity: float | None, plan: BlockPlan, budgets: tuple[int, ...] | None,
             stats: BlockStats) -> Arm:
        tape = Tape()
        manager = TapedManager(self.group, node_ranks=self.ranks, device=self.device, tape=tape)
        manager.prepare([plan.split])
        scheme = HybridScheme(manager, range(self.shape.heads), tp_rank=0, proxies=self.shape.proxies,
                              kernels=self.kernels)
        return Arm(name, sparsity, plan, TrialBlock(self.shape, self.mine, scheme, budgets, plan), tape,
                   predicted_ns(self.model, self.shape, self.topo, plan, stats) / 1e6)

    def write_predictions(self, arms: list[Arm], path: Path | None) -> None:
        """The predictions of all arms, before any of them runs."""
        rows = [{"tokens": self.shape.tokens, "sparsity": arm.sparsity or 0.0, "plan": arm.plan_text,
                 "predicted_ms": round(arm.predicted_ms, 4), **arm.facts} for arm in arms]
        for row in rows:
            self.say(f"# predicted {row['predicted_ms']:9.3f} ms: sparsity {row['sparsity']:g}, {row['plan']}")
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({"calibration": self.calibration.digest, "written": time.time(), "rows": rows},
                                       indent=1) + "\n", encoding="utf-8")

    def measure(self, arms: list[Arm], beside: Arm | None) -> list[dict[str, Any]]:
        """Rows of the arms of one sparsity whose gates are green; ``beside`` takes turns with them."""
        green = self._gates(arms)
        programs: dict[str, Program] = {}
        for arm in green:
            programs[arm.name] = arm.live
            if arm.tape is not None and self._all(functools.partial(self._record, arm), f"{arm}, recording"):
                programs[f"{arm.name} replayed"] = arm.replayed
        if beside is not None:
            programs["beside"] = beside.live
        times = self.watch.run(programs, self.seconds)
        warm = self.watch.agreed(times["beside"].total()) if beside is not None else None
        rows = [self._row(arm, times, warm) for arm in green]
        for arm in arms:
            if arm.tape is not None:
                arm.tape.clear()
        gc.collect()
        if self.device.type == "cuda":
            torch.cuda.empty_cache()
        return rows

    def _gates(self, arms: list[Arm]) -> list[Arm]:
        """The arms whose results are right on every rank."""
        references: dict[str, Reference] = {}
        green = []
        for arm in arms:
            started = time.monotonic()
            if self._all(functools.partial(self._gate, arm, arms[0], references), f"gate of {arm}"):
                green.append(arm)
                self.say(f"# gate green in {time.monotonic() - started:.1f} s: {arm} {arm.facts}")
            references = references if arm.sparsity is None else {}
        return green

    def _gate(self, arm: Arm, alone: Arm, references: dict[str, Reference]) -> None:
        """Raises GateError unless the arm is right on this rank."""
        pending = arm.block.begin()
        mask = None
        if arm.block.budgets is not None:
            mask = whole_mask(arm.block, pending.selection, self.ranks, self.rank, self.group)
            own = mask if arm.plan is None else \
                whole_mask(alone.block, alone.block.begin().selection, self.ranks, self.rank, None)
            arm.facts["agreement"] = round(check_lists(mask, own, tuple(arm.block.budgets), str(arm)), 6)
        if "reference" not in references:
            references["reference"] = Reference(self.shape, self.whole, mask, dense_backend=self.kernels.dense_backend,
                                                sparse_backend=self.kernels.sparse_backend)
        out = arm.block.attend(pending)
        got = (out.detach(), *arm.block.gradients(out))
        rank, ranks = (0, 1) if arm.plan is None else (self.rank, self.ranks)
        parts = 1 if arm.plan is None or arm.plan.g_s == 1 else 1 + min(arm.plan.stages, arm.plan.g_s - 1)
        worst = references["reference"].check_share(got, rank, ranks, parts, str(arm))
        arm.facts["worst_error"] = float(f"{worst:.3g}")

    def _record(self, arm: Arm) -> None:
        """One recorded iteration; its replay must give the same output."""
        assert arm.tape is not None
        arm.tape.record()
        first = arm.block.attend(arm.block.begin())
        arm.block.gradients(first)
        arm.facts["exchanged_mib"] = round(sum(x.numel() * x.element_size() for _, x in arm.tape.kept) / 2**20, 1)
        arm.tape.replay()
        again = arm.block.attend(arm.block.begin())
        arm.block.gradients(again)
        if not torch.equal(first, again):
            raise GateError(f"{arm}: with exchanges replaced by copies the output differs")

    def _all(self, work: Callable[[], None], what: str) -> bool:
        """Whether ``work`` succeeded on every rank; a failure anywhere is noted on all."""
        problem_text = ""
        try:
            work()
        except Exception as error:
            problem_text = str(error) if isinstance(error, GateError) else "".join(traceback.format_exception(error))
            print(f"# FAILED on rank {self.rank}: {what}: {problem_text}", file=sys.stderr, flush=True)
        if self.watch.agreed(float(bool(problem_text))) == 0.0:
            return True
        self.failures.append(f"{what}: {problem_text.strip().splitlines()[-1] if problem_text else 'on another rank'}")
        return False

    def _row(self, arm: Arm, times: dict[str, Times], beside_ms: float | None) -> dict[str, Any]:
        total, stages = self.watch.agreed_times(times[arm.name], len(TrialBlock.stages))
        replayed = times.get(f"{arm.name} replayed")
        exposed = None if replayed is None else total - self.watch.agreed(replayed.total())
        row = {
            "case": "block", "tokens": self.shape.tokens, "sparsity": arm.sparsity or 0.0, "plan": arm.plan_text,
            "ranks": 1 if arm.plan is None else self.ranks, "measured_ms": round(total, 3),
            "predicted_ms": round(arm.predicted_ms, 3), "error": round(total / arm.predicted_ms - 1, 4),
            "exposed_comm_ms": None if exposed is None else round(exposed, 3),
            "mib_per_communicator": self.calibration.cluster.communicator_mib if self.device.type == "cuda" else None,
            "peak_gib": self._peak_gib(arm),
            **{f"{name}_ms": round(ms, 3) for name, ms in zip(TrialBlock.stages, stages)},
            "dense_backend": self.kernels.dense_backend, "sparse_backend": self.kernels.sparse_backend,
            "dense_beside_ms": None if beside_ms is None else round(beside_ms, 3), **arm.facts,
            "iterations": len(times[arm.name].rows), "sustained_s": round(times[arm.name].seconds, 2)}
        self.say(f"{row['sparsity']:>5g} {row['plan'][:40]:<40} {total:9.3f} ms, predicted {arm.predicted_ms:9.3f} "
                 f"({row['error']:+.1%}), exposed {row['exposed_comm_ms']} ms, peak {row['peak_gib']} GiB "
                 f"[{', '.join(f'{ms:.2f}' for ms in stages)}]")
        return row

    def _peak_gib(self, arm: Arm) -> float | None:
        """GiB of one iteration, its inputs included; None without CUDA."""
        if self.device.type != "cuda":
            return None
        inputs = self.whole if arm.plan is None else self.mine
        self.watch.wait()
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        arm.live(lambda: None)
        self.watch.wait()
        used = torch.cuda.max_memory_allocated(self.device) - before + nbytes(inputs)
        return round(self.watch.agreed(used / 2**30), 3)


def nbytes(inputs: TrialInputs) -> int:
    """Bytes of one rank's inputs."""
    tensors: list[Tensor] = [inputs.x, inputs.weight, inputs.q, inputs.k, inputs.v, inputs.dout]
    return sum(x.numel() * x.element_size() for x in tensors)
