"""How to cast parts of weights for the wire, with scales that are known: one by a launch, or many."""

from collections import defaultdict
from collections.abc import Hashable, Sequence
from typing import Any

import torch

from f8sub.formats import ALL, Float8Format
from f8sub.kernels.triton import casts, launch, support
from f8sub.kernels.triton.launcher import MOST, Launch, sent
from f8sub.kernels.triton.parts import Part
from f8sub.kernels.triton.support import ALIGNMENT, EDGE
from f8sub.kernels.triton.tiles import Shape

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
    return launch.over(part.x, PART, casts.cast_part, arguments, launch.WARPS_8)


class Parts:
    """Casts of many parts, worked out once, to be run whenever their values changed.

    It holds where the parts lie, and not the parts.
    """

    def __init__(self, parts: Sequence[Part]) -> None:
        groups = defaultdict(list)
        for number, part in enumerate(parts):
            groups[part.format, part.through, part.x.dtype, _is_aligned(part), _is_whole(part)].append(number)
        self._launches = [
            (numbers, _of_many([parts[number] for number in numbers], *key[-2:]))
            for key, numbers in groups.items()
        ]
        self._device = parts[0].x.device

    def run(self, outs: Sequence[torch.Tensor]) -> None:
        """Cast each part into its matrix of bytes."""
        with support.device_of(outs[0]):
            for each in self.launches(outs):
                each.run()

    def launches(self, outs: Sequence[torch.Tensor]) -> list[Launch]:
        """What ``run`` launches."""
        for numbers, each in self._launches:
            each.arguments["outs_ptr"] = sent([outs[number].data_ptr() for number in numbers], self._device)
        return [each for _, each in self._launches]


_known: dict[Hashable, Parts] = {}


def cast_together(parts: Sequence[Part], outs: Sequence[torch.Tensor]) -> None:
    """Cast each part, which ``parts.takes`` takes, into its matrix of bytes. Those begin at multiples of ``ALIGNMENT``.

    What is told of the parts stays on the device for the next call with parts that lie where these do.
    """
    key = tuple(map(_place, parts))
    made = _known.get(key)
    if made is None:
        if len(_known) >= MOST:
            _known.clear()
        made = _known[key] = Parts(parts)
    made.run(outs)


def _place(part: Part) -> Hashable:
    x, scale = part.x, part.scale
    lies = x.data_ptr(), x.get_device(), x.shape, scale.data_ptr(), scale.stride(), part.out_stride
    return *lies, x.dtype, part.format.name, part.through, part.offset


def _is_aligned(part: Part) -> bool:
    """Whether every row and its codes begin at multiples of 16 elements."""
    sizes = part.x.shape[1], part.out_stride
    return part.x.data_ptr() % ALIGNMENT == 0 and all(size % ALIGNMENT == 0 for size in sizes)


def _is_whole(part: Part) -> bool:
    """Whether every program casts a whole tile."""
    rows, cols = part.x.shape
    return rows % PART[0] == 0 and cols % PART[1] == 0


def _of_many(parts: Sequence[Part], aligned: bool, whole: bool) -> Launch:
    """The launch for parts that one kernel takes, without the addresses of their codes."""
    rows: list[int] = []
    programs: list[int] = []
    for part in parts:
        (height, width), scale = part.x.shape, part.scale
        rows += [part.x.data_ptr(), sum(programs), height, width, part.out_stride]
        rows += [scale.data_ptr(), scale.stride(0), *part.offset]
        programs.append(launch.cdiv(height, PART[0]) * launch.cdiv(width, PART[1]))
    part, device = parts[0], parts[0].x.device
    counts = torch.tensor(programs, dtype=torch.int64, device="cpu")
    of_program = torch.arange(len(parts), dtype=torch.int32, device="cpu").repeat_interleave(counts)
    arguments = {
        "parts_ptr": sent(rows, device),
        "part_of_program_ptr": sent(of_program, device),
        "ELEMENT": launch.INPUTS[part.x.dtype],
        "ALIGNED": aligned,
        "TILE": Shape(*PART, whole),
        **_of_tiles(part.format, part.through),
    }
    return Launch(casts.cast_parts, sum(programs), arguments, launch.WARPS_8)


def _of_tiles(format: Float8Format, through: torch.dtype) -> dict[str, Any]:
    rows, cols = (None if edge == ALL else edge for edge in (format.tile.rows, format.tile.cols))
    return {
        "TILE_ROWS": rows,
        "TILE_COLS": cols,
        "CAST": launch.cast_to(format),
        "THROUGH": launch.INPUTS[through],
    }
