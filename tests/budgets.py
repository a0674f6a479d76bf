"""How far a float32-accumulated product may be from the exact one: derived, never typed in.

A float8 product of two codes is exact in float32. What may round: the two scales (dequantizing first or
scaling afterwards, at most four roundings in all), the K - 1 additions, and the conversion to the output's
dtype. With ``u`` the unit roundoff of float32 and ``gamma(n) = n u / (1 - n u)`` the error of the sum is at
most ``gamma(K + 4) * sum |a||b|`` in any order of summation.
"""

import numpy as np
import torch

from tests.oracle import Product

FLOAT32_UNIT = 2.0**-24


def unit_roundoff(dtype: torch.dtype) -> float:
    return torch.finfo(dtype).eps / 2


def smallest_step(dtype: torch.dtype) -> float:
    """Distance of the two smallest numbers, where a rounding error is absolute."""
    return torch.finfo(dtype).tiny * torch.finfo(dtype).eps


def gamma(roundings: int) -> float:
    return roundings * FLOAT32_UNIT / (1 - roundings * FLOAT32_UNIT)


def product_budget(product: Product, dtype: torch.dtype) -> np.ndarray:
    """Largest allowed |computed - product.value| of each element, for an output in ``dtype``."""
    contracted = product.a.shape[1]
    sums = gamma(contracted + 4) * (np.abs(product.a) @ np.abs(product.b).T)
    unit, step = unit_roundoff(dtype), smallest_step(dtype)
    budget = sums + unit * (np.abs(product.matmul) + sums) + step
    if product.bias is not None:  # the sum with the bias is rounded once more
        budget = budget + unit * (np.abs(product.value) + budget) + step
    return budget


def excess(computed: torch.Tensor, product: Product) -> float:
    """Largest error in units of its budget: at most 1 when right, inf for a NaN or a wrong shape."""
    if tuple(computed.shape) != product.value.shape:
        return float("inf")
    error = np.abs(computed.detach().to(torch.float64).numpy() - product.value)
    ratio = error / product_budget(product, computed.dtype)
    return float("inf") if np.isnan(ratio).any() else float(ratio.max(initial=0.0))
