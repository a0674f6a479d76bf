"""The tutorial as a page and as a notebook, from the script docs/tutorial.py: docs/tutorial.md and docs/tutorial.ipynb.

The script has cells as editors know them: ``# %%`` begins code, ``# %% [markdown]`` text in comments.

    python scripts/tables/tutorial.py               # shows the page
    python scripts/tables/tutorial.py --write-docs  # writes both
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tyro

DOCS = Path(__file__).parents[2] / "docs"
SCRIPT, PAGE, NOTEBOOK = (DOCS / f"tutorial.{suffix}" for suffix in ("py", "md", "ipynb"))
COMMAND = "`python scripts/tables/tutorial.py --write-docs`"
CELL = re.compile(r"^# %%( \[markdown\])?\n", re.MULTILINE)


@dataclass(frozen=True)
class Cell:
    """Text in Markdown, or code."""

    is_code: bool
    text: str


def cells() -> list[Cell]:
    """The cells of the script, in order."""
    _, *parts = CELL.split(SCRIPT.read_text())
    found = []
    for kind, body in zip(parts[::2], parts[1::2], strict=True):
        text = body.strip()
        found.append(
            Cell(kind is None, text if kind is None else re.sub(r"^# ?", "", text, flags=re.MULTILINE))
        )
    return found


def page() -> str:
    """The page in Markdown."""
    shown = (f"```python\n{cell.text}\n```" if cell.is_code else cell.text for cell in cells())
    return "\n\n".join(shown) + "\n"


def notebook() -> dict[str, Any]:
    """The notebook, in version 4.5 of Jupyter's format."""
    made: list[dict[str, Any]] = []
    for number, cell in enumerate(cells()):
        common = {"id": f"cell-{number}", "metadata": {}, "source": cell.text.splitlines(keepends=True)}
        kind = (
            {"cell_type": "code", "execution_count": None, "outputs": []}
            if cell.is_code
            else {"cell_type": "markdown"}
        )
        made.append(kind | common)
    kernel = {"display_name": "Python 3", "language": "python", "name": "python3"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": made, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def main(write_docs: bool = False) -> None:
    """Show the page, or write page and notebook.

    Args:
        write_docs: write docs/tutorial.md and docs/tutorial.ipynb.
    """
    if write_docs:
        PAGE.write_text(page())
        NOTEBOOK.write_text(json.dumps(notebook(), indent=1) + "\n")
    else:
        print(page())


if __name__ == "__main__":
    tyro.cli(main)
