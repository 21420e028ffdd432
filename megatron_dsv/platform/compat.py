"""What the megatron-core wheel needs mended on any host, with or without CUDA.

`apply()` patches, `defaults()` are parser defaults. Every patch is one function that says what breaks, where, and when
it can go; each looks at what it replaces first, and refuses a Megatron that it was not written for.
"""

import functools
import importlib.util
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from megatron_dsv.platform import child_processes, cpu, resume_schedule, validation

PIN = "0.19.2"
_applied = False


def apply() -> None:
    """Mend Megatron in this process; idempotent. Call it before arguments are parsed.

    Raises:
        RuntimeError: a function to be patched does not look as in the pinned megatron-core.
    """
    global _applied
    if _applied:
        return
    cpu.preload()
    with cpu.optional_packages():
        import megatron.training.training  # noqa: F401
    _keep_shipped_helpers()
    _install_fused_adam()
    _keep_padding_between_buckets()
    _let_current_length_win()
    _go_on_with_the_schedule()
    _end_with_the_samples()
    _report_validation_without_ppl()
    _skip_batches_of_any_kind()
    _end_helpers_with_their_rank()
    _applied = True


def defaults() -> dict[str, Any]:
    """Parser defaults (argparse `dest` -> value) for what is not installed; flags still win.

    Without Transformer Engine: its layers and fusions off. Without nvidia-resiliency-ext: `--async-save` through
    Megatron's own writer (`--async-strategy mcore`), and the persistent worker without which Megatron turns
    `--async-save` off with a warning.
    """
    values: dict[str, Any] = {"use_persistent_ckpt_worker": True}
    if importlib.util.find_spec("nvidia_resiliency_ext") is None:
        values["async_strategy"] = "mcore"
    if importlib.util.find_spec("transformer_engine") is None:
        values |= {
            "transformer_impl": "local",
            "gradient_accumulation_fusion": False,
            "masked_softmax_fusion": False,
            "no_persist_layer_norm": True,
        }
    return values


def _current(owner: Any, name: str, parameters: tuple[str, ...]) -> Callable[..., Any]:
    """The function `owner.name`, after a look at its leading parameter names."""
    function = getattr(owner, name, None)
    where = f"{getattr(owner, '__module__', '')}.{owner.__name__}.{name}".lstrip(".")
    if function is None:
        raise RuntimeError(f"{where} does not exist: this version of megatron-dsv needs megatron-core=={PIN}")
    found = tuple(inspect.signature(function).parameters)[: len(parameters)]
    if found != parameters:
        raise RuntimeError(
            f"{where} takes {found}, expected {parameters}: this version of megatron-dsv needs megatron-core=={PIN}"
        )
    return function


def _keep_shipped_helpers() -> None:
    """Skip the compilation of dataset helpers that the wheel ships compiled.

    `compile_helpers` (core/datasets/utils.py), called on rank 0 by `_compile_dependencies`, runs `make` in the wheel's
    folder, which has no Makefile, and exits 1. Can go when the wheel's function looks for helpers_cpp first.
    """
    from megatron.core.datasets import utils

    compile_helpers = _current(utils, "compile_helpers", ())
    folder = Path(utils.__file__).parent

    @functools.wraps(compile_helpers)
    def compile_unless_shipped() -> None:
        if not any(folder.glob("helpers_cpp*.so")):
            compile_helpers()

    utils.compile_helpers = compile_unless_shipped


def _install_fused_adam() -> None:
    """Give Megatron an Adam with which the distributed optimizer can resume where TE and Apex are absent.

    `DistributedOptimizer.state_dict` and `.load_state_dict` (core/optimizer/distrib_optimizer.py) read torch's `step`
    tensors from an optimizer that has not stepped: `assert len(steps) == 1`. With the step in the param group they take
    the branch written for Apex. Can go when a run on torch's AdamW and `--use-distributed-optimizer` can resume.
    """
    import megatron.core.optimizer as optimizers
    from megatron.core.optimizer import distrib_optimizer

    flags = (
        (optimizers, "USING_PYTORCH_OPTIMIZER"),
        (distrib_optimizer, "HAVE_APEX_OR_TE"),
        (distrib_optimizer, "USING_APEX_OPTIMIZER"),
        (distrib_optimizer, "USING_TE_OPTIMIZER"),
    )
    for module, flag in flags:
        if not isinstance(getattr(module, flag, None), bool):
            raise RuntimeError(f"{module.__name__}.{flag} is not a flag: megatron-dsv needs megatron-core=={PIN}")
    if distrib_optimizer.HAVE_APEX_OR_TE:
        return
    from megatron_dsv.platform.fused_adam import FusedAdam

    optimizers.Adam = FusedAdam
    optimizers.USING_PYTORCH_OPTIMIZER = False
    distrib_optimizer.Adam = FusedAdam
    distrib_optimizer.HAVE_APEX_OR_TE = True
    distrib_optimizer.USING_APEX_OPTIMIZER = True


