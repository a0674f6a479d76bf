"""The reference of f8sub's public names: docs/api.md, from signatures, docstrings and the examples beside this script.

Sources are parsed, not imported, so that the page does not depend on what is installed.

    python scripts/tables/api.py             # shows the page
    python scripts/tables/api.py --write-docs
"""

from __future__ import annotations

import argparse
import ast
import functools
import re
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path

from scripts.table import ROOT

PAGE = ROOT / "docs" / "api.md"
EXAMPLES = Path(__file__).with_name("api_examples.py")
COMMAND = "python scripts/tables/api.py --write-docs"

SECTIONS = {
    "Convert a model": (
        "f8sub",
        [
            *(
                "convert_to_float8",
                "convert_from_float8",
                "conversion_report",
                "ConversionReport",
                "LayerReport",
            ),
            "register_experts",
        ],
    ),
    "Train": (
        "f8sub",
        [
            "precompute_scales",
            "register_precompute_hook",
            "graph_step",
            "GraphedStep",
            "autocast",
            "checkpoint_policy",
            "prefer_cudnn_attention",
            "keep_swiglu_input_in_float8",
            "reduce_gradients_in_float8",
            "GradientReduction",
            "dispatch_tokens_in_float8",
            "exchange_tokens",
            "drop_high_precision",
            "restore_high_precision",
        ],
    ),
    "Before a run": ("f8sub", ["estimate", "Estimate", "estimate_step", "StepEstimate"]),
    "Look at a run": ("f8sub", ["Monitor", "sensitivity", "compare", "Comparison"]),
    "Serve, and start from float8": (
        "f8sub",
        ["save_float8", "float8_state_dict", "float8_weights", "load_float8"],
    ),
    "Find what went wrong": ("f8sub", ["skip_step_if_nonfinite", "find_nonfinite"]),
    "Recipes and formats": (
        "f8sub",
        [
            *("recipe_names", "get_recipe", "Recipe", "GemmSpec", "Float8Format", "Tile", "ALL"),
            *("ScaleRule", "Rounding"),
        ],
    ),
    "Tensors and layers": (
        "f8sub",
        ["quantize", "Float8Tensor", "Operand", "Float8Linear", "grouped_linear"],
    ),
    "Errors and warnings": (
        "f8sub",
        [
            *("Float8ConfigError", "Float8ShapeError", "Float8RankMismatchError", "Float8NumericsError"),
            "Float8Warning",
        ],
    ),
    "f8sub.optim": ("f8sub.optim", []),
    "f8sub.tensor_parallel": ("f8sub.tensor_parallel", []),
    "f8sub.integrations.transformers": ("f8sub.integrations.transformers", []),
    "f8sub.titan": ("f8sub.titan", []),
}
"""Title -> module, and its names in order; the rest of the module's public names follow by themselves."""

INTRODUCTION = f"""\
# API reference

This page lists every public name of f8sub with its signature, its docstring and a short example. Look here for an
option, a shape, a dtype or an error; the other pages say when to use what.

It is generated from the code: `{COMMAND}` writes it, and a test says when it is
out of date. The examples are in [`scripts/tables/api_examples.py`](../scripts/tables/api_examples.py)."""

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
def parsed(module: str) -> ast.Module:
    path = ROOT.joinpath(*module.split("."))
    path = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
    return ast.parse(path.read_text(), str(path))


def statements(body: list[ast.stmt]) -> Iterator[ast.stmt]:
    """Statements of a module, those in the branches of an ``if`` too."""
    for node in body:
        yield node
        if isinstance(node, ast.If):
            yield from statements([*node.body, *node.orelse])


def public_names(module: str) -> list[str]:
    """What the ``__all__`` of a module lists, all of them where it has several; else what it imports under its name."""
    listed, imported = [], []
    for node in statements(parsed(module).body):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            listed += ast.literal_eval(node.value)
        elif isinstance(node, ast.ImportFrom):
            imported += [alias.name for alias in node.names if alias.asname == alias.name]
            imported += public_names(str(node.module)) if node.names[0].name == "*" else []
    return list(dict.fromkeys(listed or imported))


def definition(module: str, name: str) -> tuple[str, ast.stmt, str]:
    """Where a name is defined, wherever it is imported from: module, statement, and docstring or string below it."""
    nodes = list(statements(parsed(module).body))
    for node, following in zip(nodes, [*nodes[1:], None], strict=True):
        if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name:
            return module, node, ast.get_docstring(node) or ""
        if isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            targets = [
                each
                for target in targets
                for each in (target.elts if isinstance(target, ast.Tuple) else [target])
            ]
            if name in map(ast.unparse, targets):
                return module, node, string(following)
        if isinstance(node, ast.ImportFrom):
            for alias in node.names:
                if name == (alias.asname or alias.name) and node.module:
                    return definition(node.module, alias.name)
                if alias.name == "*" and name in public_names(str(node.module)):
                    return definition(str(node.module), name)
    raise ValueError(f"{module}: nothing defines {name}")


