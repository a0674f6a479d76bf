"""x: quantized in forward, what is saved of it for wgrad, and read in backward.

| kept             | forward makes       | saved                          | backward makes columnwise of |
| ---------------- | ------------------- | ------------------------------ | ---------------------------- |
| "float8"         | rowwise, columnwise | columnwise codes               |                              |
| "high_precision" | rowwise             | x itself                       | x                            |
| "recompute"      | rowwise             | rowwise codes                  | the rowwise codes            |

The first two have the same numbers, bitwise. So has the third where codes are transposed; where they are re-encoded see
``reference.derive_columnwise``. A recipe whose wgrad reads x in high precision has it saved so in any case, and an x
that came in float8 stays as it came.
"""

import re
from typing import NamedTuple

import torch

from f8sub.formats import Operand, present, why_not_derivable
from f8sub.kernels.ops import copy_after
from f8sub.kernels.quantize import derive_columnwise_in_backward, quantize
from f8sub.kernels.scales import GivenScale, PriorScale, ScaleSource
from f8sub.linear.shared_input import Call, cast_or_share
from f8sub.recipe import Recipe
from f8sub.tensor.float8_tensor import Float8Tensor
from f8sub.torch_compat import saved_tensors_hook

GemmInput = Operand | torch.Tensor
"""An operand in float8, or a matrix where the GEMM stays in high precision."""

AUTO, FLOAT8, HIGH_PRECISION, RECOMPUTE = KEEP_X = ("auto", "float8", "high_precision", "recompute")
"""The ways of keeping x that a layer can be asked for."""


_VIEWS = re.compile(
    r"(View|UnsafeView|ReshapeAlias|Transpose|T|Permute|Unsqueeze|Squeeze|Slice|Select|Expand|Alias)Backward\d+"
)
"""Nodes of operators whose result lies in their argument's storage; where one copies, CloneBackward0 is between."""


class Kept(NamedTuple):
    """How a forward saved x, besides the tensors.

    Attributes:
        how: one of ``KEEP_X`` but "auto".
        is_known: of the ``PriorScale`` that the forward had, where backward casts with it again.
    """

    how: str
    is_known: bool = False


CODES, IN_HIGH_PRECISION, ROWWISE_CODES = Kept(FLOAT8), Kept(HIGH_PRECISION), Kept(RECOMPUTE)


def cast_x(
    x: torch.Tensor, call: Call, keep_x: str | None
) -> tuple[GemmInput, tuple[torch.Tensor, ...], Kept]:
    """Return what fprop reads of x, what is saved of it for wgrad, and how ``x_columnwise`` is to read that.

    Args:
        x: (..., K), what the layer was called with; may be a Float8Tensor where ``sources.distributed``, with the
            rowwise operand that the recipe reads.
        call: with the dtype that x is cast from.
        keep_x: one of ``KEEP_X``; None where there will be no wgrad.
    """
    plan, dtype, sources = call
    matrix = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    if x.dtype is not dtype:
        matrix = matrix.to(dtype)
    rowwise, columnwise = plan.recipe.fprop.a, plan.recipe.wgrad.b
    # x came from other ranks in float8: its rowwise codes are all there is of it.
    if sources.distributed and isinstance(matrix, Float8Tensor):
        received = present(matrix.rowwise)
        if columnwise is None:
            return received, () if keep_x is None else (matrix,), IN_HIGH_PRECISION
        return received, () if keep_x is None else received.tensors, ROWWISE_CODES
    how = how_kept(x, plan.recipe) if keep_x == AUTO else keep_x
    formats = rowwise, columnwise if how == FLOAT8 else None
    made = cast_or_share(x, matrix, formats, plan, sources)
    row = made.rowwise
    if how is None:
        return row or matrix, (), CODES
    # wgrad is in high precision, so x itself is saved.
    if columnwise is None:
        return row or matrix, (matrix,), IN_HIGH_PRECISION
    if how == FLOAT8:
        return row or matrix, present(made.columnwise).tensors, CODES
    if how == RECOMPUTE:
        return present(row), present(row).tensors, ROWWISE_CODES
    prior = sources.x.prior()
    if prior is None:
        return row or matrix, (x,), IN_HIGH_PRECISION
    # A copy: a feature may make another scale before backward.
    return row or matrix, (x, prior.scale.clone()), Kept(HIGH_PRECISION, prior.is_known)


def x_columnwise(saved: list[torch.Tensor], kept: Kept, call: Call, after: torch.Tensor) -> GemmInput:
    """``x``'s columnwise operand, of what ``cast_x`` saved; ``after`` as ``derive_columnwise_in_backward`` takes it."""
    plan, dtype, sources = call
    format = plan.recipe.wgrad.b
    if format is None:
        (x,) = saved
        return x.dequantize().t() if isinstance(x, Float8Tensor) else x.t()
    if kept.how == FLOAT8:
        return Operand.of(format, *saved)
    if kept.how == RECOMPUTE:
        rowwise = Operand.of(present(plan.recipe.fprop.a), *saved)
        return derive_columnwise_in_backward(rowwise, format, after, plan.any_layout)
    x, *scales = saved
    matrix = (x if x.dim() == 2 else x.reshape(-1, x.shape[-1])).to(dtype)
    source: ScaleSource = sources.x
    prior = source.prior()
    if prior is not None:
        scale = scales[0]
        if torch.compiler.is_compiling():
            # Else it is the same cast as forward's, whose codes a partitioner saves.
            scale = copy_after(scale, after)
        given = PriorScale(scale, prior.margin, covers=False, is_known=kept.is_known)
        source = GivenScale(given)
    return present(quantize(matrix, None, format, source, plan.any_layout).columnwise)


def why_not_kept(recipe: Recipe, keep_x: str) -> str | None:
    """Why layers of a recipe cannot keep x so; None when they can."""
    rowwise, columnwise = recipe.formats("x")
    if columnwise is None or keep_x in (AUTO, FLOAT8):
        return None
    if keep_x == HIGH_PRECISION:
        if rowwise is None and recipe.scaling is not None:
            return f"its fprop does not cast x, whose amax {type(recipe.scaling).__name__} takes in forward"
        return None
    if rowwise is None:
        return "its fprop does not cast x, so that there are no codes to derive any from"
    return why_not_derivable(rowwise, columnwise)


def is_saved_by_its_maker(x: torch.Tensor) -> bool:
    """Return whether the operator that made ``x``, or what ``x`` is a view of, saved its result for backward.

    ``scaled_dot_product_attention``, relu, sigmoid and softmax do. Told from the graph, so never while
    ``torch.compile`` traces; nor where hooks pack what is saved (checkpointing, offloading), each tensor by itself.
    """
    if torch.compiler.is_compiling() or (node := x.grad_fn) is None or saved_tensors_hook() is not None:
        return False
    while node is not None and _VIEWS.fullmatch(node.name()):
        node = node.next_functions[0][0]
    # Asked of the class: of the node itself it would be unpacked. What it makes besides has no gradient.
    return any(hasattr(type(node), name) for name in ("_saved_output", "_saved_result"))


def how_kept(x: torch.Tensor, recipe: Recipe) -> str:
    """Return what "auto" stands for: x itself where that takes no memory and no kernel, else float8 codes."""
    free = is_saved_by_its_maker(x) and why_not_kept(recipe, HIGH_PRECISION) is None
    return HIGH_PRECISION if free else FLOAT8
