"""Drives DSV once a step: predictor updates, profiles, the dense -> sparse gate. It reaches Megatron through one hook.

Dims: h heads of one tensor-parallel rank.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from megatron_dsv.config import DSVConfig
from megatron_dsv.metrics import Recorder
from megatron_dsv.sparsity.profile import FIELDS as STATISTICS
from megatron_dsv.sparsity.profile import GroupProfile, update_running
from megatron_dsv.sparsity.schedule import LayerState, Stage, advance, profile_due
from megatron_dsv.training.model_identity import MeasuredOtherwise
from megatron_dsv.training.predictor_optimizer import PredictorOptimizer
from megatron_dsv.training.profile_steps import ProfileSteps
from megatron_dsv.transformer.self_attention import DSVSelfAttention


@dataclass(frozen=True)
class DSVGroups:
    """The process groups that DSV reduces over.

    Attributes:
        data: ranks that hold the same model parameters (data x context parallel).
        tensor: tensor-parallel ranks of one layer.
        pipeline: pipeline stages of one model.
        model: all ranks of one model (tensor x pipeline).
        context_size: ranks of ``data`` that share each sample (context parallel).
    """

    data: ProcessGroup
    tensor: ProcessGroup
    pipeline: ProcessGroup
    model: ProcessGroup
    context_size: int = 1


@dataclass(frozen=True)
class LayerReport:
    """One layer's numbers, for the log; NaN where nothing was measured."""

    layer: int
    sparse: bool
    sparsity: float
    keep_ratio: float
    recall: float


