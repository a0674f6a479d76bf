"""docs/troubleshooting.md has an entry for each error and warning of f8sub, by the words that it always begins with.

They are read from its source: where each stands, and those words.
"""

import ast
import importlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import f8sub
from tests.docs.pages import ROOT

PACKAGE = Path(f8sub.__file__).parent
TEXT = (ROOT / "docs" / "troubleshooting.md").read_text()
PAGE = " ".join(TEXT.replace("`", "").split())
ENTRIES = [" ".join(span.split()) for span in re.findall(r"`([^`]+)`", TEXT)]
LEAST_WORDS, MOST_WORDS = 3, 5
WARNERS = {"warnings.warn", "_warn"}
MAKERS = {
    *(
        "_difference",
        "_left_out",
        "_make",
        "_no_longer_primary",
        "bad_weights",
        "jit_error",
        "no_attribute",
        "unknown",
        "without_shape",
    ),
    *("reference_warning", "why_nothing"),
}
"""Functions that make the text of a message; what they return, or give to a call in that, begins it."""


@dataclass(frozen=True)
class Message:
    """One error or warning."""

    where: str  # file and line
    opening: str  # the first words that are in every instance of it


def literals(text: ast.expr) -> list[str]:
    """The pieces of a string that do not depend on what is put into it."""
    if isinstance(text, ast.Constant) and isinstance(text.value, str):
        return [text.value]
    if isinstance(text, ast.JoinedStr):
        return [str(part.value) for part in text.values if isinstance(part, ast.Constant)]
    if isinstance(text, ast.BinOp):
        return [*literals(text.left), *literals(text.right)]
    return []


def opening(text: ast.expr) -> str | None:
    """The first piece of some words, cut after a few; the longest piece of a text of placeholders."""
    pieces = [piece.strip(" :;,.()'\"").split() for piece in literals(text)]
    pieces = [piece for piece in pieces if piece]
    found = next((piece for piece in pieces if len(piece) >= LEAST_WORDS), max(pieces, key=len, default=[]))
    return " ".join(found[:MOST_WORDS]).rstrip(" ,;:.") or None


def beginnings(text: ast.expr) -> Iterator[str]:
    """The words that messages of a text begin with, up to what varies; none where a layer's name comes first."""
    if isinstance(text, ast.BinOp):
        yield from beginnings(text.left)
    if isinstance(text, ast.Constant) and isinstance(text.value, str):
        yield text.value
    if isinstance(text, ast.JoinedStr):
        first, *others = text.values
        if isinstance(first, ast.Constant):
            yield str(first.value)
        # A name, or words where there is none: ``fqn or "the model"``.
        elif isinstance(first, ast.FormattedValue) and isinstance(first.value, ast.BoolOp):
            rest = str(others[0].value) if others and isinstance(others[0], ast.Constant) else ""
            yield from (literal + rest for each in first.value.values for literal in literals(each))


def _local(function: ast.AST, name: str) -> Iterator[ast.expr]:
    """What a function assigns to a variable, texts alone."""
    for node in ast.walk(function):
        if isinstance(node, ast.Assign) and any(
            isinstance(t, ast.Name) and t.id == name for t in node.targets
        ):
            yield node.value


