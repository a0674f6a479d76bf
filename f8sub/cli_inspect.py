"""python -m f8sub inspect MODEL."""

import argparse
import json
from typing import Any

from f8sub.cli_choices import add_choice
from f8sub.convert.class_swap import EXPERTS
from f8sub.errors import Float8ConfigError
from f8sub.estimator.estimate import estimate
from f8sub.estimator.gpus import GPUS, gpu_of
from f8sub.estimator.models import FORMS, load
from f8sub.estimator.seconds import CHECKPOINTS, SELECTIVE
from f8sub.experts.seams import AUTO_EXPERTS
from f8sub.recipe import recipe_names

EXPERTS_WORDS: dict[str, bool | str] = {"true": True, "false": False, AUTO_EXPERTS: AUTO_EXPERTS}
"""``convert_to_float8``'s option by what a command line says."""


def add_inspect(commands: Any) -> None:
    """Add the command to the subparsers ``commands``."""
    words = "what float8 would gain of a model: speed, memory, bytes on the wire; needs no GPU and no weights"
    usage = "%(prog)s MODEL [options]"
    made = commands.add_parser(
        "inspect", help=words, description=f"{words[0].upper()}{words[1:]}.", usage=usage
    )
    made.add_argument("model", metavar="MODEL", help=FORMS)
    add_choice(made, "--recipe", recipe_names(), "all by default", nargs="+")
    of_gpu = {"nargs": "+", "default": list(GPUS), "find": lambda text: gpu_of(text).name}
    add_choice(made, "--gpu", GPUS, "the first counts for layers", **of_gpu)
    made.add_argument("--tokens", type=int, default=8192, help="of one GPU in a step (8192)")
    made.add_argument("--sequence", type=int, help="tokens that attend to each other (all of them)")
    made.add_argument("--mesh", default="8", help="GPUs that shard the weights; REPLICASxSHARDS for HSDP (8)")
    add_choice(made, "--checkpoint", CHECKPOINTS, f"({SELECTIVE})", default=SELECTIVE)
    made.add_argument("--skip", nargs="+", default=[], help="patterns of layers to leave in bf16")
    add_experts(made)
    made.add_argument("--json", action="store_true", help="print all figures as JSON")
    made.set_defaults(run=run)


def add_experts(made: argparse.ArgumentParser) -> None:
    """Add the option ``--experts``."""
    default = str(EXPERTS).lower()
    words = f"whether experts of a mixture are converted, auto: those that gain ({default})"
    add_choice(made, "--experts", EXPERTS_WORDS, words, default=default)


def run(arguments: argparse.Namespace) -> tuple[str, int]:
    """What to print, and the exit status: 0.

    Raises:
        Float8ConfigError: see ``load`` and ``estimate``.
    """
    sizes = arguments.mesh.split("x")
    if not all(map(str.isdecimal, sizes)):
        raise Float8ConfigError(
            f"--mesh is a number of GPUs, or REPLICASxSHARDS such as 4x8, got {arguments.mesh!r}"
        )
    found = estimate(
        load(arguments.model),
        arguments.recipe,
        gpus=arguments.gpu,
        tokens=arguments.tokens,
        sequence=arguments.sequence,
        mesh=[int(size) for size in sizes],
        checkpoint=arguments.checkpoint,
        skip=arguments.skip,
        experts=EXPERTS_WORDS[arguments.experts],
    )
    if arguments.json:
        return json.dumps({"model": arguments.model, **found.as_dict()}, indent=1), 0
    return str(found), 0
