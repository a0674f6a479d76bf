"""The command line: ``python -m f8sub COMMAND``, or ``f8sub COMMAND``."""

import argparse
import functools
import importlib.util
import json
import re
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from f8sub.checkpoint.layouts import LAYOUTS
from f8sub.checkpoint.offline import export_checkpoint
from f8sub.checkpoint.reader import CONFIG
from f8sub.diagnostics.doctor import doctor, page
from f8sub.errors import (
    Float8ConfigError,
    Float8NumericsError,
    Float8ShapeError,
    Float8Warning,
    nearest,
    unknown,
)
from f8sub.estimator.cluster import FLOAT32, REDUCTIONS
from f8sub.estimator.estimate import KINDS, estimate, estimate_step
from f8sub.estimator.gpus import GPUS, gpu_of
from f8sub.estimator.models import FORMS, load
from f8sub.estimator.seconds import CHECKPOINTS, SELECTIVE
from f8sub.experts.seams import AUTO, EXPERTS
from f8sub.recipe import recipe_names
from f8sub.recipes import DEFAULT
from f8sub.version import __version__

if TYPE_CHECKING:
    from f8sub.estimator.results import Estimate, StepEstimate


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
            # Of other errors argparse does not print the message.
            raise argparse.ArgumentTypeError(str(error)) from error

    parser.add_argument(flag, type=read, metavar=f"{{{','.join(names)}}}", help=words, **options)


def one_of(what: str, text: str, names: Iterable[str]) -> str:
    """The name that a text is, in whatever case; Float8ConfigError where it is none."""
    of_text = {name.lower(): name for name in names}
    if text.lower() not in of_text:
        raise unknown(what, text, of_text.values())
    return of_text[text.lower()]


def command(commands: Any, name: str, words: str, usage: str) -> argparse.ArgumentParser:
    """Add a command to the subparsers ``commands``; ``words`` say what it does."""
    made: argparse.ArgumentParser = commands.add_parser(
        name, help=words, description=f"{words[0].upper()}{words[1:]}.", usage=usage
    )
    return made


def ended(made: argparse.ArgumentParser, run: Callable[[argparse.Namespace], Any], printed: str) -> None:
    """Add ``--json``, the last option of each command, and what runs the command."""
    made.add_argument("--json", action="store_true", help=f"print {printed} as JSON")
    made.set_defaults(run=run)


def refuse_others(command: argparse.ArgumentParser, others: Sequence[str]) -> None:
    """End the program, as argparse does, over arguments that a command lacks; the nearest options are named.

    Args:
        command: the parser of that command.
        others: what it left over.
    """
    known = [flag for action in command._actions for flag in action.option_strings if flag.startswith("--")]
    near = ", ".join(nearest(others[0].partition("=")[0], known))
    command.error(f"unknown argument {others[0]!r}{f' (nearest: {near})' if near else ''}")


def add_doctor(commands: Any) -> None:
    """Add the command to the subparsers ``commands``."""
    words = "run each recipe once to see what works on this machine; exit status 1 if none is native"
    made = command(commands, "doctor", words, "%(prog)s [--json]")
    ended(made, run_doctor, "all that was found")


def run_doctor(arguments: argparse.Namespace) -> tuple[str, int]:
    """Return what to print, and ``Diagnosis.status``."""
    found = doctor()
    return json.dumps(found.as_dict(), indent=1) if arguments.json else page(found), found.status


EXPERTS_WORDS: dict[str, bool | str] = {"true": True, "false": False, **{name: name for name in AUTO}}
"""``convert_to_float8``'s option by what a command line says."""


