"""python -m f8sub doctor."""

import argparse
import json
from typing import Any

from f8sub.diagnostics.doctor import doctor, page


def add_doctor(commands: Any) -> None:
    """Add the command to the subparsers ``commands``."""
    words = "what of f8sub works on this machine, proved by running it; status 1 where no recipe is native"
    made = commands.add_parser(
        "doctor", help=words, description=f"{words[0].upper()}{words[1:]}.", usage="%(prog)s [--json]"
    )
    made.add_argument("--json", action="store_true", help="print all that was found as JSON")
    made.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> tuple[str, int]:
    """What to print, and ``Diagnosis.status``."""
    found = doctor()
    return json.dumps(found.as_dict(), indent=1) if arguments.json else page(found), found.status
