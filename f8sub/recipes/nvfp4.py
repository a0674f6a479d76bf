"""Four bits an element: e2m1 with an e4m3 scale for 16 elements of a row, for 16x16 blocks of w, and one a tensor.

Source: NVIDIA, "Pretraining Large Language Models with NVFP4", arXiv 2509.25149, which trains with both options on
and some layers in higher precision; give those another recipe.
"""

from dataclasses import replace

from f8sub.formats import E2M1, Float8Format, Rounding, ScaleRule, Tile
from f8sub.recipe import GemmSpec, Recipe


def recipe(*, stochastic_rounding: bool = False, hadamard: bool = False) -> Recipe:
    """Make the recipe.

    Args:
        stochastic_rounding: round dy stochastically, so that small gradients are right on average.
        hadamard: multiply both operands of wgrad by a random 16x16 Hadamard transform, which spreads an outlier over
            the 16 elements of its tile: 0.4 dB more in dw where single tokens are large, none on gaussian data, and
            less where small elements beside an outlier matter (``pytest tests/values/test_nvfp4_options.py``).
    """
    row, block = (Float8Format(E2M1, Tile(rows, 16), ScaleRule.TWO_LEVEL) for rows in (1, 16))
    grad = replace(row, rounding=Rounding.STOCHASTIC) if stochastic_rounding else row
    size = 16 if hadamard else None
    wgrad = GemmSpec(a=replace(grad, hadamard=size), b=replace(row, hadamard=size))
    return Recipe(name="nvfp4", fprop=GemmSpec(a=row, b=block), dgrad=GemmSpec(a=grad, b=block), wgrad=wgrad)


RECIPE = recipe()
