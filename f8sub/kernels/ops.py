"""Layer 1. Operators that ``torch.compile`` must see as one node: schemas, fakes and their implementation.

Formats go by name. What is made of plain elementwise operators and reductions over whole rows is left to the compiler,
which fuses it; the rest it would unroll (partial sums), cannot lower (e8m0, e2m1) or lowers wrongly (an index that is
divided by a tile's edge fails an assertion in the C++ backend of 2.11 to 2.13).
"""

from collections.abc import Callable

import torch

from f8sub.formats import ALL, Float8Format, Operand
from f8sub.kernels import fused, reference


def is_fusible(format: Float8Format) -> bool:
    """Whether the compiler may see how a matrix of this format is quantized and read."""
    return format.is_plain and format.tile.rows in (1, ALL) and format.tile.cols in (1, ALL)


@torch.library.custom_op("f8sub::quantize_rowwise", mutates_args=())
def _quantize_rowwise(x: torch.Tensor, rowwise: str) -> list[torch.Tensor]:
    return _quantized(x, Float8Format.parse(rowwise), None)


@torch.library.custom_op("f8sub::quantize_columnwise", mutates_args=())
def _quantize_columnwise(x: torch.Tensor, columnwise: str) -> list[torch.Tensor]:
    return _quantized(x, None, Float8Format.parse(columnwise))


@torch.library.custom_op("f8sub::quantize_both", mutates_args=())
def _quantize_both(x: torch.Tensor, rowwise: str, columnwise: str) -> list[torch.Tensor]:
    return _quantized(x, Float8Format.parse(rowwise), Float8Format.parse(columnwise))


@_quantize_rowwise.register_fake
def _(x: torch.Tensor, rowwise: str) -> list[torch.Tensor]:
    return list(_empty_operand(x, Float8Format.parse(rowwise), *x.shape).tensors)


@_quantize_columnwise.register_fake
def _(x: torch.Tensor, columnwise: str) -> list[torch.Tensor]:
    return list(_empty_operand(x, Float8Format.parse(columnwise), *x.shape[::-1]).tensors)


@_quantize_both.register_fake
def _(x: torch.Tensor, rowwise: str, columnwise: str) -> list[torch.Tensor]:
    row = _empty_operand(x, Float8Format.parse(rowwise), *x.shape)
    return [*row.tensors, *_empty_operand(x, Float8Format.parse(columnwise), *x.shape[::-1]).tensors]


def _quantized(
    x: torch.Tensor, rowwise: Float8Format | None, columnwise: Float8Format | None
) -> list[torch.Tensor]:
    row, col = fused.quantize(x, rowwise, columnwise)
    if row is not None and col is not None:
        # An operator may not return one tensor twice: of the reference both usages may share a scale.
        taken = {tensor.untyped_storage().data_ptr() for tensor in row.tensors}
        own = (t.clone() if t.untyped_storage().data_ptr() in taken else t for t in col.tensors)
        col = Operand.of(col.format, *own)
    return [tensor for operand in (row, col) if operand is not None for tensor in operand.tensors]


def quantize(
    x: torch.Tensor, rowwise: Float8Format | None, columnwise: Float8Format | None
) -> tuple[Operand | None, Operand | None]:
    """``reference.quantize`` as one node, an operator each for one usage, the other, and both.

    An operator's results live or die together: one that made both could not leave one out.
    """
    if rowwise is not None and columnwise is not None:
        return _operands(_quantize_both(x, rowwise.name, columnwise.name), rowwise, columnwise)
    if rowwise is not None:
        return _operands(_quantize_rowwise(x, rowwise.name), rowwise, None)
    if columnwise is not None:
        return _operands(_quantize_columnwise(x, columnwise.name), None, columnwise)
    return None, None


def _operands(
    tensors: list[torch.Tensor], rowwise: Float8Format | None, columnwise: Float8Format | None
) -> tuple[Operand | None, Operand | None]:
    row = col = None
    if rowwise is not None:
        count = 3 if rowwise.scale_rule.has_global else 2
        row, tensors = Operand.of(rowwise, *tensors[:count]), tensors[count:]
    if columnwise is not None:
        col = Operand.of(columnwise, *tensors)
    return row, col