def _texts(path: Path) -> list[ast.expr]:
    """What is raised or warned in a file, and what the ``MAKERS`` in it return; constants by their values."""
    found: list[ast.expr] = []
    module = ast.parse(path.read_text())
    constants = {
        target.id: node.value
        for node in module.body
        if isinstance(node, ast.Assign)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(module):
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            found += node.exc.args[:1]
        elif isinstance(node, ast.Call) and ast.unparse(node.func) in WARNERS:
            found += node.args[:1]
        if isinstance(node, ast.FunctionDef):
            # Messages that a function writes before it raises them or warns.
            named = [
                call.args[0].id
                for call in ast.walk(node)
                if isinstance(call, ast.Call) and call.args and isinstance(call.args[0], ast.Name)
                if ast.unparse(call.func) in {*WARNERS, "Float8ConfigError"}
            ]
            found += [text for name in named for text in _local(node, name) if literals(text)]
        if isinstance(node, ast.FunctionDef) and node.name in MAKERS:
            for inner in ast.walk(node):
                if isinstance(inner, ast.Return) and isinstance(inner.value, ast.Call):
                    found += inner.value.args[:1]
                elif isinstance(inner, ast.Return) and inner.value is not None:
                    found.append(inner.value)
    return [constants.get(text.id, text) if isinstance(text, ast.Name) else text for text in found]


def messages() -> list[Message]:
    """All of them, in the order of the files."""
    found = []
    for path in sorted(PACKAGE.rglob("*.py")):
        for text in _texts(path):
            if words := opening(text):
                found.append(Message(f"{path.relative_to(PACKAGE)}:{text.lineno}", words))
    return found


def test_every_error_and_warning_has_an_entry():
    assert not [f"{each.where}: {each.opening}" for each in messages() if each.opening not in PAGE]


def test_an_entry_begins_as_its_message_does():
    """So that the first words of a message are found, letter by letter."""
    stripped = [entry.lstrip("… ") for entry in ENTRIES]
    entries = [*stripped, *(entry.removeprefix("unknown ") for entry in stripped)]
    missing = [
        f"{path.relative_to(PACKAGE)}:{text.lineno}: {words}"
        for path in sorted(PACKAGE.rglob("*.py"))
        for text in _texts(path)
        for beginning in beginnings(text)
        if (words := " ".join(beginning.split()[: MOST_WORDS - 1]).rstrip(" ,;:.('"))
        if not any(entry.startswith(words) for entry in entries)
    ]
    assert not missing, "\n".join(missing)


def sequence(*sizes: int) -> nn.Sequential:
    return nn.Sequential(*(nn.Linear(size, size) for size in sizes))


def converted(**options: Any) -> nn.Module:
    return f8sub.convert_to_float8(sequence(32, 32), min_dim=0, **options)


REAL: dict[str, Callable[[], Any]] = {
    "nothing to convert": lambda: f8sub.convert_to_float8(sequence(17)),
    "no linear layer": lambda: f8sub.convert_to_float8(nn.Sequential(nn.ReLU())),
    "an option": lambda: f8sub.convert_to_float8(sequence(32), exclude=["0"]),
    "a recipe": lambda: f8sub.convert_to_float8(sequence(32), "roywise"),
    "a pattern": lambda: f8sub.convert_to_float8(sequence(32, 32), min_dim=0, skip="00"),
    "patterns": lambda: f8sub.convert_to_float8(sequence(32), {"0": "rowwise", "*": "tensorwise"}, min_dim=0),
    "converted again": lambda: f8sub.convert_to_float8(converted()),
    "converted otherwise": lambda: f8sub.convert_to_float8(converted(), "rowwise"),
    "an input's width": lambda: converted()(torch.ones(4, 48)),
    "an input's dtype": lambda: converted()(torch.ones(4, 32, dtype=torch.float64)),
    "never converted": lambda: f8sub.precompute_scales(sequence(32)),
    "a monitor's layers": lambda: f8sub.Monitor(converted(), layers="mlp"),
    "an attribute": lambda: f8sub.Float8LinearConfig,
    "an import": lambda: exec("from f8sub import convert_to_float8_training", {}),
    "a module's attribute": lambda: importlib.import_module("f8sub.tensor_parallel").Float8Colwise,
    "a second guard": lambda: [f8sub.skip_step_if_nonfinite(SGD) for _ in range(2)],
    "not finite": lambda: spoil(converted()),
    "a GPU": lambda: f8sub.estimate_step("llama3-8b", gpus=8, gpu="H1000"),
    "a model's name": lambda: f8sub.estimate("no-such-model"),
    "a dtype": lambda: f8sub.float8_state_dict(converted(), dtype=torch.int8),
}
"""Calls that raise or warn, for one message each."""
SGD = torch.optim.SGD([torch.zeros(2)])


def spoil(model: nn.Module) -> None:
    with torch.no_grad():
        model[0].weight[0, 0] = torch.nan
    for _ in range(2):
        f8sub.precompute_scales(model)


@pytest.mark.parametrize("case", REAL)
def test_a_real_message_has_an_entry(case):
    """An entry matches the whole beginning of the message, with "…" for what varies."""
    with pytest.raises((ValueError, TypeError, RuntimeError, AttributeError, ImportError, Warning)) as raised:
        REAL[case]()
    message = str(raised.value)
    patterns = [
        re.escape(entry).replace("…", ".*?") for entry in ENTRIES if len(entry.split()) >= LEAST_WORDS
    ]
    found = [pattern for pattern in patterns if re.match(pattern.removesuffix(".*?"), message)]
    assert found, message


def test_messages_are_found():
    """The walk sees what is raised, what is warned, and what functions make; with and without names in front."""
    found = {each.opening for each in messages()}
    assert {"is already sharded", "a GEMM takes both operands", "ranks were converted differently"} <= found
    assert "precompute_scales(model) was not called after" in found
    assert "no native float8 GEMM on" in found
    assert len(found) > 120
