"""What the kernels of gradients on the wire compile to for Hopper (sm_90a), on any machine.

Needs triton, no GPU. A kernel is held to: no spilled register; of chunks that are aligned, gradients read and sums
written by 128-bit accesses, codes by 64-bit ones at least, and no more instructions than they need; no subnormal
float32 flushed; no register read that was never written.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from f8sub.gradients import wire as gradient_wire
from f8sub.gradients.wire import GradientChunks, chunk_size, layout_of
from tests.kernels.compiled import compiler
from tests.kernels.compiled.compiler import WARP

if TYPE_CHECKING:
    from f8sub.kernels.triton.launch import Launch

MOST_INSTRUCTIONS = {("pack", True): 37, ("pack", False): 21}
"""For an element of an aligned chunk's tile, by what the wire has, with what a program does once."""

LOADED = {"pack": 3, "add": 1}
"""How often the code loads a tile: in the loop, and for the two before it."""

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp16": torch.float16}
SHAPES = {True: (4096, 4096), False: (4097, 4093)}


@dataclass(frozen=True)
class Case:
    """One kernel: ``pack`` or ``add``, ``DTYPES``' name of what it reads or writes, codes or bfloat16, alignment."""

    kernel: str
    dtype: str
    codes: bool
    aligned: bool

    @property
    def words(self) -> str:
        """What it is, in words."""
        wire = "e4m3" if self.codes else "bf16"
        return f"{self.kernel} {self.dtype} {wire}{'' if self.aligned else ', anywhere'}"


def cases() -> list[Case]:
    return [
        Case(kernel, dtype, codes, aligned)
        for kernel in ("pack", "add")
        for dtype in DTYPES
        for codes in (True, False)
        for aligned in (True, False)
    ]


def launch_of(case: Case, ranks: int = 8) -> Launch:
    """Its launch, over tensors that are not read."""
    dtype, shape = DTYPES[case.dtype], SHAPES[case.aligned]
    layout = layout_of((chunk_size(shape, ranks),), codes=case.codes)
    wire = torch.empty(ranks, layout.row_bytes, dtype=torch.uint8)
    if case.kernel == "pack":
        gradient = torch.empty(shape, dtype=dtype).view(-1)
        sources = [GradientChunks(gradient, layout.chunks[0].size, gradient.numel())]
        return gradient_wire.pack_launches(sources, layout, 1, wire)[0]
    return gradient_wire.add_launches(wire, layout, 1 / ranks, torch.empty(layout.numel, dtype=dtype))[0]


def report(case: Case) -> dict[str, Any]:
    """Compile a case and look at it."""
    launch = launch_of(case)
    made = compiler.compiled(launch)
    sass, usage = compiler.disassembled(made.asm["cubin"])
    opcodes = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]+)", sass, re.MULTILINE)

    def count(pattern: str) -> int:
        return sum(re.match(pattern, opcode) is not None for opcode in opcodes)

    def widths(name: str) -> tuple[int, int, int]:
        wide, half = count(rf"({name})\b.*\.128"), count(rf"({name})\b.*\.64")
        return wide, half, count(rf"({name})\b") - wide - half

    local = int(re.search(r"LOCAL:(\d+)", usage)[1])
    blocks = launch.arguments.get("TILE", launch.arguments["BLOCKS"])
    elements = blocks * launch.arguments["BLOCK"] // (launch.options["num_warps"] * WARP)
    found = {
        "case": case.words,
        "spilled": local + 4 * count(r"(LDL|STL)\b"),  # bytes a thread
        "elements": elements,  # a thread's
        "instructions": len(opcodes) / elements,
        "loads": widths("LDG|LDGSTS"),
        "stores": widths("STG"),
        "flushes": made.asm["ptx"].count(".ftz."),
        "undefined": compiler.undefined(sass),
    }
    return {**found, "missed": list(missed(case, found))}


def missed(case: Case, found: dict[str, Any]) -> Iterator[str]:
    if found["spilled"]:
        yield f"spills {found['spilled']} bytes"
    if found["flushes"]:
        yield f"{found['flushes']} instructions flush subnormals"
    if found["undefined"] and not found["spilled"]:
        yield f"{found['undefined']} instructions read R1, which ptxas puts for a register it lost"
    if not case.aligned:
        return
    most = MOST_INSTRUCTIONS.get((case.kernel, case.codes), float("inf"))
    if found["instructions"] > most:
        yield f"{found['instructions']:.1f} instructions an element, more than {most}"
    sizes = DTYPES[case.dtype].itemsize, 1 if case.codes else 2
    read, written = sizes if case.kernel == "pack" else sizes[::-1]
    read *= LOADED[case.kernel]
    for what, widths, size in (("reads", found["loads"], read), ("writes", found["stores"], written)):
        if 16 * widths[0] + 8 * widths[1] < found["elements"] * size:
            yield f"{what} {found['elements'] * size} bytes a thread by {widths} accesses of 128, 64 and less bits"
