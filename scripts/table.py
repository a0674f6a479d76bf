"""One table, three places: the terminal, a page between two markers, and JSON."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import importlib.metadata
import json
import platform
import re
import string
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import rich.table
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

ROOT = Path(__file__).parents[1]
WIDE = 160
"""Columns of a table that goes into a file or a pipe."""


@dataclass(frozen=True)
class Table:
    """Text in rows and columns; the first column is what a row is about, the others are numbers."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]

    @classmethod
    def of(
        cls, title: str, found: Iterable[tuple[Any, Mapping[str, Any]]], columns: Sequence[tuple[str, str]]
    ) -> Table:
        """A row for each name and its figures in ``found``.

        Args:
            title: of the table.
            found: names and figures.
            columns: headers and format strings of the figures, such as ``"{step[bytes]/1e6:.2f}"``, which divides.
                A cell whose figure is missing or None is a dash.
        """
        rows = [[str(name), *(cell(text, of) for _, text in columns)] for name, of in found]
        return cls(title, ["", *(header for header, _ in columns)], rows)

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


class _Units(string.Formatter):
    """Formats as ``str.format`` does, and divides where a field's name ends with a slash and a number."""

    def get_field(self, field_name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, Any]:
        name, _, unit = field_name.partition("/")
        value, used = super().get_field(name, args, kwargs)
        return (value / float(unit) if unit else value), used


def cell(text: str, figures: Mapping[str, Any]) -> str:
    try:
        return _Units().vformat(text, (), figures)
    except (KeyError, TypeError):
        return "-"


def parser(description: str | None, marker: str = "") -> argparse.ArgumentParser:
    """What every script that makes a table takes; with a ``marker``, ``finish`` can put it into its page."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--json", metavar="FILE", help="also write the figures here")
    made.set_defaults(write_docs=False, marker=marker)
    if marker:
        made.add_argument("--write-docs", action="store_true", help="put the table into its page of docs/")
    return made


def finish(arguments: argparse.Namespace, figures: Any, table: Table, markdown: str = "") -> None:
    """Show the table and write what the command line asks for; ``markdown`` takes its place in the page."""
    table.show()
    if arguments.json:
        write_json(arguments.json, figures)
    if arguments.write_docs:
        write_between_markers(arguments.marker, f"{markdown or table.markdown()}\n\n{provenance()}")


def provenance() -> str:
    """The line below a table: the command without what says where its figures go, the machine, and the date."""
    script = Path(sys.argv[0]).resolve().relative_to(ROOT)
    options = re.sub(r" --(write-docs|json[ =]\S+)", "", " ".join(["", *sys.argv[1:]]))
    torch = importlib.metadata.version("torch").partition("+")[0]
    today = datetime.date.today().isoformat()
    return f"<sub>`python {script}{options}` · {processor()}, torch {torch} · {today}</sub>"


def processor() -> str:
    """The CPU's name as Linux tells it."""
    cpus = Path("/proc/cpuinfo")
    found = re.search(r"model name\s*: (.*)", cpus.read_text()) if cpus.exists() else None
    return found[1].strip() if found else platform.processor() or platform.machine()


@contextlib.contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """What is given the name of each thing that begins; a terminal shows it, and the time since the first."""
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        task = bar.add_task("", total=None)
        yield lambda what: bar.update(task, description=what)


def write_json(path: str, figures: Any) -> None:
    Path(path).write_text(json.dumps(figures, indent=1) + "\n")


def write_between_markers(name: str, text: str, root: Path = ROOT) -> None:
    """Replace what stands between ``<!-- begin NAME -->`` and ``<!-- end NAME -->`` in README.md or a page of docs/.

    Raises:
        ValueError: no page has each marker once, in this order.
    """
    begin, end = f"<!-- begin {name} -->\n", f"<!-- end {name} -->"
    found = (root / "README.md", *sorted((root / "docs").rglob("*.md")))
    pages = {page: page.read_text() for page in found if page.exists()}
    page = next((page for page, content in pages.items() if begin in content), None)
    before, found_begin, rest = pages.get(page, "").partition(begin)
    _, found_end, after = rest.partition(end)
    if page is None or not (found_begin and found_end) or begin in after or end in before + after:
        where = page or "README.md or a page of docs/"
        raise ValueError(
            f"{where} needs the lines {begin.strip()} and {end}, each once: the table goes between them"
        )
    page.write_text(f"{before}{begin}{text}\n{end}{after}")
