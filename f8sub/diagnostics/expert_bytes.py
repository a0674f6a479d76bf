"""The bytes of every weight of experts, predicted: weights, wire, saved for backward, transient; beside bf16's."""

from collections.abc import Iterator
from typing import Any

import torch

from f8sub.convert.checks import is_converted
from f8sub.diagnostics.bytes import Bytes, LayerBytes, WeightBytes, operand_bytes
from f8sub.estimator.shapes import Product, expert_products
from f8sub.experts.adapters import own_parameter
from f8sub.experts.module import Float8Experts
from f8sub.experts.seams import seam_of
from f8sub.formats import ALL, Float8Format
from f8sub.kernels.grouped.operands import aligned_rows, start_of_groups
from f8sub.torch_compat import param_dtypes


def expert_bytes(model: torch.nn.Module, tokens: int, dtype: torch.dtype) -> Iterator[LayerBytes]:
    """Of each weight of experts whose seam is known, however many tokens each expert gets; where they lie aside.

    Args:
        model: converted or not; of a sharded one told is this rank's.
        tokens: of one forward, before they are sent to experts.
        dtype: the high precision, FSDP2's ``param_dtype``.
    """
    modules: dict[str, Any] = dict(model.named_modules())
    found = {fqn: module for fqn, module in modules.items() if seam_of(module) is not None}
    sharded = {module for module, _ in param_dtypes(found.values())}
    for fqn, module in found.items():
        for product in expert_products(model, fqn, None):
            name = product.fqn.removeprefix(f"{fqn}.")
            weight = WeightBytes.of(own_parameter(module, name), sharded=module in sharded)
            yield _described(module, name, product, weight, round(tokens * product.uses), dtype)


def _described(
    module: Any, name: str, product: Product, weight: WeightBytes, rows: int, dtype: torch.dtype
) -> LayerBytes:
    """Of one weight, of whose tokens' copies there are ``rows``, those of all experts."""
    learns = own_parameter(module, name).requires_grad
    x = 0 if product.shares_x or not learns else rows * product.cols * dtype.itemsize
    plain = weight.in_high_precision(x, dtype)
    shape = product.experts, product.rows, product.cols
    if not is_converted(module):
        return LayerBytes(product.fqn, shape, "high precision", plain, plain)
    here = _in_float8(module, name, product, weight, plain, rows)
    return LayerBytes(product.fqn, shape, module.plan.recipe.name, here, plain)


def _in_float8(
    module: Float8Experts, name: str, product: Product, weight: WeightBytes, plain: Bytes, rows: int
) -> Bytes:
    plan, format = module.plan, module.format_of(name)
    recipe, gathered = plan.recipe, module.is_gathered(name)
    x_col, (dy_row, dy_col) = recipe.formats("x")[1], recipe.formats("dy")
    learns = getattr(module, name).requires_grad
    saved = plain.saved
    if saved and x_col is not None:
        saved = _tokens_bytes(x_col, rows, product.cols, product.experts, plan.multiple, contracted=True)
    wire = weight.world * weight.sent(format) if gathered and format is not None else plain.wire
    made = _weight_made_in_backward(module, product)
    if dy_row is not None:
        made += _tokens_bytes(dy_row, rows, product.rows, product.experts, 1, contracted=False)
    if dy_col is not None and learns:
        made += _tokens_bytes(dy_col, rows, product.rows, product.experts, plan.multiple, contracted=True)
    codes = 0
    if format is not None and gathered and weight.layout is not None:
        codes = weight.sent(format)
    elif format is not None and weight.layout is None:
        codes = operand_bytes(format, *weight.shape)
    return Bytes(plain.master, codes, wire, saved, wire + made)


def _weight_made_in_backward(module: Float8Experts, product: Product) -> int:
    """Of the columnwise operand, where it is no view of the rowwise codes."""
    row, col = module.plan.recipe.formats("w")
    if col is None or (row is not None and row.tile.is_transpose_of(col.tile)):
        return 0
    return product.experts * operand_bytes(col, product.cols, product.rows)


def _tokens_bytes(
    format: Float8Format, rows: int, cols: int, experts: int, multiple: int, *, contracted: bool
) -> int:
    """Codes and scales of ``Tokens``: of (rows, cols) in groups, those with tiles of several rows aligned to them."""
    tile = format.tile.t() if contracted else format.tile
    start = start_of_groups(tile.rows, multiple)
    rows = rows if start == 1 else aligned_rows(rows, experts, start)
    down = experts if tile.rows == ALL else -(-rows // tile.rows)
    along = tile.scale_shape((1, cols))[1]
    return rows * cols // format.codes_per_byte + down * along * format.scale_rule.stored_as.itemsize