class DSVController:
    """Owns nothing but the order of events; state lives in the layers, so checkpoints carry it.

    Args:
        model: the model chunks of this rank (wrapped or not).
        dsv: the sparse-attention configuration.
        groups: process groups.
        num_layers: of the whole model.
        recorder: takes the numbers of each step for the log.
        profile_steps: which steps may be profiled; None for all of them.

    Attributes:
        profiles_now: whether the step under way is profiled.
        profiled_at: the last step that was, None before the first of this launch.
        profiled_tokens: real tokens of a sample that ``layer_reports`` speak of: those of the last profile.
        layer_reports: of the last profile.
        step_reports: the same statistics, for a sequence of the last step's length: a layer may be sparse at one
            length and dense at another.
    """

    def __init__(self, model: Iterable[nn.Module], dsv: DSVConfig, groups: DSVGroups, num_layers: int,
                 recorder: Recorder, profile_steps: ProfileSteps | None = None) -> None:
        self.dsv = dsv
        self.groups = groups
        self.num_layers = num_layers
        self.recorder = recorder
        self._profile_steps = profile_steps
        found = [module for chunk in model for module in chunk.modules() if isinstance(module, DSVSelfAttention)]
        self.attentions = {module.layer_number: module for module in found}
        if len(self.attentions) < len(found):
            raise NotImplementedError("DSVController drives one stack of layers with numbers of their own; give each "
                                      "TransformerBlock a controller")
        predictors = {number: attention.predictor for number, attention in self.attentions.items()
                      if attention.predictor is not None}
        self.optimizer = PredictorOptimizer(
            predictors, data_group=groups.data, tensor_group=groups.tensor, model_group=groups.model,
            context_size=groups.context_size, weight_decay=dsv.dsv_predictor_weight_decay,
            clip_grad=dsv.dsv_predictor_clip_grad) if predictors else None
        self.num_tokens = 0
        self.profiled_at: int | None = None
        self.profiled_tokens: int | None = None if profile_steps is None else profile_steps.longest
        self.layer_reports: list[LayerReport] = []
        self.step_reports: list[LayerReport] = []
        self._reports: dict[int, list[LayerReport]] = {}
        self._decided: dict[int, tuple[bool, bool]] = {}
        self._step: int | None = None
        self._lacks_profile = False
        self.profiles_now = False

    def begin_run(self, others: MeasuredOtherwise | None = None) -> None:
        """To be called once, after a checkpoint is loaded and before the first step, by every rank.

        If some layer of the model has no budget yet, or statistics that are not of this run's measure, the first step
        that may be profiled is. The ranks agree on that here, since collectives follow from it and pipeline stages
        reach a step's first forward one after the other.

        Args:
            others: statistics of the checkpoint that this run must not take over; they are forgotten.
        """
        if self.optimizer is None:
            return
        layers = self.attentions.values()
        missing = any(attention.selector.budgets(1) is None for attention in layers)
        forgotten = frozenset[str]() if others is None else others.statistics
        device = next(iter(layers)).linear_proj.weight.device
        flags = torch.tensor([missing, *(name in forgotten for name in STATISTICS)], dtype=torch.int32, device=device)
        for group in (self.groups.model, self.groups.data):
            torch.distributed.all_reduce(flags, op=torch.distributed.ReduceOp.MAX, group=group)
        self._lacks_profile, *forget = map(bool, flags.tolist())
        if any(forget):
            self._forget([name for name, flag in zip(STATISTICS, forget) if flag], others)
        if self._profile_steps is not None and self._profile_steps.words and torch.distributed.get_rank() == 0:
            print(f" {self._profile_steps.words}", flush=True)

    def _forget(self, names: list[str], others: MeasuredOtherwise | None) -> None:
        known = False
        for attention in self.attentions.values():
            assert attention.statistics is not None
            known = known or not all(math.isnan(mean) for mean in attention.statistics.layer_means().values())
            attention.statistics.forget(names)
        self._lacks_profile = True
        if known and others is not None and torch.distributed.get_rank() == 0:
            print(f" {' and '.join(names).replace('_', ' ')} of the checkpoint's layers were measured {others.words}: "
                  "they are measured anew" + (", and every layer passes the gate anew" if "recall" in names and
                                              self.dsv.dsv_sparse_stage == Stage.AUTO else ""), flush=True)

    def begin_micro_batch(self, step: int, num_tokens: int) -> None:
        """To be called before each training micro-batch's forward; acts once a step.

        Args:
            step: finished steps of the run.
            num_tokens: real tokens of a sample.
        """
        self.num_tokens = num_tokens
        if step == self._step:
            return
        self._step = step
        self.profiles_now = self.optimizer is not None and self._profile_is_due(step)
        for attention in self.attentions.values():
            attention.begin_step(step, profiles=self.profiles_now)

    def _profile_is_due(self, step: int) -> bool:
        return (profile_due(step, self.dsv.dsv_profile_interval, self._may_profile)
                or (self._lacks_profile and self._may_profile(step)))

    def _may_profile(self, step: int) -> bool:
        return self._profile_steps is None or self._profile_steps.may_profile(step)

    def end_step(self) -> None:
        """To be called once a step, after the last backward and before the backbone's optimizer."""
        if self._step is None or self.optimizer is None:
            return
        done = self.optimizer.step(
            {number: self._learning_rate(attention) for number, attention in self.attentions.items()})
        self.recorder.record("dsv/predictor_loss", done.loss)
        self.recorder.record("dsv/predictor_grad_norm", done.grad_norm)
        self.recorder.record("dsv/predictor_skipped_layers", done.skipped_layers)
        if self.profiles_now:
            self._absorb_profiles()
            self.profiled_at, self.profiled_tokens = self._step, self.num_tokens
            self._lacks_profile = False
            self._reports.clear()
        # In a launch that resumed, before its first profile, of what the checkpoint holds.
        self.layer_reports = self._report(self.num_tokens if self.profiled_tokens is None else self.profiled_tokens)
        self.step_reports = self._report(self.num_tokens)
        for attention in self.attentions.values():
            left = attention.cache.clear()
            assert left == 0, f"layer {attention.layer_number} kept {left} selections that no backward asked for"

    def _report(self, num_tokens: int) -> list[LayerReport]:
        """``report_layers``, asked once per length and profile."""
        if num_tokens not in self._reports:
            self._reports[num_tokens] = self.report_layers(num_tokens)
        return self._reports[num_tokens]

    def report_layers(self, num_tokens: int) -> list[LayerReport]:
        """All layers of the model, gathered over the pipeline; every rank must call it.

        Args:
            num_tokens: real tokens of a sample; whether a layer attends sparsely depends on it.
        """
        rows = torch.zeros(self.num_layers, 4, dtype=torch.float64)
        for number, attention in self.attentions.items():
            if attention.statistics is None:
                continue
            means = attention.statistics.layer_means()
            rows[number - 1] = torch.tensor([
                attention.selector.attends_sparsely(num_tokens), means["sparsity"],
                attention.selector.keep_ratio(), means["recall"]])
        device = next(iter(self.attentions.values())).linear_proj.weight.device
        rows = rows.to(device)
        torch.distributed.all_reduce(rows, group=self.groups.pipeline)
        return [LayerReport(number, bool(sparse), sparsity, keep, recall)
                for number, (sparse, sparsity, keep, recall) in enumerate(rows.tolist(), start=1)]

    def changed_decisions(self) -> list[str]:
        """A line on each layer of this rank that has turned sparse or dense, or passed the gate or failed it, since the
        last call: what it is now, and why. It is empty but on the first rank of those that hold the same layers."""
        lines = []
        for number, attention in self.attentions.items():
            if self.profiled_tokens is None or attention.statistics is None:
                continue
            decision = attention.selector.decision(self.profiled_tokens)
            decided = attention.selector.may_be_sparse, decision.sparse
            if decided != self._decided.get(number, (False, False)):
                lines.append(f"layer {number} at {self.profiled_tokens} tokens is {decision.reason}")
            self._decided[number] = decided
        return lines if self.groups.data.rank() == self.groups.tensor.rank() == 0 else []

    def _learning_rate(self, attention: DSVSelfAttention) -> float:
        # A predictor that steers videos keeps its lower rate in a step of images, which may be dense.
        tokens = self.num_tokens if self._profile_steps is None else self._profile_steps.longest
        sparse = attention.selector.attends_sparsely(tokens)
        return self.dsv.dsv_predictor_lr * (self.dsv.dsv_predictor_sparse_lr_scale if sparse else 1.0)

    def _absorb_profiles(self) -> None:
        """Sums the profiles over data- and context-parallel ranks and lets every layer take its next state.

        Of a sample's heads, each context-parallel rank has profiled others.

        All ranks of a layer see the same sums, so they decide alike.
        """
        for attention in self.attentions.values():
            statistics = attention.statistics
            assert statistics is not None
            if statistics.pending is None:
                continue
            stacked = statistics.pending.stacked().double()
            torch.distributed.all_reduce(stacked, group=self.groups.data)
            observed = GroupProfile.from_stacked(stacked).means()
            running = update_running(statistics.running(), observed, self.dsv.dsv_profile_momentum)
            state = statistics.state()
            recall = float(self._layer_means(observed)[2])
            if self.dsv.dsv_sparse_stage == Stage.AUTO:
                state = self._advance(state, recall)
            statistics.update(running, self._layer_means(running), state)
            statistics.pending = None

    def _advance(self, state: LayerState, recall: float) -> LayerState:
        return advance(state, recall, gate_recall=self.dsv.dsv_gate_recall, gate_passes=self.dsv.dsv_gate_passes,
                       rollback_recall=min(self.dsv.dsv_rollback_recall, self.dsv.dsv_gate_recall))

    def _layer_means(self, per_head: Tensor) -> Tensor:
        """[3, h] of this rank -> [3], the mean over the heads of all tensor-parallel ranks."""
        total = per_head.double().mean(-1)
        torch.distributed.all_reduce(total, group=self.groups.tensor)
        return (total / self.groups.tensor.size()).float()
