"""What the Triton kernels compile to for Hopper (sm_90a), on any machine: registers, spills, widths of accesses.

Needs triton, no GPU: its wheel brings ptxas and cuobjdump. A kernel is held to: no spilled register; matrices read and
codes written by 128-bit accesses (by 64-bit ones codes of rows alone, and of paired vectors); 8-bit tiles transposed
with ldmatrix and read from shared memory in no single bytes; no subnormal float32 flushed; no register read that was
never written. On other GPUs it is held to fit into shared memory, and to no more.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from tests.kernels.compiled import compiler
from tests.kernels.compiled.cases import Case
from tests.kernels.compiled.compiler import SHARED, WARP

if TYPE_CHECKING:
    from f8sub.kernels.triton.launch import Launch

SOURCES, ROWS, COLUMNS = ("x_ptr", "codes_ptr"), ("row_ptr", "out_ptr", "outs_ptr"), ("col_ptr",)
RECIPROCAL = "rcp.approx.ftz.f32"
"""The one instruction that may flush subnormals: of what is neither subnormal nor has a subnormal reciprocal."""


def report(case: Case) -> dict[str, Any]:
    """Compile a case and look at it."""
    launch = case.launches()[case.index]
    name, threads = launch.kernel.fn.__name__, launch.options["num_warps"] * WARP
    made = compiler.compiled(launch)
    sass, usage = compiler.disassembled(made.asm["cubin"])
    opcodes = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]+)", sass, re.MULTILINE)

    def count(pattern: str) -> int:
        return sum(re.match(pattern, opcode) is not None for opcode in opcodes)

    tile = tile_of(launch)
    # Of a row a thread has 8 elements at a time: faster than with 16, measured. Its codes are 64 bits.
    by_8 = re.search("paired_.*vectors|whole_rows", name) is not None or tile < 16 * threads
    stores = {16: count(r"STG\b.*\.128"), 8: count(r"STG\b.*\.64") if by_8 else 0}
    found = {
        **asdict(case),
        "kernel": name,
        "spilled": int(re.search(r"LOCAL:(\d+)", usage)[1]) + 4 * count(r"(LDL|STL)\b"),  # bytes a thread
        "wide_loads": count(r"LDG(STS)?\b.*\.128"),  # from global memory, into shared memory too
        "transposed": count(r"LDSM\b.*\.M?T"),  # each of up to four 8x8 matrices
        "byte_loads": count(r"LDS\.[US]8"),  # from shared memory
        "flushes": made.asm["ptx"].count(".ftz.") - made.asm["ptx"].count(RECIPROCAL),
        "undefined": compiler.undefined(sass),
        "transposes": name == "transpose_codes" or makes(launch, COLUMNS) > 0,
    }
    stored = sum(width * number for width, number in stores.items())
    return {**found, "missed": list(missed(launch, found, tile, stored))}


def fits(case: Case, capability: int) -> str | None:
    """Why a case's kernel does not run on GPUs of a compute capability; None where it does."""
    from f8sub.kernels.triton import support

    has_pairs = divmod(capability, 10) >= support.OLDEST_WITH_PAIRS
    with mock.patch.object(support, "compares_pairs", return_value=has_pairs):
        launch = case.launches()[case.index]
    try:
        shared = compiler.compiled(launch, capability).metadata.shared
    except Exception as error:
        reasons = [line for line in str(error).splitlines() if "error" in line.lower()]
        return f"{launch.kernel.fn.__name__}: {(reasons or [str(error)])[-1]}"
    if shared > SHARED[capability]:
        return f"{launch.kernel.fn.__name__}: {shared} bytes of shared memory"
    return None


def makes(launch: Launch, names: tuple[str, ...]) -> int:
    """How many of some results it writes."""
    return sum(launch.taken.get(name) is not None for name in names)


def tile_of(launch: Launch) -> int:
    """Elements that a program reads, or one step of its loop."""
    arguments = launch.taken
    if "TILE" in arguments:
        return int(arguments["TILE"].ROWS * arguments["TILE"].COLS)
    return int(arguments["BLOCK"] if "BLOCK" in arguments else arguments["PART"])


def missed(launch: Launch, found: dict[str, Any], tile: int, stored: int) -> Iterator[str]:
    """What a kernel is held to and does not keep; ``stored`` bytes are what a thread writes with wide stores."""
    arguments, threads = launch.taken, launch.options["num_warps"] * WARP
    codes = "codes_ptr" in arguments
    writes = found["transposes"] if codes else makes(launch, (*ROWS, *COLUMNS))
    sources = [arguments[name] for name in SOURCES if name in arguments]
    sources = sources or [arguments.get("amax_ptr", arguments.get("ends_ptr"))]
    if (element := arguments.get("ELEMENT")) is not None:
        size = element.primitive_bitwidth // 8
    else:
        size = 1 if codes else sum(source.dtype.itemsize for source in sources)
    if "first_ptr" in arguments:
        size = 0  # a table of which each program reads all, and that is small
    if "matrices_ptr" in arguments:
        # Lines and blocks of 4 bytes, 2 and 2 an element, each by itself; those that are not aligned by elements.
        size = 2 * (4 + 2 + 2) * arguments["ALIGNED"]
    if found["spilled"]:
        yield f"spills {found['spilled']} bytes"
    if found["wide_loads"] * 16 * threads < tile * size:
        yield f"reads {tile * size} bytes of a tile with {found['wide_loads']} 128-bit loads"
    if stored * threads < tile * writes:
        yield f"writes {tile * writes} bytes of a tile, {stored * threads} of them with wide stores"
    if found["transposes"] and not found["transposed"]:
        yield "transposes without ldmatrix"
    scales = arguments.get("row_scale_inv_ptr")
    # Scales that are bytes are read so: one a row and 32 columns.
    if found["byte_loads"] > (2 if scales is not None and scales.dtype == torch.uint8 else 0):
        yield f"{found['byte_loads']} loads of single bytes from shared memory"
    if found["flushes"]:
        yield f"{found['flushes']} instructions flush subnormals"
    if found["undefined"] and not found["spilled"]:
        yield f"{found['undefined']} instructions read R1, which ptxas puts for a register it lost"
