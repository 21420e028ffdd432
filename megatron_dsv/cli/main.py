"""The ``dsv`` command. A subcommand's module is imported only when it is asked for."""

from __future__ import annotations

import argparse
import importlib
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from megatron_dsv.suggestions import did_you_mean

COMMANDS = {
    # name: (module in this package, one line of help)
    "plan": ("plan", "predict step time, memory and context-parallel plans of a job on a cluster"),
    "bench": ("bench", "measure kernels and links of the GPUs at hand for plans"),
    "doctor": ("doctor", "print what is installed, what runs where and why"),
    "prepare": ("prepare", "turn a folder of videos and captions into a latent data set"),
    "sample": ("sample", "generate a video from a checkpoint"),
    "report": ("report", "print a run's metrics from its TensorBoard folder"),
    "configs-check": ("configs_check", "parse every configuration file as its launch would"),
}


class _Parser(argparse.ArgumentParser):
    """argparse's, whose complaints also say what was probably meant."""

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '(.*)' \(choose from (.*)\)$", message)
        if choice:
            message += did_you_mean(choice[1], [word.strip(" '") for word in choice[2].split(",")])
        super().error(message)

    def refuse_unknown(self, arguments: Sequence[str]) -> None:
        """Ends the program at the first flag that is none of this parser's, before anything else is found missing."""
        for token in arguments[:arguments.index("--")] if "--" in arguments else arguments:
            flag = token.split("=")[0]
            # argparse takes unambiguous beginnings of a flag, and text with spaces as a value.
            if flag.startswith("--") and " " not in flag and \
                    not any(option.startswith(flag) for option in self._option_string_actions):
                self.error(f"unknown flag {flag}{did_you_mean(flag, self._option_string_actions)}")


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``dsv <command> ...``; a module gives ``add_arguments(parser)`` and ``run(args) -> exit status``.

    Returns:
        The exit status: that of the command, 2 for misuse, or 1 where the system refuses a file; either is one line
        on stderr.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = _Parser(prog="dsv", description="Megatron-DSV: dynamic sparse attention for video DiTs.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    asked = next((token for token in arguments if not token.startswith("-")), None)
    for name, (module_name, text) in COMMANDS.items():
        child = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        if name == asked:
            module = importlib.import_module(f"megatron_dsv.cli.{module_name}")
            module.add_arguments(child)
            child.set_defaults(run=module.run)
            child.refuse_unknown(arguments)
    args = parser.parse_args(arguments)
    try:
        return int(args.run(args) or 0)
    except (ValueError, NotImplementedError) as error:
        print(f"dsv {args.command}: error: {error}", file=sys.stderr)
        return 2
    except BrokenPipeError:
        # The reader, such as `head`, has seen enough.
        sys.stderr.close()
        return 0
    except OSError as error:
        place = f" ({error.filename})" if error.filename else ""
        print(f"dsv {args.command}: error: {error.strerror or error}{place}", file=sys.stderr)
        return 1


if __name__ == "__main__":
    sys.exit(main())
