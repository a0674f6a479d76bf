"""What re-encoding costs: a columnwise operand derived from rowwise codes, beside a cast of its own.

A weight is cast once, by rows, and what dgrad reads is made from those codes; with keep_x="recompute" so is what wgrad
reads of x. For every recipe that has to re-scale them: the share of the codes that come out as if cast directly, the
SQNR of the median column (a whole hides its small columns) either way, and the share of the elements that only
re-encoding flushes to zero. 1024 x 1024 matrices.

    python scripts/tables/reencoding.py --write-docs
"""

from __future__ import annotations

import itertools

import torch

import f8sub
from f8sub.formats import why_not_derivable
from f8sub.kernels import reference
from scripts.table import Table, finish, parser
from scripts.tables import numerics
from scripts.tables.numerics import Draw, sqnr

SHAPE = (1024, 1024)
DATA_SETS: dict[str, Draw] = {
    "gaussian": numerics.gaussian,
    "columns lognormal, sigma 2": numerics.lognormal_columns(2.0),
    "columns lognormal, sigma 4": numerics.lognormal_columns(4.0),
    "element outliers": numerics.element_outliers,
    "student-t": numerics.student_t,
}


def rescaled() -> dict[str, tuple[f8sub.Float8Format, f8sub.Float8Format]]:
    """(rowwise, columnwise) formats of w or x where a byte transpose is not enough, under the recipes' names."""
    names: dict[tuple[f8sub.Float8Format, f8sub.Float8Format], list[str]] = {}
    for name, operand in itertools.product(f8sub.recipe_names(), ("w", "x")):
        row, col = f8sub.get_recipe(name).formats(operand)
        if row is None or col is None or why_not_derivable(row, col) is not None:
            continue
        if not row.tile.is_transpose_of(col.tile):
            names.setdefault((row, col), []).append(f"{name} {operand}")
    return {", ".join(same): formats for formats, same in names.items()}


def measure(
    rowwise: f8sub.Float8Format, columnwise: f8sub.Float8Format, weight: torch.Tensor
) -> dict[str, float]:
    """Figures of the columnwise operand, direct and derived."""
    row, direct, _ = reference.quantize(weight, rowwise, columnwise)
    derived = reference.derive_columnwise(row, columnwise)
    columns = weight.t()
    directly, again = (reference.dequantize(operand, torch.float32) for operand in (direct, derived))
    return {
        "same": (again == directly).double().mean().item(),
        "median_column_sqnr_direct": sqnr(columns, directly).median().item(),
        "median_column_sqnr_derived": sqnr(columns, again).median().item(),
        "flushed_direct": numerics.flushed(direct, columns),
        "newly_flushed": ((again == 0) & (directly != 0)).double().mean().item(),
    }


def report() -> dict[str, dict[str, dict[str, float]]]:
    """Recipes -> data set -> figures."""
    weights = {name: draw(SHAPE, torch.Generator().manual_seed(0)) for name, draw in DATA_SETS.items()}
    return {
        recipe: {data: measure(*formats, weight) for data, weight in weights.items()}
        for recipe, formats in rescaled().items()
    }


def main() -> None:
    arguments = parser(__doc__, "reencoding_table").parse_args()
    results = report()
    columns = ["", "matrix", "as cast directly", "median column dB: direct", "derived", "newly flushed"]
    rows = [
        [
            recipe,
            data,
            f"{100 * figures['same']:.3f}%",
            f"{figures['median_column_sqnr_direct']:.2f}",
            f"{figures['median_column_sqnr_derived']:.2f}",
            numerics.percent(figures["newly_flushed"]),
        ]
        for recipe, found in results.items()
        for data, figures in found.items()
    ]
    finish(arguments, results, Table("A columnwise operand, derived from rowwise codes", columns, rows))


if __name__ == "__main__":
    main()