def string(node: ast.stmt | None) -> str:
    """The text of a statement that is a string."""
    is_text = (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )
    return textwrap.dedent(node.value.value).strip() if is_text else ""


def is_decorated(node: ast.ClassDef | ast.FunctionDef, name: str) -> bool:
    return any(name in ast.unparse(decorator) for decorator in node.decorator_list)


def parameters_of(module: str, arguments: ast.arguments) -> list[str]:
    """Each with its annotation and default, ``self`` left out; constants of a module by their values."""

    def parameter(argument: ast.arg, default: ast.expr | None) -> str:
        text = ast.unparse(argument)
        return text if default is None else f"{text} = {value_of(module, default)}"

    names = [*arguments.posonlyargs, *arguments.args]
    defaults = [None] * (len(names) - len(arguments.defaults)) + list(arguments.defaults)
    shown = [parameter(each, default) for each, default in zip(names, defaults, strict=True)]
    shown = [text for text in shown if text not in ("self", "cls")]
    if arguments.vararg:
        shown.append(f"*{ast.unparse(arguments.vararg)}")
    elif arguments.kwonlyargs:
        shown.append("*")
    pairs = zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    shown += [parameter(each, default) for each, default in pairs]
    if arguments.kwarg:
        shown.append(f"**{ast.unparse(arguments.kwarg)}")
    return shown


def value_of(module: str, default: ast.expr) -> str:
    """The literal that a name stands for; any other expression as it is."""
    if not isinstance(default, ast.Name):
        return ast.unparse(default)
    _, node, _ = definition(module, default.id)
    value = node.value if isinstance(node, ast.Assign | ast.AnnAssign) and node.value else default
    if (
        isinstance(node, ast.Assign)
        and isinstance(node.targets[-1], ast.Tuple)
        and isinstance(value, ast.Tuple)
    ):
        value = value.elts[list(map(ast.unparse, node.targets[-1].elts)).index(default.id)]
    return ast.unparse(value if isinstance(value, ast.Constant) else default)


def fields_of(node: ast.ClassDef) -> list[str]:
    """Parameters of a dataclass or a named tuple."""
    found = ["*"] if is_decorated(node, "kw_only=True") else []
    for each in node.body:
        if (
            isinstance(each, ast.AnnAssign)
            and "init=False" not in ast.unparse(each)
            and "ClassVar" not in ast.unparse(each)
        ):
            found.append(ast.unparse(each))
    return found


def signature(module: str, name: str, node: ast.stmt) -> str:
    """How it is called; "" for what is not."""
    returns = ""
    if isinstance(node, ast.FunctionDef):
        parameters = parameters_of(module, node.args)
        returns = f" -> {ast.unparse(node.returns)}" if node.returns else ""
    elif isinstance(node, ast.ClassDef):
        made = [each for each in node.body if isinstance(each, ast.FunctionDef) and each.name == "__init__"]
        bases = {ast.unparse(base) for base in node.bases}
        if made:
            parameters = parameters_of(module, made[0].args)
        elif is_decorated(node, "dataclass") or "NamedTuple" in bases:
            parameters = fields_of(node)
        else:
            return ""
    elif isinstance(node, ast.Assign) and isinstance(node.value, ast.UnaryOp | ast.Constant):
        return f"{name} = {ast.unparse(node.value)}"
    else:
        return ""
    flat = f"{name}({', '.join(parameters)}){returns}"
    if len(flat) <= WIDTH:
        return flat.replace("'", '"')
    lines = "".join(f"    {each},\n" for each in parameters)
    return f"{name}(\n{lines}){returns}".replace("'", '"')


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


def members(module: str, node: ast.ClassDef) -> Iterator[str]:
    """Values of an enumeration; public methods and properties of any other class."""
    bases = [ast.unparse(base) for base in node.bases]
    if "Enum" in bases:
        for each, following in zip(node.body, [*node.body[1:], None], strict=True):
            if isinstance(each, ast.Assign):
                yield f"- `{ast.unparse(each.targets[0])}`: {as_one_line(string(following))}"
    if any(base.startswith(QUIET_BASES) for base in bases):
        return
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and not each.name.startswith("_"):
            of_property = is_decorated(each, "property")
            shown = each.name if of_property else signature(module, each.name, each).partition(" -> ")[0]
            shown = re.sub(r"\s+", " ", shown).replace("( ", "(").replace(", )", ")")
            yield f"- `.{shown}`: {as_one_line((ast.get_docstring(each) or '').partition(chr(10) * 2)[0])}"