def _keep_padding_between_buckets() -> None:
    """Save each parameter's own optimizer state where buckets of the distributed optimizer are padded.

    `DistributedOptimizer.sharded_param_state_fully_reshardable` (core/optimizer/distrib_optimizer.py) gathers buffers
    without the padding between their buckets, then cuts them at offsets that count it: behind the first padded bucket
    every main weight and moment in the checkpoint is another parameter's. Can go when a buffer of two padded buckets
    comes back as it was saved.
    """
    from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer

    save = _current(DistributedOptimizer, "sharded_param_state_fully_reshardable", ("self", "model_sharded_state_dict"))
    gather = _current(DistributedOptimizer, "get_parameter_state_dp_zero", ("self",))

    @functools.wraps(save)
    def save_with_padding(self: Any, *args: Any, **kwargs: Any) -> Any:
        def gather_with_padding(**options: Any) -> Any:
            state = gather(self, **options)
            return state if state is None else state | {
                index: {dtype: _padded(tensors, buffer) for dtype, tensors in state[index].items()}
                for index, buffer in enumerate(self.buffers)}

        self.get_parameter_state_dp_zero = gather_with_padding
        try:
            return save(self, *args, **kwargs)
        finally:
            del self.get_parameter_state_dp_zero

    DistributedOptimizer.sharded_param_state_fully_reshardable = save_with_padding


def _padded(tensors: dict[str, Any], buffer: Any) -> dict[str, Any]:
    """Tensors [elements of all buckets] -> [elements and padding], laid out as `buffer.param_index_map` counts."""

    def spread(compact: torch.Tensor) -> torch.Tensor:
        full = compact.new_zeros(buffer.numel)
        start = 0
        for bucket in buffer.buckets:
            size = bucket.numel_unpadded
            full[bucket.offset : bucket.offset + size] = compact[start : start + size]
            start += size
        return full

    # One at a time, dropping its source: each is as large as the whole buffer.
    for name in list(tensors):
        if isinstance(tensors[name], torch.Tensor):
            tensors[name] = spread(tensors.pop(name))
    return tensors


def _let_current_length_win() -> None:
    """Let a run be extended: a resume with another `--train-iters` follows the schedule of the current flags.

    `OptimizerParamScheduler._check_and_set` (core/optimizer_param_scheduler.py) stops any resume whose schedule
    differs, at a bare assertion; but a longer run differs by intent. Can go when Megatron treats the length apart.
    """
    from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
    from megatron.training.utils import print_rank_0

    load_state_dict = _current(OptimizerParamScheduler, "load_state_dict", ("self", "state_dict"))

    @functools.wraps(load_state_dict)
    def load(self: Any, state_dict: dict[str, Any]) -> None:
        if not (self.override_opt_param_scheduler or self.use_checkpoint_opt_param_scheduler):
            current = self.state_dict()
            lengths = sorted(resume_schedule.changed_lengths(current, state_dict))
            if lengths:
                changes = ", ".join(f"{key} {state_dict[key]} -> {current[key]}" for key in lengths)
                print_rank_0(f"> the length of the run follows the current flags (in samples): {changes}")
            state_dict = state_dict | {key: current[key] for key in lengths}
        load_state_dict(self, state_dict)

    OptimizerParamScheduler.load_state_dict = load


def _go_on_with_the_schedule() -> None:
    """Resume the schedule with any batch size; refuse another learning rate or decay in words, before it is loaded.

    `load_checkpoint` (training/checkpointing.py) takes the schedule's counts, in samples of the batch size at the save,
    for samples of the current one, and stops in the optimizer, at "Could not find parameter group with key
    (None, 0.02, ...)", or in the scheduler, at an assertion. Can go when a resume with twice the batch keeps its
    learning rate, and such errors name flags.
    """
    from megatron.training import checkpointing, get_args, training
    from megatron.training.utils import print_rank_0

    load_checkpoint = _current(training, "load_checkpoint", ("ddp_model", "optimizer", "opt_param_scheduler"))
    load_common = _current(checkpointing, "_load_base_checkpoint", ("load_dir", "args", "rank0"))
    _current(training, "get_optimizer_param_scheduler", ("optimizer",))

    @functools.wraps(load_checkpoint)
    def load(ddp_model: Any, optimizer: Any, opt_param_scheduler: Any, *rest: Any, **kwargs: Any) -> Any:
        args = get_args()
        saved = None
        resumes = args.load is not None and not (args.finetune or args.no_load_optim)
        if resumes and opt_param_scheduler is not None and args.ckpt_format == "torch_dist":
            common = load_common(args.load, args, rank0=True)[0] or {}
            saved = resume_schedule.continued(args, opt_param_scheduler.state_dict(), common)
        if saved is None:
            return load_checkpoint(ddp_model, optimizer, opt_param_scheduler, *rest, **kwargs)
        if saved != common["opt_param_scheduler"]:
            print_rank_0(f"> the schedule goes on at the same share of its iterations: --global-batch-size "
                         f"{common['args'].global_batch_size} -> {args.global_batch_size}")
        load_schedule = opt_param_scheduler.load_state_dict
        opt_param_scheduler.load_state_dict = lambda stored: load_schedule(saved)
        try:
            return load_checkpoint(ddp_model, optimizer, opt_param_scheduler, *rest, **kwargs)
        finally:
            del opt_param_scheduler.load_state_dict

    training.load_checkpoint = load


