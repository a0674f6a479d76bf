"""Quantizes a matrix in high precision to a Float8Tensor."""

import torch

from f8sub.errors import Float8ConfigError, Float8ShapeError
from f8sub.formats import HIGH_PRECISION, Float8Format
from f8sub.kernels import cuda
from f8sub.kernels import quantize as kernels
from f8sub.kernels.scales import CURRENT, GivenScale, PriorScale, ScaleSource
from f8sub.recipe import OperandName, Recipe, get_recipe
from f8sub.tensor.float8_tensor import Float8Tensor


def quantize(
    x: torch.Tensor,
    format_or_recipe: Float8Format | Recipe | str,
    operand: OperandName = "x",
    rowwise: bool = True,
    columnwise: bool = True,
) -> Float8Tensor:
    """Quantize a matrix with scales of its own current amax, as a layer does in its first step.

    A recipe whose scales are of the past leaves the headroom that it gives a first scale.

    Args:
        x: (rows, cols), float32, bfloat16 or float16; parameters and master weights too. Not differentiated.
        format_or_recipe: one format for both usages as stored, or a recipe (or its name) whose formats for
            ``operand`` are taken.
        operand: ``"x"``, ``"w"`` or ``"dy"``; only matters with a recipe. A weight's columnwise operand is
            derived from its rowwise codes, as it is in training, sharded or not.
        rowwise: have the operand stored as ``x``.
        columnwise: have the operand stored as ``x.t()``.

    Returns:
        A Float8Tensor of ``x``'s shape and dtype.

    Raises:
        Float8ShapeError: ``x`` is not a matrix, or its dimensions cannot be packed as a format asks.
        TypeError: ``x`` is of another dtype than those.
        Float8ConfigError: no usage asked for, or none that the recipe keeps in float8.
    """
    if x.dim() != 2:
        raise Float8ShapeError(
            f"quantize takes a matrix, got shape {tuple(x.shape)}; flatten the leading dims"
        )
    if x.dtype not in HIGH_PRECISION:
        raise TypeError(f"quantize takes a matrix of {', '.join(map(str, HIGH_PRECISION))}, got {x.dtype}")
    source: ScaleSource = CURRENT
    if isinstance(format_or_recipe, Float8Format):
        formats: tuple[Float8Format | None, Float8Format | None] = (format_or_recipe, format_or_recipe)
        derive = False
    else:
        recipe = get_recipe(format_or_recipe)
        formats = recipe.formats(operand)
        derive = operand == "w"
        if recipe.scaling is not None:
            margin = recipe.scaling.margin_of(operand)
            # Delayed scaling without a past: a scale of 0 asks for the current amax, with
            # the headroom of a first scale.
            none_yet = torch.zeros(1, 1, dtype=torch.float32, device=x.device)
            source = GivenScale(PriorScale(none_yet, margin, covers=derive))
    row, col = formats[0] if rowwise else None, formats[1] if columnwise else None
    if row is None and col is None:
        raise Float8ConfigError(
            f"nothing to quantize: rowwise={rowwise}, columnwise={columnwise}, and the formats are {formats}"
        )
    for format, depth in ((row, x.shape[1]), (col, x.shape[0])):
        if format is not None and depth % format.depth_multiple:
            raise Float8ShapeError(
                f"{format} takes rows of a multiple of {format.depth_multiple} elements, got {tuple(x.shape)}"
            )
    with torch.no_grad():
        # A weight of f8sub has its values there.
        plain = getattr(x, "plain") if isinstance(getattr(type(x), "plain", None), property) else x.detach()  # noqa: B009
        if derive and col is not None and formats[0] is not None:
            # w [N, K] is cast once, by rows; the columnwise operand [K, N] is derived from these data.
            cast = kernels.quantize(plain, formats[0], None, source).rowwise
            derived = None if cast is None else cuda.derive_columnwise(cast, col)
            return Float8Tensor(cast if rowwise else None, derived, x.dtype)
        made = kernels.quantize(plain, row, col, source)
        return Float8Tensor(made.rowwise, made.columnwise, x.dtype)
