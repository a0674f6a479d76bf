"""Quantizers of CUDA tensors: one Triton kernel for both usages, or two; the reference for everything else.

Of a matrix, of tokens in groups, which are read once for both usages, and of all experts' weights, in one launch. All
of them are bitwise equal to the reference, or to ``grouped/operands.py``, so none is asked for by name.
"""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, cast

import torch

from f8sub.capture import is_capturing
from f8sub.formats import ALL, HIGH_PRECISION, MULTIPLE, Float8Format, Operand, Tile, present, share_scale
from f8sub.kernels import reference
from f8sub.kernels.grouped import operands
from f8sub.kernels.grouped.operands import (
    EACH,
    Computed,
    ExpertWeights,
    Gated,
    Groups,
    Taken,
    Tokens,
    aligned_rows,
    empty_codes,
    empty_scale_inv,
    stacked,
    start_of_groups,
)
from f8sub.kernels.reference import Quantized
from f8sub.kernels.scales import PriorScale
from f8sub.kernels.triton import prepared, support
from f8sub.kernels.triton.support import (
    ALIGNMENT,
    EDGE,
    EXPONENT_VECTOR,
    PAIRED_SQUARES,
    ROWWISE,
    TENSORWISE,
    VECTOR,
    ShardSlice,
    takes_slice,
    why_no_kernel,
)

if TYPE_CHECKING:
    from f8sub.kernels.triton.launch import Launches

_RECAST = ((ROWWISE, ROWWISE), (VECTOR, VECTOR))
"""The tiles of rowwise codes and of columnwise ones between which a kernel casts anew."""


def quantize(
    x: torch.Tensor,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    any_layout: bool = False,
    prior: PriorScale | None = None,
    amax: torch.Tensor | None = None,
) -> Quantized:
    """``reference.quantize``; goes there for tensors and formats that no kernel takes.

    If ``amax`` is given, it is ``scales.amax`` of ``x``, and both formats have one scale a matrix.
    """
    if prior is None and not any_layout:
        names = None if rowwise is None else rowwise.name, None if columnwise is None else columnwise.name
        if (again := quantize_again(x, amax, *names)) is not None:
            return _quantized(again, rowwise, columnwise)
    formats = [format for format in (rowwise, columnwise) if format is not None]
    is_current = prior is None and amax is None
    in_bands = (
        is_current
        and rowwise is not None
        and columnwise is None
        and support.has_scale_per_expert(rowwise, len(x))
    )
    if (
        x.dtype not in HIGH_PRECISION
        or not support.takes(x)
        or not formats
        or not (in_bands or not any(why_no_kernel(format) for format in formats))
        or (any_layout and prior is not None)
    ):
        known = None if amax is None else lambda own, tile: amax
        return reference.quantize(x, rowwise, columnwise, any_layout, prior, known)
    # One cast serves both usages: the columnwise operand is a view of the rowwise codes.
    if any_layout and len(set(formats)) == 1 and formats[0].tile == formats[0].tile.t():
        row = cast(Operand, quantize(x, formats[0], None, amax=amax).rowwise)
        col = None if columnwise is None else reference.transposed(row, columnwise, any_layout=True)
        return Quantized(None if rowwise is None else row, col)
    from f8sub.kernels.triton import launch, quantize_grouped_launch, quantize_launch

    x = x.contiguous()
    with support.device_of(x):
        if prior is not None:
            plan = quantize_launch.quantization(x, rowwise, columnwise, prior, amax)
            for one in plan.launches:
                one.run()
            return Quantized(*plan[1:4])
        tensors = launch.run(
            tuple(None if format is None else format.name for format in (rowwise, columnwise)),
            (x, amax),
            lambda: (
                quantize_grouped_launch.quantization_of_stacked_weights(x, present(rowwise))
                if in_bands
                else quantize_launch.quantization(x, rowwise, columnwise, None, amax).made
            ),
        )
    return _quantized(tensors, rowwise, columnwise)


