"""Adds DSV's numbers to Megatron's log lines: stdout, TensorBoard, wandb."""

from __future__ import annotations

import functools
import math
import sys
from dataclasses import dataclass
from typing import Any

import torch

from megatron_dsv.config import DSVConfig
from megatron_dsv.metrics import METRICS, of_layer
from megatron_dsv.sparsity.schedule import Stage
from megatron_dsv.training.dsv_controller import LayerReport
from megatron_dsv.training.flops import forward_flops, peak_tflops
from megatron_dsv.training.run import TrainingRun

_FAR_BELOW_THE_GATE = 0.2
"""In recall: the gate's default of 0.9 leaves a tenth of the mass out, this three tenths."""


def install(run: TrainingRun) -> None:
    """Wraps Megatron's ``training_log``, which has no hook of its own: our numbers follow each of its lines."""
    from megatron.training import training

    # Megatron counts the parameters, memory and operations of a language model, which this is not.
    training.report_theoretical_memory = lambda *args, **kwargs: None
    training.num_floating_point_operations = functools.partial(_step_flops, run)
    original = training.training_log
    work = _Work()
    has_warned = False

    def training_log(loss_dict: Any, total_loss_dict: Any, learning_rate: Any, iteration: int, *args: Any,
                     **kwargs: Any) -> Any:
        nonlocal work, has_warned
        work = work.and_step(run)
        due = iteration % run.args.log_interval == 0
        seconds = training.get_timers()("interval-time").elapsed(reset=False) if due else 0.0
        result = original(loss_dict, total_loss_dict, learning_rate, iteration, *args, **kwargs)
        if due:
            _write(_numbers(run, work, seconds), iteration)
            # Megatron's timer runs on after a launch's first step.
            work = work if kwargs.get("is_first_iteration") else _Work()
        if run.controller is not None and run.controller.profiled_at == iteration - 1:
            _write_layers(run.controller.layer_reports, iteration, _of_videos(run))
            for line in run.controller.changed_decisions():
                print(f" {line}", flush=True)
            warning = low_recall_warning(run.dsv, run.controller.layer_reports)
            if warning is not None and not has_warned and training.is_last_rank():
                print(warning, file=sys.stderr, flush=True)
            has_warned = has_warned or warning is not None
        return result

    training.training_log = training_log


def low_recall_warning(dsv: DSVConfig, reports: list[LayerReport]) -> str | None:
    """A line about layers that attend sparsely, without a gate, to keys that hold too little; None if all is well."""
    recalls = [report.recall for report in reports if report.sparse and not math.isnan(report.recall)]
    if dsv.dsv_sparse_stage != Stage.SPARSE or not recalls:
        return None
    mean = sum(recalls) / len(recalls)
    if mean >= dsv.dsv_gate_recall - _FAR_BELOW_THE_GATE:
        return None
    return (f"warning: --dsv-sparse-stage sparse trains at a mean recall of {mean:.2f}, far below --dsv-gate-recall "
            f"{dsv.dsv_gate_recall:g}; auto keeps layers dense until their predictors have learned")


def _step_flops(run: TrainingRun, args: Any, batch_size: int, *rest: Any, **kwargs: Any) -> float:
    """Model FLOPs of ``batch_size`` samples, counted dense, in place of Megatron's count for language models."""
    num_tokens = run.controller.num_tokens if run.controller is not None else 0
    return 3 * batch_size * forward_flops(args, num_tokens)


@dataclass(frozen=True)
class _Work:
    """What the steps since the last log line did: real tokens, and model FLOPs counted dense and as done."""

    tokens: float = 0.0
    dense: float = 0.0
    useful: float = 0.0

    def and_step(self, run: TrainingRun) -> _Work:
        """This work and that of the step just finished, whose samples all have one shape."""
        from megatron.core.num_microbatches_calculator import get_current_global_batch_size

        controller, samples = run.controller, get_current_global_batch_size()
        if controller is None:
            return self
        tokens = controller.num_tokens
        return _Work(self.tokens + samples * tokens,
                     self.dense + 3 * samples * forward_flops(run.args, tokens),
                     self.useful + 3 * samples * forward_flops(run.args, tokens, _kept_shares(run)))


