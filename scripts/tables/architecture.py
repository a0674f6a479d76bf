"""The map of the code: docs/images/architecture.svg, and the lists of files in docs/architecture.md.

Which folder imports which is read from the sources. The files of a flow are those that run: a small layer is trained,
alone and under FSDP2 on two ranks, and every file of f8sub is noted when it is first entered.

    python scripts/tables/architecture.py --write-docs
"""

from __future__ import annotations

import argparse
import ast
import functools
import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from types import FrameType
from typing import Any
from xml.etree import ElementTree

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import f8sub
from scripts.bench.ranks import on_ranks
from scripts.table import ROOT, write_between_markers

PACKAGE = ROOT / "f8sub"
PICTURE = ROOT / "docs" / "images" / "architecture.svg"
COMMAND = "python scripts/tables/architecture.py --write-docs"
CORE = ("convert", "linear", "weights", "tensor", "kernels", "values")
"""Folders of the core, the topmost first; the modules at the top of the package are values, or the public names."""
NAMES = {
    "f8sub",
    "f8sub.__main__",
    "f8sub.features",
    "f8sub.integrations",
    "f8sub.integrations.transformers",
    "f8sub.optim",
    "f8sub.recipes.delayed",
    "f8sub.tensor_parallel",
    "f8sub.titan",
}
VALUES = "Formats, recipes, errors, and what differs between versions of torch."


def dotted(path: Path) -> str:
    """``f8sub.linear.saved_input`` of a file; a folder's name for its ``__init__.py``."""
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def folder_of(module: str) -> str:
    """``linear``, ``features/delayed``, ``values`` or ``names``: where a module is drawn."""
    parts = module.split(".")
    if module in NAMES:
        return "names"
    if len(parts) > 2 and parts[1] == "features":
        return f"features/{parts[2]}"
    return parts[1] if parts[1] in CORE else "values"


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


def data() -> dict[str, Any]:
    """What the picture is drawn from: what each folder holds, and which folders it imports."""
    trees = modules()
    found: dict[str, dict[str, Any]] = {}
    for name, tree in trees.items():
        folder = folder_of(name)
        entry = found.setdefault(folder, {"holds": VALUES if folder == "values" else "", "imports": set()})
        if name == f"f8sub.{folder.replace('/', '.')}":
            entry["holds"] = first_line(tree)
        entry["imports"] |= {folder_of(other) for other in imported(tree, set(trees))} - {folder, "names"}
    found.pop("names")
    found.pop("features", None)
    return {
        name: {**of, "imports": sorted(of["imports"])}
        for name, of in sorted(found.items())
        if name != "features"
    }


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
        return [name for name in self.seen if name not in NAMES and ".recipes" not in name]


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


def folder_table() -> str:
    """A line for each folder, with its files."""
    files: dict[str, list[str]] = {}
    for name in modules():
        path = path_of(name)
        if path.name != "__init__.py" and (folder := folder_of(name)) != "names":
            files.setdefault(folder, []).append(f"`{path.stem}`")
    held = {name: of["holds"] for name, of in data().items()}
    order = [*reversed(CORE), *sorted(name for name in files if name not in CORE)]
    rows = [f"| `{name}` | {as_markdown(held[name])} | {' '.join(files[name])} |" for name in order]
    return "\n".join(["| folder | what it holds | files |", "| --- | --- | --- |", *rows])


def tables(found: dict[str, list[str]]) -> dict[str, str]:
    """Marker -> table, of docs/architecture.md."""
    return {"folders": folder_table(), **{name: flow_table(names) for name, names in found.items()}}


BOX, GAP, LEFT, WIDE = 70, 20, 96, 372
"""Of the core's boxes, in pixels: height, distance, left edge, width."""
FEATURES, COLUMN, ROW = 520, 27, 55
"""Of the features' table: left edge, width of a column of dots, height of a row."""
INK, GREY, BLUE, LINE = "#1f2933", "#627282", "#2563a8", "#b9c4d0"


def text(x: float, y: float, words: str, size: int = 12, color: str = INK, more: str = "") -> str:
    shown = escape(words.replace("``", ""))
    return f'<text x="{x:g}" y="{y:g}" font-size="{size}" fill="{color}" {more}>{shown}</text>'


def lines(x: float, y: float, words: str, columns: int, most: int = 2) -> list[str]:
    """Small grey text, wrapped."""
    wrapped = textwrap.wrap(words.replace("``", ""), columns, max_lines=most, placeholder=" ...")
    return [text(x, y + 14 * i, line, 11, GREY) for i, line in enumerate(wrapped)]