def as_one_line(docstring: str) -> str:
    return re.sub(r"\s+", " ", markdown(docstring))


IMPORTS = {"torch": "import torch", "nn": "from torch import nn", "f8sub": "import f8sub"}
"""What an example imports where it uses the name."""


class Example:
    """One of ``api_examples.py``: the text of a function of that name, and the words behind ``python``."""

    def __init__(self, node: ast.FunctionDef, source: str) -> None:
        self.words = ast.get_docstring(node) or ""
        body = node.body[1:] if self.words else node.body
        imports = [each for each in body if isinstance(each, ast.Import | ast.ImportFrom)]
        rest = body[len(imports) :]
        used = {each.id for part in rest for each in ast.walk(part) if isinstance(each, ast.Name)}
        lines = {*map(ast.unparse, imports), *(line for name, line in IMPORTS.items() if name in used)}
        text = textwrap.dedent("\n".join(source.splitlines()[rest[0].lineno - 1 : node.end_lineno]))
        text = "\n\n".join([*_in_groups(lines), text])
        # What is defined stands between two empty lines at the top of a file.
        text = re.sub(r"\n\n(?=class |def |@)", "\n\n\n", text)
        self.text = re.sub(r"(\n    .*)\n\n(?=\S)", r"\1\n\n\n", text)

    def markdown(self) -> str:
        """The block of the page."""
        return f"```{f'python {self.words}'.strip()}\n{self.text}\n```"


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
    source = EXAMPLES.read_text()
    nodes = [node for node in ast.parse(source).body if isinstance(node, ast.FunctionDef)]
    return {node.name: Example(node, source) for node in nodes}


@functools.cache
def commands() -> dict[str, str]:
    """Examples that are no Python: name -> fenced block."""
    for node in ast.parse(EXAMPLES.read_text()).body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "COMMANDS":
            return ast.literal_eval(node.value)
    return {}


def key_of(module: str, name: str) -> str:
    """What an example is called."""
    return "_".join([*module.split(".")[1:], name])


def entries() -> dict[str, list[tuple[str, str]]]:
    """Title of each section -> (module, name) of what stands in it, each public name once."""
    placed = {name for module, names in SECTIONS.values() for name in names if module == "f8sub"}
    found = {}
    for title, (module, names) in SECTIONS.items():
        rest = [name for name in public_names(module) if name not in names and module != "f8sub"]
        found[title] = [(module, name) for name in (*names, *rest)]
    missing = [name for name in public_names("f8sub") if name not in placed]
    return found | ({"More": [("f8sub", name) for name in missing]} if missing else {})


def entry(module: str, name: str) -> str:
    """The heading, signature, docstring and example of one name."""
    home, node, docstring = definition(module, name)
    shown = name if module == "f8sub" else f"{module.removeprefix('f8sub.')}.{name}"
    parts = [f"### `{shown}`"]
    if call := signature(home, shown, node):
        parts.append(f"```py\n{call}\n```")
    parts.append(markdown(docstring))
    if isinstance(node, ast.ClassDef) and (listed := list(members(home, node))):
        title = "Values" if "Enum" in map(ast.unparse, node.bases) else "Methods and properties"
        parts.append("\n".join([f"**{title}**", "", *listed]))
    key = key_of(module, name)
    parts.append(examples()[key].markdown() if key in examples() else commands().get(key, ""))
    return "\n\n".join(filter(None, parts))


def made_by_call(module: str, name: str) -> bool:
    """Whether a name is what a function returned, as torchtitan's configs are, which have no docstring of their own."""
    _, node, _ = definition(module, name)
    return isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)


def section(title: str, names: list[tuple[str, str]]) -> str:
    module = names[0][0]
    parts = [f"## {title}"]
    if title == module:
        parts += [markdown(ast.get_docstring(parsed(module)) or ""), *NOTES.get(module, "").splitlines()]
    parts += [entry(*each) for each in names if not made_by_call(*each)]
    if alike := [name for each, name in names if made_by_call(each, name)]:
        listed = ", ".join(f"`{name}`" for name in alike)
        parts.append(f"### Ready-made configs\n\nFor `--module {module} --config NAME`: {listed}.")
        parts.append(commands().get(key_of(module, "configs"), ""))
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


def main() -> None:
    options = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    options.add_argument("--write-docs", action="store_true", help=f"write {PAGE.relative_to(ROOT)}")
    if options.parse_args().write_docs:
        PAGE.write_text(page())
    else:
        print(page())


if __name__ == "__main__":
    main()