def add_inspect(commands: Any) -> None:
    """Add the command to the subparsers ``commands``."""
    words = "what a model would gain in float8: speed, memory, bytes on the wire; needs no GPU and no weights"
    made = command(commands, "inspect", words, "%(prog)s MODEL [options]")
    made.add_argument("model", metavar="MODEL", help=FORMS)
    add_choice(made, "--recipe", recipe_names(), "all by default", nargs="+")
    of_gpu = {"nargs": "+", "default": list(GPUS), "find": lambda text: gpu_of(text).name}
    add_choice(made, "--gpu", GPUS, "the first counts for layers", **of_gpu)
    made.add_argument("--tokens", type=int, default=8192, help="of one GPU in a step (8192)")
    made.add_argument("--sequence", type=int, help="tokens that attend to each other (all of them)")
    made.add_argument("--mesh", default="8", help="GPUs that shard the weights; REPLICASxSHARDS for HSDP (8)")
    add_layers(made)
    ended(made, run_inspect, "all figures")


def add_layers(made: argparse.ArgumentParser) -> None:
    """Add the options of checkpointing and of the layers that are converted."""
    add_choice(made, "--checkpoint", CHECKPOINTS, f"({SELECTIVE})", default=SELECTIVE)
    made.add_argument("--skip", nargs="+", default=[], help="patterns of layers to leave in bf16")
    default = str(EXPERTS).lower()
    words = f"whether experts of a mixture are converted, auto: those that gain ({default})"
    add_choice(made, "--experts", EXPERTS_WORDS, words, default=default)


def run_inspect(arguments: argparse.Namespace) -> tuple[str, int]:
    """Return what to print, and the exit status: 0.

    Raises:
        Float8ConfigError: see ``load`` and ``estimate``.
    """
    # One number of GPUs shards the weights over all of them; two are HSDP's replicas and shards.
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
    return printed(arguments, found), 0


def printed(arguments: argparse.Namespace, found: "Estimate | StepEstimate") -> str:
    """Return an estimate's page, or all of its figures as JSON."""
    if arguments.json:
        return json.dumps({"model": arguments.model, **found.as_dict()}, indent=1)
    return str(found)


OPTIONS = (
    *("gpu", "gpus_per_host", "network", "tokens", "sequence", "replicas", "tensor_parallel"),
    *("recipe", "reduction", "checkpoint", "skip"),
)
"""The options of ``estimate_step``, by its names for them."""


def add_estimate(commands: Any) -> None:
    """Add the command to the subparsers ``commands``."""
    words = "a step's time on 8 to 1024 GPUs, and what float8 adds to it part by part; needs no GPU"
    made = command(commands, "estimate", words, "%(prog)s MODEL [options]")
    made.add_argument("model", metavar="MODEL", help=FORMS)
    made.add_argument("--gpus", nargs="+", type=int, default=[8, 64, 128, 1024], help="(8 64 128 1024)")
    of_gpu = {"default": "H100", "find": lambda text: gpu_of(text, KINDS).name}
    add_choice(made, "--gpu", KINDS, "(H100); the published 8B runs had H100-500W", **of_gpu)
    made.add_argument("--gpus-per-host", type=int, default=8, help="that NVLink joins (8)")
    made.add_argument("--network", type=float, default=400, help="Gbit/s of a GPU's NIC (400)")
    made.add_argument("--tokens", type=int, default=8192, help="of a data-parallel rank in a step (8192)")
    made.add_argument("--sequence", type=int, help="tokens that attend to each other (all of them)")
    made.add_argument("--replicas", type=int, default=1, help="copies of the weights, for HSDP (1)")
    made.add_argument("--tensor-parallel", type=int, default=1, help="GPUs that share each layer (1)")
    add_choice(made, "--recipe", recipe_names(), f"({DEFAULT})", default=DEFAULT)
    words = "of gradients, but in the last row (float32); e4m3-flat is one exchange over all hosts"
    add_choice(made, "--reduction", REDUCTIONS, words, default=FLOAT32)
    add_layers(made)
    ended(made, run_estimate, "all figures")


