"""An f8sub format in the oracle's words, and the other way round."""

import torch

from f8sub import ALL, Float8Format, GemmSpec, Recipe, ScaleRule, Tile
from tests import oracle

_DTYPES = {dtype: name for name, dtype in oracle.TORCH_DTYPES.items()}
_RULES = {
    ScaleRule.FLOAT: "float",
    ScaleRule.POWER_OF_2: "power_of_2",
    ScaleRule.E8M0: "e8m0",
    ScaleRule.TWO_LEVEL: "two_level",
}
STORED_AS = {
    ScaleRule.FLOAT: torch.float32,
    ScaleRule.POWER_OF_2: torch.float32,
    ScaleRule.E8M0: torch.float8_e8m0fnu,
    ScaleRule.TWO_LEVEL: torch.float8_e4m3fn,
}
"""How scales' inverses are stored."""


def spec_of(format: Float8Format) -> oracle.Spec:
    rows, cols = (oracle.ALL if edge == ALL else edge for edge in (format.tile.rows, format.tile.cols))
    return oracle.Spec(_DTYPES[format.dtype], (rows, cols), _RULES[format.scale_rule])


def recipe_of(name: str) -> Recipe:
    """The oracle's recipe as one that f8sub could ship."""
    rules = {word: rule for rule, word in _RULES.items()}
    formats = {}
    for operand, spec in oracle.VARIANTS[name].items():
        tile = Tile(*(ALL if edge is oracle.ALL else edge for edge in spec.tile))
        formats[operand] = Float8Format(oracle.TORCH_DTYPES[spec.format], tile, rules[spec.rule])
    x, w, dy = formats["x"], formats["w"], formats["dy"]
    return Recipe(name=name, fprop=GemmSpec(a=x, b=w), dgrad=GemmSpec(a=dy, b=w), wgrad=GemmSpec(a=dy, b=x))
