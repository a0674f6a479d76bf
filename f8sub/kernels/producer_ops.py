"""Layer 1. Operators that ``torch.compile`` sees for what makes a tensor and casts it: schemas, fakes, implementation.

A tensor argument that is not there is one of no elements, a format that is not there an empty name; what was measured
is a list of what there is.
"""

from collections.abc import Sequence

import torch

from f8sub.formats import Float8Format, Operand
from f8sub.kernels import normed, producers
from f8sub.kernels.delayed import PastScale
from f8sub.kernels.normed import Measured
from f8sub.kernels.norms import Norm
from f8sub.kernels.ops import as_list, empty_operand, operator
from f8sub.kernels.producers import Activated, Cast, Formats, Gradients, Wanted


def _quantize_swiglu(
    gate: torch.Tensor, up: torch.Tensor, past: torch.Tensor, margin: float, is_known: bool, rowwise: str
) -> list[torch.Tensor]:
    scale = PastScale(past, margin, False, is_known) if past.numel() else None
    made = producers.quantize_swiglu(gate, up, Float8Format.parse(rowwise), scale)
    one = made.scale.clone() if made.scale is past else made.scale  # an operator returns no argument
    return as_list([made.row]) + [tensor for tensor in (one, made.largest) if tensor is not None]


def _fake_swiglu(
    gate: torch.Tensor, up: torch.Tensor, past: torch.Tensor, margin: float, is_known: bool, rowwise: str
) -> list[torch.Tensor]:
    format = Float8Format.parse(rowwise)
    made = list(empty_operand(gate, format, *gate.shape).tensors)
    count = producers.has_one_scale(format) + bool(past.numel())
    return made + [gate.new_empty((1, 1), dtype=torch.float32) for _ in range(count)]


def quantize_swiglu(
    gate: torch.Tensor, up: torch.Tensor, rowwise: Float8Format, past: PastScale | None = None
) -> Activated:
    """``producers.quantize_swiglu`` as one node."""
    none = gate.new_empty((0, 1), dtype=torch.float32)
    scale = PastScale(none, 0.0, False) if past is None else past
    made = _swiglu(gate, up, scale.scale, float(scale.margin), scale.is_known, rowwise.name)
    row, rest = _operand(rowwise, made)
    one, rest = (rest[0], rest[1:]) if producers.has_one_scale(rowwise) else (None, rest)
    return Activated(row, one, rest[0] if past is not None else None)


def _quantize_swiglu_backward(  # noqa: PLR0913  (a schema is flat)
    dh: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    scale: torch.Tensor,
    pasts: torch.Tensor,
    margins: list[float],
    is_known: bool,
    formats: str,
) -> list[torch.Tensor]:
    wanted = wanted_of(formats)
    if pasts.numel():
        dgate, dup = (
            PastScale(past, margin, False, is_known)
            for past, margin in zip(pasts.split(1), margins, strict=True)
        )
        wanted = wanted._replace(pasts=(dgate, dup))
    found = producers.quantize_swiglu_backward(dh, gate, up, wanted, scale if scale.numel() else None)
    operands = (found.dgate.row, found.dgate.col, found.dup.row, found.dup.col, found.h_col)
    largest = (found.dgate.largest, found.dup.largest)
    return as_list(operands) + [tensor for tensor in largest if tensor is not None]


def _fake_swiglu_backward(  # noqa: PLR0913
    dh: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    scale: torch.Tensor,
    pasts: torch.Tensor,
    margins: list[float],
    is_known: bool,
    formats: str,
) -> list[torch.Tensor]:
    made: list[torch.Tensor] = []
    wanted = wanted_of(formats)
    for rowwise, columnwise in (wanted.dgate, wanted.dup, (None, wanted.h_col)):
        if rowwise is not None:
            made += empty_operand(gate, rowwise, *gate.shape).tensors
        if columnwise is not None:
            made += empty_operand(gate, columnwise, *gate.shape[::-1]).tensors
    return made + [gate.new_empty((1, 1), dtype=torch.float32) for _ in range(pasts.numel())]