def run_estimate(arguments: argparse.Namespace) -> tuple[str, int]:
    """Return what to print, and the exit status: 0.

    Raises:
        Float8ConfigError: see ``load`` and ``estimate_step``.
    """
    given = vars(arguments)
    options = {name: given[name] for name in OPTIONS} | {"experts": EXPERTS_WORDS[arguments.experts]}
    found = estimate_step(load(arguments.model), arguments.gpus, **options)
    return printed(arguments, found), 0


DTYPES = ("bfloat16", "float16", "float32")


def add_export(commands: Any) -> None:
    """Add the command to the subparsers ``commands``."""
    words = (
        "cast a finished checkpoint to the float8 data of its training, for inference engines; needs no GPU"
    )
    made = command(commands, "export", words, "%(prog)s CHECKPOINT OUT --recipe NAME [options]")
    made.add_argument(
        "checkpoint", metavar="CHECKPOINT", help="a folder of safetensors, or of torch.distributed.checkpoint"
    )
    made.add_argument("out", metavar="OUT", help="the folder to create")
    add_choice(made, "--recipe", recipe_names(), "what the model was trained with", required=True)
    made.add_argument(
        "--model", help=f"what the checkpoint is of, where it has no config.json of transformers: {FORMS}"
    )
    add_choice(made, "--layout", ("auto", *LAYOUTS), "(auto)", default="auto")
    add_choice(made, "--dtype", DTYPES, f"dtype of the forward ({DTYPES[0]})", default=DTYPES[0])
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
    ended(made, run_export, "what was written")


def run_export(arguments: argparse.Namespace) -> tuple[str, int]:
    """Return what to print, and the exit status: 0.

    Raises:
        Float8ConfigError: see ``inspect``'s ``load`` and ``export_checkpoint``; so are the other errors.
    """
    folder = Path(arguments.checkpoint)
    if not folder.is_dir():
        raise Float8ConfigError(f"{folder} is no folder, and a checkpoint is one")
    # Before anything is loaded or written.
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
    layers = f"{len(exported.formats)} layer{'s' * (len(exported.formats) != 1)} in float8"
    return (
        f"{arguments.out}: {layers} ({arguments.recipe}, layout "
        f"{exported.layout}), {len(exported.in_high_precision)} in {arguments.dtype}, {size / 1e6:,.1f} MB in "
        f"{len(files)} file{'s' * (len(files) > 1)}"
    ), 0


def _progress() -> Any:
    """A bar over the tensors where a terminal looks on and rich is installed, beside what is printed."""
    # In a log a bar is noise.
    if not sys.stderr.isatty() or importlib.util.find_spec("rich") is None:
        return iter
    from rich.console import Console
    from rich.progress import track

    track_names: Any = functools.partial(track, description="Casting", console=Console(stderr=True))
    return track_names


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
    words = list(sys.argv[1:] if argv is None else argv)
    at = next((index for index, word in enumerate(words) if not word.startswith("-")), None)
    if at is not None:
        try:
            words[at] = one_of("command", words[at], commands.choices)
        except Float8ConfigError as error:
            parser.error(str(error))
    arguments, others = parser.parse_known_args(words)
    if others and at is not None:
        refuse_others(commands.choices[words[at]], others)
    try:
        text, status = arguments.run(arguments)
    # Any other error is a bug, and shows where it came from.
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
    # JSON is for programs.
    if not sys.stdout.isatty() or importlib.util.find_spec("rich") is None or text.startswith("{"):
        sys.stdout.write(f"{text}\n")
        return
    from rich.console import Console
    from rich.text import Text

    shown = Text(text)
    shown.highlight_regex(re.compile(r"^\S.*$", re.MULTILINE), "bold")
    shown.highlight_regex(re.compile(r"(failed|slow)$", re.MULTILINE), "red")
    shown.highlight_regex(re.compile(r"native$", re.MULTILINE), "green")
    # Rows of tables are not to be broken at the terminal's width.
    Console(soft_wrap=True).print(shown)
