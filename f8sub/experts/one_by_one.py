"""Experts one after the other, each as the linear layer that it is: for formats that groups of tokens have not.

Where a format packs codes, or has a scale of the whole matrix or a transform along the tokens, an expert's tokens are a
matrix of their own. Where groups lie is read on the host for that.
"""

import torch

from f8sub.kernels.gemm.select import REFERENCE, Plan
from f8sub.kernels.grouped.operands import Groups
from f8sub.kernels.scales import CURRENT_SOURCES
from f8sub.linear.float8_linear import Float8Matmul
from f8sub.linear.saved_input import AUTO
from f8sub.recipe import Recipe
from f8sub.torch_compat import apply, untraced


@untraced
def linear(
    x: torch.Tensor,
    weight: torch.Tensor,
    groups: Groups,
    recipe: Recipe,
    dtype: torch.dtype,
    transposed: bool,
) -> torch.Tensor:
    """``grouped_linear`` of a weight of (E, N, K), or (E, K, N) where ``transposed``; y in ``dtype``."""
    call = Plan.make(recipe, torch.device(x.device.type), REFERENCE), dtype, CURRENT_SOURCES
    counts = [end - first for first, end in groups.host_bounds]
    *parts, past = x.split([*counts, len(x) - sum(counts)])
    found = [
        apply(Float8Matmul, part, stored.t() if transposed else stored, None, call, AUTO, False)
        for part, stored in zip(parts, weight.unbind(0), strict=True)
    ]
    width = weight.shape[2 if transposed else 1]
    return torch.cat([*found, past.new_zeros((len(past), width), dtype=dtype)])