def core(drawn: dict[str, Any], top: float) -> Iterator[str]:
    """Boxes of the core, one above the other, and an arrow from each to those it imports."""
    middle = {name: top + i * (BOX + GAP) + BOX / 2 for i, name in enumerate(CORE)}
    for name in CORE:
        y = middle[name] - BOX / 2
        yield f'<rect x="{LEFT}" y="{y:g}" width="{WIDE}" height="{BOX}" rx="6" fill="#eef4fb" stroke="{BLUE}"/>'
        yield text(LEFT + 14, y + 22, name, 14, INK, 'font-weight="bold"')
        yield from lines(LEFT + 14, y + 40, drawn[name]["holds"], 58)
    for i, name in enumerate(CORE):
        for other in drawn[name]["imports"]:
            steps = CORE.index(other) - i
            start, end = middle[name] + 4 + 3 * steps, middle[other] - 8 + 3 * i
            if steps == 1:
                x, y = LEFT + WIDE / 2, middle[name] + BOX / 2
                path = f"M {x:g} {y:g} L {x:g} {y + GAP - 2:g}"
            else:
                out = LEFT - 18 * steps + 8
                path = f"M {LEFT} {start:g} C {out:g} {start:g} {out:g} {end:g} {LEFT - 2} {end:g}"
            yield f'<path d="{path}" fill="none" stroke="{BLUE}" stroke-width="1.3" marker-end="url(#arrow)"/>'


def features(drawn: dict[str, Any], top: float) -> Iterator[str]:
    """A row for each feature, with a dot below each folder of the core that it imports."""
    dots = FEATURES + 300
    for i, name in enumerate(CORE):
        x = dots + i * COLUMN
        yield text(x, top - 12, name, 11, INK, f'transform="rotate(-45 {x:g} {top - 12:g})"')
    names = sorted(name for name in drawn if name not in CORE)
    for row, name in enumerate(names):
        y, imports = top + row * ROW, drawn[name]["imports"]
        yield f'<line x1="{FEATURES}" y1="{y:g}" x2="{dots + 6 * COLUMN}" y2="{y:g}" stroke="{LINE}"/>'
        yield text(FEATURES + 4, y + 17, name.partition("/")[2], 13, INK, 'font-weight="bold"')
        others = [other.partition("/")[2] for other in imports if other not in CORE]
        if others:
            yield text(
                dots - 20,
                y + 17,
                f"also imports {', '.join(others)}",
                10,
                GREY,
                'text-anchor="end" font-style="italic"',
            )
        yield from lines(FEATURES + 4, y + 33, drawn[name]["holds"], 46)
        for i, folder in enumerate(CORE):
            fill = BLUE if folder in imports else "none"
            stroke = BLUE if folder in imports else LINE
            yield f'<circle cx="{dots + 5 + i * COLUMN}" cy="{y + ROW / 2:g}" r="5" fill="{fill}" stroke="{stroke}"/>'


def picture(drawn: dict[str, Any]) -> str:
    """The SVG, with what it was drawn from as its metadata."""
    rows = len(drawn) - len(CORE)
    top = 96
    width, height = 1010, top + max(len(CORE) * (BOX + GAP), rows * ROW) + 24
    size = f'viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    marker = 'id="arrow" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto"'
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="Helvetica, Arial, sans-serif">',
        "<title>The folders of f8sub and what they import</title>",
        f"<metadata>{escape(json.dumps(drawn))}</metadata>",
        f'<defs><marker {marker}><path d="M 0 0 L 8 4 L 0 8 z" fill="{BLUE}"/></marker></defs>',
        f'<rect width="{width}" height="{height}" fill="white"/>',
        text(LEFT, 36, "Core", 16, INK, 'font-weight="bold"'),
        text(LEFT, 56, "A folder imports those below it, and no feature.", 12, GREY),
        text(FEATURES + 4, 36, "Features", 16, INK, 'font-weight="bold"'),
        text(FEATURES + 4, 56, "Each enters by a socket of the core:", 12, GREY),
        text(FEATURES + 4, 72, "a dot is a folder that it imports.", 12, GREY),
        *core(drawn, top),
        *features(drawn, top),
        "</svg>",
    ]
    return "\n".join(parts) + "\n"


def drawn_from(svg: str) -> dict[str, Any]:
    """What a picture was drawn from."""
    found = ElementTree.fromstring(svg).findtext("{http://www.w3.org/2000/svg}metadata")
    return json.loads(found or "{}")


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--write-docs", action="store_true", help="write the picture and the tables")
    arguments = options.parse_args()
    made = tables(on_ranks(2, flows)[0])
    if arguments.write_docs:
        PICTURE.write_text(picture(data()))
        for marker, table in made.items():
            write_between_markers(marker, f"{table}\n\n<sub>`{COMMAND}`</sub>")
    else:
        print("\n\n".join(made.values()))


if __name__ == "__main__":
    main()
