"""The error of every recipe in one row: y, dx and dw on gaussian data, and on the worst of five data sets.

Median-row SQNR in dB against float64, as ``scripts/tables/recipe_errors.py`` measures it.

    python scripts/tables/recipe_numbers.py --write-docs
"""

from __future__ import annotations

from typing import Any

import f8sub
from scripts.table import Table, finish, parser
from scripts.tables import recipe_errors
from scripts.tables.recipe_errors import PRODUCTS, joined

MEDIAN = "median_row_sqnr"


def least(results: dict[str, dict[str, dict[str, Any]]], recipe: str) -> dict[str, Any]:
    """Of each product the least figure of all data sets."""
    return {
        product: {MEDIAN: min(found[recipe][product][MEDIAN] for found in results.values())}
        for product in PRODUCTS
    }


def table(results: dict[str, dict[str, dict[str, Any]]]) -> Table:
    rows = [
        [f"`{recipe}`", joined(results["gaussian"][recipe], MEDIAN), joined(least(results, recipe), MEDIAN)]
        for recipe in f8sub.recipe_names()
    ]
    columns = ["median-row SQNR of y / dx / dw, dB", "gaussian", "least of five data sets"]
    return Table("Median-row SQNR of y / dx / dw in dB", columns, rows)


def main() -> None:
    arguments = parser(__doc__, "recipe_numbers").parse_args()
    results = recipe_errors.report()
    finish(arguments, results, table(results))


if __name__ == "__main__":
    main()
