"""What a layer's three products should be: codes made on the CPU, multiplied in float64."""

import numpy as np
import torch

import f8sub
from f8sub import get_recipe
from f8sub.formats import Operand
from f8sub.kernels import reference
from f8sub.kernels.quantize import quantize
from f8sub.kernels.reference import PROMOTION
from tests.kernels.products import exact
from tests.oracle import Product

RECIPES = f8sub.recipe_names()


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