def _quantized(
    tensors: Sequence[torch.Tensor], rowwise: Float8Format | None, columnwise: Float8Format | None
) -> Quantized:
    data, scale_inv = tensors[-2:]
    if share_scale(rowwise, columnwise):
        _, scale_inv, data = tensors
    return Quantized(
        None if rowwise is None else Operand(tensors[0], tensors[1], rowwise),
        None if columnwise is None else Operand(data, scale_inv, columnwise),
    )


def quantize_again(
    x: torch.Tensor, amax: torch.Tensor | None, rowwise: str | None, columnwise: str | None
) -> list[torch.Tensor] | None:
    """Data and scales of each usage, each tensor once, by launches that ``quantize`` prepared; None where it has not.

    Nothing else is asked: what was prepared for a tensor of this kind holds for the next one. Formats go by name.
    """
    return prepared.run((rowwise, columnwise), (x, amax))


def derive_again(
    codes: torch.Tensor, scale_inv: torch.Tensor, rowwise: str, columnwise: str
) -> list[torch.Tensor] | None:
    """Data and scales of the columnwise operand, by launches that ``derive_columnwise`` prepared, or None.

    Data alone where both usages share a scale.
    """
    return prepared.run(("derived", rowwise, columnwise), (codes, scale_inv))


def stage(amax: torch.Tensor, staged: torch.Tensor, met: torch.Tensor) -> None:
    """Raise ``staged`` to as many amaxes, in place; one that is not finite sets its ``met`` to 1. Float32."""
    if amax.numel() == 1 and support.takes(amax):
        from f8sub.kernels.triton import quantize_launch

        with support.device_of(amax):
            quantize_launch.staging(amax, staged, met).run()
        return
    amax = amax.view_as(staged)
    finite = amax.isfinite()
    staged.copy_(torch.maximum(staged, torch.where(finite, amax, 0.0)))
    met.copy_(torch.maximum(met, (~finite).float()))


def derive_columnwise(rowwise: Operand, columnwise: Float8Format) -> Operand:
    """``reference.derive_columnwise``; goes there for operands that no kernel takes."""
    codes, shared = rowwise.data, share_scale(rowwise.format, columnwise)
    kind = "derived", rowwise.format.name, columnwise.name
    if (again := derive_again(codes, rowwise.scale_inv, *kind[1:])) is not None:
        return Operand(again[0], rowwise.scale_inv if shared else again[1], columnwise)
    if not support.takes(codes) or why_no_kernel(columnwise):
        return reference.derive_columnwise(rowwise, columnwise)
    tiles = rowwise.format.tile, columnwise.tile
    if tiles[0].is_transpose_of(tiles[1]):
        if not _is_transposed_by_words(codes):
            return reference.transposed(rowwise, columnwise, any_layout=False)
    elif tiles not in _RECAST or not (rowwise.format.is_plain and codes.is_contiguous()):
        # No kernel goes from codes to codes between these tiles, so it takes two steps.
        values = reference.dequantize(rowwise, torch.float32)
        return cast(Operand, quantize(values, None, columnwise).columnwise)
    if tiles[0].is_transpose_of(tiles[1]):
        rowwise = rowwise._replace(scale_inv=rowwise.scale_inv.contiguous())
    from f8sub.kernels.triton import launch, quantize_launch

    with support.device_of(codes):
        made = launch.run(
            kind,
            (codes, rowwise.scale_inv),
            lambda: (
                quantize_launch.transposed(codes)
                if shared
                else quantize_launch.derivation(rowwise, columnwise).made
            ),
        )
    return Operand(made[0], rowwise.scale_inv if shared else made[1], columnwise)


def transpose(codes: torch.Tensor) -> torch.Tensor:
    """``torch.t_copy`` of float8 codes."""
    if not support.takes(codes) or not _is_transposed_by_words(codes):
        return torch.t_copy(codes)
    from f8sub.kernels.triton import launch, quantize_launch

    with support.device_of(codes):
        return launch.run("transposed", (codes,), lambda: quantize_launch.transposed(codes))[0]


