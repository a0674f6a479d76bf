"""Operators that ``torch.compile`` must see as one node: schemas, fakes and their implementation.

Formats go by name. The compiler fuses, and so is left with, plain elementwise operators and reductions over whole rows,
as long as nothing is copied transposed: Inductor's transposed stores take several times as long as ours. It would
unroll partial sums, cannot lower e8m0 and e2m1, and lowers an index that is divided by a tile's edge wrongly (an
assertion fails in the C++ backend of 2.11 to 2.13).

[Note] Scales of blocks are flat between two of these nodes: ``Operand.scale_inv`` has one dimension there. A matrix of
scales has a dimension that counts blocks, ceil(M / 128), and torch compiles once more when the size of a dimension
changes from 1 to another. The flat size, K * ceil(M / 128), changes so only where all of K is in one block.
"""

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.fx.traceback import get_current_meta

from f8sub.formats import ALL, Float8Format, Operand, present, share_scale
from f8sub.kernels import cuda, reference, scales
from f8sub.kernels.gemm.block_scales import empty_scale_inv, flat, is_laid_out, unflat
from f8sub.kernels.graph_ops import (
    call_directly_in_graphs,
    enter_graph_functions,
    in_graph,
    policies,
)
from f8sub.kernels.grouped import operands
from f8sub.kernels.grouped.operands import (
    Computed,
    ExpertWeights,
    Groups,
    Tokens,
    aligned_rows,
    computed_of,
    empty_codes,
    start_of_groups,
)
from f8sub.kernels.grouped.operands import empty_scale_inv as empty_scale_inv_of_groups
from f8sub.kernels.reference import Quantized
from f8sub.kernels.scales import PriorScale
from f8sub.kernels.triton import prepared

_library = torch.library.Library("f8sub", "DEF")


def operator(
    function: Callable[..., Any],
    name: str,
    fake: Callable[..., Any],
    mutates: tuple[str, ...] = (),
    asked: Callable[..., prepared.Asked] | None = None,
) -> Callable[..., Any]:
    """``f8sub::NAME``, which changes no argument but those that ``mutates`` names, for all devices.

    Defined in the library itself: ``torch.library.custom_op`` wraps a call in what costs the host three times as much
    as the dispatcher. In code that Inductor generates the function is called by itself, unless it mutates; by launches
    that are prepared for each call, where ``asked`` says which.
    """
    schema = torch.library.infer_schema(function, mutates_args=mutates)
    # Exact strides, because kernels read rows as they lie, and Inductor may lay out inputs in another way.
    _library.define(name + schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.needs_exact_strides))
    _library.impl(name, function, "CompositeExplicitAutograd")
    torch.library.register_fake(f"f8sub::{name}", fake, lib=_library)
    made: Callable[..., Any] = getattr(torch.ops.f8sub, name).default
    if not mutates:
        maker = None if asked is None else functools.partial(prepared.at_one_place, function, asked)
        call_directly_in_graphs(str(made), function, maker)
    return made


def is_fusible(format: Float8Format) -> bool:
    """Return whether the compiler may see how a matrix of this format is quantized and read."""
    return format.is_plain and not _has_blocks(format)


def _has_blocks(format: Float8Format) -> bool:
    """Return whether one scale serves more than one element of a line, and not all of it."""
    return format.tile.rows not in (1, ALL) or format.tile.cols not in (1, ALL)


def _as_list(made: Iterable[Operand]) -> list[torch.Tensor]:
    """An operator's results, each with memory of its own and laid out as the fake says; scales of blocks flat."""
    found: list[torch.Tensor] = []
    for operand in made:
        if not is_laid_out(operand):
            laid_out = empty_scale_inv(operand.data, operand.format, *operand.shape)
            operand = operand._replace(scale_inv=laid_out.copy_(operand.scale_inv))
        if _has_blocks(operand.format):
            operand = operand._replace(scale_inv=flat(operand))
        found += operand.tensors
    # Both usages of the reference may share a scale, and an operator may not return one tensor twice.
    addresses = [tensor.data_ptr() for tensor in found]
    return [t.clone() if addresses[i] in addresses[:i] else t for i, t in enumerate(found)]


