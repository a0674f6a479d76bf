"""Layer 1. Operators that ``torch.compile`` must see as one node: schemas, fakes and their implementation."""

import torch

from f8sub.formats import Float8Format, Operand, ScaleRule, Tile
from f8sub.kernels import reference


@torch.library.custom_op("f8sub::derive_columnwise", mutates_args=())
def _derive_columnwise(
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    dy: torch.Tensor,
    dtype: torch.dtype,
    rowwise_tile: list[int],
    columnwise_tile: list[int],
    scale_rule: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    rule = ScaleRule(scale_rule)
    rowwise = Operand(data, scale_inv, Float8Format(dtype, Tile(*rowwise_tile), rule))
    columnwise = reference.derive_columnwise(rowwise, Float8Format(dtype, Tile(*columnwise_tile), rule))
    # An operator may not return its argument, and the transpose of a (1, 1) scale is that.
    return columnwise.data, columnwise.scale_inv.clone()


@_derive_columnwise.register_fake
def _(
    data: torch.Tensor,
    scale_inv: torch.Tensor,
    dy: torch.Tensor,
    dtype: torch.dtype,
    rowwise_tile: list[int],
    columnwise_tile: list[int],
    scale_rule: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, cols = data.shape
    shape = Tile(*columnwise_tile).scale_shape((cols, rows))
    return data.new_empty((cols, rows)), scale_inv.new_empty(shape)


def derive_columnwise_in_backward(
    rowwise: Operand, columnwise: Float8Format, dy: torch.Tensor, any_layout: bool = False
) -> Operand:
    """``reference.derive_columnwise`` that a compiled graph cannot move into the forward pass.

    Derived from a weight alone, the transposed copy would depend on nothing of the backward pass: a partitioner
    hoists it and saves an unsharded weight for every layer (pytorch/ao#936). Taking ``dy`` ties it down.

    Args:
        rowwise: (N, K) codes of the weight.
        columnwise: format of the (K, N) result.
        dy: any tensor of the backward pass; its values are not read.
        any_layout: see ``reference.quantize``; compiled code is always row-major.
    """
    if not torch.compiler.is_compiling():
        return reference.derive_columnwise(rowwise, columnwise, any_layout)
    row, col = rowwise.format.tile, columnwise.tile
    data, scale_inv = _derive_columnwise(
        rowwise.data,
        rowwise.scale_inv,
        dy,
        columnwise.dtype,
        [row.rows, row.cols],
        [col.rows, col.cols],
        columnwise.scale_rule.value,
    )
    return Operand(data, scale_inv, columnwise)
