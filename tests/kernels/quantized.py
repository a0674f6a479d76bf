"""Formats that Triton's quantizers cast to, and whether what they made is the reference's to the bit."""

from collections.abc import Iterable

import pytest
import torch

from f8sub import ALL, Float8Format, Operand, ScaleRule, Tile
from f8sub.kernels import cuda, reference
from f8sub.kernels.scales import PriorScale
from tests.kernels.products import E4M3, E5M2, assert_same_bits
from tests.selection import long_but

POWER_OF_2 = ScaleRule.POWER_OF_2
NAN, INF = float("nan"), float("inf")
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
SMALL = (40, 72)
SHAPES = [(256, 128), (130, 144), (129, 130), (1, 300), (300, 1)]
"""Whole tiles; tiles cut at both edges, where rows are and are not pairs and of whole 16 bytes; single lines."""

on_each_format = pytest.mark.parametrize("name", FORMATS)
WALKS = ["tensorwise", "rowwise", "1x128", "128x128", "256x256-e5m2"]
on_each_walk = pytest.mark.parametrize("name", long_but(["rowwise"], WALKS))
"""What depends on how a kernel walks through a matrix: the other formats are walked through alike."""
on_each_rule_and_dtype = pytest.mark.parametrize(
    ("name", "dtype"),
    long_but(
        [("1x128", torch.bfloat16)],
        [
            *((name, torch.bfloat16) for name in FORMATS),
            *((name, dtype) for name in ("tensorwise", "1x128") for dtype in (torch.float32, torch.float16)),
        ],
    ),
)
"""What is a rule of single elements, which all walks call: data sets, edge values."""


def same_bits(ours: Operand | None, right: Operand | None) -> None:
    """Of any layout, the same; row-major where the reference is. Scales of 1x128 may be column-major."""
    if ours is None or right is None:
        assert ours is right
        return
    assert ours.data.is_contiguous() or not right.data.is_contiguous()
    by_column = ours.format.tile == Tile(1, 128)
    assert ours.scale_inv.is_contiguous() or (by_column and ours.scale_inv.t().is_contiguous())
    assert_same_bits(*(operand._replace(data=operand.data.contiguous()) for operand in (ours, right)))


def check(x: torch.Tensor, row, col, any_layout: bool = False, device: str = "cpu") -> None:
    """In a rowwise format, a columnwise one, or both."""
    found = cuda.quantize(x.to(device), row, col, any_layout)
    for ours, right in zip(found, reference.quantize(x, row, col, any_layout), strict=True):
        same_bits(ours, right)


def usages_of(name: str) -> list[tuple[Float8Format | None, Float8Format | None]]:
    """Both operands in a format, the rowwise one alone and the columnwise one alone."""
    return [(FORMATS[name], FORMATS[name]), (FORMATS[name], None), (None, FORMATS[name])]


def check_priors(name: str, matrices: Iterable[torch.Tensor], device: str = "cpu") -> None:
    """Scales of the past: of none, covering and known ones, that saturate and do not."""
    for x in matrices:
        for scale in (0.0, 1.37, 3.7e3, 2.0**-120):
            for covers, known in ((False, False), (True, False), (False, scale != 0), (True, scale != 0)):
                past = PriorScale(torch.full((1, 1), scale), 1.0, covers, known)
                on_device = past._replace(scale=past.scale.to(device))
                for row, col in usages_of(name):
                    expected = reference.quantize(x, row, col, prior=past)
                    found = cuda.quantize(x.to(device), row, col, prior=on_device)
                    same_bits(found[0], expected[0])
                    same_bits(found[1], expected[1])
                    torch.testing.assert_close(found[2].cpu(), expected[2], rtol=0, atol=0, equal_nan=True)
