"""The training program: arguments -> data -> Megatron's `pretrain()`."""

from __future__ import annotations

import functools
import os
import sys
import warnings
from typing import Any

from megatron_dsv.platform import child_processes, compat, cpu


def main(argv: list[str]) -> None:
    """Trains as the command line says; a mistake ends the process with one line and status 2.

    Args:
        argv: the command line without the program's name.
    """
    child_processes.end_with_launcher()
    from megatron_dsv.training import arguments, dry_run

    try:
        cpu.enable()
        compat.apply()
    except ImportError as error:
        arguments.exit_with(error)
    if dry_run.asked_for(argv):
        try:
            return dry_run.run(argv)
        except (ValueError, NotImplementedError) as error:
            arguments.exit_with(error)
    args = arguments.parse(argv)
    if args.world_size == 1:
        # A launch of one rank needs no launcher: port 0 is any free one.
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        os.environ.setdefault("MASTER_PORT", "0")
    # Megatron's fault-tolerance set-up parses the command line a second time.
    sys.argv = [sys.argv[0], *args.expanded_argv]
    from megatron_dsv.data.latent_dataset import DamagedDataError
    from megatron_dsv.platform.resume_schedule import ScheduleError
    from megatron_dsv.training import run_lock
    from megatron_dsv.training.checkpoint_guard import CheckpointError
    from megatron_dsv.training.datasets import SampleOrderError
    from megatron_dsv.training.finite_steps import NotFiniteError
    from megatron_dsv.training.rank_agreement import RanksDifferError
    from megatron_dsv.training.save_failures import NotSavedError

    try:
        with run_lock.hold(args.save if args.rank == 0 else None):
            _train(args)
    except (CheckpointError, RanksDifferError, ScheduleError, SampleOrderError, run_lock.FolderInUseError) as error:
        arguments.exit_with(error)
    except (DamagedDataError, NotSavedError) as error:
        arguments.exit_with(error, status=1)
    except NotFiniteError as error:
        from megatron.training.async_utils import maybe_finalize_async_save

        # Every rank is here: a save that is still being written becomes the last checkpoint.
        maybe_finalize_async_save(blocking=True, terminate=True)
        arguments.exit_with(error, status=1)


def _train(args: Any) -> None:
    from megatron.core.distributed import finalize_model_grads
    from megatron.core.enums import ModelType
    from megatron.training import training
    from megatron.training.argument_utils import pretrain_cfg_container_from_args

    from megatron_dsv.data.latent_dataset import LatentDataset
    from megatron_dsv.training import arguments, ema, finite_steps, logging, model_identity, run_config, save_failures
    from megatron_dsv.training.builders import build_model, process_groups
    from megatron_dsv.training.checkpoint_guard import CheckpointError, check_before_build, guard, loaded_arguments
    from megatron_dsv.training.cp_record import carry, stored_text
    from megatron_dsv.training.cp_runtime import build_cp_runtime
    from megatron_dsv.training.datasets import DatasetProvider
    from megatron_dsv.training.dsv_controller import DSVController, DSVGroups
    from megatron_dsv.training.flag_relations import lost_evaluations
    from megatron_dsv.training.forward_step import forward_step
    from megatron_dsv.training.observers import build_planning, build_trace
    from megatron_dsv.training.rank_agreement import check_agreement, facts_of
    from megatron_dsv.training.run import TrainingRun

    try:
        run = TrainingRun(args, LatentDataset(args.latent_data, text_length=args.dit_text_length))
        run.check_data()
        if args.rank == 0 and (warning := lost_evaluations(args)) is not None:
            print(warning, file=sys.stderr, flush=True)
        resumed = check_before_build(args)
        others = model_identity.measured_otherwise(loaded_arguments(args), args)
    except CheckpointError as error:
        # Ranks have not met yet: one that cannot read what the others read must speak for itself.
        arguments.exit_with(arguments.HostError(str(error)))
    except ValueError as error:
        arguments.exit_with(error)
    run.set_sequence_length()

    def model_provider(pre_process: bool = True, post_process: bool = True, config: Any = None,
                       pg_collection: Any = None, vp_stage: int | None = None) -> Any:
        pg_collection = process_groups(pg_collection)
        check_agreement(facts_of(args, run.latents))
        run.cp = build_cp_runtime(args, run.dsv, run.dit, pg_collection)
        model = build_model(args, pre_process, post_process, pg_collection, vp_stage,
                            None if run.cp is None else run.cp.store)
        groups = DSVGroups(data=pg_collection.dp_cp, tensor=pg_collection.tp, pipeline=pg_collection.pp,
                           model=pg_collection.mp, context_size=pg_collection.cp.size())
        run.controller = controller = DSVController([model], run.dsv, groups, args.num_layers, run.recorder,
                                                    run.profile_steps)
        run.planning = build_planning(run, controller)
        run.trace = build_trace(run, controller)
        finalize = run.finite_steps.finalize_with(finalize_model_grads, lambda: args.curr_iteration + 1)

        def finalize_and_end_step(*positional: Any, **named: Any) -> None:
            finalize(*positional, **named)
            controller.end_step()
            # No micro-batch is under way on any rank: the one place in a step where the plan may change.
            run.plan_next_step(args.curr_iteration + 1)

        model.config.finalize_model_grads_func = finalize_and_end_step
        return model

    if args.ema_decay > 0:
        ema.install(args.ema_decay)
    training.load_checkpoint = guard(training.load_checkpoint, args)
    train = training.train

    def begin_and_train(*positional: Any, **named: Any) -> Any:
        if run.controller is not None:
            run.controller.begin_run(others)
        measured_otherwise = others is not None and not others.statistics.isdisjoint(model_identity.OF_SELECTIONS)
        if run.planning is not None:
            run.planning.begin_run(stored_text(resumed), args.iteration, measured_otherwise=measured_otherwise)
        elif not measured_otherwise:
            carry(resumed, args)
        run.plan_next_step(args.iteration)
        return train(*positional, **named)

    training.train = begin_and_train
    finite_steps.install(run.finite_steps)
    save_failures.install(args)
    logging.install(run)
    run_config.install(args)
    with warnings.catch_warnings(action="ignore"):  # of Megatron, about interfaces that it may change
        settings = pretrain_cfg_container_from_args(args)
    training.pretrain(
        settings, DatasetProvider(args, run.latents), ModelType.encoder_or_decoder,
        functools.partial(forward_step, run), model_provider=model_provider,
        get_embedding_ranks=lambda ranks: [ranks[0]], get_position_embedding_ranks=lambda ranks: [ranks[0]])
