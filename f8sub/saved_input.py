"""Layer 4. x: quantized in forward, what is saved of it for wgrad, and its columnwise operand in backward."""

from typing import TypeVar

import torch

from f8sub.backends import Plan
from f8sub.formats import Float8Format, Operand
from f8sub.kernels.ops import derive_columnwise_in_backward
from f8sub.scaling_state import Past, X
from f8sub.shared_input import quantize_input, quantize_input_delayed
from f8sub.spread import Spread

GemmInput = Operand | torch.Tensor
"""An operand in float8, or a matrix where the GEMM stays in high precision."""

Present = TypeVar("Present", Operand, Float8Format)

Scaling = Past | Spread | None
"""How scales are made: of the past, over tensor-parallel ranks (of the past or not), or of current amaxes here."""


def quantize_x(
    x: torch.Tensor, matrix: torch.Tensor, plan: Plan, scaling: Scaling, *, keep: bool
) -> tuple[GemmInput, tuple[torch.Tensor, ...]]:
    """What fprop reads of ``x``, and what wgrad needs of it: its columnwise operand, or nothing.

    Args:
        x: what the layer was called with.
        matrix: (M, K), ``x`` flattened and in the GEMM's high-precision dtype.
        plan: of the call.
        scaling: likewise.
        keep: whether there will be a wgrad.
    """
    formats = plan.recipe.fprop.a, plan.recipe.wgrad.b if keep else None
    if scaling is None:
        row, col = quantize_input(x, matrix, formats, plan.any_layout)
    elif isinstance(scaling, Spread):
        row, col = scaling.quantize(X, matrix, formats, plan.any_layout)
    else:
        row, col = quantize_input_delayed(x, matrix, formats, plan.any_layout, scaling)
    if not keep:
        return row or matrix, ()
    return row or matrix, (matrix,) if col is None else col.tensors


def x_columnwise(saved: list[torch.Tensor], plan: Plan, after: torch.Tensor, scaling: Scaling) -> GemmInput:
    """``x``'s columnwise operand, of what forward saved of it.

    Args:
        saved: by ``quantize_x``.
        plan: of the call.
        after: see ``derive_columnwise_in_backward``.
        scaling: of the call.
    """
    format = plan.recipe.wgrad.b
    if format is None:
        return saved[0].t()
    if isinstance(scaling, Spread) and scaling.received:
        rowwise = Operand.of(present(plan.recipe.fprop.a), *saved)
        return derive_columnwise_in_backward(rowwise, format, after, plan.any_layout)
    return Operand.of(format, *saved)


def present(operand: Present | None) -> Present:
    """What the recipe says is there."""
    if operand is None:
        raise RuntimeError("a float8 tensor lacks the operand that its recipe reads")
    return operand
