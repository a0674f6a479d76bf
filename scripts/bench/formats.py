"""Formats whose kernels are timed and compiled."""

import torch

from f8sub import ALL, Float8Format, ScaleRule, Tile

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {
    "tensorwise": Float8Format(E4M3, Tile(ALL, ALL)),
    "tensorwise e5m2": Float8Format(E5M2, Tile(ALL, ALL)),
    "rowwise": Float8Format(E4M3, Tile(1, ALL), ScaleRule.POWER_OF_2),
    "1x128": Float8Format(E4M3, Tile(1, 128), ScaleRule.POWER_OF_2),
    "1x128 float": Float8Format(E4M3, Tile(1, 128)),
    "128x128": Float8Format(E4M3, Tile(128, 128), ScaleRule.POWER_OF_2),
    "256x256": Float8Format(E4M3, Tile(256, 256)),
    "256x256 e5m2": Float8Format(E5M2, Tile(256, 256)),
}
USAGES = {"both": (True, True), "row": (True, False), "column": (False, True)}
