"""A warning of layers that keep x as rowwise codes which backward re-encodes."""

import warnings
from collections.abc import Sequence

from f8sub.convert.checks import Chosen
from f8sub.errors import Float8Warning
from f8sub.linear.saved_input import RECOMPUTE
from f8sub.recipe import Recipe


def reencodes(recipe: Recipe) -> bool:
    """Whether "recompute" makes other codes than "float8": re-scaled ones, where no byte transpose will do."""
    rowwise, columnwise = recipe.formats("x")
    return not (rowwise is None or columnwise is None or rowwise.tile.is_transpose_of(columnwise.tile))


def warn_of_reencoding(chosen: Sequence[Chosen]) -> None:
    """Warn once where layers that are to be converted keep x so."""
    rounded = [
        f"{layer.fqn} ({layer.plan.recipe.name})"
        for layer in chosen
        if layer.keep_x == RECOMPUTE and reencodes(layer.plan.recipe)
    ]
    if rounded:
        warnings.warn(
            f"keep_x='recompute' re-scales the codes of x by columns in {len(rounded)} layers, {rounded[0]} first: "
            "what falls below a column's smallest code is rounded again or lost; keep_x='high_precision' or 'auto' "
            "keeps the numbers",
            Float8Warning,
            stacklevel=4,
        )