def _flat(made: list[torch.Tensor], *formats: str | None) -> list[torch.Tensor]:
    """Results of kernels as an operator's: each has memory of its own already, and scales of blocks become flat."""
    return prepared.flatten(made, _scales_of_blocks(formats))


@functools.cache
def _scales_of_blocks(names: tuple[str | None, ...]) -> tuple[int, ...]:
    """Return which of an operator's results are scales of blocks."""
    formats = [Float8Format.parse(name) for name in names if name is not None]
    return tuple(2 * index + 1 for index, format in enumerate(formats) if _has_blocks(format))


def _empty_operand(like: torch.Tensor, format: Float8Format, rows: int, depth: int) -> Operand:
    """Return a fake's result for an operand of (rows, depth) elements; scales of blocks are flat."""
    depth = -(-depth // format.depth_multiple) * format.depth_multiple
    data = like.new_empty((rows, depth // format.codes_per_byte), dtype=format.dtype)
    if _has_blocks(format):
        lines, blocks = format.tile.scale_shape((rows, depth))
        scale_inv = like.new_empty(lines * blocks, dtype=format.scale_rule.stored_as)
    else:
        scale_inv = empty_scale_inv(like, format, rows, depth)
    level = like.new_empty((1, 1), dtype=torch.float32) if format.scale_rule.has_global else None
    return Operand(data, scale_inv, format, level)


def _quantize(
    x: torch.Tensor, amax: torch.Tensor | None, rowwise: str | None, columnwise: str | None
) -> list[torch.Tensor]:
    x = prepared.without_class(x)
    if (again := cuda.quantize_again(x, amax, rowwise, columnwise)) is not None:
        return _flat(again, rowwise, columnwise)
    row, col = (None if name is None else Float8Format.parse(name) for name in (rowwise, columnwise))
    made = cuda.quantize(x, row, col, amax=amax)
    found = _as_list(operand for operand in (made.rowwise, made.columnwise) if operand is not None)
    return found[:3] if share_scale(row, col) else found


def _fake_quantized(
    x: torch.Tensor, amax: torch.Tensor | None, rowwise: str | None, columnwise: str | None
) -> list[torch.Tensor]:
    row, col = (None if name is None else Float8Format.parse(name) for name in (rowwise, columnwise))
    shaped = ((row, x.shape), (col, x.shape[::-1]))
    made = [_empty_operand(x, format, *shape) for format, shape in shaped if format is not None]
    found = [tensor for operand in made for tensor in operand.tensors]
    return found[:3] if share_scale(row, col) else found


def _derive_columnwise(
    data: torch.Tensor, scale_inv: torch.Tensor, after: torch.Tensor, rowwise: str, columnwise: str
) -> list[torch.Tensor]:
    """Codes, and scales where they are others than ``scale_inv``."""
    reference.refuse_freed(data)
    if (
        scale_inv.dim() == 2
        and (again := cuda.derive_again(data, scale_inv, rowwise, columnwise)) is not None
    ):
        return _flat(again, columnwise)
    operand = unflat(Operand(data, scale_inv, Float8Format.parse(rowwise)))
    derived = cuda.derive_columnwise(operand, Float8Format.parse(columnwise))
    # An operator may not return its argument, and the transpose of a (1, 1) scale is that.
    is_given = derived.scale_inv.untyped_storage().data_ptr() == scale_inv.untyped_storage().data_ptr()
    if is_given:
        derived = derived._replace(scale_inv=derived.scale_inv.clone())
    made = _as_list([derived._replace(global_scale_inv=None)])
    return made[:1] if share_scale(operand.format, derived.format) else made


def _fake_derived(
    data: torch.Tensor, scale_inv: torch.Tensor, after: torch.Tensor, rowwise: str, columnwise: str
) -> list[torch.Tensor]:
    formats = Float8Format.parse(rowwise), Float8Format.parse(columnwise)
    rows, cols = Operand(data, scale_inv, formats[0]).shape
    derived = _empty_operand(data, formats[1], cols, rows)
    return [derived.data] if share_scale(*formats) else [derived.data, derived.scale_inv]


def _copy_after(tensor: torch.Tensor, after: torch.Tensor) -> torch.Tensor:
    # ``after`` is not read: that it is an argument keeps this behind it in the graph.
    return tensor.clone()


def _asked_to_quantize(
    x: torch.Tensor, amax: torch.Tensor | None, rowwise: str | None, columnwise: str | None
) -> prepared.Asked:
    formats = rowwise, columnwise
    return prepared.Asked(formats, (x, amax), _scales_of_blocks(formats))


def _asked_to_derive(
    data: torch.Tensor, scale_inv: torch.Tensor, after: torch.Tensor, rowwise: str, columnwise: str
) -> prepared.Asked:
    scales = unflat(Operand(data, scale_inv, Float8Format.parse(rowwise))).scale_inv
    return prepared.Asked(("derived", rowwise, columnwise), (data, scales), _scales_of_blocks((columnwise,)))


quantize_as_one_node = operator(_quantize, "quantize", _fake_quantized, asked=_asked_to_quantize)
transpose = operator(cuda.transpose, "transpose", lambda codes: codes.new_empty(codes.shape[::-1]))
derive_columnwise = operator(_derive_columnwise, "derive_columnwise", _fake_derived, asked=_asked_to_derive)
copy_after = operator(_copy_after, "copy_after", lambda tensor, after: torch.empty_like(tensor))


def quantize_in_graph(
    x: torch.Tensor, amax: torch.Tensor | None, rowwise: str | None, columnwise: str | None
) -> list[torch.Tensor]:
    """``quantize_as_one_node``, which is the columnwise usage alone where the function is checkpointed.

    A checkpointed x is cast for fprop in forward and for wgrad in backward. One operator that makes both usages would
    make in each pass codes that this pass does not read. Apart, the compiler fuses the rowwise cast with what is around
    it, and forward launches no operator of ours for it.
    """
    enter_graph_functions()
    return _in_graph(x, amax, rowwise, columnwise)


@in_graph
def _in_graph(
    x: torch.Tensor, amax: torch.Tensor | None, rowwise: str | None, columnwise: str | None
) -> list[torch.Tensor]:
    # torch's mode of selective checkpointing shows it, or the tag that dynamo gives a node.
    is_checkpointed = bool(policies()) or "recompute" in get_current_meta()
    row = None if rowwise is None else Float8Format.parse(rowwise)
    if row is None or columnwise is None or not is_checkpointed or not is_fusible(row):
        together: list[torch.Tensor] = quantize_as_one_node(x, amax, rowwise, columnwise)
        return together
    made = reference.quantize(x, row, None, reduce=None if amax is None else lambda own, tile: amax)
    apart = quantize_as_one_node(x, amax, None, columnwise)
    # As many as together.
    apart = apart[:1] if share_scale(row, Float8Format.parse(columnwise)) else apart
    return [*present(made.rowwise).tensors, *apart]


def quantized(
    x: torch.Tensor,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    prior: PriorScale | None = None,
) -> Quantized:
    """``reference.quantize`` as one node for the usages that are asked for.

    An operator's results live or die together: one that made both could not leave one out. The amax of a whole matrix
    is left to the compiler, which finds it in the kernel that makes the matrix. With a prior scale the compiler casts
    and finds the amax in one kernel, and the transposition of the codes is a node.
    """
    if prior is not None and columnwise is not None:
        # Its tile is the whole matrix, which lies in both usages alike.
        made, _, largest = reference.quantize(x, columnwise, None, prior=prior)
        col = None if made is None else made._replace(data=transpose(made.data))
        return Quantized(None if rowwise is None else made, col, largest)
    shared = share_scale(rowwise, columnwise)
    amax = scales.amax(x, present(rowwise).tile) if shared else None
    names = (None if format is None else format.name for format in (rowwise, columnwise))
    tensors = quantize_in_graph(x, amax, *names)
    # Codes and their scales, and with two levels the matrix's own scale.
    count = 0 if rowwise is None else 3 if rowwise.scale_rule.has_global else 2
    of_columns = [tensors[2], tensors[1]] if shared else tensors[count:]
    row = None if rowwise is None else Operand.of(rowwise, *tensors[:count])
    return Quantized(row, None if columnwise is None else Operand.of(columnwise, *of_columns))


def with_copied_columns(made: Quantized) -> Quantized:
    """``reference.quantize`` with ``any_layout``, but row-major: the copy of transposed codes is one node.

    Inductor's own is slow, see above, and not always right: where float8 codes are stored twice, once transposed,
    beside a clamp that keeps NaN, ptxas 12 writes other bytes (triton-lang/triton#11111). torch 2.14 generates such
    clamps, and Triton up to 3.8 has such a ptxas for Hopper.
    """
    col = made.columnwise
    # Codes whose bytes run along their own dimension were cast where they are.
    if col is None or col.format.depth_multiple > 1:
        return made
    return made._replace(columnwise=col._replace(data=transpose(col.data.t())))


def gemm_as_one_node(backend: str, gemm_nt: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """A backend's ``gemm_nt`` behind an operator of its own, ``f8sub::BACKEND_gemm_nt``."""

    def multiply(
        a: list[torch.Tensor],
        b: list[torch.Tensor],
        a_format: str,
        b_format: str,
        out_dtype: torch.dtype,
        fast_accum: bool,
    ) -> torch.Tensor:
        left = unflat(Operand.of(Float8Format.parse(a_format), *a))
        right = unflat(Operand.of(Float8Format.parse(b_format), *b))
        # Filled up to whole blocks, a product is a view of a larger one; the fake's strides are the promise.
        return gemm_nt(left, right, out_dtype, fast_accum).contiguous()

    def fake(a: list[torch.Tensor], b: list[torch.Tensor], *how: Any) -> torch.Tensor:
        _, _, out_dtype, _ = how
        return a[0].new_empty((a[0].shape[0], b[0].shape[0]), dtype=out_dtype)

    gemm = operator(multiply, f"{backend}_gemm_nt", fake)

    def run(a: Operand, b: Operand, out_dtype: torch.dtype, fast_accum: bool) -> torch.Tensor:
        product: torch.Tensor = gemm(
            list(a.tensors), list(b.tensors), a.format.name, b.format.name, out_dtype, fast_accum
        )
        return product

    return run


def derived_in_backward(
    rowwise: Operand, columnwise: Float8Format, after: torch.Tensor, any_layout: bool
) -> Operand:
    """``quantize.derive_columnwise_in_backward`` in compiled code.

    One node, unless the GEMM takes ``any_layout``: there the compiler re-encodes rows to columns, dequantizing inside
    of both of its kernels, which is tied down by the scales.
    """
    both_seen = is_fusible(rowwise.format) and is_fusible(columnwise)
    if any_layout and both_seen and not rowwise.format.tile.is_transpose_of(columnwise.tile):
        scale_inv = copy_after(rowwise.scale_inv, after)
        seen = reference.derive_columnwise(rowwise._replace(scale_inv=scale_inv), columnwise, any_layout)
        return present(with_copied_columns(Quantized(None, seen)).columnwise)
    data, *scales = derive_columnwise(
        rowwise.data, rowwise.scale_inv, after, rowwise.format.name, columnwise.name
    )
    scale_inv = scales[0] if scales else rowwise.scale_inv
    return Operand(data, scale_inv, columnwise, rowwise.global_scale_inv)


def _quantize_groups(
    x: torch.Tensor,
    first: torch.Tensor,
    ends: torch.Tensor,
    rowwise: str | None,
    columnwise: str | None,
    multiple: int,
) -> list[torch.Tensor]:
    """Codes and scales of each usage, and where its groups begin and end if that is not where they do in x."""
    row, col = (None if name is None else Float8Format.parse(name) for name in (rowwise, columnwise))
    made = cuda.quantize_tokens(x, Groups(first, ends, x.shape[0]), row, col, multiple)
    return _listed(x, made, row, col, multiple)


def _quantize_computed(  # noqa: PLR0913  (an operator has no structures)
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor | None,
    side: str,
    first: torch.Tensor,
    ends: torch.Tensor,
    rowwise: str | None,
    columnwise: str | None,
    multiple: int,
) -> list[torch.Tensor]:
    """``_quantize_groups`` of ``computed_of`` three tensors."""
    row, col = (None if name is None else Float8Format.parse(name) for name in (rowwise, columnwise))
    computed = computed_of(a, b, c, side)
    like = computed.empty()
    quantize = operands.quantize_computed if a.is_cpu else cuda.quantize_computed
    made = quantize(computed, Groups(first, ends, like.shape[0]), row, col, multiple)
    return _listed(like, made, row, col, multiple)


def _fake_computed(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor | None, side: str, *rest: Any
) -> list[torch.Tensor]:
    computed = computed_of(a, b, c, side)
    return _fake_groups(computed.empty(), *rest, count=computed.matrices)


def _listed(
    x: torch.Tensor,
    made: tuple[Tokens | None, Tokens | None],
    row: Float8Format | None,
    col: Float8Format | None,
    multiple: int,
) -> list[torch.Tensor]:
    """Return the tensors of both operands of ``x`` as the fake has them."""
    found: list[torch.Tensor] = []
    for format, codes, contracted in zip((row, col), made, (False, True), strict=True):
        if format is not None and codes is not None:
            scale_inv = codes.scale_inv
            # The fake promises these strides.
            if not codes.is_laid_out:
                scale_inv = empty_scale_inv_of_groups(x, format, codes.groups, contracted=contracted).copy_(
                    scale_inv
                )
            found += [codes.data.contiguous(), scale_inv]
            if _start(format, contracted=contracted, multiple=multiple) > 1:
                # Both usages of squares lie alike, and an operator may not return one tensor twice.
                lie = codes.groups.first, codes.groups.ends
                found += [t.clone() if any(t is one for one in found) else t for t in lie]
    return found


def _start(format: Float8Format, *, contracted: bool, multiple: int) -> int:
    """Return the multiple of rows that groups of a usage begin at; 1 where they lie in the codes as in x."""
    tile = format.tile.t() if contracted else format.tile
    return start_of_groups(tile.rows, multiple if contracted else 1)


def _fake_groups(
    x: torch.Tensor,
    first: torch.Tensor,
    ends: torch.Tensor,
    rowwise: str | None,
    columnwise: str | None,
    multiple: int,
    *,
    count: int = 1,
) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for name, contracted in ((rowwise, False), (columnwise, True)):
        if name is None:
            continue
        format = Float8Format.parse(name)
        start = _start(format, contracted=contracted, multiple=multiple)
        rows = x.shape[0] if start == 1 else aligned_rows(x.shape[0], ends.shape[0], start)
        shape = (count * x.shape[1], rows) if contracted else (count * rows, x.shape[1])
        groups = Groups(first, ends, rows)
        scale_inv = empty_scale_inv_of_groups(x, format, groups, contracted=contracted, count=count)
        found += [x.new_empty(shape, dtype=format.dtype), scale_inv]
        if start > 1:
            found += [torch.empty_like(first), torch.empty_like(ends)]
    return found


def _packed(made: ExpertWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """An operator's results as the fake says, also where a dimension is 1, and contiguous() leaves odd strides."""
    data, scale_inv = (t.flatten().view(t.shape) for t in (made.data, made.scale_inv))
    return data, scale_inv


def _quantize_experts(w: torch.Tensor, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    return _packed(cuda.quantize_experts(prepared.without_class(w), Float8Format.parse(format)))


def _fake_experts(w: torch.Tensor, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    made = empty_codes(w, Float8Format.parse(format))
    return made.data, made.scale_inv


def _derive_columnwise_of_experts(
    data: torch.Tensor, scale_inv: torch.Tensor, after: torch.Tensor, rowwise: str, columnwise: str
) -> tuple[torch.Tensor, torch.Tensor]:
    reference.refuse_freed(data)
    given = ExpertWeights(data, scale_inv, Float8Format.parse(rowwise))
    made = cuda.derive_columnwise_of_experts(given, Float8Format.parse(columnwise))
    # An operator may not return a view of its argument.
    if made.data.untyped_storage().data_ptr() == data.untyped_storage().data_ptr():
        made = made._replace(data=made.data.clone(), scale_inv=made.scale_inv.clone())
    return _packed(made)


def _fake_derived_of_experts(
    data: torch.Tensor, scale_inv: torch.Tensor, after: torch.Tensor, rowwise: str, columnwise: str
) -> tuple[torch.Tensor, torch.Tensor]:
    made = empty_codes(data.transpose(1, 2), Float8Format.parse(columnwise))
    return made.data, made.scale_inv


quantize_groups_as_one_node = operator(_quantize_groups, "quantize_groups", _fake_groups)
quantize_computed_as_one_node = operator(_quantize_computed, "quantize_computed", _fake_computed)
experts_as_one_node = operator(_quantize_experts, "quantize_experts", _fake_experts)
derive_of_experts_as_one_node = operator(
    _derive_columnwise_of_experts, "derive_columnwise_of_experts", _fake_derived_of_experts
)


def quantized_groups(
    x: torch.Tensor,
    groups: Groups,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    multiple: int = 1,
) -> tuple[Tokens | None, Tokens | None]:
    """``operands.quantize_tokens`` of both operands as one node."""
    names = (None if format is None else format.name for format in (rowwise, columnwise))
    tensors = quantize_groups_as_one_node(x, groups.first, groups.ends, *names, multiple)
    return _unlisted(tensors, groups, rowwise, columnwise, multiple)


def quantized_computed(
    computed: Computed,
    groups: Groups,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    multiple: int = 1,
) -> tuple[Tokens | None, Tokens | None]:
    """``quantized_groups`` of what is computed where it is cast."""
    names = (None if format is None else format.name for format in (rowwise, columnwise))
    given = *computed[:3], computed.side, groups.first, groups.ends
    tensors = quantize_computed_as_one_node(*given, *names, multiple)
    return _unlisted(tensors, groups, rowwise, columnwise, multiple)


def _unlisted(
    made: list[torch.Tensor],
    groups: Groups,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    multiple: int,
) -> tuple[Tokens | None, Tokens | None]:
    """Return both operands, of the tensors of ``_listed``."""
    tensors = iter(made)
    found: list[Tokens | None] = []
    for format, contracted in ((rowwise, False), (columnwise, True)):
        if format is None:
            found.append(None)
            continue
        data, scale_inv, lie = next(tensors), next(tensors), groups
        if _start(format, contracted=contracted, multiple=multiple) > 1:
            lie = Groups(next(tensors), next(tensors), data.shape[1 if contracted else 0])
        found.append(Tokens(data, scale_inv, format, lie, contracted))
    return found[0], found[1]
