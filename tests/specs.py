"""An f8sub format in the oracle's words."""

import torch

from f8sub import ALL, Float8Format, ScaleRule
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
