"""The error of every recipe: y, dx and dw of one linear layer against float64, on five data sets.

SQNR in dB, of the whole product and the median over its rows, and the share of the elements of x, w and dy that
quantization flushes to zero (rowwise / columnwise usage). 512 tokens, 512 x 512 weights, float32 in and
out, so that nothing but the recipe rounds.

    python scripts/tables/recipe_errors.py --write-docs
"""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any, NamedTuple

import torch
from rich.progress import track
from torch import nn

import f8sub
from scripts.table import Table, finish, parser
from scripts.tables import numerics
from scripts.tables.numerics import Draw, gaussian, student_t

TOKENS, IN_FEATURES, OUT_FEATURES = 512, 512, 512
OPERANDS = ("x", "w", "dy")
PRODUCTS = ("y", "dx", "dw")
E4M3_GRADIENTS = "tensorwise, e4m3 dy"
"""What the rows of ``tensorwise`` would be with e4m3 gradients: the reason why they are e5m2."""


class DataSet(NamedTuple):
    """How x (tokens, in), w (out, in) and dy (tokens, out) are drawn."""

    x: Draw = gaussian
    w: Draw = gaussian
    dy: Draw = gaussian

    def draw(self, seed: int) -> dict[str, torch.Tensor]:
        """float32 x, w and dy by name."""
        rng = torch.Generator().manual_seed(seed)
        return {
            "x": self.x((TOKENS, IN_FEATURES), rng),
            "w": self.w((OUT_FEATURES, IN_FEATURES), rng) * IN_FEATURES**-0.5,
            "dy": self.dy((TOKENS, OUT_FEATURES), rng),
        }


DATA_SETS = {
    "gaussian": DataSet(),
    "token-imbalanced gradients": DataSet(dy=numerics.lognormal_rows),
    "outlier activations": DataSet(x=numerics.element_outliers),
    "lognormal channels": DataSet(x=numerics.lognormal_columns(1.5), w=numerics.lognormal_columns(1.5)),
    "student-t": DataSet(student_t, student_t, student_t),
}


def recipes() -> dict[str, f8sub.Recipe]:
    """Every recipe by name, and tensorwise with e4m3 gradients."""
    found = {name: f8sub.get_recipe(name) for name in f8sub.recipe_names()}
    tensorwise = found["tensorwise"]
    dgrad, wgrad = (
        dataclasses.replace(spec, a=tensorwise.fprop.a) for spec in (tensorwise.dgrad, tensorwise.wgrad)
    )
    e4m3_gradients = dataclasses.replace(tensorwise, name=E4M3_GRADIENTS, dgrad=dgrad, wgrad=wgrad)
    return {**found, E4M3_GRADIENTS: e4m3_gradients}


def products(
    recipe: f8sub.Recipe, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """y, dx and dw of a converted layer."""
    layer = nn.Linear(w.shape[1], w.shape[0], bias=False)
    with torch.no_grad():
        layer.weight.copy_(w)
    model = f8sub.convert_to_float8(nn.Sequential(layer), recipe=recipe)
    x = x.clone().requires_grad_()
    y = model(x)
    dx, dw = torch.autograd.grad(y, (x, *model.parameters()), dy)
    return y.detach(), dx, dw


def flushed_usages(recipe: f8sub.Recipe, name: Any, values: torch.Tensor) -> list[float | None]:
    """Share flushed to zero of the rowwise and the columnwise usage; None for one that stays in high precision."""
    if recipe.formats(name) == (None, None):
        return [None, None]
    quantized = f8sub.quantize(values, recipe, operand=name)
    usages = ((quantized.rowwise, values), (quantized.columnwise, values.t()))
    return [None if usage is None else numerics.flushed(usage, matrix) for usage, matrix in usages]


def measure(recipe: f8sub.Recipe, data: DataSet, seed: int = 0) -> dict[str, Any]:
    """Product -> its errors, and ``flushed``: operand -> share of each usage."""
    drawn = data.draw(seed)
    x, w, dy = (drawn[name].double() for name in OPERANDS)
    pairs = zip(PRODUCTS, (x @ w.t(), dy @ w, dy.t() @ x), products(recipe, **drawn), strict=True)
    figures: dict[str, Any] = {name: numerics.errors(true, found) for name, true, found in pairs}
    figures["flushed"] = {name: flushed_usages(recipe, name, drawn[name]) for name in OPERANDS}
    return figures


def report() -> dict[str, dict[str, dict[str, Any]]]:
    """Data set -> recipe -> figures."""
    shown = track(DATA_SETS.items(), description="data sets", transient=True)
    return {name: {recipe: measure(of, data) for recipe, of in recipes().items()} for name, data in shown}


def joined(figures: dict[str, Any], figure: str) -> str:
    """One cell of three products; what a float32 matmul leaves, 130 dB and more, is no error of a recipe."""
    decibels = [figures[name][figure] for name in PRODUCTS]
    return " / ".join(">100" if value > 100 else f"{value:.1f}" for value in decibels)


def tables(results: dict[str, dict[str, dict[str, Any]]]) -> list[Table]:
    """One for each data set."""
    columns = ["", f"{'/'.join(PRODUCTS)} dB", "median row dB", *(f"{name} flushed" for name in OPERANDS)]

    def row(recipe: str, figures: dict[str, Any]) -> list[str]:
        flushed = [" / ".join(map(numerics.percent, shares)) for shares in figures["flushed"].values()]
        return [recipe, joined(figures, "sqnr"), joined(figures, "median_row_sqnr"), *flushed]

    return [Table(data, columns, list(itertools.starmap(row, of.items()))) for data, of in results.items()]


def summary(results: dict[str, dict[str, dict[str, Any]]]) -> Table:
    """The median row of each product, recipes by data sets."""
    rows = [
        [recipe, *(joined(found[recipe], "median_row_sqnr") for found in results.values())]
        for recipe in recipes()
    ]
    return Table("Median-row SQNR of y / dx / dw in dB", ["y / dx / dw, dB", *results], rows)


def markdown(results: dict[str, dict[str, dict[str, Any]]]) -> str:
    """The summary, and the full tables folded below it."""
    folded = "\n\n".join(f"**{table.title}**\n\n{table.markdown()}" for table in tables(results))
    return (
        f"{summary(results).markdown()}\n\n<details><summary>SQNR of the whole product, and the share of the elements "
        f"that is flushed to zero</summary>\n\n{folded}\n\n</details>"
    )


def main() -> None:
    arguments = parser(__doc__, "recipe_error_table").parse_args()
    results = report()
    for table in tables(results):
        table.show()
    finish(arguments, results, summary(results), markdown(results))


if __name__ == "__main__":
    main()
