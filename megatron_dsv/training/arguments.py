"""The command line of a training run: configuration files, Megatron's parser and ours, defaults, one-line errors."""

from __future__ import annotations

import argparse
import contextlib
import enum
import importlib.util
import io
import os
import re
import socket
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any, NoReturn

from megatron_dsv.config_fields import add_dataclass_arguments, flag_of
from megatron_dsv.config_files import Expansion, add_opposites, expand, settings_of
from megatron_dsv.data.latent_dataset import DamagedDataError
from megatron_dsv.suggestions import did_you_mean
from megatron_dsv.training import run_folders
from megatron_dsv.training.dry_run import asked_for
from megatron_dsv.training.host_checks import check_host
from megatron_dsv.training.launcher import LauncherError, check_launcher
from megatron_dsv.training.save_failures import NotSavedHereError
from megatron_dsv.training.validation import CONFIGS, check_data_folder, validate

__all__ = ["HostError", "defaults", "dry_parse", "exit_with", "parse", "parse_or_raise", "validate"]

_EXIT_GRACE_SECONDS = 5.0


class HostError(ValueError):
    """Misuse that only this host may see, such as a folder that is not mounted here."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command line of the entry script; the result is also Megatron's global arguments.

    A mistake ends the process with status 2 and one line on stderr, printed by rank 0 alone (by the first rank of
    each host if it concerns the host, by all if the launcher gave them no rank), with no traceback.

    Args:
        argv: arguments without the program's name; ``--config`` may occur anywhere and more than once.
    """
    try:
        check_launcher(os.environ)
        return parse_or_raise(argv)
    except (ValueError, NotImplementedError) as error:
        exit_with(error)


def parse_or_raise(argv: Sequence[str]) -> argparse.Namespace:
    """What :func:`parse` does, with mistakes raised.

    Raises:
        ValueError: misuse, also of Megatron's own flags; one line with the flag, what is allowed and what it got.
        NotImplementedError: unsupported; one line with the way out.
    """
    from megatron.training.global_vars import set_global_variables

    with _quiet_ranks():
        args = _parse_and_validate(argv, check_files=True)
        try:
            check_host(args)
            run_folders.check(args)
        except (ValueError, NotImplementedError) as error:
            raise HostError(str(error)) from error
        with _megatron_errors(args):
            # A tokenizer would be built, and transformers imported, for text that is never tokenised.
            args.padded_vocab_size = args.vocab_size
            set_global_variables(args, build_tokenizer=False)
    return args


def dry_parse(argv: Sequence[str], world_size: int | None, *, check_files: bool = False,
              without: Collection[str] = ()) -> argparse.Namespace:
    """Parse and validate as rank 0 of so many Hopper GPUs would, without changing any global state.

    Args:
        argv: as for :func:`parse`.
        world_size: number of ranks; None takes the ``gpus`` of the configuration files.
        check_files: whether the data folder must exist.
        without: arguments that configuration files do not set.

    Raises:
        ValueError, NotImplementedError: as :func:`parse_or_raise`; also if there is no ``gpus`` key to take.
    """
    import megatron.training.arguments as megatron_arguments

    def take_ranks(expansion: Expansion) -> None:
        if "--dry-run-gpus" in expansion.origins:
            raise ValueError("--dry-run-gpus must stand on the command line, got it from "
                             f"{expansion.origins['--dry-run-gpus']}; add the flag, or use the key `gpus`")
        ranks = world_size or expansion.gpus
        if ranks is None:
            raise ValueError("a `gpus` key is required: the number of ranks that the file is for, got none")
        os.environ["WORLD_SIZE"] = str(ranks)

    environment = {"RANK": "0", "WORLD_SIZE": "1", "CUDA_DEVICE_MAX_CONNECTIONS": "1"}
    saved = {name: os.environ.get(name) for name in environment}
    arch = megatron_arguments.get_device_arch_version
    os.environ.update(environment)
    megatron_arguments.get_device_arch_version = lambda: 9
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            return _parse_and_validate(argv, check_files=check_files, on_expansion=take_ranks, without=without)
    finally:
        megatron_arguments.get_device_arch_version = arch
        for name, value in saved.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})


