"""How to cast parts of weights for the wire, with scales that are known: one by a launch, or many."""

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch

from f8sub.formats import ALL, Float8Format
from f8sub.host_copy import sent_to
from f8sub.kernels.triton import quantize, quantize_launch, support
from f8sub.kernels.triton.launch import Launch
from f8sub.kernels.triton.parts import Part
from f8sub.kernels.triton.support import ALIGNMENT, EDGE
from f8sub.kernels.triton.tile_ops import Shape

PART = 64, EDGE
"""Tiles of ``cast_part``."""


def part_cast(part: Part, out: torch.Tensor) -> Launch:
    """How to cast a part that ``parts.takes`` takes into ``out``, (M, N), adjacent in a row."""
    arguments = {
        "x_ptr": part.x,
        "scale_ptr": part.scale,
        "out_ptr": out,
        "OUT_STRIDE": out.stride(0),
        "SCALE_STRIDE": part.scale.stride(0),
        "first_row": part.offset[0],
        "first_col": part.offset[1],
        **_of_tiles(part.format, part.through),
    }
    return quantize_launch.over(part.x, PART, quantize.cast_part, arguments, quantize_launch.WARPS_8)


class Parts:
    """Casts of many parts into one memory, worked out once, to be run whenever their values changed.

    It holds where the parts lie, and neither the parts nor a memory.

    Args:
        parts: those that ``parts.takes`` takes.
        offsets: the bytes from the memory's begin to the codes of each, multiples of ``ALIGNMENT``.
    """

    def __init__(self, parts: Sequence[Part], offsets: Sequence[int]) -> None:
        groups = defaultdict(list)
        for part, offset in zip(parts, offsets, strict=True):
            key = part.format, part.through, part.x.dtype, _is_aligned(part), _is_whole(part)
            groups[key].append((part, offset))
        self._launches = [_of_many(placed, *key[-2:]) for key, placed in groups.items()]

    def run(self, memory: torch.Tensor) -> None:
        """Cast each part. ``memory`` begins at a multiple of ``ALIGNMENT``."""
        with support.device_of(memory):
            for each in self.launches(memory):
                each.run()

    def launches(self, memory: torch.Tensor) -> list[Launch]:
        """What ``run`` launches."""
        return [each._replace(arguments={**each.arguments, "out_ptr": memory}) for each in self._launches]


def _is_aligned(part: Part) -> bool:
    """Whether every row and its codes begin at multiples of 16 elements."""
    sizes = part.x.shape[1], part.out_stride
    return part.x.data_ptr() % ALIGNMENT == 0 and all(size % ALIGNMENT == 0 for size in sizes)


def _is_whole(part: Part) -> bool:
    """Whether every program casts a whole tile."""
    rows, cols = part.x.shape
    return rows % PART[0] == 0 and cols % PART[1] == 0


def _of_many(placed: Sequence[tuple[Part, int]], aligned: bool, whole: bool) -> Launch:
    """The launch for parts that one kernel takes, each with the offset of its codes, without their memory."""
    rows: list[int] = []
    programs: list[int] = []
    for part, out_offset in placed:
        (height, width), scale = part.x.shape, part.scale
        rows += [part.x.data_ptr(), sum(programs), height, width, out_offset, part.out_stride]
        rows += [scale.data_ptr(), scale.stride(0), *part.offset]
        programs.append(quantize_launch.cdiv(height, PART[0]) * quantize_launch.cdiv(width, PART[1]))
    part, device = placed[0][0], placed[0][0].x.device
    counts = torch.tensor(programs, dtype=torch.int64, device="cpu")
    of_program = torch.arange(len(placed), dtype=torch.int32, device="cpu").repeat_interleave(counts)
    arguments = {
        "parts_ptr": sent_to(device, rows),
        "part_of_program_ptr": sent_to(device, of_program),
        "ELEMENT": quantize_launch.INPUTS[part.x.dtype],
        "ALIGNED": aligned,
        "TILE": Shape(*PART, whole),
        **_of_tiles(part.format, part.through),
    }
    return Launch(quantize.cast_parts, sum(programs), arguments, quantize_launch.WARPS_8)


def _of_tiles(format: Float8Format, through: torch.dtype) -> dict[str, Any]:
    rows, cols = (None if edge == ALL else edge for edge in (format.tile.rows, format.tile.cols))
    return {
        "TILE_ROWS": rows,
        "TILE_COLS": cols,
        "CAST": quantize_launch.cast_to(format),
        "THROUGH": quantize_launch.INPUTS[through],
    }
