"""One scale for 128 elements of a row of x and dy, and for 128x128 blocks of w: e4m3 everywhere.

dy is scaled by 1x128 in both directions, never by 128x128, with which a 16B model diverged. Partial sums move to
float32 every 128 elements of K, so no GEMM uses fast accumulation.

Source: DeepSeek-V3, arXiv 2412.19437, section 3.3 and appendix B.2; TransformerEngine's Float8BlockScaling, whose
default also is scales that are powers of two.
"""

import torch

from f8sub.formats import Float8Format, ScaleRule, Tile
from f8sub.recipe import GemmSpec, Recipe


def recipe(*, power_of_2_scales: bool = True) -> Recipe:
    """``power_of_2_scales=False`` takes any float32: as fast, and less than 0.1 dB better."""
    rule = ScaleRule.POWER_OF_2 if power_of_2_scales else ScaleRule.FLOAT
    row = Float8Format(torch.float8_e4m3fn, Tile(1, 128), rule)
    block = Float8Format(torch.float8_e4m3fn, Tile(128, 128), rule)
    by_block = GemmSpec(a=row, b=block)
    return Recipe(name="blockwise", fprop=by_block, dgrad=by_block, wgrad=GemmSpec(a=row, b=row))


RECIPE = recipe()
