"""What more GPUs change: torchtitan 0.2 with f8sub on all GPUs of a host, in six sections, each a table.

    steps    the three steps of PyTorch's article on float8 and FSDP2, torchao beside them; communication beside which
             nothing runs, from a trace
    blocks   the same where NCCL_MAX_CTAS leaves a collective 8 or 16 thread blocks
    recipes  every recipe with selective checkpointing and without, and gradients in float8, torchao beside them
    layouts  FSDP, HSDP, tensor parallelism and a pipeline, each in bf16, too
    experts  4 layers of Qwen3-30B-A3B, sharded by FSDP and by expert parallelism, torchao beside it
    weak     1, 2, 4, ... GPUs with as many tokens each, torchao beside it

A row is compared with bf16 on the same GPUs in the same layout: torchtitan's first weights depend on how many ranks
shard them, and its batches on how many are data-parallel. Losses of step 1 are from before rounding has grown. A last
one that is far from bf16's says that the speed is not worth having. An option that is not this script's is
torchtitan's. A row that fails is told at the end, and the exit status is 1.

    python scripts/bench/many_gpus.py --sections steps weak --flavor 8B --steps 18 --skip 8 --json many.json
    python scripts/bench/many_gpus.py --gpus 2 --flavor 8B-8 --tokens 2048
    python scripts/bench/many_gpus.py --sections experts --only "EP 4"
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from scripts.bench import budget, titan
from scripts.bench.timing import machine, version_of
from scripts.table import Table, progress, write_json

OURS, PEER, BF16 = "f8sub tensorwise compiled", "torchao tensorwise compiled", "bf16 compiled"
PEER_BY_ROW = "torchao rowwise compiled"
RECIPES = ("tensorwise", "rowwise", "blockwise", "gridquant", "delayed")
LIMITS = (8, 16)
"""Values of NCCL_MAX_CTAS: how many thread blocks a collective takes from the GEMMs beside it."""
TRACED = ("steps", "blocks")


@dataclass(frozen=True)
class Row:
    """One run: an arm of titan.py, torchtitan's options and the environment besides, and how many GPUs."""

    name: str
    arm: str
    gpus: int
    more: tuple[str, ...] = ()
    base: str = "bf16"
    """The row that it is compared with."""
    env: dict[str, str] = field(default_factory=dict)


def steps(gpus: int) -> Iterator[Row]:
    """The article's steps; torchao has the second, which f8sub does not: an all-reduce for each weight."""
    kinds: tuple[tuple[str, str, tuple[str, ...]], ...] = (
        ("bf16", BF16, ()),
        ("float8 products, bf16 all-gather", OURS, ("--f8sub.no-enable-fsdp-float8-all-gather",)),
        (
            "torchao: an all-reduce a weight",
            PEER,
            ("--quantize.linear.float8.no-precompute-float8-dynamic-scale-for-fsdp",),
        ),
        ("torchao: one all-reduce", PEER, ()),
        ("one all-reduce", OURS, ()),
        ("gradients in float8", OURS, ("--f8sub.reduce-gradients-in-float8",)),
    )
    for name, arm, more in kinds:
        yield Row(name, arm, gpus, more)


def blocks(gpus: int) -> Iterator[Row]:
    """The steps with each limit."""
    for limit in LIMITS:
        for row in steps(gpus):
            name, base = (f"{of}, {limit} blocks" for of in (row.name, row.base))
            yield replace(row, name=name, base=base, env={"NCCL_MAX_CTAS": str(limit)})


def recipes(gpus: int) -> Iterator[Row]:
    """Recipes by checkpointing."""
    for mode in ("selective", "none"):
        checkpoint, base = (f"--activation_checkpoint.mode={mode}",), f"bf16, {mode}"
        for name, arm in (("bf16", BF16), ("torchao", PEER), ("torchao rowwise", PEER_BY_ROW)):
            yield Row(f"{name}, {mode}", arm, gpus, checkpoint, base)
        for recipe in RECIPES:
            more = (*checkpoint, f"--f8sub.recipe_name={recipe}")
            yield Row(f"{recipe}, {mode}", OURS, gpus, more, base)
        more = (*checkpoint, "--f8sub.reduce-gradients-in-float8")
        yield Row(f"gradients in float8, {mode}", OURS, gpus, more, base)


def layouts(gpus: int) -> Iterator[Row]:
    """Ways to place the model, as far as there are GPUs."""
    ways: dict[str, tuple[str, ...]] = {"FSDP": ()}
    for replicas in (2, 4):
        if gpus % replicas == 0 and gpus > replicas:
            option = f"--parallelism.data_parallel_replicate_degree={replicas}"
            ways[f"HSDP {replicas}x{gpus // replicas}"] = (option,)
    if gpus % 2 == 0:
        ways[f"TP 2 x FSDP {gpus // 2}"] = ("--parallelism.tensor_parallel_degree=2",)
        ways[f"PP 2 x FSDP {gpus // 2}"] = (
            "--parallelism.pipeline_parallel_degree=2",
            "--parallelism.pipeline_parallel_schedule=1F1B",
            "--training.local_batch_size=2",
        )
    for way, placed in ways.items():
        for name, arm in (("bf16", BF16), ("tensorwise", OURS), ("torchao", PEER)):
            yield Row(f"{name}, {way}", arm, gpus, placed, f"bf16, {way}")


