"""The command line: ``python -m f8sub COMMAND``, or ``f8sub COMMAND``."""

import argparse
import functools
import importlib.util
import re
import sys
import warnings
from collections.abc import Sequence
from typing import Any

import torch

from f8sub.cli_doctor import add_doctor
from f8sub.cli_estimate import add_estimate
from f8sub.cli_export import add_export
from f8sub.cli_inspect import add_inspect
from f8sub.errors import Float8ConfigError, Float8NumericsError, Float8ShapeError, Float8Warning
from f8sub.version import __version__

COMMANDS = (add_doctor, add_inspect, add_estimate, add_export)
"""Each adds one command, whose ``run`` takes the parsed arguments and returns a text and an exit status."""

WRONG_USE = 2
"""The exit status of argparse's errors, and of a model or option that there is not."""

FAILED = 1
"""The exit status where all was asked for rightly and could not be done: a full disk, a weight that is not finite."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; the exit status."""
    parser = argparse.ArgumentParser(prog="f8sub", description="Float8 training for PyTorch, made for FSDP2.")
    parser.add_argument(
        "--version", action="version", version=f"f8sub {__version__}, torch {torch.__version__}"
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    for add in COMMANDS:
        add(commands)
    arguments = parser.parse_args(argv)
    try:
        text, status = arguments.run(arguments)
    except (Float8ConfigError, Float8ShapeError, Float8NumericsError, OSError) as error:
        sys.stderr.write(f"f8sub: {error}\n")
        return FAILED if isinstance(error, Float8NumericsError | OSError) else WRONG_USE
    _show(text)
    return int(status)


def run() -> None:
    """The console script; it finds modules of the working directory, as ``python -m`` does."""
    sys.path.insert(0, "")
    warnings.showwarning = functools.partial(_show_warning, warnings.showwarning)
    sys.exit(main())


def _show_warning(otherwise: Any, message: Any, category: Any, *more: Any) -> None:
    """A warning of f8sub's without the line of code that a command has it from."""
    if issubclass(category, Float8Warning):
        sys.stderr.write(f"f8sub: warning: {message}\n")
    else:
        otherwise(message, category, *more)


def _show(text: str) -> None:
    """Print a page; headings and verdicts in colour where this is a terminal and rich is installed."""
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None or text.startswith("{"):
        sys.stdout.write(f"{text}\n")
        return
    from rich.console import Console
    from rich.text import Text

    shown = Text(text)
    shown.highlight_regex(re.compile(r"^\S.*$", re.MULTILINE), "bold")
    shown.highlight_regex(re.compile(r"(failed|slow)$", re.MULTILINE), "red")
    shown.highlight_regex(re.compile(r"native$", re.MULTILINE), "green")
    Console(soft_wrap=True).print(shown)