def cast_into(
    out: torch.Tensor,
    x: torch.Tensor,
    scale: torch.Tensor,
    format: Float8Format,
    offset: tuple[int, int],
    through: torch.dtype,
) -> None:
    """``reference.cast_into``; goes there for what no kernel takes."""
    part = ShardSlice(x.contiguous(), format, through, offset, scale, out.stride(0))
    if takes_slice(part) and out.stride(-1) == 1:
        from f8sub.kernels.triton import quantize_launch

        with support.device_of(x):
            quantize_launch.part_cast(part, out[:, : x.shape[1]]).run()
        return
    reference.cast_into(out, x, scale, format, offset, through)


def cast_together(
    parts: Sequence[ShardSlice | None], outs: Sequence[torch.Tensor]
) -> tuple[Callable[[torch.Tensor], None] | None, list[int]]:
    """``cast_into`` of parts that few launches cast.

    Args:
        parts: each as ``cast_into`` takes it, if its ``x`` is contiguous; None for what is to be left.
        outs: a matrix of bytes for each, which may have more rows; all in one memory.

    Returns:
        What casts the parts as they are when it is called, into the same places of a memory that begins as ``outs[0]``
        does; it holds where the parts lie, and not the parts. None where kernels cast none of them. And the numbers of
        the parts that it leaves to ``cast_into``.
    """
    begin = outs[0].data_ptr()
    offsets = [out.data_ptr() - begin for out in outs]
    # A replayed graph would read what is told of the parts from host memory that has become another tensor's.
    fits = begin % ALIGNMENT == 0 and not is_capturing(outs[0])
    taken = {
        number: part
        for number, part in enumerate(parts)
        if fits and part is not None and offsets[number] % ALIGNMENT == 0 and takes_slice(part)
    }
    # Also one alone, as on one GPU, where FSDP2 copies each weight by itself: its launch is worked out once.
    if not taken:
        return None, list(range(len(parts)))
    from f8sub.kernels.triton import quantize_launch

    made = quantize_launch.SliceCasts(list(taken.values()), [offsets[number] for number in taken])
    return made.run, [number for number in range(len(parts)) if number not in taken]


def _is_transposed_by_words(codes: torch.Tensor) -> bool:
    begins_at_a_word = codes.data_ptr() % 2 == 0
    return codes.is_contiguous() and codes.shape[0] % 2 == codes.shape[1] % 2 == 0 and begins_at_a_word


MOST_GROUPS = 1024
"""The most groups that one program of ``lay_out`` holds; torch's grouped products take 1023."""


def why_no_kernel_of_groups(format: Float8Format) -> str | None:
    """Why no kernel casts groups to a format; None where one does."""
    if is_of_exponents(format):
        return None
    return why_no_kernel(format)


def is_of_exponents(format: Float8Format) -> bool:
    """Return whether one exponent byte serves 32 elements of a row, as Blackwell's tensor cores read them."""
    return format.scale_rule.stored_as == torch.float8_e8m0fnu and format.tile == EXPONENT_VECTOR