def quantize_swiglu_backward(
    dh: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    wanted: Wanted,
    scale: torch.Tensor | None = None,
) -> Gradients:
    """``producers.quantize_swiglu_backward`` as one node, row-major."""
    none = gate.new_empty((0, 1), dtype=torch.float32)
    pasts = wanted.pasts or ()
    made = _swiglu_backward(
        dh,
        gate,
        up,
        none if scale is None else scale,
        torch.cat([past.scale for past in pasts]) if pasts else none,
        [float(past.margin) for past in pasts],
        all(past.is_known for past in pasts),
        ";".join("" if format is None else format.name for format in _formats(wanted)),
    )
    operands: list[Operand | None] = []
    for format in _formats(wanted):
        operand, made = _operand(format, made) if format is not None else (None, made)
        operands.append(operand)
    largest: Sequence[torch.Tensor | None] = made or (None, None)
    return Gradients(
        Cast(operands[0], operands[1], largest[0]), Cast(operands[2], operands[3], largest[1]), operands[4]
    )


def _measure_normed(x: torch.Tensor, weight: torch.Tensor, eps: float, rounds: bool) -> list[torch.Tensor]:
    found = normed.measure(x, weight, Norm(eps, rounds), needs_amax=True)
    return [tensor for tensor in found if tensor is not None]


def _fake_measured(x: torch.Tensor, weight: torch.Tensor, eps: float, rounds: bool) -> list[torch.Tensor]:
    return [x.new_empty((rows, 1), dtype=torch.float32) for rows in (x.shape[0], 1)]


def measure_normed(x: torch.Tensor, weight: torch.Tensor, norm: Norm) -> Measured:
    """``normed.measure`` with the amax as one node."""
    return Measured(*_measured(x, weight, norm.eps, norm.rounds))


def _quantize_normed(
    x: torch.Tensor,
    weight: torch.Tensor,
    measured: list[torch.Tensor],
    eps: float,
    rounds: bool,
    formats: str,
) -> list[torch.Tensor]:
    usages = usages_of(formats)
    row, col, _ = normed.quantize(x, weight, Norm(eps, rounds), Measured(*measured), usages)
    return as_list((row, col))


def _fake_normed(
    x: torch.Tensor,
    weight: torch.Tensor,
    measured: list[torch.Tensor],
    eps: float,
    rounds: bool,
    formats: str,
) -> list[torch.Tensor]:
    made: list[torch.Tensor] = []
    for format, shape in zip(usages_of(formats), (x.shape, x.shape[::-1]), strict=True):
        if format is not None:
            made += empty_operand(x, format, *shape).tensors
    return made


def quantize_normed(
    x: torch.Tensor, weight: torch.Tensor, norm: Norm, measured: Measured, usages: Formats
) -> tuple[Operand | None, Operand | None]:
    """``normed.quantize`` with scales of its own amaxes as one node.

    It is given nothing that was made for it alone: calls of layers that share an x are one in a compiled graph.
    """
    given = [tensor for tensor in measured if tensor is not None]
    names = ";".join("" if format is None else format.name for format in usages)
    made = _normed(x, weight, given, norm.eps, norm.rounds, names)
    operands: list[Operand | None] = []
    for format in usages:
        operand, made = (None, made) if format is None else _operand(format, made)
        operands.append(operand)
    return operands[0], operands[1]


def usages_of(formats: str) -> Formats:
    """What ``quantize_normed``'s operator was asked for, of the names of its formats."""
    rowwise, columnwise = map(_format, formats.split(";"))
    return rowwise, columnwise


_measured = operator(_measure_normed, "measure_normed", _fake_measured)
_normed = operator(_quantize_normed, "quantize_normed", _fake_normed)
_swiglu = operator(_quantize_swiglu, "quantize_swiglu", _fake_swiglu)
_swiglu_backward = operator(_quantize_swiglu_backward, "quantize_swiglu_backward", _fake_swiglu_backward)


def _formats(wanted: Wanted) -> tuple[Float8Format | None, ...]:
    return (*wanted.dgate, *wanted.dup, wanted.h_col)


def wanted_of(formats: str) -> Wanted:
    """What an operator was asked for, of the names of its formats."""
    names = formats.split(";")
    found = [_format(name) for name in names]
    dgate: Formats = (found[0], found[1])
    return Wanted(dgate, (found[2], found[3]), found[4])


def _format(name: str) -> Float8Format | None:
    return Float8Format.parse(name) if name else None


def _operand(format: Float8Format, tensors: list[torch.Tensor]) -> tuple[Operand, list[torch.Tensor]]:
    """The first one of ``tensors``, and the rest of them."""
    count = 3 if format.scale_rule.has_global else 2
    return Operand.of(format, *tensors[:count]), tensors[count:]
