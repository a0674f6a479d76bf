"""One exponent byte for 32 elements of a row, e4m3 everywhere: the microscaling format of Blackwell's tensor cores.

Source: OCP Microscaling Formats (MX) v1.0; e4m3 for gradients too and exponents rounded up as in Mishra et al.,
"Recipes for Pre-training LLMs with MXFP8", arXiv 2506.08027.
"""

import torch

from f8sub.formats import Float8Format, ScaleRule, Tile
from f8sub.recipe import GemmSpec, Recipe


def recipe() -> Recipe:
    """It has no options."""
    row = Float8Format(torch.float8_e4m3fn, Tile(1, 32), ScaleRule.E8M0)
    gemm = GemmSpec(a=row, b=row)
    return Recipe(name="mxfp8", fprop=gemm, dgrad=gemm, wgrad=gemm)


RECIPE = recipe()