def quantize_tokens(
    x: torch.Tensor,
    groups: Groups,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    multiple: int = 1,
) -> tuple[Tokens | None, Tokens | None]:
    """``operands.quantize_both`` of groups in a row; goes there for what no kernel takes."""
    # One kernel makes both usages of one format; two formats take a kernel each.
    if rowwise is not None and columnwise is not None and rowwise != columnwise:
        return quantize_tokens(x, groups, rowwise, None)[0], quantize_tokens(
            x, groups, None, columnwise, multiple
        )[1]
    if not _takes_groups(x, groups, rowwise, columnwise, multiple):
        return operands.quantize_both(x, groups, rowwise, columnwise, multiple)
    if columnwise is None and rowwise is not None and rowwise.tile in (ROWWISE, VECTOR):
        # No tile knows of a group.
        made = quantize(x, rowwise, None).rowwise
        return (None if made is None else Tokens(made.data, made.scale_inv, rowwise, groups, False)), None
    from f8sub.kernels.triton import launch

    # Before the look-up: launches that read a copy of what was given are worked out at each call.
    x, ends = x.contiguous(), groups.ends.contiguous()
    with support.device_of(x):
        tensors = launch.run(
            ("groups", rowwise, columnwise, multiple),
            (x, ends),
            lambda: token_launches(x, ends, rowwise, columnwise, multiple),
        )
    return _tokens_of(tensors, groups, rowwise, columnwise)


def _tokens_of(
    tensors: Sequence[torch.Tensor],
    groups: Groups,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
) -> tuple[Tokens | None, Tokens | None]:
    # First rows and ends of what is laid out come before the table.
    first, laid_ends = tensors[-3], tensors[-2]
    row = col = None
    if rowwise is not None:
        is_laid_out = rowwise.tile.rows not in (1, ALL)
        found = Groups(first, laid_ends, len(tensors[0])) if is_laid_out else groups
        row = Tokens(tensors[0], tensors[1], rowwise, found, False)
    if columnwise is not None:
        data, scale_inv = tensors[-5:-3]
        col = Tokens(data, scale_inv, columnwise, Groups(first, laid_ends, data.shape[1]), True)
    return row, col


def quantize_computed(
    computed: Computed,
    groups: Groups,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    multiple: int = 1,
) -> tuple[Tokens | None, Tokens | None]:
    """``quantize_tokens`` of what is computed where it is cast; of its values where no kernel does both."""
    how = groups, rowwise, columnwise, multiple
    is_of_rows = columnwise is None and rowwise is not None and rowwise.tile in (ROWWISE, VECTOR)
    if is_of_rows and isinstance(computed, Taken):
        if computed.factors is None:
            return _codes_of_rows(computed, groups, present(rowwise)), None
        # Kernels of groups make columns, too, which take half the bytes of the products in high precision.
        return quantize_computed(computed, groups, rowwise, rowwise, multiple)[0], None
    takes = _takes_taken(computed, *how) if isinstance(computed, Taken) else _takes_gated(computed, *how)
    if not takes:
        if isinstance(computed, Gated) and computed.side == EACH:
            return stacked([quantize_computed(one, *how) for one in computed.each()])
        return quantize_tokens(computed.values(), *how)
    from f8sub.kernels.triton import launch

    ends = groups.ends.contiguous()
    with support.device_of(computed[0]):
        tensors = launch.run(
            ("computed", computed.side, rowwise, columnwise, multiple),
            (*computed[:3], ends),
            lambda: token_launches(computed.empty(), ends, rowwise, columnwise, multiple, computed),
        )
    return _tokens_of(tensors, groups, rowwise, columnwise)


def _codes_of_rows(taken: Taken, groups: Groups, format: Float8Format) -> Tokens:
    """Return rowwise codes: those of all of x by index, because a row's depend on no other."""
    data, scale_inv, *_ = present(quantize(taken.x, format, None).rowwise)
    # As bytes, because torch does not index float8 on every device.
    data = data.view(torch.uint8)[taken.rows].view(format.dtype)
    placed = empty_scale_inv(taken.empty(), format, groups, contracted=False)
    return Tokens(data, placed.copy_(scale_inv[taken.rows]), format, groups, False)


def _takes_taken(
    taken: Taken,
    groups: Groups,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    multiple: int,
) -> bool:
    """Return whether the kernels of groups cast it, which look up where each row lies."""
    x, rows, factors = taken
    return (
        (None in (rowwise, columnwise) or rowwise == columnwise)
        and _takes_groups(taken.empty(), groups, rowwise, columnwise, multiple)
        and x.is_contiguous()
        and x.data_ptr() % ALIGNMENT == 0
        and rows.is_contiguous()
        and (factors is None or (factors.is_contiguous() and factors.dtype in HIGH_PRECISION))
    )