def defaults(parser: argparse.ArgumentParser) -> None:
    """Set the defaults in which a video DiT differs from a language model; flags and files still win."""
    parser.set_defaults(
        transformer_impl="local",
        # The fused kernel is apex's, which is never required.
        gradient_accumulation_fusion=importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        no_persist_layer_norm=True,
        position_embedding_type="none",
        attention_dropout=0.0,
        hidden_dropout=0.0,
        # Megatron wants a tokenizer and a sequence length; the real length comes from the data set.
        tokenizer_type="NullTokenizer",
        vocab_size=1,
        seq_length=1,
        max_position_embeddings=1,
        # Megatron divides by it, also where nothing is evaluated.
        eval_interval=1000,
        dataloader_type="single",
        calculate_per_token_loss=True,
        ckpt_format="torch_dist",
        dist_ckpt_optim_fully_reshardable=True,
        # finite_steps.py ends the run at the first step that is not finite, which Megatron would run again and save.
        rerun_mode="disabled",
    )
    from megatron_dsv.platform import compat, cpu

    parser.set_defaults(**compat.defaults() | cpu.defaults())


def _parse_and_validate(argv: Sequence[str], *, check_files: bool,
                        on_expansion: Callable[[Expansion], None] = lambda expansion: None,
                        without: Collection[str] = ()) -> argparse.Namespace:
    """Parse, check with our rules, then with Megatron's; sets no global."""
    from megatron.training.argument_utils import core_transformer_config_from_args
    from megatron.training.arguments import parse_args, validate_args
    from megatron.training.training import get_megatron_ddp_config, get_megatron_optimizer_config

    from megatron_dsv.transformer.transformer_config import DiTTransformerConfig

    expansion = Expansion(argv=[])
    settings: dict[str, Any] = {}

    def provider(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
        nonlocal expansion
        group = parser.add_argument_group("Configuration files")
        group.add_argument("--config", nargs="+", default=None, metavar="YAML", help="YAML files or presets (such as "
                           "model/wan2.1-1.3b); later files win, null in one unsets a key, flags on the command "
                           "line win over all of them.")
        for cls in CONFIGS:
            add_dataclass_arguments(parser, cls)
        add_opposites(parser)
        _name_enum_choices(parser)
        _escape_help(parser)
        defaults(parser)
        expansion = expand(argv, parser, without)
        on_expansion(expansion)
        if any(token.split("=")[0] == "--yaml-cfg" for token in expansion.argv):
            # Megatron would replace the parsed arguments before anything could check them.
            raise NotImplementedError(
                "--yaml-cfg is not supported; use --config: the command line then stays in force")
        settings.update(settings_of(expansion.argv, parser))
        parser.error = lambda message: _refuse(message, parser, expansion)  # type: ignore[method-assign]
        sys.argv = [sys.argv[0], *expansion.argv]
        return parser

    program = sys.argv
    try:
        args = parse_args(provider)
    finally:
        sys.argv = program
    empty = next((key for key, value in settings.items() if value == ""), None)
    if empty is not None:
        raise ValueError(f"--{empty} must not be empty, got ''; leave the flag out to do without")
    args.config = expansion.files
    args.launch_argv = list(argv)
    args.expanded_argv = expansion.argv
    args.launch_settings = settings
    args.launch_gpus = expansion.gpus
    if args.dry_run and not asked_for(argv):
        # The program looks for it before it reads any file.
        raise ValueError("--dry-run must stand on the command line, got it from a configuration file; add the flag, or "
                         "drop the key `dry-run` to start the run")
    validate(args, check_files=False)
    run_folders.check_flags(args)
    if check_files:
        try:
            check_data_folder(args.latent_data)
        except ValueError as error:
            raise HostError(str(error)) from None
    # Megatron wants the two halves of causal chunks; the real length comes from the data set.
    halves = 2 * args.context_parallel_size if args.context_parallel_size > 1 else 1
    args.seq_length = -(-args.seq_length // halves) * halves
    args.max_position_embeddings = max(args.max_position_embeddings, args.seq_length)
    if args.tensor_model_parallel_size > 1 or args.context_parallel_size > 1:
        # Megatron insists on it for TP and CP before Blackwell; it only acts if set before CUDA starts.
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if args.skip_train and args.train_iters is None and args.train_samples is None:
        # Megatron sizes the training set by it, which nothing reads.
        args.train_iters = 1
    with _megatron_errors(args):
        validate_args(args, {})
        # What these configurations refuse would otherwise end a launch after its ranks have met.
        with warnings.catch_warnings(action="ignore"):
            core_transformer_config_from_args(args, DiTTransformerConfig)
            get_megatron_ddp_config(args)
            get_megatron_optimizer_config(args)
    return args


def _refuse(message: str, parser: argparse.ArgumentParser, expansion: Expansion) -> NoReturn:
    """argparse's complaint as one line that names the flag and the file that holds it."""
    if message.startswith("unrecognized arguments: "):
        unknown = message.removeprefix("unrecognized arguments: ").split()
        flags = [token for token in unknown if token.startswith("-")] or unknown
        if not flags:
            raise ValueError("an argument is empty, got ''; drop it, or give the flag before it its value")
        raise ValueError(f"unknown flag {flags[0]}"
                         f"{did_you_mean(flags[0].split('=')[0], parser._option_string_actions)}")
    if message.startswith("argument "):
        names, _, rest = message.removeprefix("argument ").partition(": ")
        options = names.split("/")
        file = next((expansion.origins[option] for option in options if option in expansion.origins), None)
        space = " " if rest.startswith("must be") else ": "
        raise ValueError(f"{file + ': ' if file else ''}{options[0]}{space}{rest}")
    raise ValueError(message)


def _name_enum_choices(parser: argparse.ArgumentParser) -> None:
    """Megatron's enum flags raise KeyError on an unknown word; let them list the words instead."""
    for action in parser._actions:
        choices = list(action.choices or ())
        if choices and all(isinstance(choice, enum.Enum) for choice in choices) and callable(action.type):
            action.type = _enum_reader(action.type, [choice.name for choice in choices])


def _escape_help(parser: argparse.ArgumentParser) -> None:
    """Megatron has help texts with a bare percent sign, at which argparse's formatting ends the whole ``--help``."""
    for action in parser._actions:
        try:
            (action.help or "") % (vars(action) | {"prog": parser.prog})
        except (ValueError, TypeError, KeyError):
            action.help = (action.help or "").replace("%", "%%")


def _enum_reader(read: Callable[[str], Any], names: list[str]) -> Callable[[str], Any]:
    def checked(text: str) -> Any:
        if text not in names:
            raise argparse.ArgumentTypeError(f"must be one of {', '.join(names)}, got {text!r}")
        return read(text)
    return checked


@contextlib.contextmanager
def _megatron_errors(args: argparse.Namespace) -> Iterator[None]:
    """Turn whatever Megatron raises about arguments into the ValueError that it means."""
    try:
        yield
    except (ValueError, NotImplementedError) as error:
        reason = " ".join(str(error).split())
        raise type(error)(reason if "--" in reason else f"megatron-core refuses the arguments: {reason}") from error
    except (Exception, SystemExit) as error:
        line = traceback.extract_tb(error.__traceback__)[-1].line or ""
        names = dict.fromkeys(re.findall(r"args\.(\w+)", line))
        got = ", ".join(f"{flag_of(name)} {getattr(args, name)}" for name in names if hasattr(args, name))
        reason = " ".join(str(error).split())
        if not isinstance(error, AssertionError | RuntimeError | SystemExit):
            reason = f"{type(error).__name__} {reason}".strip()
        # Many assertions name no flag or carry no message: the asserted line and the values say what is wrong.
        if reason in ("", "None"):
            reason = line.removeprefix("assert ").rstrip(" \\")
        if "--" not in reason and got:
            reason += f", got {got}"
        raise ValueError(f"megatron-core refuses the arguments: {reason}") from error


@contextlib.contextmanager
def _quiet_ranks() -> Iterator[None]:
    """Megatron prints from every rank before torch.distributed is up; let rank 0 speak alone."""
    if os.environ.get("RANK", "0") == "0":
        yield
    else:
        with contextlib.redirect_stdout(io.StringIO()):
            yield


def exit_with(error: Exception, *, status: int = 2) -> NoReturn:
    """Print on the one rank that speaks, then leave with this status on every rank; 2 is misuse."""
    per_host = isinstance(error, HostError)
    alone = isinstance(error, DamagedDataError | LauncherError | NotSavedHereError)
    speaks = alone or os.environ.get("LOCAL_RANK" if per_host else "RANK", "0") == "0"
    if speaks:
        where = f" on {socket.gethostname()}" if per_host and int(os.environ.get("WORLD_SIZE", "1")) > 1 else ""
        print(f"{os.path.basename(sys.argv[0]) or 'megatron-dsv'}: error{where}: {error}", file=sys.stderr, flush=True)
    else:
        # A launcher kills every rank as soon as one has failed: the one that speaks must come first.
        time.sleep(_EXIT_GRACE_SECONDS)
    raise SystemExit(status)
