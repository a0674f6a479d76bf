"""Operands of products, what they stand for in float64, whether two of them are the same to the bit; and how products
are made where: natively on a CPU, which torch's versions differ in, and with sums that round.
"""

import numpy as np
import pytest
import torch

from f8sub import ALL, Float8Format, Operand, ScaleRule, Tile
from f8sub.formats import E2M1
from f8sub.kernels import reference
from f8sub.kernels.gemm import scaled_mm
from tests.data_sets import make
from tests.oracle import Product

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
TENSOR, TENSOR_E5M2 = Float8Format(E4M3, Tile(ALL, ALL)), Float8Format(E5M2, Tile(ALL, ALL))
ROW, ROW_E5M2 = Float8Format(E4M3, Tile(1, ALL), ScaleRule.POWER_OF_2), Float8Format(E5M2, Tile(1, ALL))
VECTOR, BLOCK = Float8Format(E4M3, Tile(1, 128)), Float8Format(E4M3, Tile(128, 128))
LARGE, LARGE_E5M2 = Float8Format(E4M3, Tile(256, 256)), Float8Format(E5M2, Tile(256, 256))
MX = Float8Format(E4M3, Tile(1, 32), ScaleRule.E8M0)
NV, NV_WEIGHT = (Float8Format(E2M1, Tile(rows, 16), ScaleRule.TWO_LEVEL) for rows in (1, 16))

PAIRS = {
    "tensor-tensor": (TENSOR, TENSOR),
    "e5m2-e4m3": (TENSOR_E5M2, TENSOR),
    "e4m3-e5m2": (TENSOR, TENSOR_E5M2),
    "row-row": (ROW, ROW),
    "row-tensor": (ROW, TENSOR),
    "tensor-row": (TENSOR, ROW),
    "row-e5m2-row": (ROW_E5M2, ROW),
}
"""One scale a matrix or a row."""

BLOCK_PAIRS = {
    "1x128-128x128": (VECTOR, BLOCK),
    "1x128-1x128": (VECTOR, VECTOR),
    "128x128-1x128": (BLOCK, VECTOR),
    "256x256-256x256": (LARGE, LARGE),
    "256x256-e5m2-256x256": (LARGE_E5M2, LARGE),
    "row-128x128": (ROW, BLOCK),
    "1x128-tensor": (VECTOR, TENSOR),
}
OUR_PAIRS = BLOCK_PAIRS | {
    "256x256-e5m2-256x256-e5m2": (LARGE_E5M2, LARGE_E5M2),
    "384x128-1x256": (Float8Format(E4M3, Tile(384, 128)), Float8Format(E4M3, Tile(1, 256))),
}
"""What our own GEMM multiplies, where cuBLASLt's does not take the last ones."""

SMALL_BLOCK_PAIRS = {"mxfp8": (MX, MX), "nvfp4": (NV, NV), "nvfp4-weight": (NV, NV_WEIGHT)}
ONE_BYTE_PAIRS = SMALL_BLOCK_PAIRS | {
    "mxfp8-of-larger-tiles": tuple(
        Float8Format(E4M3, tile, ScaleRule.E8M0) for tile in (Tile(1, 64), Tile(32, ALL))
    )
}
"""Of scales of one byte, those of cuBLASLt's blocks and of tiles of several blocks."""
FLOAT8 = (E4M3, E5M2)


def operands(pair, shape: tuple[int, int, int], data: str = "row_outliers") -> tuple[Operand, Operand]:
    """Two, of a pair of formats: of ``rows`` and ``cols`` rows of ``depth`` elements."""
    rows, cols, depth = shape
    a = reference.quantize(make(data, (rows, depth), 1) / 300, pair[0], None)[0]
    b = reference.quantize(make(data, (cols, depth), 2) / 300, pair[1], None)[0]
    return a, b


def exact(operand: Operand) -> np.ndarray:
    return reference.dequantize(operand, torch.float64).numpy()


def product(a: Operand, b: Operand) -> Product:
    return Product(exact(a), exact(b))


def promoted(backend: str | None, fast_accum: bool, depth: int) -> int | None:
    """Elements of K in a tensor core's accumulator; the reference has none, high precision a wider one."""
    if backend == "reference":
        return None
    return depth if fast_accum or backend is None else reference.PROMOTION


def natively_by_rows() -> bool:
    """Whether ``torch._scaled_mm`` takes one scale a row here; torch 2.11 does not."""
    return scaled_mm._why_not_rows_on_the_cpu() is None


def skip_without_rows(*formats: object) -> None:
    """Of formats, where one of them has a scale a row; else in any case."""
    by_rows = not formats or any(getattr(format, "tile", None) == scaled_mm.ROWWISE for format in formats)
    if by_rows and not natively_by_rows():
        pytest.skip("this torch multiplies rowwise operands on a GPU alone, or in the reference")


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of a tensor of any dtype, on the CPU; not every dtype can be copied or compared."""
    return tensor.contiguous().view(-1).view(torch.uint8).cpu()


def assert_same_bytes(name: object, found: torch.Tensor, right: torch.Tensor) -> None:
    assert (found.shape, found.dtype) == (right.shape, right.dtype)
    differ = bits(found) != bits(right)
    if found.dtype in FLOAT8:  # Of NaN the sign is the processor's.
        differ &= ~(found.cpu().float().isnan() & right.float().isnan()).flatten()
    wrong = int(differ.sum())
    assert wrong == 0, f"{wrong} of {right.numel()} bytes of {name} differ"


def assert_same_bits(found: Operand | None, expected: Operand | None) -> None:
    if expected is None or found is None:
        assert found is expected
        return
    assert found.format == expected.format
    assert len(found.tensors) == len(expected.tensors)
    for part, right in zip(found.tensors, (tensor.cpu() for tensor in expected.tensors), strict=True):
        assert_same_bytes(found.format, part, right)
