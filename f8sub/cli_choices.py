"""Arguments of a command line that are one of several names, in whatever case they are written."""

import argparse
from collections.abc import Callable, Iterable
from typing import Any

from f8sub.errors import Float8ConfigError, unknown


def add_choice(
    parser: argparse.ArgumentParser, flag: str, known: Iterable[str], words: str, **options: Any
) -> None:
    """Add an option that is one of some names; another one is an error with the nearest of them.

    Args:
        parser: of a command.
        flag: such as ``--gpu``.
        known: the names.
        words: the option's help.
        options: of ``add_argument``; ``find`` besides, which is given the text and returns the name or raises
            Float8ConfigError, for names that are an error of their own.
    """
    names = list(known)
    find: Callable[[str], str] = options.pop("find", None) or (lambda text: one_of(flag[2:], text, names))

    def read(text: str) -> str:
        try:
            return find(text)
        except Float8ConfigError as error:
            raise argparse.ArgumentTypeError(str(error)) from error

    parser.add_argument(flag, type=read, metavar=f"{{{','.join(names)}}}", help=words, **options)


def one_of(what: str, text: str, names: Iterable[str]) -> str:
    """The name that a text is, in whatever case; Float8ConfigError where it is none."""
    of_text = {name.lower(): name for name in names}
    if text.lower() not in of_text:
        raise unknown(what, text, of_text.values())
    return of_text[text.lower()]
