"""The training program with a schedule of context-parallel plans: several plans are timed in one launch.

    torchrun --nproc-per-node 2 benchmarks/cp/scheduled_pretrain.py SCHEDULE.json [flags of pretrain_video_dit.py]

Between two steps, where training itself may change plans, the schedule's next plan is proposed, voted and committed;
everything else is the program as it is. Budgets of heads come from the schedule, too: those of a random model, which
its first step profiles, mean nothing.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from cp.train_cases import Case, densities, plan_of
from megatron_dsv.sparsity.profile import FIELDS
from megatron_dsv.training.main import main
from megatron_dsv.training.run import TrainingRun


class Schedule:
    """What happens before which step.

    Args:
        case: the launch.
    """

    def __init__(self, case: Case) -> None:
        self.case = case
        self.arm: str | None = None

    def before(self, run: TrainingRun, step: int) -> None:
        """Puts the step's arm in force; every rank calls it alike."""
        if step >= self.case.steps:
            self._report(self.arm)
            return
        self._set_budgets(run)
        arm = self.case.arm_at(step)
        if arm == self.arm:
            return
        self._report(self.arm)
        self.arm = arm
        if run.cp is None or dist.get_world_size() == 1:
            return
        store = run.cp.store
        proposal = None
        if dist.get_rank() == 0:
            blocks = tuple(plan_of(arm, self.case, store.plan.topo, layers=run.args.num_layers, tokens=high)
                           for _, high in store.plan.buckets)
            proposal = replace(store.plan, version=store.plan.version + 1, effective_step=step, blocks=blocks,
                               predicted_ns=())
        decision = store.propose(proposal, dist.group.WORLD)
        if not decision.committed:
            raise RuntimeError(f"plan {arm} was refused by rank {decision.refused_by}: {decision.reason}")

    def _set_budgets(self, run: TrainingRun) -> None:
        if self.case.sparsity is None or run.controller is None:
            return
        for number, attention in run.controller.attentions.items():
            statistics = attention.statistics
            shares = densities(self.case.sparsity, run.args.num_attention_heads, number - 1)
            local = torch.tensor([shares[head] for head in attention.selector.query_heads])
            kept = sum(shares) / len(shares)
            running = torch.stack([{"block_fraction": local, "sparsity": 1 - local}.get(name, torch.ones_like(local))
                                   for name in FIELDS]).to(statistics.running().device)
            means = running.new_tensor([{"block_fraction": kept, "sparsity": 1 - kept}.get(name, 1.0)
                                        for name in FIELDS])
            statistics.update(running, means, statistics.state())

    def _report(self, arm: str | None) -> None:
        """Peak memory since the arm began, on the fullest rank."""
        if not torch.cuda.is_available():
            return
        peak = torch.tensor([torch.cuda.max_memory_allocated() / 2**30], device="cuda")
        dist.all_reduce(peak, op=dist.ReduceOp.MAX)
        if arm is not None and dist.get_rank() == 0:
            print(f"ARM {json.dumps({'arm': arm, 'peak_gib': round(float(peak), 3)})}", flush=True)
        torch.cuda.reset_peak_memory_stats()


def run_scheduled(argv: Sequence[str]) -> None:
    """Trains as ``argv[1:]`` says, under the schedule in the file ``argv[0]``."""
    schedule = Schedule(Case.from_json(Path(argv[0]).read_text(encoding="utf-8")))

    def plan_next_step(run: TrainingRun, step: int, *rest: Any) -> None:
        schedule.before(run, step)

    TrainingRun.plan_next_step = plan_next_step  # type: ignore[method-assign]
    main(list(argv[1:]))


if __name__ == "__main__":
    run_scheduled(sys.argv[1:])