def experts(gpus: int) -> Iterator[Row]:
    """A mixture by ways to place its experts, as far as there are GPUs."""
    mixture = ("--model.name=qwen3", "--model.flavor=30B-A3B-4")
    for degree in sorted({1, gpus} | ({2} if gpus % 2 == 0 else set())):
        name = "FSDP" if degree == 1 else f"EP {degree} x FSDP {gpus // degree}"
        placed = (*mixture, f"--parallelism.expert_parallel_degree={degree}")
        for arm in (BF16, *titan.MIXTURES):
            yield Row(f"{arm.removesuffix(' compiled')}, {name}", arm, gpus, placed, f"bf16, {name}")


def weak(gpus: int) -> Iterator[Row]:
    """As many tokens a GPU on 1, 2, 4, ... of them."""
    count = 1
    while count <= gpus:
        for name, arm in (("bf16", BF16), ("tensorwise", OURS), ("torchao", PEER)):
            yield Row(f"{name}, {count} GPUs", arm, count, base=f"bf16, {count} GPUs")
        count *= 2


SECTIONS = {
    "steps": steps,
    "blocks": blocks,
    "recipes": recipes,
    "layouts": layouts,
    "experts": experts,
    "weak": weak,
}


def measured(arguments: argparse.Namespace, row: Row, folder: Path, traced: bool) -> dict[str, Any]:
    """Train a row; with the account of its last step where that is traced, or ``untraced``: why there is none."""
    tracing = budget.tracing(arguments) if traced else []
    own = argparse.Namespace(
        **{**vars(arguments), "gpus": row.gpus, "more": [*row.more, *tracing, *arguments.more]}
    )
    before = {name: os.environ.get(name) for name in row.env}
    os.environ.update(row.env)
    try:
        found: dict[str, Any] = titan.run(own, row.arm, folder)
    finally:
        for name, value in before.items():
            os.environ.pop(name) if value is None else os.environ.update({name: value})
    if traced:
        try:
            account = budget.account(budget.last_trace(folder))
            found |= {name: account[name] for name in ("alone_ms", "idle_ms")}
        except ValueError as error:
            found["untraced"] = str(error)
    return found


def table(section: str, found: dict[str, dict[str, Any]], bases: dict[str, str]) -> Table:
    """The rows of a section; each is compared with its base, where that was run."""
    rows = []
    for name, of in found.items():
        base = found.get(bases[name])
        compared = base and {
            "over_base": of["tokens_per_second"] / base["tokens_per_second"],
            "first_gap": of["first_loss"] - base["first_loss"],
            "last_gap": of["loss"] - base["loss"],
        }
        rows.append((name, {**of, **(compared or {})}))
    columns = [
        ("tokens/s and GPU", "{tokens_per_second:,.0f} ({slowest:,.0f} to {fastest:,.0f})"),
        ("over bf16", "{over_base:.3f}"),
        ("GiB active / reserved", "{active_gib:.1f} / {reserved_gib:.1f}"),
        ("loss - bf16's, first and last that was logged", "{first_gap:+.4f}, {last_gap:+.3f}"),
    ]
    if section in TRACED:
        columns.append(("communication alone / idle, ms", "{alone_ms:.1f} / {idle_ms:.1f}"))
    return Table.of(section, rows, tuple(columns))


def parsed() -> argparse.Namespace:
    """This script's options, and those of titan.py but for its arms."""
    made = titan.options(__doc__)
    made.add_argument("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    made.add_argument("--only", nargs="+", default=[""], help="of the rows those whose name has any of these")
    made.add_argument("--no-trace", action="store_true", help="no trace of the sections steps and blocks")
    return titan.checked(made)


def main() -> None:
    from tests.integrations.torchtitan.gloo import make_assets

    arguments = parsed()
    device = torch.device("cuda", 0) if torch.cuda.is_available() else torch.device("cpu")
    about = {**machine(device), "torchtitan": version_of("torchtitan"), "options": vars(arguments)}
    found: dict[str, dict[str, dict[str, Any]]] = {}
    failed: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as temporary, progress() as begin:
        assets = Path(temporary) / "assets"
        assets.mkdir()
        make_assets(0, 1, assets)
        for section in arguments.sections:
            found[section] = {}
            for number, row in enumerate(SECTIONS[section](arguments.gpus)):
                if not any(words in row.name for words in arguments.only):
                    continue
                begin(f"{section}: {row.name}")
                folder = Path(temporary) / f"{section}{number}"
                folder.mkdir()
                for name in ("tokenizer", "data"):
                    (folder / name).symlink_to(assets / name)
                try:
                    traced = section in TRACED and not arguments.no_trace
                    of_row = found[section][row.name] = measured(arguments, row, folder, traced)
                    if "untraced" in of_row:
                        failed[f"{section}: the trace of {row.name}"] = of_row["untraced"]
                except (RuntimeError, ValueError) as error:
                    failed[f"{section}: {row.name}"] = str(error)
                if arguments.json:
                    write_json(arguments.json, {"about": about, "figures": found, "failed": failed})
    for section, of_section in found.items():
        bases = {row.name: row.base for row in SECTIONS[section](arguments.gpus)}
        table(section, of_section, bases).show()
    for name, error in failed.items():
        print(f"FAILED {name}: {error}", file=sys.stderr)
    sys.exit(1 if failed else 0)


if __name__ == "__main__":
    main()
