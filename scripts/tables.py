"""One table, three places: the terminal, the README between two markers, and JSON."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich.table
from rich.console import Console

README = Path(__file__).parents[1] / "README.md"
WIDE = 160
"""Columns of a table that goes into a file or a pipe."""


@dataclass(frozen=True)
class Table:
    """Text in rows and columns; the first column is what a row is about, the others are numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    def show(self) -> None:
        """Print it, as wide as the terminal or ``WIDE``."""
        shown = rich.table.Table(*self.columns, title=self.title, title_justify="left")
        for column in shown.columns[1:]:
            column.justify = "right"
        for row in self.rows:
            shown.add_row(*row)
        console = Console()
        if not console.is_terminal:
            console = Console(width=WIDE)
        console.print(shown)

    def markdown(self) -> str:
        """Its lines in GitHub's Markdown, without the title."""
        lines = [self.columns, ["---", *["---:"] * (len(self.columns) - 1)], *self.rows]
        return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def parser(description: str | None) -> argparse.ArgumentParser:
    """What every script that makes a table takes."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--json", metavar="FILE", help="also write the figures here")
    made.add_argument("--write-readme", action="store_true", help="put the table into README.md")
    return made


def write_json(path: str, figures: Any) -> None:
    Path(path).write_text(json.dumps(figures, indent=1) + "\n")


def write_between_markers(name: str, text: str, page: Path = README) -> None:
    """Replace what stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->``.

    Raises:
        ValueError: ``page`` does not have each marker once, in this order.
    """
    begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
    content = page.read_text()
    before, found_begin, rest = content.partition(begin)
    _, found_end, after = rest.partition(end)
    if not (found_begin and found_end) or begin in after or end in before + after:
        raise ValueError(
            f"{page} needs the lines {begin.strip()} and {end}, each once: the table goes between them"
        )
    page.write_text(f"{before}{begin}{text}\n{end}{after}")
