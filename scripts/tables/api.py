"""The reference of f8sub's public names: docs/api.md, from signatures, docstrings and the examples beside this script.

griffe parses the modules. Only those with constants that are defaults are imported, which need nothing but torch, so
that the page does not depend on what is installed.

    python scripts/tables/api.py             # shows the page
    python scripts/tables/api.py --write-docs
"""

from __future__ import annotations

import ast
import functools
import inspect
import pydoc
import re
import sys
import textwrap
from collections.abc import Iterator
from types import FunctionType

import griffe
import tyro

from scripts.table import ROOT
from scripts.tables import api_examples
from scripts.tables.api_examples import COMMANDS

PAGE = ROOT / "docs" / "api.md"
COMMAND = "python scripts/tables/api.py --write-docs"

SECTIONS = {
    "Convert a model": """convert_to_float8 convert_from_float8 conversion_report ConversionReport LayerReport
        register_experts""",
    "Train": """precompute_scales register_precompute_hook graph_step GraphedStep autocast checkpoint_policy
        prefer_cudnn_attention keep_swiglu_input_in_float8 reduce_gradients_in_float8 GradientReduction
        dispatch_tokens_in_float8 exchange_tokens drop_high_precision restore_high_precision""",
    "Before a run": "estimate Estimate estimate_step StepEstimate",
    "Look at a run": "Monitor sensitivity compare Comparison",
    "Serve, and start from float8": "save_float8 float8_state_dict float8_weights load_float8",
    "Find what went wrong": "skip_step_if_nonfinite find_nonfinite",
    "Recipes and formats": """recipe_names get_recipe Recipe GemmSpec Float8Format Tile ALL ScaleRule
        Rounding""",
    "Tensors and layers": "quantize Float8Tensor Operand Float8Linear grouped_linear",
    "Errors and warnings": """Float8ConfigError Float8ShapeError Float8RankMismatchError Float8NumericsError
        Float8Warning""",
}
"""Title -> names of f8sub, in order."""

MODULES = (
    *("f8sub.optim", "f8sub.tensor_parallel", "f8sub.integrations.accelerate"),
    *("f8sub.integrations.lightning", "f8sub.integrations.torchao", "f8sub.integrations.transformers"),
    "f8sub.titan",
)
"""Each has a section of all its public names, below those of f8sub."""

INTRODUCTION = f"""\
# API reference

This page lists every public name of f8sub with its signature, its docstring and a short example. Look here for an
option, a shape, a dtype or an error; the other pages say when to use what.

It is generated from the code: `{COMMAND}` writes it, and a test says when it is
out of date. The examples are in [`scripts/tables/api_examples.py`](../scripts/tables/api_examples.py). Those that shard
run in a job of two ranks whose process group exists."""

NOTES = {"f8sub.titan": "The options are explained on the page [torchtitan](torchtitan.md#options)."}
"""What the page says of a module below its docstring."""

FIELD = re.compile(r"^(\w+): (.*)$")
HEADERS = {
    "Args": "Arguments",
    "Attributes": "Attributes",
    "Attributes that follow": "Attributes that follow from these",
    "Returns": "Returns",
    "Yields": "Yields",
    "Raises": "Raises",
}
WIDTH = 100
"""Of a signature on one line."""
QUIET_BASES = (
    "torch.nn.",
    "torch.optim.",
    "ColwiseParallel",
    "RowwiseParallel",
    "PrepareModuleInput",
    "Quantization",
)
"""Classes derived from these have their base's methods, which the page leaves to the base's documentation."""


@functools.cache
def modules() -> griffe.ModulesCollection:
    """f8sub's, as griffe reads them."""
    loader = griffe.GriffeLoader(search_paths=[ROOT])
    loader.load("f8sub")
    loader.resolve_aliases(implicit=True)
    return loader.modules_collection


def public_names(path: str) -> list[str]:
    """What the ``__all__`` of a module lists; else what it imports from modules of f8sub."""
    found = modules()[path]
    aliases = [each for each in found.members.values() if each.is_alias and "f8sub." in each.target_path]
    return list(map(str, found.exports or [each.name for each in aliases if not each.is_module]))


def definition(path: str, name: str) -> griffe.Object:
    """What a name of a module stands for, wherever it is imported from."""
    found = modules()[path][name]
    return found.final_target if found.is_alias else found


def text_of(found: griffe.Object) -> str:
    return found.docstring.value if found.docstring else ""


