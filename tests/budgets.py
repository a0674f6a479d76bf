"""How far a float32-accumulated product may be from the exact one: derived, never typed in.

A float8 product of two codes is exact in float32. What may round: the two scales (dequantizing first or
scaling afterwards, at most four roundings in all), the K - 1 additions, and the conversion to the output's
dtype. With ``u`` the unit roundoff of float32 and ``gamma(n) = n u / (1 - n u)`` the error of the sum is at
most ``gamma(K + 4) * sum |a||b|`` in any order of summation.

A tensor core adds with fewer bits, see ``tensor_core_budget``.
"""

import numpy as np
import torch

from tests.oracle import Product

FLOAT32_UNIT = 2.0**-24


def gamma(roundings: int) -> float:
    return roundings * FLOAT32_UNIT / (1 - roundings * FLOAT32_UNIT)


TENSOR_CORE_STEP = 32
"""float8 products that one instruction of Hopper's tensor cores adds to an accumulator."""

TENSOR_CORE_UNIT = 2.0**-12
"""What each addend of a step may lose, as a share of the largest one. They are shifted to the exponent of the largest
and cut off after 14 bits (arXiv 2412.19437, 3.3.2), of which a product of two mantissas in [1, 2) needs two before the
point."""


def tensor_core_budget(product: Product, promoted: int) -> np.ndarray:
    """Largest error of sums that a tensor core makes of ``promoted`` elements of K before float32 takes them."""
    a, b = product.a, product.b
    budget = np.zeros((a.shape[0], b.shape[0]))
    for start in range(0, a.shape[1], TENSOR_CORE_STEP):
        if start % promoted == 0:
            accumulator = np.zeros_like(budget)
        left, right = (operand[:, start : start + TENSOR_CORE_STEP] for operand in (a, b))
        largest = np.maximum(np.abs(left[:, None] * right[None]).max(-1), np.abs(accumulator))
        accumulator = accumulator + left @ right.T
        largest = np.maximum(largest, np.abs(accumulator))
        budget += (TENSOR_CORE_STEP + 1) * TENSOR_CORE_UNIT * largest
    return budget


def product_budget(product: Product, dtype: torch.dtype, promoted: int | None = None) -> np.ndarray:
    """Largest allowed |computed - product.value| of each element, for an output in ``dtype``.

    ``promoted``: elements of K in a tensor core's accumulator; None where every sum is in float32.
    """
    contracted = product.a.shape[1]
    sums = gamma(contracted + 4) * (np.abs(product.a) @ np.abs(product.b).T)
    if promoted is not None:
        sums = sums + tensor_core_budget(product, promoted)
    info = torch.finfo(dtype)
    # The second is the distance of the two smallest numbers, where a rounding error is absolute.
    unit, step = info.eps / 2, info.tiny * info.eps
    budget = sums + unit * (np.abs(product.matmul) + sums) + step
    if product.bias is not None:  # the sum with the bias is rounded once more
        budget = budget + unit * (np.abs(product.value) + budget) + step
    return budget


def decibels(true: torch.Tensor, found: torch.Tensor) -> float:
    """Signal to noise; infinite for what is equal."""
    true = true.double()
    return 20 * torch.log10(true.norm() / (found.double() - true).norm()).item()


def excess(computed: torch.Tensor, product: Product, promoted: int | None = None) -> float:
    """Largest error in units of its budget: at most 1 when right, inf for a NaN or a wrong shape."""
    if tuple(computed.shape) != product.value.shape:
        return float("inf")
    error = np.abs(computed.detach().to(torch.float64).cpu().numpy() - product.value)
    ratio = error / product_budget(product, computed.dtype, promoted)
    return float("inf") if np.isnan(ratio).any() else float(ratio.max(initial=0.0))
