"""``rowwise`` with wgrad in high precision: no outlier of a token or of its gradient meets a float8 dw.

x is saved for wgrad in high precision, 2 bytes an element in bf16 where ``rowwise`` saves 1.

Source: torchao's recipe of the same name. Its dgrad reads w with one scale a tensor; here w's columns are derived
from the rowwise codes, as in every recipe, so that a weight is cast once and gathered once.
"""

from dataclasses import replace

from f8sub.recipe import Recipe
from f8sub.recipes import rowwise


def recipe() -> Recipe:
    """It has no options."""
    return replace(rowwise.recipe().with_high_precision(wgrad=True), name="rowwise_with_gw_hp")


RECIPE = recipe()
