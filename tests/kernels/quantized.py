"""Formats that Triton's quantizers cast to, and whether what they made is the reference's to the bit."""

from collections.abc import Container, Iterable

import pytest
import torch

from f8sub import ALL, Float8Format, ScaleRule, Tile
from f8sub.formats import Operand
from tests.cuda.products import assert_same_bits
from tests.selection import long_but

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
POWER_OF_2 = ScaleRule.POWER_OF_2
FORMATS = {
    "tensorwise": Float8Format(E4M3, Tile(ALL, ALL)),
    "tensorwise-e5m2": Float8Format(E5M2, Tile(ALL, ALL), POWER_OF_2),
    "rowwise": Float8Format(E4M3, Tile(1, ALL), POWER_OF_2),
    "rowwise-e5m2": Float8Format(E5M2, Tile(1, ALL)),
    "1x128": Float8Format(E4M3, Tile(1, 128), POWER_OF_2),
    "1x128-float": Float8Format(E4M3, Tile(1, 128)),
    "128x128": Float8Format(E4M3, Tile(128, 128), POWER_OF_2),
    "256x256-e5m2": Float8Format(E5M2, Tile(256, 256)),
}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
SMALL = (40, 72)


def with_long(names: Iterable[str], quick: Container[str]) -> pytest.MarkDecorator:
    """Parametrize ``name``; all but ``quick`` are long."""
    return pytest.mark.parametrize("name", long_but(quick, names))


on_each_format = pytest.mark.parametrize("name", FORMATS)
on_each_walk = with_long(FORMATS, ("tensorwise", "rowwise", "1x128", "128x128", "256x256-e5m2"))
"""What depends on how a kernel walks through a matrix: the other formats are walked through alike."""
on_each_rule = with_long(FORMATS, ("tensorwise", "1x128"))
"""What is a rule of single elements, which all walks call: data sets, edge values."""


def with_dtypes(quick: Container[str]) -> pytest.MarkDecorator:
    """Parametrize ``name`` and ``dtype``: every format in bf16, and two in every dtype; all but ``quick`` are long."""
    cases = [(name, torch.bfloat16) for name in FORMATS]
    others = [dtype for dtype in DTYPES.values() if dtype is not torch.bfloat16]
    cases += [(name, dtype) for name in ("tensorwise", "1x128") for dtype in others]
    chosen = [(name, torch.bfloat16) for name in FORMATS if name in quick]
    return pytest.mark.parametrize(("name", "dtype"), long_but(chosen, cases))


on_each_rule_and_dtype = with_dtypes(("tensorwise", "1x128"))
on_each_walk_and_dtype = with_dtypes(("tensorwise", "rowwise", "1x128", "128x128", "256x256-e5m2"))
on_each_dtype = pytest.mark.parametrize(
    "dtype",
    [
        pytest.param(dtype, id=name, marks=() if name == "bf16" else pytest.mark.long)
        for name, dtype in DTYPES.items()
    ],
)


def same_bits(ours: Operand | None, right: Operand | None) -> None:
    """Of any layout, the same; row-major where the reference is. Scales of 1x128 may be column-major."""
    if ours is None or right is None:
        assert ours is right
        return
    assert ours.data.is_contiguous() or not right.data.is_contiguous()
    by_column = ours.format.tile == Tile(1, 128)
    assert ours.scale_inv.is_contiguous() or (by_column and ours.scale_inv.t().is_contiguous())
    assert_same_bits(*(operand._replace(data=operand.data.contiguous()) for operand in (ours, right)))