def _end_with_the_samples() -> None:
    """End a resumed run when its `--train-samples` are consumed, and say so where nothing is left to train.

    `update_train_iters` (training/training.py) divides `--train-samples` by the current batch size, whatever iteration
    the checkpoint holds; a run without any iteration left ends without a word. Can go when Megatron counts from the
    checkpoint, and says why it trains nothing.
    """
    from megatron.training import get_args, training
    from megatron.training.utils import print_rank_0

    load_checkpoint = _current(training, "load_checkpoint", ("ddp_model", "optimizer", "opt_param_scheduler"))
    _current(training, "update_train_iters", ("args",))

    @functools.wraps(load_checkpoint)
    def load_and_count(*positional: Any, **named: Any) -> Any:
        loaded = load_checkpoint(*positional, **named)
        args, iteration = get_args(), loaded[0]
        if args.skip_train:
            return loaded
        if args.train_samples is not None:
            args.train_iters = resume_schedule.last_iteration(args, iteration)
            if iteration:
                print_rank_0(f"> --train-samples {args.train_samples} are consumed at iteration {args.train_iters}")
        if args.train_iters is not None and 0 < args.train_iters <= iteration:
            print_rank_0(f"> nothing is left to train: the checkpoint holds iteration {iteration}, and the last one is "
                         f"{args.train_iters}; raise --train-iters or --train-samples")
        return loaded

    training.load_checkpoint = load_and_count


def _report_validation_without_ppl() -> None:
    """Report validation losses without a perplexity, which a diffusion loss does not have.

    `evaluate_and_print_results` (training/training.py) prints exp(loss) as "PPL" beside every loss, and writes losses
    to wandb only if TensorBoard is on, too. Can go when Megatron lets a model choose what is printed.
    """
    from megatron.training import training

    original = _current(training, "evaluate_and_print_results", validation.PARAMETERS)
    _current(training, "evaluate", validation.EVALUATE_PARAMETERS)
    training.evaluate_and_print_results = functools.wraps(original)(validation.evaluate_and_report)


def _skip_batches_of_any_kind() -> None:
    """Let `--iterations-to-skip` pass over batches that are not text, where every rank has its own iterator.

    `dummy_train_step` (training/training.py) reads on the first tensor-parallel rank and broadcasts tokens, for which
    the others wait for ever; under context parallelism it fails. Can go when it asks the model's batch function.
    """
    from megatron.core.num_microbatches_calculator import get_num_microbatches
    from megatron.core.rerun_state_machine import get_rerun_state_machine
    from megatron.training import training

    original = _current(training, "dummy_train_step", ("data_iterator",))

    @functools.wraps(original)
    def pass_over(data_iterator: Any) -> None:
        steps = get_rerun_state_machine()
        while steps.should_run_forward_backward(data_iterator):
            for _ in range(get_num_microbatches()):
                next(data_iterator)

    training.dummy_train_step = pass_over


def _end_helpers_with_their_rank() -> None:
    """Let the processes of saves and data loaders end when their rank is killed, and a rank when its saver is.

    They wait for work in `get_write_results_queue` (strategies/filesystem_async.py), `PersistentAsyncCaller.async_loop`
    (strategies/async_utils.py) and torch's workers, and outlive a killed rank with its log and its sockets open. A rank
    whose saver was killed waits for it for ever. Can go when none of them does.
    """
    from megatron.core.dist_checkpointing.strategies import filesystem_async
    from megatron.core.dist_checkpointing.strategies.async_utils import PersistentAsyncCaller
    from megatron.training import training

    _current(filesystem_async, "get_write_results_queue", ("mp_mode",))
    if torch.cuda.is_available():  # else `cpu.enable()` has done it
        child_processes.install_save_queue(None)
    child_processes.async_save_loop.megatrons = _current(  # type: ignore[attr-defined]
        PersistentAsyncCaller, "async_loop", ("rank", "queue", "preload_q", "comp_q"))
    PersistentAsyncCaller.async_loop = staticmethod(child_processes.async_save_loop)
    for name, parameters in (("_get_process", ("rank", "mp_mode")), ("schedule_async_call", ("self", "async_req")),
                             ("is_current_async_call_done", ("self", "blocking", "no_dist")),
                             ("close", ("self", "abort"))):
        _current(PersistentAsyncCaller, name, parameters)
    child_processes.notice_a_dead_saver(PersistentAsyncCaller)
    training.build_pretraining_data_loader = child_processes.with_mortal_workers(
        _current(training, "build_pretraining_data_loader", ("dataset", "consumed_samples")))