def parameters_of(found: griffe.Class | griffe.Function) -> list[str]:
    """Each with its annotation and default, ``self`` left out; constants of a module by their values."""

    def text(each: griffe.Parameter | griffe.Attribute, default: str | griffe.Expr | None) -> str:
        annotated = f"{each.name}: {each.annotation}" if each.annotation else each.name
        return annotated if default is None else f"{annotated} = {value_of(default)}"

    if "NamedTuple" in map(str, getattr(found, "bases", ())):
        return [text(each, each.value) for each in found.attributes.values() if "property" not in each.labels]
    shown = []
    for each in found.parameters:
        stars = {"variadic positional": "*", "variadic keyword": "**"}.get(each.kind.value, "")
        if each.kind.value == "keyword-only" and not any(other.startswith("*") for other in shown):
            shown.append("*")
        shown.append(stars + text(each, None if stars else each.default))
    return [each for each in shown if each not in ("self", "cls")]


def value_of(default: str | griffe.Expr) -> str:
    """The literal that a name stands for; any other expression as it is."""
    value = pydoc.locate(default.canonical_path) if isinstance(default, griffe.ExprName) else None
    return repr(value) if isinstance(value, str | int | float) else str(default)


def signature(name: str, found: griffe.Object) -> str:
    """How it is called; "" for what is not."""
    if found.is_attribute:
        return f"{name} = {found.value}"
    parameters = parameters_of(found)
    if found.is_class and not parameters and "__init__" not in found.members:
        return ""
    returns = f" -> {found.returns}" if found.is_function and found.returns else ""
    flat = f"{name}({', '.join(parameters)}){returns}"
    if len(flat) > WIDTH:
        lines = "".join(f"    {each},\n" for each in parameters)
        flat = f"{name}(\n{lines}){returns}"
    return flat.replace("'", '"')


def markdown(docstring: str) -> str:
    """A docstring in Google's style as Markdown: sections are headings, their entries a list."""
    lines, out, section = docstring.splitlines(), [], ""
    for line in lines:
        header = line.rstrip(":")
        if line.endswith(":") and header in HEADERS and not line.startswith(" "):
            section = header
            out += [f"**{HEADERS[header]}**", ""]
        elif section and line.startswith("    "):
            inner = line[4:]
            entry = FIELD.match(inner)
            if entry and section not in ("Returns", "Yields"):
                out.append(f"- `{entry[1]}`: {entry[2]}")
            else:
                out.append(inner if section in ("Returns", "Yields") else f"  {inner.strip()}")
        else:
            section = section if line else ""
            out.append(line)
    return re.sub(r"``(.+?)``", r"`\1`", "\n".join(out)).replace("::\n", ":\n").strip()


def members(found: griffe.Class) -> Iterator[str]:
    """Values of an enumeration; public methods and properties of any other class."""
    quiet = any(str(base).startswith(QUIET_BASES) for base in found.bases)
    for each in found.members.values():
        name = each.name
        if each.is_function:
            name = f"{name}({', '.join(parameters_of(each))})".replace("'", '"')
        if each.is_function or "property" in each.labels:
            name = "" if quiet or each.name.startswith("_") else f".{name}"
        elif not is_enum(found):
            continue
        if name:
            text = as_one_line(text_of(each).partition("\n\n")[0])
            yield f"- `{name}`: {text}" if text else f"- `{name}`"


def is_enum(found: griffe.Object) -> bool:
    return found.is_class and "Enum" in map(str, found.bases)


def as_one_line(docstring: str) -> str:
    return re.sub(r"\s+", " ", markdown(docstring))


IMPORTS = {"torch": "import torch", "nn": "from torch import nn", "f8sub": "import f8sub"}
"""What an example imports where it uses the name."""


class Example:
    """A function of ``api_examples.py``: its text, and the words of the comment above it, which are its docstring."""

    def __init__(self, function: FunctionType) -> None:
        source = inspect.getsource(function)
        (node,) = ast.parse(source).body
        assert isinstance(node, ast.FunctionDef)
        self.words = ast.get_docstring(node) or ""
        body = node.body[1:] if self.words else node.body
        imports = [each for each in body if isinstance(each, ast.Import | ast.ImportFrom)]
        rest = body[len(imports) :]
        used = {each.id for part in rest for each in ast.walk(part) if isinstance(each, ast.Name)}
        lines = {*map(ast.unparse, imports), *(line for name, line in IMPORTS.items() if name in used)}
        text = textwrap.dedent("\n".join(source.splitlines()[rest[0].lineno - 1 :]))
        text = "\n\n".join([*_in_groups(lines), text])
        # What is defined stands between two empty lines at the top of a file.
        text = re.sub(r"\n\n(?=class |def |@)", "\n\n\n", text)
        self.text = re.sub(r"(\n    .*)\n\n(?=\S)", r"\1\n\n\n", text)

    def markdown(self) -> str:
        """The block of the page."""
        above = f"<!-- run: {self.words} -->\n" if self.words else ""
        return f"{above}```python\n{self.text}\n```"