def _takes_gated(
    gated: Gated,
    groups: Groups,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    multiple: int,
) -> bool:
    """Return whether the kernels of whole tiles of bfloat16 cast it, which alone compute what they cast."""
    like, tensors = gated.empty(), [t for t in (gated.gate, gated.up, gated.dh) if t is not None]
    if columnwise is None or rowwise not in (None, columnwise):
        return False
    tile = columnwise.tile
    edge = start_of_groups(tile.cols, multiple)
    return (
        gated.gate.dtype == torch.bfloat16
        and _takes_groups(like, groups, rowwise, columnwise, multiple)
        and support.compares_pairs(like.device)
        and (tile in (TENSORWISE, ROWWISE) or (gated.matrices == 1 and _is_local(tile)))
        and edge % EDGE == 0
        and gated.gate.shape[1] % max(EDGE, 1 if tile.cols == ALL else tile.cols) == 0
        and gated.gate.stride() == gated.up.stride()
        and gated.gate.stride(1) == 1
        and gated.gate.stride(0) % (ALIGNMENT // 2) == 0
        and (gated.dh is None or gated.dh.is_contiguous())
        and not any(t.data_ptr() % ALIGNMENT for t in tensors)
    )


def _is_local(tile: Tile) -> bool:
    """Return whether kernels of pairs find scales of such tiles in one look."""
    return tile == VECTOR or tile.cols in PAIRED_SQUARES


def token_launches(
    x: torch.Tensor,
    ends: torch.Tensor,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    multiple: int,
    computed: Computed | None = None,
) -> "Launches":
    """How kernels make the operands of one format, of groups that follow each other; they fill what is made here.

    ``computed`` is cast in place of ``x``, which is its ``empty()`` then.
    """
    format = rowwise or columnwise
    if format is None:
        raise RuntimeError("asked to quantize for no usage")
    tile = format.tile
    is_square = tile.rows == tile.cols != ALL
    is_laid_out = is_square or columnwise is not None
    edge = tile.cols if tile == EXPONENT_VECTOR else MULTIPLE
    if is_laid_out:
        edge = start_of_groups(tile.cols, multiple)
    given = Groups(ends, ends, len(x))
    # A kernel writes where the groups lie, which the host does not know.
    laid = Groups(torch.empty_like(ends), torch.empty_like(ends), aligned_rows(len(x), len(ends), edge))
    row = col = None
    count = 1 if computed is None else computed.matrices
    if rowwise is not None:
        of_rows = laid if is_square else given
        data = x.new_empty((count * of_rows.rows, x.shape[1]), dtype=rowwise.dtype)
        row = Operand(data, empty_scale_inv(x, rowwise, of_rows, contracted=False, count=count), rowwise)
    if columnwise is not None:
        data = x.new_empty((count * x.shape[1], laid.rows), dtype=columnwise.dtype)
        col = Operand(data, empty_scale_inv(x, columnwise, laid, contracted=True, count=count), columnwise)
    where = (laid.first, laid.ends) if is_laid_out else None
    from f8sub.kernels.triton import quantize_grouped_launch

    return quantize_grouped_launch.quantization(x, ends, row, col, edge, laid.rows, where, computed)


def _takes_groups(
    x: torch.Tensor,
    groups: Groups,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    multiple: int,
) -> bool:
    formats = [format for format in (rowwise, columnwise) if format is not None]
    start = MULTIPLE if columnwise is None else start_of_groups(columnwise.tile.cols, multiple)
    is_square = bool(formats) and formats[0].tile.rows == formats[0].tile.cols != ALL
    return (
        x.dtype in HIGH_PRECISION
        and support.takes(x)
        and not any(why_no_kernel_of_groups(format) for format in formats)
        # Rows begin at multiples of 16 bytes, and so do the groups of columnwise codes.
        and x.shape[1] % MULTIPLE == 0
        and start % MULTIPLE == 0
        and (is_square or start & (start - 1) == 0)
        and 0 < len(groups.ends) <= MOST_GROUPS
    )


def quantize_experts(w: torch.Tensor, format: Float8Format) -> ExpertWeights:
    """``operands.quantize_weights``; goes there for what no kernel takes. Experts may have any stride."""
    if w.dtype not in HIGH_PRECISION or not support.takes(w) or why_no_kernel_of_groups(format):
        return operands.quantize_weights(w, format)
    count, rows, cols = w.shape
    tile = format.tile
    if tile.is_whole or (tile.rows == tile.cols and tile.rows % EDGE == 0):
        # The experts may lie anywhere, but each one's matrix has to be row-major.
        if not w[0].is_contiguous():
            w = w.contiguous()
        from f8sub.kernels.triton import launch

        with support.device_of(w):
            made = launch.run(format, (w,), lambda: weight_launches(w, format))
        return ExpertWeights(made[0], made[1], format)
    # No tile knows of an expert.
    flat = w.reshape(count * rows, cols)
    if is_of_exponents(format):
        one = Groups.of(torch.full((1,), len(flat), dtype=torch.int32, device=w.device), len(flat))
        codes, _ = quantize_tokens(flat, one, format, None)
        found = None if codes is None else (codes.data, codes.scale_inv)
    else:
        operand = quantize(flat, format, None).rowwise
        found = None if operand is None else (operand.data, operand.scale_inv)
    if found is None:
        raise RuntimeError("quantize returned no rowwise codes for a rowwise format")
    data, scale_inv = found
    return ExpertWeights(data.view(w.shape), scale_inv.unflatten(0, (count, rows)), format)


def derive_columnwise_of_experts(rowwise: ExpertWeights, format: Float8Format) -> ExpertWeights:
    """``operands.derive_columnwise``; goes there for what no kernel takes. Kernels make contiguous codes."""
    codes, scale_inv, own = rowwise
    if not (support.takes(codes) and derives_of_experts(rowwise, format)):
        return operands.derive_columnwise(rowwise, format)
    from f8sub.kernels.triton import launch

    given = rowwise._replace(scale_inv=scale_inv.contiguous())
    with support.device_of(codes):
        made = launch.run((own, format), (codes, given.scale_inv), lambda: derivation_launches(given, format))
    return ExpertWeights(made[0], made[1], format)


def weight_launches(w: torch.Tensor, format: Float8Format) -> "Launches":
    """How kernels make rowwise codes; they fill what is made here."""
    from f8sub.kernels.triton import quantize_grouped_launch

    return quantize_grouped_launch.weight_quantization(w, Operand(*empty_codes(w, format)))


def derivation_launches(rowwise: ExpertWeights, format: Float8Format) -> "Launches":
    """How kernels make columnwise codes; they fill what is made here."""
    from f8sub.kernels.triton import quantize_grouped_launch

    derived = Operand(*empty_codes(rowwise.data.transpose(1, 2), format))
    return quantize_grouped_launch.weight_derivation(Operand(*rowwise), derived)


def derives_of_experts(rowwise: ExpertWeights, format: Float8Format) -> bool:
    """Return whether a kernel makes columnwise codes of a format from rowwise ones."""
    codes, _, own = rowwise
    transposes = own.tile.is_transpose_of(format.tile) and (own.tile.is_whole or own.tile.rows % EDGE == 0)
    recasts = own.tile == format.tile == ROWWISE
    in_words = codes.shape[1] % 2 == codes.shape[2] % 2 == 0 and codes.data_ptr() % 2 == 0
    is_plain = own.is_plain and format.is_plain
    return is_plain and codes.is_contiguous() and in_words and (transposes or recasts)
