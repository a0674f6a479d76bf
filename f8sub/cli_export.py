"""python -m f8sub export CHECKPOINT OUT."""

import argparse
import functools
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import torch

from f8sub.checkpoint.layouts import LAYOUTS
from f8sub.checkpoint.offline import export_checkpoint
from f8sub.checkpoint.reader import CONFIG
from f8sub.cli_choices import add_choice
from f8sub.errors import Float8ConfigError
from f8sub.estimator.models import FORMS, load
from f8sub.recipe import recipe_names

DTYPES = ("bfloat16", "float16", "float32")


def add_export(commands: Any) -> None:
    """Add the command to the subparsers ``commands``."""
    words = "cast a finished checkpoint to the codes that training multiplied, for inference engines; needs no GPU"
    usage = "%(prog)s CHECKPOINT OUT --recipe NAME [options]"
    made = commands.add_parser(
        "export", help=words, description=f"{words[0].upper()}{words[1:]}.", usage=usage
    )
    made.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a folder of safetensors, or of torch.distributed.checkpoint"
    )
    made.add_argument("out", metavar="OUT", help="the folder to make")
    add_choice(made, "--recipe", recipe_names(), "what the model was trained with", required=True)
    made.add_argument(
        "--model", help=f"what the checkpoint is of, where it has no config.json of transformers: {FORMS}"
    )
    add_choice(made, "--layout", ("auto", *LAYOUTS), "(auto)", default="auto")
    add_choice(made, "--dtype", DTYPES, f"what the forward computes in ({DTYPES[0]})", default=DTYPES[0])
    made.add_argument(
        "--prefix", help="before the model's names in the checkpoint, such as model. (found by itself)"
    )
    made.add_argument(
        "--skip", nargs="+", default=[], help="patterns of layers that training left in high precision"
    )
    made.add_argument(
        "--no-skip-defaults",
        dest="skip_defaults",
        action="store_false",
        help="training multiplied output heads, routers and small layers in float8, too",
    )
    made.add_argument(
        "--experts", action="store_true", help="training multiplied mixtures of experts in float8, too"
    )
    made.add_argument("--json", action="store_true", help="print what was written as JSON")
    made.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> tuple[str, int]:
    """What to print, and the exit status: 0.

    Raises:
        Float8ConfigError: see ``inspect``'s ``load`` and ``export_checkpoint``; so are the other errors.
    """
    folder = Path(arguments.checkpoint)
    if not folder.is_dir():
        raise Float8ConfigError(f"{folder} is no folder, and a checkpoint is one")
    if arguments.model is None and not (folder / CONFIG).exists():
        raise Float8ConfigError(
            f"{folder} has no {CONFIG} that says what model it is of; give --model: {FORMS}"
        )
    exported = export_checkpoint(
        folder,
        arguments.out,
        load(arguments.model or arguments.checkpoint),
        recipe=arguments.recipe,
        layout=arguments.layout,
        dtype=getattr(torch, arguments.dtype),
        prefix=arguments.prefix,
        skip=tuple(arguments.skip),
        skip_defaults=arguments.skip_defaults,
        experts=arguments.experts,
        progress=_progress(),
    )
    files = [path for path in Path(arguments.out).iterdir() if path.suffix == ".safetensors"]
    size = sum(path.stat().st_size for path in files)
    if arguments.json:
        names = {"float8": list(exported.formats), "high_precision": exported.in_high_precision}
        written = {"folder": arguments.out, "files": len(files), "bytes": size}
        chosen = {"recipe": arguments.recipe, "layout": exported.layout, "dtype": arguments.dtype}
        return json.dumps({**written, **chosen, **names}, indent=1), 0
    return (
        f"{arguments.out}: {len(exported.formats)} layers in float8 ({arguments.recipe}, layout "
        f"{exported.layout}), {len(exported.in_high_precision)} in {arguments.dtype}, {size / 1e6:,.1f} MB in "
        f"{len(files)} file{'s' * (len(files) > 1)}"
    ), 0


def _progress() -> Any:
    """A bar over the tensors where a terminal looks on and rich is installed, beside what is printed."""
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        return iter
    from rich.console import Console
    from rich.progress import track

    track_names: Any = functools.partial(track, description="Casting", console=Console(stderr=True))
    return track_names
