"""The kernels that ``kernels.py`` compiles: each as it is launched over matrices without memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from f8sub import ALL, Float8Format, Operand, ScaleRule, Tile
from f8sub.kernels.gemm.block_scales import empty_scale_inv
from f8sub.kernels.scales import PriorScale
from scripts.bench.formats import E4M3, FORMATS, USAGES

if TYPE_CHECKING:
    from f8sub.kernels.triton.launch import Launch

WHOLE, RAGGED, NARROW = (8192, 4096), (8208, 4112), (8192, 768)
"""Of whole tiles; of rows that begin at multiples of 16 bytes only; and of rows that are no power of two."""

OF_GROUPS, OF_EXPERTS = "groups ", "experts "
GROUP_FORMATS = {**FORMATS, "1x32 e8m0": Float8Format(E4M3, Tile(1, 32), ScaleRule.E8M0)}
OF_ROWS = ("rowwise", "1x128", "1x128 float")
"""Formats whose rowwise codes alone are those of a whole matrix."""

ALIKE = ("tensorwise e5m2", "1x128 float", "256x256 e5m2")
"""Formats with the kernels of another one, but for how an element or a scale is rounded."""

INPUTS = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class Case:
    """One kernel as it is launched over one matrix."""

    name: str  # what it does, in which format
    dtype: str  # ``INPUTS``' name of the matrix's
    shape: tuple[int, int]
    usages: str  # ``USAGES``' name of what is made
    index: int  # which launch of the plan

    @property
    def words(self) -> str:
        """What it is, in words."""
        kind = {RAGGED: ", ragged", NARROW: ", narrow"}.get(self.shape, "")
        return f"{self.name} {self.dtype} {self.usages}{kind}"

    def launches(self) -> list[Launch]:
        """All that the plan launches, over tensors without memory."""
        from f8sub.kernels.triton import quantize_launch
        from f8sub.kernels.triton.support import ShardSlice

        x = torch.empty(self.shape, dtype=INPUTS.get(self.dtype, E4M3), device="meta")
        if self.name == "amaxes of many":
            return launches_over_tables(x)
        if self.name == "transpose":
            return [quantize_launch.transposition(x, x.new_empty(x.shape[::-1]))]
        if self.name.startswith(OF_GROUPS):
            return launches_over_groups(x, self.name.removeprefix(OF_GROUPS), USAGES[self.usages])
        if self.name.startswith(OF_EXPERTS):
            return launches_over_experts(x, self.name.removeprefix(OF_EXPERTS), self.usages)
        name, _, what = self.name.rpartition(" ")
        if what not in ("transpose", "recast", "part", "delayed", "known"):
            name, what = self.name, ""
        format = FORMATS[name]
        row, col = (format if is_made else None for is_made in USAGES[self.usages])
        if what in ("transpose", "recast"):
            codes = Operand(x.to(format.dtype), empty_scale_inv(x, format, *x.shape), format)
            return quantize_launch.derivation(codes, format)[0]
        if what == "part":
            scale = torch.empty(format.tile.scale_shape(x.shape), device="meta")
            out = torch.empty(self.shape, dtype=torch.uint8, device="meta")
            part = ShardSlice(x, format, torch.bfloat16, (0, 0), scale, out.stride(0))
            together = quantize_launch.SliceCasts([part, part], [0, out.numel()])
            return [quantize_launch.part_cast(part, out), *together.launches(out)]
        if what:
            known, scale = what == "known", torch.empty(1, 1, device="meta")
            past = PriorScale(scale, 0.0, covers=self.usages == "row" and not known, is_known=known)
            return quantize_launch.quantization(x, row, col, past).launches
        return quantize_launch.quantization(x, row, col).launches


def ways(format: str, whole: tuple[int, int]) -> Iterator[tuple[str, tuple[int, int], str]]:
    """Both usages over bf16; of formats that are like no other each usage, the other inputs and ragged matrices too."""
    yield "bf16", whole, "both"
    if format not in ALIKE:
        yield from (("bf16", whole, usages) for usages in ("row", "column"))
        yield from ((dtype, whole, "both") for dtype in ("fp16", "fp32"))
        yield "bf16", RAGGED, "both"


def cases(whole: tuple[int, int]) -> Iterator[Case]:
    """Every kernel of every format, the ways it is used."""
    for name in FORMATS:
        for way in ways(name, whole):
            yield from launches(name, *way)
    for usages in USAGES:
        yield from launches("tensorwise delayed", "bf16", whole, usages)
        yield from launches("tensorwise known", "bf16", whole, usages)
    for dtype in ("fp16", "fp32"):
        yield from launches("tensorwise e5m2 delayed", dtype, whole, "both")
    yield Case("rowwise", "bf16", RAGGED, "row", 0)
    yield from (Case("rowwise", dtype, NARROW, "row", 0) for dtype in INPUTS)
    for name in ("tensorwise", "rowwise", "128x128"):
        for dtype in ("bf16", "fp32"):
            yield from launches(f"{name} part", dtype, whole, "row")
        yield from launches(f"{name} part", "fp32", RAGGED, "row")
    for name in ("rowwise", "1x128", "1x128 float"):
        yield from launches(f"{name} recast", "fp8", whole, "column")
    yield from launches("rowwise recast", "fp8", RAGGED, "column")
    yield from launches("1x128 recast", "fp8", RAGGED, "column")
    yield from launches("amaxes of many", "fp32", whole, "row")
    yield from cases_of_groups()
    for name in ("transpose", "tensorwise transpose", "128x128 transpose"):
        yield Case(name, "fp8", whole, "column", 0)
        yield Case(name, "fp8", RAGGED, "column", 0)


def launches_over_groups(x: torch.Tensor, name: str, usages: tuple[bool, bool]) -> list[Launch]:
    """Of 128 experts; the name may end with what groups begin at multiples of."""
    from f8sub.kernels import cuda

    name, _, multiple = name.partition(" by ")
    ends = torch.empty(128, dtype=torch.int32, device="meta")
    format = GROUP_FORMATS[name]
    row, col = (format if is_made else None for is_made in usages)
    return list(cuda.token_launches(x, ends, row, col, int(multiple or 16)).launches)


def launches_over_experts(x: torch.Tensor, name: str, usages: str) -> list[Launch]:
    """Of three or four experts, of multiples of 16 rows: rowwise codes, or columnwise ones of them."""
    from f8sub.kernels import cuda
    from f8sub.kernels.grouped import operands

    w, format = x.unflatten(0, (3 if x.shape == RAGGED else 4, -1)), FORMATS[name]
    if usages == "row":
        return list(cuda.weight_launches(w, format).launches)
    return list(cuda.derivation_launches(operands.empty_codes(w, format), format).launches)


def launches_over_tables(x: torch.Tensor) -> list[Launch]:
    """Amaxes of many matrices, whose dtypes are no part of the kernels; scales of them, of a past and of none."""
    from f8sub.kernels.triton import multi_tensor_launch
    from f8sub.kernels.triton.multi_tensor_launch import ShardInTable

    whole, rounded = Float8Format(E4M3, Tile(ALL, ALL)), torch.bfloat16
    amax, scale, scale_inv = torch.empty(3, 8192, device="meta")
    matrices = [ShardInTable(x, whole.tile, (0, 0), 0, 1), ShardInTable(x[:, :-1], whole.tile, (0, 0), 4, 1)]
    pasts = [None, PriorScale(amax, 0.0, covers=True)]
    return [
        *multi_tensor_launch.amaxes(matrices, amax),
        *(multi_tensor_launch.scales(amax, past, scale, scale_inv, whole, rounded) for past in pasts),
    ]


def cases_of_groups() -> Iterator[Case]:
    """As ``cases``, of groups of rows, some from multiples of 128 on, and of experts; columns are multiples of 16."""
    for format in GROUP_FORMATS:
        name = OF_GROUPS + format
        for way in ways(format, WHOLE):
            if not (way[2] == "row" and format in OF_ROWS):
                yield from launches(name, *way)
        if format in ("tensorwise", "rowwise"):
            for usages in ("both", "column"):
                yield from launches(f"{name} by 128", "bf16", WHOLE, usages)
    for format in ("tensorwise", "128x128", "256x256"):
        yield from launches(OF_EXPERTS + format, "bf16", WHOLE, "row")
    for format in ("tensorwise", "128x128", "rowwise"):
        for shape in (WHOLE, RAGGED):
            yield from launches(OF_EXPERTS + format, "fp8", shape, "column")


def launches(name: str, dtype: str, shape: tuple[int, int], usages: str) -> Iterator[Case]:
    first = Case(name, dtype, shape, usages, 0)
    for index in range(len(first.launches())):
        yield replace(first, index=index)
