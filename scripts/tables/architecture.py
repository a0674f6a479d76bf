"""The map of the code and the lists of files in docs/architecture.md.

Which room imports which is read from the sources. The files of a flow are those that run: a small layer is trained,
alone and under FSDP2 on two ranks, experts are trained, a checkpoint is loaded and a model estimated, and every file of
f8sub is noted when it is first entered.

    python scripts/tables/architecture.py --write-docs
"""

from __future__ import annotations

import ast
import collections
import functools
import re
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import tyro
from torch import nn
from torch.distributed.fsdp import fully_shard

import f8sub
from scripts.bench.ranks import on_ranks
from scripts.table import ROOT, write_between_markers

PACKAGE = ROOT / "f8sub"
COMMAND = "python scripts/tables/architecture.py --write-docs"
ROOMS = (
    *("values", "kernels", "attention", "tensor", "weights", "delayed", "linear", "experts", "convert"),
    *("tensor_parallel", "gradients", "graphs", "checkpoint", "estimator", "diagnostics", "integrations"),
)
"""In the order of imports: a module imports its own room or those before it."""
VALUES = {"capture", "errors", "formats", "host_copy", "recipe", "recipes"}
VALUES |= {"text_table", "torch_compat", "version"}
HELD = {"values": "Formats, recipes, errors, text tables, and what differs between versions of torch."}


def dotted(path: Path) -> str:
    """``f8sub.linear.saved_input`` of a file; a folder's name for its ``__init__.py``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def room_of(module: str) -> str:
    """``linear``, ``values`` or ``names``, the public names at the top of the package."""
    part = [*module.split("."), ""][1]
    if part in VALUES:
        return "values"
    if part == "optim":  # under the name that users know; its topic is primary weights, which convert has
        return "convert"
    return part if part in ROOMS else "names"


@functools.cache
def modules() -> dict[str, ast.Module]:
    """Every module of f8sub by its name, parsed."""
    return {dotted(path): ast.parse(path.read_text()) for path in sorted(PACKAGE.rglob("*.py"))}


def imported(tree: ast.AST, known: set[str]) -> Iterator[str]:
    """Modules of f8sub that a module imports at run time, in functions too."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names if alias.name in known)
        elif isinstance(node, ast.ImportFrom):
            names = [f"{node.module}.{alias.name}" for alias in node.names]
            yield from {name if name in known else str(node.module) for name in names} & known
        yield from imported(node, known)


def first_line(tree: ast.Module) -> str:
    """The first sentence of a module's docstring, on one line."""
    return re.sub(r"\s+", " ", (ast.get_docstring(tree) or "").partition("\n\n")[0])


def imports() -> dict[tuple[str, str], int]:
    """Pairs of rooms, and how many imports of the first name modules of the second."""
    trees = modules()
    found: collections.Counter[tuple[str, str]] = collections.Counter()
    for name, tree in trees.items():
        for other in set(imported(tree, set(trees))):
            found[room_of(name), room_of(other)] += 1
    return {pair: count for pair, count in found.items() if pair[0] != pair[1] and "names" not in pair}


class Visits:
    """Notes modules of f8sub in the order in which code of theirs is first entered."""

    def __init__(self) -> None:
        self.seen: dict[str, None] = {}

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        """What Python calls at every call of a function."""
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(PACKAGE):
            self.seen[dotted(path)] = None

    def during(self, run: Callable[[], Any]) -> list[str]:
        """Those that ``run`` enters; recipes and the public names are no part of a flow."""
        before = sys.getprofile()
        sys.setprofile(self)
        try:
            run()
        finally:
            sys.setprofile(before)
        return [name for name in self.seen if room_of(name) != "names" and ".recipes" not in name]


def flows() -> dict[str, list[str]]:
    """Modules of each flow, in a step of a small model that is like every later one; in a group of two ranks."""
    torch.manual_seed(0)
    x, dy = torch.randn(32, 64, requires_grad=True), torch.randn(32, 64)
    alone = f8sub.convert_to_float8(nn.Sequential(nn.Linear(64, 64)))
    sharded = f8sub.convert_to_float8(nn.Sequential(nn.Linear(64, 64)))
    fully_shard(sharded)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)

    def step() -> None:
        sharded(x).backward(dy)
        optimizer.step()

    def gather() -> None:
        sharded.unshard()
        sharded.reshard()

    def prepare() -> None:
        with torch.no_grad():
            alone[0].weight.mul_(0.5)
        step()
        f8sub.precompute_scales(sharded)

    for _ in range(2):  # what happens once is no part of a flow
        prepare()
        alone(x).backward(dy)
    prepare()
    found = {"flow_1": Visits().during(lambda: alone(x).backward(dy))}
    found["flow_2"] = Visits().during(gather)
    step()
    found["flow_3"] = Visits().during(lambda: f8sub.precompute_scales(sharded))
    return found