def _in_groups(imports: set[str]) -> Iterator[str]:
    """Imports as ruff sorts them: the standard library's, others', f8sub's."""
    groups: dict[int, list[str]] = {0: [], 1: [], 2: []}
    for line in sorted(imports, key=lambda line: (line.startswith("from"), line)):
        package = line.split()[1].partition(".")[0]
        groups[2 if package == "f8sub" else 0 if package in sys.stdlib_module_names else 1].append(line)
    return ("\n".join(lines) for lines in groups.values() if lines)


@functools.cache
def examples() -> dict[str, Example]:
    """By name of the function, ``optim_MasterWeights`` for ``f8sub.optim.MasterWeights``."""
    functions = inspect.getmembers(api_examples, inspect.isfunction)
    return {name: Example(function) for name, function in functions}


def key_of(module: str, name: str) -> str:
    """What an example is called."""
    return "_".join([*module.split(".")[1:], name])


def entries() -> dict[str, list[tuple[str, str]]]:
    """Title of each section -> (module, name) of what stands in it, each public name once."""
    found = {title: names.split() for title, names in SECTIONS.items()}
    placed = {name for names in found.values() for name in names}
    found["More"] = [name for name in public_names("f8sub") if name not in placed]
    found |= {path: public_names(path) for path in MODULES}
    return {
        title: [(title if title in MODULES else "f8sub", name) for name in names]
        for title, names in found.items()
        if names
    }


def entry(path: str, name: str) -> str:
    """The heading, signature, docstring and example of one name."""
    found = definition(path, name)
    shown = name if path == "f8sub" else f"{path.removeprefix('f8sub.')}.{name}"
    parts = [f"### `{shown}`"]
    if call := signature(shown, found):
        parts.append(f"```py\n{call}\n```")
    parts.append(markdown(text_of(found)))
    if found.is_class and (listed := list(members(found))):
        title = "Values" if is_enum(found) else "Methods and properties"
        parts.append("\n".join([f"**{title}**", "", *listed]))
    key = key_of(path, name)
    parts.append(examples()[key].markdown() if key in examples() else COMMANDS.get(key, ""))
    return "\n\n".join(filter(None, parts))


def made_by_call(path: str, name: str) -> bool:
    """Whether a name is what a function returned, as torchtitan's configs are, which have no docstring of their own."""
    found = definition(path, name)
    return found.is_attribute and isinstance(found.value, griffe.ExprCall)


def section(title: str, names: list[tuple[str, str]]) -> str:
    path = names[0][0]
    parts = [f"## {title}"]
    if title == path:
        parts += [markdown(text_of(modules()[path])), *NOTES.get(path, "").splitlines()]
    parts += [entry(*each) for each in names if not made_by_call(*each)]
    if alike := [name for each, name in names if made_by_call(each, name)]:
        listed = ", ".join(f"`{name}`" for name in alike)
        parts.append(f"### Configs\n\nFor `--module {path} --config NAME`: {listed}.")
        parts.append(COMMANDS.get(key_of(path, "configs"), ""))
    return "\n\n".join(parts)


def page() -> str:
    """The whole page."""
    found = entries()
    contents = []
    for title, names in found.items():
        links = [f"[{name}](#{anchor(of, name)})" for of, name in names if not made_by_call(of, name)]
        contents.append(f"- {title}: {', '.join(links)}")
    return (
        "\n\n".join([INTRODUCTION, "\n".join(contents), *(section(*each) for each in found.items())]) + "\n"
    )


def anchor(module: str, name: str) -> str:
    """Of the heading, as GitHub makes it."""
    shown = name if module == "f8sub" else f"{module.removeprefix('f8sub.')}{name}"
    return shown.lower().replace(".", "")


def main(write_docs: bool = False) -> None:
    """Show the page, or write it.

    Args:
        write_docs: write docs/api.md.
    """
    if write_docs:
        PAGE.write_text(page())
    else:
        print(page())


if __name__ == "__main__":
    tyro.cli(main, description=__doc__)
