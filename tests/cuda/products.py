"""What a layer's three products should be: codes made on the CPU, multiplied in float64."""

import numpy as np
import torch

import f8sub
from f8sub import get_recipe
from f8sub.formats import Float8Format, Operand
from f8sub.kernels import reference
from f8sub.kernels.quantize import quantize
from f8sub.kernels.reference import PROMOTION
from tests.oracle import Product

RECIPES = f8sub.recipe_names()
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def exact(operand: Operand) -> np.ndarray:
    return reference.dequantize(operand, torch.float64).numpy()


def factor(operand: Operand | None, matrix: torch.Tensor) -> np.ndarray:
    """What a GEMM reads: an operand, or the matrix itself where it stays in high precision."""
    return matrix.double().numpy() if operand is None else exact(operand)


def promoted(backend: str | None, fast_accum: bool, depth: int) -> int | None:
    """Elements of K in a tensor core's accumulator; the reference has none, high precision a wider one."""
    if backend == "reference":
        return None
    return depth if fast_accum or backend is None else PROMOTION


def linear(
    recipe: str, x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor, bias: torch.Tensor | None = None
) -> dict[str, Product]:
    """y, dx and dw of matrices on the CPU that are already in the dtype they are cast from."""
    made = get_recipe(recipe)
    x_row, x_col, _ = quantize(x, *made.formats("x"))
    dy_row, dy_col, _ = quantize(dy, *made.formats("dy"))
    w_row, w_col = quantize(w, made.fprop.b, None)[0], None
    if w_row is not None and made.dgrad.b is not None:
        w_col = reference.derive_columnwise(w_row, made.dgrad.b)
    added = None if bias is None else bias.double().numpy()
    return {
        "y": Product(factor(x_row, x), factor(w_row, w), added),
        "dx": Product(factor(dy_row, dy), factor(w_col, w.t())),
        "dw": Product(factor(dy_col, dy.t()), factor(x_col, x.t())),
    }


def bits(tensor: torch.Tensor) -> torch.Tensor:
    """Bytes of a tensor of any dtype, on the CPU; not every dtype can be copied or compared."""
    return tensor.contiguous().view(-1).view(torch.uint8).cpu()


def assert_same_bits(found: Operand | None, expected: Operand | None) -> None:
    if expected is None or found is None:
        assert found is expected
        return
    assert found.format == expected.format
    assert len(found.tensors) == len(expected.tensors)
    for part, right in zip(found.tensors, (tensor.cpu() for tensor in expected.tensors), strict=True):
        assert (part.shape, part.dtype) == (right.shape, right.dtype)
        differ = bits(part) != bits(right)
        if part.dtype in FLOAT8:  # Of NaN the sign is the processor's.
            differ &= ~(part.cpu().float().isnan() & right.float().isnan()).view(-1)
        wrong = int(differ.sum())
        assert wrong == 0, f"{wrong} of {right.numel()} bytes of {found.format} differ"


def operand(format: Float8Format, matrix: torch.Tensor) -> Operand:
    made = reference.quantize(matrix, format, None)[0]
    assert made is not None
    return made
