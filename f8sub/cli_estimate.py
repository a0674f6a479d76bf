"""python -m f8sub estimate MODEL --gpus N."""

import argparse
import json
from typing import Any

from f8sub.cli_choices import add_choice
from f8sub.cli_inspect import EXPERTS_WORDS, add_experts
from f8sub.estimator.cluster import FLOAT32, REDUCTIONS
from f8sub.estimator.estimate_step import KINDS, estimate_step
from f8sub.estimator.gpus import gpu_of
from f8sub.estimator.models import FORMS, load
from f8sub.estimator.seconds import CHECKPOINTS, SELECTIVE
from f8sub.recipe import recipe_names
from f8sub.recipes import DEFAULT

OPTIONS = (
    *("gpu", "gpus_per_host", "network", "tokens", "sequence", "replicas", "tensor_parallel"),
    *("recipe", "reduction", "checkpoint", "skip"),
)
"""Of ``estimate_step``, by its names."""


def add_estimate(commands: Any) -> None:
    """Add the command to the subparsers ``commands``."""
    words = "a step's time on 8 to 1024 GPUs, and what float8 adds to it part by part; needs no GPU"
    usage = "%(prog)s MODEL [options]"
    made = commands.add_parser(
        "estimate", help=words, description=f"{words[0].upper()}{words[1:]}.", usage=usage
    )
    made.add_argument("model", metavar="MODEL", help=FORMS)
    made.add_argument("--gpus", nargs="+", type=int, default=[8, 64, 128, 1024], help="(8 64 128 1024)")
    of_gpu = {"default": "H100", "find": lambda text: gpu_of(text, KINDS).name}
    add_choice(made, "--gpu", KINDS, "(H100); published runs had H100-500W", **of_gpu)
    made.add_argument("--gpus-per-host", type=int, default=8, help="that NVLink joins (8)")
    made.add_argument("--network", type=float, default=400, help="Gbit/s of a GPU's NIC (400)")
    made.add_argument("--tokens", type=int, default=8192, help="of a data-parallel rank in a step (8192)")
    made.add_argument("--sequence", type=int, help="tokens that attend to each other (all of them)")
    made.add_argument("--replicas", type=int, default=1, help="copies of the weights, for HSDP (1)")
    made.add_argument("--tensor-parallel", type=int, default=1, help="GPUs that share each layer (1)")
    add_choice(made, "--recipe", recipe_names(), f"({DEFAULT})", default=DEFAULT)
    words = "of gradients, but in the last row (float32); e4m3-flat is one exchange over all hosts"
    add_choice(made, "--reduction", REDUCTIONS, words, default=FLOAT32)
    add_choice(made, "--checkpoint", CHECKPOINTS, f"({SELECTIVE})", default=SELECTIVE)
    made.add_argument("--skip", nargs="+", default=[], help="patterns of layers to leave in bf16")
    add_experts(made)
    made.add_argument("--json", action="store_true", help="print all figures as JSON")
    made.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> tuple[str, int]:
    """What to print, and the exit status: 0.

    Raises:
        Float8ConfigError: see ``load`` and ``estimate_step``.
    """
    given = vars(arguments)
    options = {name: given[name] for name in OPTIONS} | {"experts": EXPERTS_WORDS[arguments.experts]}
    found = estimate_step(load(arguments.model), arguments.gpus, **options)
    if arguments.json:
        return json.dumps({"model": arguments.model, **found.as_dict()}, indent=1), 0
    return str(found), 0
