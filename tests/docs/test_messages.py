"""docs/troubleshooting.md has an entry for each error and warning of f8sub, by the words that it always begins with.

They are read from its source: where each stands, and those words.
"""

import ast
from dataclasses import dataclass
from pathlib import Path

import f8sub
from tests.docs.pages import ROOT

PACKAGE = Path(f8sub.__file__).parent
PAGE = " ".join((ROOT / "docs" / "troubleshooting.md").read_text().replace("`", "").split())
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
    return " ".join(found[:MOST_WORDS]).rstrip(" ,;:") or None


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
        elif isinstance(node, ast.FunctionDef) and node.name in MAKERS:
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


def test_messages_are_found():
    """The walk sees what is raised, what is warned, and what functions make; with and without names in front."""
    found = {each.opening for each in messages()}
    assert {"is already sharded", "a GEMM takes both operands", "ranks were converted differently"} <= found
    assert "precompute_scales(model) was not called after" in found
    assert "no native float8 GEMM on" in found
    assert len(found) > 120