class Experts(nn.Module):
    """Two products of four experts of 64 features."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(4, 64, 64))
        self.down = nn.Parameter(torch.randn(4, 64, 64))

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        """Multiply x (M, 64), sorted by expert, by both weights of each row's expert."""
        return f8sub.grouped_linear(f8sub.grouped_linear(x, self.up, ends), self.down, ends)


def counted_flows() -> dict[str, list[str]]:
    """Modules of a step of experts, of a load and of an estimate, each like every later one; in this process."""
    torch.manual_seed(0)
    f8sub.register_experts(Experts)
    experts = f8sub.convert_to_float8(nn.Sequential(Experts()), "rowwise", experts=True)
    optimizer = torch.optim.SGD(experts.parameters(), lr=0.1)
    x, ends = torch.randn(64, 64, requires_grad=True), torch.tensor([16, 32, 48, 64])

    def step() -> None:
        experts[0](x, ends).sum().backward()

    def layer() -> nn.Module:
        made = nn.Sequential(nn.Linear(256, 256, dtype=torch.bfloat16))
        return f8sub.convert_to_float8(made, "blockwise", skip_defaults=False)

    for _ in range(2):  # what happens once is no part of a flow
        step()
        optimizer.step()
    found = {"experts": Visits().during(step)}
    with tempfile.TemporaryDirectory() as folder:
        f8sub.save_float8(layer(), folder)
        f8sub.load_float8(layer(), folder)
        loaded = layer()
        found["load"] = Visits().during(lambda: f8sub.load_float8(loaded, folder))
    large = nn.Sequential(nn.Linear(1024, 1024))
    f8sub.estimate(large)
    found["estimate"] = Visits().during(lambda: f8sub.estimate(large))
    return found


def path_of(module: str) -> Path:
    path = ROOT.joinpath(*module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def linked(module: str) -> str:
    """A link from docs/architecture.md."""
    path = path_of(module)
    return f"[`{path.relative_to(PACKAGE)}`](../{path.relative_to(ROOT)})"


def as_markdown(docstring: str) -> str:
    return docstring.replace("``", "`").replace("|", "\\|")


def flow_table(names: list[str]) -> str:
    """A line for each file of a flow."""
    trees = modules()
    rows = [f"| {linked(name)} | {as_markdown(first_line(trees[name]))} |" for name in names]
    return "\n".join(["| file | what it is |", "| --- | --- |", *rows])


def room_table() -> str:
    """A line for each room, with its files."""
    files: dict[str, list[str]] = {room: [] for room in ROOMS}
    held = dict(HELD)
    for name, tree in modules().items():
        path, room = path_of(name), room_of(name)
        if name == f"f8sub.{room}":
            held[room] = first_line(tree)
        if path.name != "__init__.py" and room != "names":
            files[room].append(f"`{path.stem}`")
    rows = [f"| `{room}` | {as_markdown(held[room])} | {' '.join(files[room])} |" for room in ROOMS]
    return "\n".join(["| room | what it holds | files |", "| --- | --- | --- |", *rows])


def nearest(pairs: set[tuple[str, str]]) -> list[tuple[str, str]]:
    """The pairs of rooms that no other way joins, so that the map has few lines."""
    reach: dict[str, set[str]] = {}
    for room in ROOMS:
        below = {other for one, other in pairs if one == room and ROOMS.index(other) < ROOMS.index(room)}
        reach[room] = below | {further for other in below for further in reach[other]}
    return [
        (one, other)
        for one, other in sorted(pairs, key=lambda pair: (ROOMS.index(pair[0]), ROOMS.index(pair[1])))
        if other in reach[one] and not any(other in reach[step] for step in reach[one])
    ]


def diagram() -> str:
    """The rooms and the imports between them, as Mermaid text."""
    lines = ["```mermaid", "flowchart TD"]
    lines += [f"    {one} --> {other}" for one, other in nearest(set(imports()))]
    return "\n".join([*lines, "```"])


def counted_table(counted: dict[str, list[str]]) -> str:
    """A line for each flow that has no table of its own, with its files."""
    titles = {"experts": "a step of experts", "load": "`load_float8`", "estimate": "`estimate`"}
    rows = []
    for name, modules_of in counted.items():
        files = " ".join(f"`{path_of(each).relative_to(PACKAGE).with_suffix('')}`" for each in modules_of)
        rows.append(f"| {titles[name]} | {len(modules_of)} | {files} |")
    return "\n".join(["| flow | files | which |", "| --- | --- | --- |", *rows])


def tables(found: dict[str, list[str]], counted: dict[str, list[str]]) -> dict[str, str]:
    """Marker -> table, of docs/architecture.md."""
    flows_of = {name: flow_table(names) for name, names in found.items()}
    return {"map": diagram(), "rooms": room_table(), **flows_of, "counted": counted_table(counted)}


def main(write_docs: bool = False) -> None:
    made = tables(on_ranks(2, flows)[0], counted_flows())
    if write_docs:
        for marker, table in made.items():
            write_between_markers(marker, f"{table}\n\n<sub>`{COMMAND}`</sub>")
    else:
        print("\n\n".join(made.values()))


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