def _kept_shares(run: TrainingRun) -> list[float] | None:
    """Share of key blocks that each layer of the model read in the step just finished; None for all of them."""
    controller = run.controller
    assert controller is not None
    window = None if run.step_layout is None else run.window_share(run.step_layout)
    if window is not None:
        return [window] * controller.num_layers
    return [report.keep_ratio if report.sparse else 1.0 for report in controller.step_reports] or None


def _numbers(run: TrainingRun, work: _Work, seconds: float) -> dict[str, float]:
    """What a log line adds; every rank takes part, because bins are summed over the data-parallel group."""
    controller = run.controller
    if controller is None:
        return {}
    pipeline = controller.groups.pipeline
    is_last_stage = pipeline.rank() == pipeline.size() - 1
    numbers = run.loss_bins.take(controller.groups.data) if is_last_stage else {}
    reports, record = controller.layer_reports, run.recorder.record
    per_gpu = 1e-12 / seconds / torch.distributed.get_world_size()
    record("dsv/tokens_per_second", work.tokens / seconds)
    record("dsv/tflops_dense", work.dense * per_gpu)
    record("dsv/tflops_useful", work.useful * per_gpu)
    peak = peak_tflops(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    if peak is not None:
        record("dsv/mfu", work.useful * per_gpu / peak)
    if reports:
        record("dsv/sparse_layers", sum(report.sparse for report in reports))
        for name in ("sparsity", "keep_ratio", "recall"):
            values = [getattr(report, name) for report in reports if not math.isnan(getattr(report, name))]
            if values:
                record(f"dsv/{name}", sum(values) / len(values))
    return numbers | run.recorder.report()


def _write(numbers: dict[str, float], iteration: int) -> None:
    from megatron.training import get_tensorboard_writer, get_wandb_writer, training

    line = " | ".join(f"{name}: {value:.4g}" for name, value in numbers.items())
    training.print_rank_last(f" step {iteration:8d} | {line}")
    writer, wandb = get_tensorboard_writer(), get_wandb_writer()
    for name, value in numbers.items():
        if writer:
            writer.add_scalar(name, value, iteration)
    if wandb and training.is_last_rank():
        wandb.log(numbers, iteration)


def _of_videos(run: TrainingRun) -> str:
    """Of which videos a profile is, where the data set has several lengths."""
    assert run.controller is not None
    several = run.profile_steps is not None and run.profile_steps.several
    return f" (videos of {run.controller.profiled_tokens} tokens)" if several else ""


def _write_layers(reports: list[LayerReport], iteration: int, of_videos: str) -> None:
    """The table of layers, after each profile."""
    from megatron.training import get_tensorboard_writer, get_wandb_writer, training

    training.print_rank_last(f" profile at step {iteration}{of_videos}:{_rows(reports)}")
    writer, wandb = get_tensorboard_writer(), get_wandb_writer()
    numbers = {of_layer(name, report.layer): float(getattr(report, name.removeprefix("dsv/"))) for report in reports
               for name, metric in METRICS.items() if metric.per_layer}
    for name, value in numbers.items():
        if writer:
            writer.add_scalar(name, value, iteration)
    if wandb and training.is_last_rank():
        wandb.log(numbers, iteration)


def _rows(reports: list[LayerReport]) -> str:
    """The table that people read; what no profile has measured yet is not a number there."""
    def shown(value: float) -> str:
        return "not measured" if math.isnan(value) else f"{value:.3f}"

    return "".join(
        f"\n   layer {report.layer:3d}  {'sparse' if report.sparse else 'dense ':6s}  "
        f"sparsity {shown(report.sparsity)}  keep {shown(report.keep_ratio)}  recall {shown(report.recall)}"
        for report in reports)