def gemm_as_one_node(backend: str, gemm_nt: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A backend's ``gemm_nt`` behind an operator of its own, ``f8sub::BACKEND_gemm_nt``."""

    @torch.library.custom_op(f"f8sub::{backend}_gemm_nt", mutates_args=())
    def operator(
        a: list[torch.Tensor],
        b: list[torch.Tensor],
        a_format: str,
        b_format: str,
        out_dtype: torch.dtype,
        fast_accum: bool,
    ) -> torch.Tensor:
        left, right = (
            Operand.of(Float8Format.parse(a_format), *a),
            Operand.of(Float8Format.parse(b_format), *b),
        )
        # Filled up to whole blocks, a product is a view of a larger one; the fake's strides are the promise.
        return gemm_nt(left, right, out_dtype, fast_accum).contiguous()

    @operator.register_fake
    def _(
        a: list[torch.Tensor],
        b: list[torch.Tensor],
        a_format: str,
        b_format: str,
        out_dtype: torch.dtype,
        fast_accum: bool,
    ) -> torch.Tensor:
        return a[0].new_empty((a[0].shape[0], b[0].shape[0]), dtype=out_dtype)

    def run(a: Operand, b: Operand, out_dtype: torch.dtype, fast_accum: bool) -> torch.Tensor:
        product: torch.Tensor = operator(
            list(a.tensors), list(b.tensors), a.format.name, b.format.name, out_dtype, fast_accum
        )
        return product

    return run


@torch.library.custom_op("f8sub::derive_columnwise", mutates_args=())
def _derive_columnwise(
    data: torch.Tensor, scale_inv: torch.Tensor, after: torch.Tensor, rowwise: str, columnwise: str
) -> tuple[torch.Tensor, torch.Tensor]:
    operand = Operand(data, scale_inv, Float8Format.parse(rowwise))
    derived = fused.derive_columnwise(operand, Float8Format.parse(columnwise))
    # An operator may not return its argument, and the transpose of a (1, 1) scale is that.
    return derived.data, derived.scale_inv.clone()


@_derive_columnwise.register_fake
def _(
    data: torch.Tensor, scale_inv: torch.Tensor, after: torch.Tensor, rowwise: str, columnwise: str
) -> tuple[torch.Tensor, torch.Tensor]:
    rows, cols = Operand(data, scale_inv, Float8Format.parse(rowwise)).shape
    derived = _empty_operand(data, Float8Format.parse(columnwise), cols, rows)
    return derived.data, derived.scale_inv


@torch.library.custom_op("f8sub::copy_after", mutates_args=())
def _copy_after(tensor: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    return tensor.clone()


@_copy_after.register_fake
def _(tensor: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(tensor)


def derive_columnwise_in_backward(
    rowwise: Operand, columnwise: Float8Format, after: torch.Tensor, any_layout: bool = False
) -> Operand:
    """``reference.derive_columnwise`` that a compiled graph cannot move into the forward pass.

    Derived from a weight alone, the transposed copy would depend on nothing of the backward pass: a partitioner
    hoists it and saves an unsharded weight for every layer (pytorch/ao#936). Taking ``after`` ties it down.

    A transposition is one node. What is re-encoded (rows to columns) is left to the compiler, which dequantizes inside
    of both of its kernels, for 3 bytes an element; it is tied down by its scales.

    Args:
        rowwise: (N, K) codes of the weight.
        columnwise: format of the (K, N) result.
        after: a small tensor that is made in the backward pass; its values are not read. Of a large one the compiler
            would need all of it in memory.
        any_layout: see ``reference.quantize``; compiled code is always row-major.
    """
    if not torch.compiler.is_compiling():
        return fused.derive_columnwise(rowwise, columnwise, any_layout)
    both_seen = is_fusible(rowwise.format) and is_fusible(columnwise)
    if both_seen and not rowwise.format.tile.is_transpose_of(columnwise.tile):
        scale_inv = _copy_after(rowwise.scale_inv, after)
        return reference.derive_columnwise(rowwise._replace(scale_inv=scale_inv), columnwise)
    data, scale_inv = _derive_columnwise(
        rowwise.data, rowwise.scale_inv, after, rowwise.format.name, columnwise.name
    )
    return Operand(data, scale_inv, columnwise, rowwise.global_scale_inv)


def small_part_of(dy: torch.Tensor, quantized: Operand | None) -> torch.Tensor:
    """``after`` of ``derive_columnwise_in_backward``: what is not known before ``dy`` is.

    Args:
        dy: (rows, cols).
        quantized: an operand of ``dy`` with scales of its current amax, if there is one.
    """
    if not torch.compiler.is_compiling():
        return dy
    return dy[:1, :1] if quantized is None else quantized.scale_inv


def _empty_operand(like: torch.Tensor, format: Float8Format, rows: int, depth: int) -> Operand:
    depth = -(-depth // format.depth_multiple) * format.depth_multiple
    data = like.new_empty((rows, depth // format.codes_per_byte), dtype=format.dtype)
    scale_inv = like.new_empty(format.tile.scale_shape((rows, depth)), dtype=format.scale_rule.stored_as)
    level = like.new_empty((1, 1), dtype=torch.float32) if format.scale_rule.has_global else None
    return Operand(data, scale_inv, format, level)
