"""``--dsv-cp-plan planned``: solves the context-parallel plan from what the run measures, and puts it in force.

After a profile every rank joins what it knows; the first rank solves; all take the plan, or none does. Between two
profiles nothing here runs. Statistics are sums over ranks, so that all ranks hold the same; only the solution, made by
one of them, has to be told.

Dims: L layers and G key/value heads of the whole model, n of one tensor-parallel rank, C context-parallel ranks.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

from megatron_dsv.config import DSVConfig
from megatron_dsv.context_parallel.block_watch import PASSES, SELECT
from megatron_dsv.context_parallel.corrections import kind_of
from megatron_dsv.context_parallel.coverage import coverage
from megatron_dsv.context_parallel.geometry import splits
from megatron_dsv.context_parallel.plan import CPPlan
from megatron_dsv.context_parallel.plan_commit import Decision, broadcast_bytes
from megatron_dsv.context_parallel.replanner import Profile, Proposal, Replanner
from megatron_dsv.context_parallel.statistics import BlockStats
from megatron_dsv.training import head_shares
from megatron_dsv.training.cp_record import PlanningRecord
from megatron_dsv.training.cp_runtime import CPRuntime
from megatron_dsv.training.plan_log import PlanLog
from megatron_dsv.transformer.self_attention import DSVSelfAttention

_NEVER_MS = 1e30
"""Stands for a pass that no block of this rank had."""


@dataclass(frozen=True)
class PlanningGroups:
    """Ranks that planning joins.

    Attributes:
        world: all ranks of the job, which follow one plan.
        model: of one model (tensor x pipeline).
        data: that hold the same parameters (data x context).
        context: that share a sequence.
    """

    world: ProcessGroup
    model: ProcessGroup
    data: ProcessGroup
    context: ProcessGroup


class CPPlanning:
    """Owns when the plan changes. Every rank has one and calls it alike.

    Args:
        runtime: process groups and the plan in force.
        replanner: solves plans; only the first rank of ``groups.world`` asks it.
        attentions: of this rank, by global layer number from 1.
        dsv: configuration.
        args: parsed arguments, which carry the record into checkpoints.
        groups: process groups.
        log: says what was decided.
        layers, heads, kv_heads: of the whole model.
        windows: share of the keys that the window baseline keeps in each bucket; None without windows.
    """

    def __init__(self, runtime: CPRuntime, replanner: Replanner, attentions: Mapping[int, DSVSelfAttention],
                 dsv: DSVConfig, args: argparse.Namespace, groups: PlanningGroups, log: PlanLog, *, layers: int,
                 heads: int, kv_heads: int, windows: Sequence[float] | None = None) -> None:
        self.runtime, self.replanner, self.attentions = runtime, replanner, attentions
        self.dsv, self.groups, self.log = dsv, groups, log
        self.layers, self.heads, self.kv_heads = layers, heads, kv_heads
        self._args, self._windows = args, windows
        self.record = PlanningRecord(runtime.store.plan, calibration=replanner.calibration_digest)
        self._fresh = replanner.states[0]
        self._first_profile = True
        self._tokens = 0

    @property
    def device(self) -> torch.device:
        """Where messages live."""
        return self.runtime.manager.device

    def begin_run(self, stored: str | None, step: int, *, measured_otherwise: bool = False) -> None:
        """Takes up the plan of the checkpoint, or solves the first one; after the checkpoint is loaded.

        Args:
            stored: the record among the checkpoint's arguments; None if there is none. What the first rank read counts.
            step: finished steps of the run.
            measured_otherwise: the checkpoint's selections were of other groups, blocks or budgets; here, too, what
                the first rank read counts.
        """
        text, otherwise = json.loads(self._broadcast(json.dumps([stored, measured_otherwise]).encode()))
        if text:
            found, reason = self._restored(text, otherwise)
            by = -1
            if found is not None:
                decision = self._propose(found.plan)
                if decision.committed:
                    self.record = found
                    self.replanner.states = found.states(self._fresh, len(self.replanner.buckets))
                    self._remember(step=found.replanned_at)
                    self.log.resumed(found.plan, step)
                    return
                reason, by = decision.reason, decision.refused_by
            self.log.not_resumed(reason, step, by=by)
        self._replan(step)

    def begin_micro_batch(self, *, profiles: bool, tokens: int) -> None:
        """Before a training micro-batch's forward; in a profiled step, blocks are watched.

        Args:
            profiles: whether the step is profiled.
            tokens: of its samples, padding included.
        """
        self._tokens = tokens
        if profiles and not self.runtime.manager.watch.active:
            self.runtime.manager.watch.start()

    def end_step(self, step: int) -> None:
        """Between two steps, once statistics are up to date; acts after a profiled one.

        Args:
            step: finished steps of the run.
        """
        watch = self.runtime.manager.watch
        if not watch.active:
            return
        watch.stop()
        self._learn_coverage()
        profile = self._profile()
        # The first profiled step of a launch also compiles kernels.
        is_solved = self.runtime.store.plan.buckets == self.replanner.buckets
        if is_solved and not self._first_profile:
            self._compare_times(profile, step)
        self._first_profile = False
        turned = not is_solved or any(
            block.sparse != sparse for row, flags in zip(self.runtime.store.plan.blocks, profile.sparse)
            for block, sparse in zip(row, flags))
        if turned or step - self.record.replanned_at >= (self.dsv.dsv_cp_replan_interval or 1):
            self._replan(step, profile)
        else:
            self._remember(step=self.record.replanned_at)

    def _restored(self, text: str, measured_otherwise: bool) -> tuple[PlanningRecord | None, str]:
        """(the record whose plan this job could take up, why it cannot); statistics are taken up in any case."""
        try:
            found = PlanningRecord.read(text)
        except ValueError as error:
            return None, str(error)
        self.replanner.last_version = found.plan.version
        others = found.plan.kv_blocks - {self.dsv.dsv_kv_block_size}
        if not others and not measured_otherwise and all(
                layer < self.layers and all(len(row) == self.kv_heads for row in rows.values())
                for layer, rows in found.coverage.items()):
            self.record.coverage = found.coverage
        if found.calibration == self.replanner.calibration_digest:
            self.record.corrections = found.corrections
            if self.dsv.corrects_costs:
                self.replanner.corrections = found.corrections
        found.coverage, found.corrections = self.record.coverage, self.record.corrections
        found.calibration = self.replanner.calibration_digest
        if found.plan.topo != self.runtime.store.plan.topo:
            return None, (f"it was made for {found.plan.topo.words}, the job runs "
                          f"{self.runtime.store.plan.topo.words}")
        if others:
            return None, (f"it was made for key blocks of {', '.join(map(str, sorted(others)))}, the job selects "
                          f"blocks of {self.dsv.dsv_kv_block_size}")
        if measured_otherwise:
            return None, "the statistics that it was solved from are measured anew"
        if found.plan.buckets != self.replanner.buckets:
            return None, "it was made for other sequence lengths than those of the data set"
        return found, ""

    def _replan(self, step: int, profile: Profile | None = None) -> None:
        started = time.perf_counter()
        profile = self._profile() if profile is None else profile
        store = self.runtime.store
        proposal: Proposal | None = None
        failure, before = "", store.plan
        if self.groups.world.rank() == 0:
            try:
                proposal = self.replanner.solve(before, profile, step)
            except ValueError as error:
                failure = str(error)
        states = self.replanner.states if proposal is None else proposal.states
        said = json.loads(self._broadcast(json.dumps({
            "proposes": None if proposal is None else proposal.plan.version, "failure": failure,
            "waited": [list(state.waited) for state in states]}).encode()))
        takes_effect = True
        if said["proposes"] is not None:
            decision = self._propose(None if proposal is None else proposal.plan)
            takes_effect = decision.committed
            seconds = time.perf_counter() - started
            self.log.decided(before, store.plan, proposal, decision, version=said["proposes"], step=step,
                             seconds=seconds)
        elif said["failure"]:
            self.log.failed(before, said["failure"], step)
        if takes_effect:
            # A refused proposal is made again at the next profile: until then nothing was decided.
            self.replanner.states = tuple(replace(state, waited=tuple(waited))
                                          for state, waited in zip(self.replanner.states, said["waited"]))
        self._remember(step=step)

    def _propose(self, plan: CPPlan | None) -> Decision:
        leads = self.groups.world.rank() == 0
        return self.runtime.store.propose(plan if leads else None, self.groups.world)

    def _broadcast(self, payload: bytes) -> bytes:
        leads = self.groups.world.rank() == 0
        return broadcast_bytes(payload if leads else None, self.groups.world, self.device,
                             what=f"plan {self.runtime.store.plan.version} in force")

    def _remember(self, *, step: int) -> None:
        self.record.plan, self.record.replanned_at = self.runtime.store.plan, step
        if self.dsv.corrects_costs:
            self.record.corrections = self.replanner.corrections
        self.record.waited = [list(state.waited) for state in self.replanner.states]
        self.record.keep(self._args)

    def _profile(self) -> Profile:
        """What is known of all heads, for every bucket."""
        shares = head_shares.gather(
            self.attentions, [high for _, high in self.replanner.buckets], layers=self.layers, heads=self.heads,
            model_group=self.groups.model, device=self.device, windows=self._windows)
        return Profile(tuple(tuple(self._stats(layer, kept) for layer, kept in enumerate(row)) for row in shares.kept),
                       shares.sparse)

    def _stats(self, layer: int, kept: tuple[float, ...]) -> BlockStats:
        rows = self.record.coverage.get(layer, {})
        return BlockStats(kept, tuple((ranks, tuple(rows[ranks])) for ranks in sorted(rows)))

    def _learn_coverage(self) -> None:
        """Adds what the watched selections would exchange to the running means."""
        manager = self.runtime.manager
        sizes = sorted({split.g_s for split in splits(manager.size, manager.size)} - {1})
        # One more column counts the ranks that know the layer.
        table = torch.zeros(self.layers, len(sizes), self.kv_heads + 1, device=self.device)
        for number, attention in self.attentions.items():
            if number - 1 not in manager.watch.seen:
                continue
            joined = self._joined_needs(number - 1)
            heads = attention.selector.query_heads
            first = heads.start * self.kv_heads // self.heads
            for place, (_, row) in enumerate(coverage(joined).items()):
                table[number - 1, place, first:first + len(row)] = row
                table[number - 1, place, -1] = float(heads.start == 0)
        for group in (self.groups.data, self.groups.model):
            torch.distributed.all_reduce(table, group=group)
        replicas = self.groups.data.size()
        momentum = self.dsv.dsv_profile_momentum
        seen_layers = {layer: rows for layer, rows in enumerate(table.tolist()) if rows[0][-1]}
        # Until now they were planned as if all keys travelled.
        self.replanner.hurry(seen_layers.keys() - self.record.coverage.keys(), of=self.layers)
        for layer, rows in seen_layers.items():
            for ranks, row in zip(sizes, rows):
                seen = [min(1.0, share / replicas) for share in row[:-1]]
                old = self.record.coverage.setdefault(layer, {}).get(ranks, seen)
                self.record.coverage[layer][ranks] = [momentum * a + (1 - momentum) * b for a, b in zip(old, seen)]

    def _joined_needs(self, layer: int) -> Tensor:
        """uint8 [n, C, Nk] of a layer: every rank adds the heads and chunks of queries that it computes."""
        manager = self.runtime.manager
        seen = manager.watch.seen[layer]
        heads = self.attentions[layer + 1].selector.query_heads
        plan, tp_rank = seen.plan, heads.start // len(heads)
        joined = torch.zeros(plan.units, manager.size, seen.blocks, dtype=torch.uint8, device=self.device)
        if seen.needs is not None:
            units = sorted(plan.units_of(tp_rank, plan.split.h_rank(manager.rank)))
            for row, unit in zip(seen.needs, units):
                joined[unit, list(plan.split.h_group(manager.rank))] = row
        return manager.all_reduce(joined, "needed blocks of all ranks")

    def _compare_times(self, profile: Profile, step: int) -> None:
        """Logs the time that the watched blocks took beside the predicted one, and corrects the costs by it if asked.

        A rank that comes early waits for the others inside its span: of those that share a sequence, the one that took
        least came last and tells how long the pass was. Of replicas, the slowest counts. A layer that attended
        otherwise than its plan says, as its gate opened since, tells nothing of that kind of block.
        """
        plan = self.runtime.store.plan
        bucket = plan.bucket(self._tokens)
        passes = torch.full((self.layers, len(PASSES)), _NEVER_MS, device=self.device)
        for layer, spans in self.runtime.manager.watch.milliseconds().items():
            for which, ms in spans.items():
                passes[layer, PASSES.index(which)] = ms
        torch.distributed.all_reduce(passes, op=torch.distributed.ReduceOp.MIN, group=self.groups.context)
        known = passes != _NEVER_MS
        # Beside the sum, whether the layer selected anything, which a dense one does not.
        times = torch.stack((passes.masked_fill(~known, 0.0).sum(-1), known[:, PASSES.index(SELECT)].float()), 1)
        torch.distributed.all_reduce(times, op=torch.distributed.ReduceOp.MAX, group=self.groups.world)
        predicted = self.replanner.predicted_ms(plan, profile, bucket, tokens=self._tokens)
        sums: dict[str, tuple[float, float]] = {}
        for block, (measured, selected), expected in zip(plan.blocks[bucket], times.tolist(), predicted):
            if measured > 0 and block.sparse == bool(selected):
                kind = kind_of(block.split, block.sparse)
                before = sums.get(kind, (0.0, 0.0))
                sums[kind] = before[0] + measured, before[1] + expected
        if self.dsv.corrects_costs:
            for kind, pair in sorted(sums.items()):
                self.replanner.corrections = self.replanner.corrections.observe(kind, *pair)
        if sums:
            self.log.measured(sums, self.replanner.corrections.stale, step)
