"""Casts of experts' operands as ``torch.compile`` must see them: one node of the graph each, see ``kernels/ops.py``."""

import torch

from f8sub.formats import Float8Format
from f8sub.kernels.grouped import tokens_cuda, weights_cuda
from f8sub.kernels.grouped.groups import Groups, aligned_rows, start_of_groups
from f8sub.kernels.grouped.tokens import Tokens, empty_scale_inv
from f8sub.kernels.grouped.weights import ExpertWeights, empty_codes
from f8sub.kernels.ops import operator


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
    groups = Groups(first, ends, x.shape[0])
    made = tokens_cuda.quantize(x, groups, row, col, multiple)
    found: list[torch.Tensor] = []
    for format, codes, contracted in zip((row, col), made, (False, True), strict=True):
        if format is not None and codes is not None:
            scale_inv = codes.scale_inv
            if not codes.is_laid_out:
                scale_inv = empty_scale_inv(x, format, codes.groups, contracted=contracted).copy_(scale_inv)
            found += [codes.data.contiguous(), scale_inv]
            if _start(format, contracted=contracted, multiple=multiple) > 1:
                # Both usages of squares lie alike, and an operator may not return one tensor twice.
                lie = codes.groups.first, codes.groups.ends
                found += [t.clone() if any(t is one for one in found) else t for t in lie]
    return found


def _start(format: Float8Format, *, contracted: bool, multiple: int) -> int:
    """What groups of a usage begin at multiples of; 1 where they lie in the codes as in x."""
    tile = format.tile.t() if contracted else format.tile
    return start_of_groups(tile.rows, multiple if contracted else 1)


def _fake_groups(
    x: torch.Tensor,
    first: torch.Tensor,
    ends: torch.Tensor,
    rowwise: str | None,
    columnwise: str | None,
    multiple: int,
) -> list[torch.Tensor]:
    found: list[torch.Tensor] = []
    for name, contracted in ((rowwise, False), (columnwise, True)):
        if name is None:
            continue
        format = Float8Format.parse(name)
        start = _start(format, contracted=contracted, multiple=multiple)
        rows = x.shape[0] if start == 1 else aligned_rows(x.shape[0], ends.shape[0], start)
        shape = (x.shape[1], rows) if contracted else (rows, x.shape[1])
        groups = Groups(first, ends, rows)
        scale_inv = empty_scale_inv(x, format, groups, contracted=contracted)
        found += [x.new_empty(shape, dtype=format.dtype), scale_inv]
        if start > 1:
            found += [torch.empty_like(first), torch.empty_like(ends)]
    return found


def _packed(made: ExpertWeights) -> tuple[torch.Tensor, torch.Tensor]:
    """An operator's results as the fake says, also where a dimension is 1, and contiguous() leaves odd strides."""
    data, scale_inv = (t.flatten().view(t.shape) for t in (made.data, made.scale_inv))
    return data, scale_inv


def _quantize_experts(w: torch.Tensor, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    return _packed(weights_cuda.quantize(w, Float8Format.parse(format)))


def _fake_experts(w: torch.Tensor, format: str) -> tuple[torch.Tensor, torch.Tensor]:
    made = empty_codes(w, Float8Format.parse(format))
    return made.data, made.scale_inv


def _derive_columnwise_of_experts(
    data: torch.Tensor, scale_inv: torch.Tensor, after: torch.Tensor, rowwise: str, columnwise: str
) -> tuple[torch.Tensor, torch.Tensor]:
    given = ExpertWeights(data, scale_inv, Float8Format.parse(rowwise))
    made = weights_cuda.derive_columnwise(given, Float8Format.parse(columnwise))
    if made.data.untyped_storage().data_ptr() == data.untyped_storage().data_ptr():
        made = made._replace(data=made.data.clone(), scale_inv=made.scale_inv.clone())
    return _packed(made)


def _fake_derived_of_experts(
    data: torch.Tensor, scale_inv: torch.Tensor, after: torch.Tensor, rowwise: str, columnwise: str
) -> tuple[torch.Tensor, torch.Tensor]:
    made = empty_codes(data.transpose(1, 2), Float8Format.parse(columnwise))
    return made.data, made.scale_inv


quantize_groups_as_one_node = operator(_quantize_groups, "quantize_groups", _fake_groups)
quantize_experts = operator(_quantize_experts, "quantize_experts", _fake_experts)
derive_columnwise_of_experts = operator(
    _derive_columnwise_of_experts, "derive_columnwise_of_experts", _fake_derived_of_experts
)


def quantized_groups(
    x: torch.Tensor,
    groups: Groups,
    rowwise: Float8Format | None,
    columnwise: Float8Format | None,
    multiple: int = 1,
) -> tuple[Tokens | None, Tokens | None]:
    """``tokens.quantize`` of both operands as one node."""
    names = (None if format is None else format.name for format in (rowwise, columnwise))
    tensors = iter(quantize_groups_as_one_node(x, groups.first, groups.ends, *names, multiple))
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
