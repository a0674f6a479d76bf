"""How near f8sub.estimate comes to every time, speed and peak of memory that the documentation holds of a GPU.

One row a set of figures; --all prints each of them. No GPU needed: what was measured stands in
tests/estimator/measured.toml, with machine, day and command.

    python scripts/tables/measured.py
"""

from __future__ import annotations

import itertools
import statistics

from scripts.table import Table, finish, parser
from tests.estimator.predictions import Figure, figures

WITHIN = 0.10


def summary(found: list[Figure]) -> list[str]:
    errors = {figure: figure.error() for figure in found}
    hit = [abs(error) for error in errors.values() if abs(error) <= WITHIN]
    missed = len(found) - len(hit)
    typical = f"{statistics.median(hit):.1%}" if hit else "-"
    worst = f"{max(hit):.1%}" if hit else "-"
    return [found[0].group["title"], str(len(found)), typical, worst, str(missed) if missed else ""]


def main() -> None:
    options = parser(__doc__, "measured")
    options.add_argument("--all", action="store_true", help="a row a figure")
    arguments = options.parse_args()
    sets = [list(found) for _, found in itertools.groupby(figures(), lambda figure: figure.group["title"])]
    if arguments.all:
        columns = ["set", "row", "figure", "measured", "error", "named miss"]
        rows = [
            [
                figure.group["title"],
                str(figure.row.get("recipe", figure.row.get("sizes"))),
                figure.what,
                f"{figure.measured:g}",
                f"{figure.error():+.1%}",
                figure.miss or "",
            ]
            for found in sets
            for figure in found
        ]
        finish(arguments, rows, Table("predicted and measured", columns, rows))
        return
    columns = ["", "figures", "median error", "largest", "missed"]
    rows = [summary(found) for found in sets]
    finish(arguments, rows, Table("predicted and measured", columns, rows))


if __name__ == "__main__":
    main()
