"""What the Triton kernels compile to for Hopper (sm_90a), on any machine: registers, spills, widths of accesses.

Needs triton, no GPU: its wheel brings ptxas and cuobjdump. Ends with status 1 where a kernel misses what it is held to:
no spilled register; matrices read and codes written by 128-bit accesses (by 64-bit ones codes of rows alone, and of
paired vectors); 8-bit tiles transposed with ldmatrix and read from shared memory in no single bytes; no subnormal
float32 flushed; no register read that was never written.

    python scripts/kernel_report.py
    python scripts/kernel_report.py --capability 89

Of other GPUs it tells whether all kernels that they run compile and fit into shared memory; they are held to no more.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import repeat
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch
from kernel_cases import WHOLE, Case, cases
from tables import Table, parser, write_json

if TYPE_CHECKING:
    from f8sub.kernels.triton.launcher import Launch

CAPABILITY, WARP = 90, 32
SHARED = {89: 101376, 90: 232448, 100: 232448, 120: 101376}
"""Bytes of shared memory that a program may have, by compute capability: of Ada, Hopper and both Blackwells. Source:
CUDA C++ programming guide, technical specifications per compute capability."""
SOURCES = ("x_ptr", "codes_ptr", "dh_ptr", "gate_ptr", "up_ptr")
ROWS = ("row_ptr", "dgate_row_ptr", "dup_row_ptr", "out_ptr")
COLUMNS = ("col_ptr", "dgate_col_ptr", "dup_col_ptr", "h_col_ptr")
OF_DH = ("amax_ptr", "dgate_row_ptr", "dgate_col_ptr", "dgate_row_amax_ptr", "dgate_col_amax_ptr")
"""What dh is read for."""
MAY_FLUSH = {"ex2.approx.ftz.f32": 6, "rcp.approx.ftz.f32": 1}
"""Instructions that may flush subnormals, counted by one of them: of CUDA's exponential, of which none shows once 1 is
added to it, and the reciprocal of what is neither subnormal nor has a subnormal one."""
TYPES = {
    torch.float32: "*fp32",
    torch.float16: "*fp16",
    torch.bfloat16: "*bf16",
    torch.int32: "*i32",
    torch.int64: "*i64",
    torch.uint8: "*u8",
    torch.uint16: "*u16",
}


@dataclass(frozen=True)
class Report:
    """What a kernel compiled to.

    Attributes:
        kernel: its name.
        registers: a thread's.
        spilled: bytes of local memory a thread.
        shared: bytes of shared memory a program.
        instructions: of a program's threads, an element of its tile; of a loop, once.
        wide_loads: 128-bit loads from global memory, into shared memory too.
        narrow_loads: the others, of amaxes and scales.
        wide_stores: 128-bit stores, 64-bit ones where a thread has 8 codes.
        narrow_stores: the others, of scales.
        transposed: ldmatrix with .trans, each of up to four 8x8 matrices.
        byte_loads: of single bytes from shared memory.
        flushes: float32 instructions that flush subnormals.
        undefined: instructions that read R1, the stack's pointer, which a kernel without a stack only loads.
        transposes: whether it makes a columnwise operand.
        missed: what it is held to and misses.
    """

    kernel: str
    registers: int
    spilled: int
    shared: int
    instructions: int
    wide_loads: int
    narrow_loads: int
    wide_stores: int
    narrow_stores: int
    transposed: int
    byte_loads: int
    flushes: int
    undefined: int
    transposes: bool
    missed: tuple[str, ...] = ()


def compiled(launch: Launch, capability: int = CAPABILITY) -> Any:
    """The kernel compiled with the launch's arguments, specialized as Triton does when it launches."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    kernel = launch.kernel
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(kernel.params):
        value = launch.arguments[parameter.name]
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = TYPES[value.dtype]
            # torch's allocations begin at multiples of 512 bytes, and views of them here at multiples of 16.
            aligned = True
        elif parameter.is_constexpr or value is None or value == 1:
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        else:
            signature[parameter.name] = "i32" if value < 2**31 else "i64"
            aligned = value % 16 == 0
        if aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, constants, attributes)
    target = GPUTarget("cuda", capability, WARP)
    return triton.compile(source, target=target, options=launch.options)


def disassembled(cubin: bytes) -> tuple[str, str]:
    """SASS and resource usage, by the cuobjdump of Triton's wheel."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        found = [
            subprocess.run([tool, option, file.name], check=True, capture_output=True, text=True).stdout
            for option in ("--dump-sass", "--dump-resource-usage")
        ]
    return found[0], found[1]


def report(case: Case) -> Report:
    """Compile a case and look at it."""
    launch = case.launches()[case.index]
    made = compiled(launch)
    sass, usage = disassembled(made.asm["cubin"])
    opcodes = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+ )?([A-Z][\w.]+)", sass, re.MULTILINE)

    def count(pattern: str) -> int:
        return sum(re.match(pattern, opcode) is not None for opcode in opcodes)

    registers, local = (int(re.search(rf"{word}:(\d+)", usage)[1]) for word in ("REG", "LOCAL"))
    spills = count(r"(LDL|STL)\b")
    loads, stores = count(r"LDG(STS)?\b"), count(r"STG\b")
    tile = tile_of(launch)
    # Of a row a thread has 8 elements at a time: faster than with 16, measured.
    of_vectors = re.search("paired_.*vectors", launch.kernel.fn.__name__) is not None
    by_8 = of_vectors or tile < 16 * launch.options["num_warps"] * WARP
    wide_loads = count(r"LDG(STS)?\b.*\.128")
    by_bytes = {16: count(r"STG\b.*\.128"), 8: count(r"STG\b.*\.64") if by_8 else 0}
    wide_stores = sum(by_bytes.values())
    found = Report(
        launch.kernel.fn.__name__,
        registers,
        local + 4 * spills,
        made.metadata.shared,
        len(opcodes) * launch.options["num_warps"] * WARP // tile,
        wide_loads,
        loads - wide_loads,
        wide_stores,
        stores - wide_stores,
        count(r"LDSM\b.*\.M?T"),
        count(r"LDS\.[US]8"),
        len(re.findall(r"\.ftz\.", made.asm["ptx"]))
        - sum(made.asm["ptx"].count(o) * n for o, n in MAY_FLUSH.items()),
        len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/[^;\n]*,[^;\n]*\bR1\b", sass, re.MULTILINE)),
        launch.kernel.fn.__name__ == "transpose_codes"
        or any(launch.taken.get(name) is not None for name in COLUMNS),
    )
    stored = sum(width * number for width, number in by_bytes.items())
    return Report(**{**asdict(found), "missed": tuple(missed(case, launch, found, tile, stored))})


def fits(case: Case, capability: int) -> str | None:
    """Why a case's kernel does not run on GPUs of a compute capability; None where it does."""
    from f8sub.kernels.triton import support

    has_pairs = divmod(capability, 10) >= support.OLDEST_WITH_PAIRS
    with mock.patch.object(support, "compares_pairs", return_value=has_pairs):
        launch = case.launches()[case.index]
    try:
        shared = compiled(launch, capability).metadata.shared
    except Exception as error:
        reasons = [line for line in str(error).splitlines() if "error" in line.lower()]
        return f"{launch.kernel.fn.__name__}: {(reasons or [str(error)])[-1]}"
    if shared > SHARED[capability]:
        return f"{launch.kernel.fn.__name__}: {shared} bytes of shared memory"
    return None


def tile_of(launch: Launch) -> int:
    """Elements that a program reads, or one step of its loop."""
    arguments = launch.taken
    if "TILE" in arguments:
        return int(arguments["TILE"].ROWS * arguments["TILE"].COLS)
    return int(arguments["BLOCK"] if "BLOCK" in arguments else arguments["PART"])


def missed(case: Case, launch: Launch, found: Report, tile: int, stored: int) -> Iterator[str]:
    """What a kernel is held to and does not keep; ``stored`` bytes are what a thread writes with wide stores."""
    arguments = launch.taken
    threads = launch.options["num_warps"] * WARP
    codes = "codes_ptr" in arguments
    writes = found.transposes if codes else sum(arguments.get(name) is not None for name in (*ROWS, *COLUMNS))
    of_dh = any(arguments.get(name) is not None for name in OF_DH)
    sources = [arguments[name] for name in SOURCES if name in arguments and (name != "dh_ptr" or of_dh)]
    size = 1 if codes else sum(source.dtype.itemsize for source in sources or [arguments["amax_ptr"]])
    if "matrices_ptr" in arguments:
        # Lines and blocks of 4 bytes, 2 and 2 an element, each by itself; those that are not aligned by elements.
        size = 2 * (4 + 2 + 2) * arguments["ALIGNED"]
    if found.spilled:
        yield f"spills {found.spilled} bytes"
    if found.wide_loads * 16 * threads < tile * size:
        yield f"reads {tile * size} bytes of a tile with {found.wide_loads} 128-bit loads"
    if stored * threads < tile * writes:
        yield f"writes {tile * writes} bytes of a tile, {stored * threads} of them with wide stores"
    if found.transposes and not found.transposed:
        yield "transposes without ldmatrix"
    if found.byte_loads:
        yield f"{found.byte_loads} loads of single bytes from shared memory"
    if found.flushes:
        yield f"{found.flushes} instructions flush subnormals"
    if found.undefined and not found.spilled:
        yield f"{found.undefined} instructions read R1, which ptxas puts for a register it lost"


def table(found: dict[Case, Report]) -> Table:
    columns = (
        "kernel, input, usages",
        "registers",
        "spilled",
        "shared KB",
        "instr./element",
        "LDG.128 + other",
        "STG.128 + other",
        "ldmatrix.trans",
        "byte loads",
    )
    rows = [
        (
            f"{case.words}: {r.kernel}",
            str(r.registers),
            str(r.spilled),
            f"{r.shared / 1024:.0f}",
            str(r.instructions),
            f"{r.wide_loads} + {r.narrow_loads}",
            f"{r.wide_stores} + {r.narrow_stores}",
            str(r.transposed),
            str(r.byte_loads),
        )
        for case, r in found.items()
    ]
    import triton

    return Table(f"sm_{CAPABILITY}a, triton {triton.__version__}", columns, rows)


def main() -> None:
    arguments_parser = parser(__doc__)
    arguments_parser.add_argument("--only", nargs="+", default=[""], help="what begins with one of these")
    arguments_parser.add_argument(
        "--shape", nargs=2, type=int, default=WHOLE, help="of a matrix, if not ragged"
    )
    arguments_parser.add_argument("--jobs", type=int, default=2, help="kernels compiled at a time")
    arguments_parser.add_argument("--capability", type=int, default=CAPABILITY, choices=SHARED)
    arguments = arguments_parser.parse_args()
    starts, shape = tuple(arguments.only), tuple(arguments.shape)
    chosen = [case for case in cases(shape) if case.words.startswith(starts)]
    if arguments.capability != CAPABILITY:
        with ProcessPoolExecutor(arguments.jobs) as pool:
            reasons = list(pool.map(fits, chosen, repeat(arguments.capability)))
        wrong = [f"{case.words}: {why}" for case, why in zip(chosen, reasons, strict=True) if why]
        print("\n".join(wrong) if wrong else f"{len(chosen)} kernels, all run on sm_{arguments.capability}")
        sys.exit(bool(wrong))
    with ProcessPoolExecutor(arguments.jobs) as pool:
        found = dict(zip(chosen, pool.map(report, chosen), strict=True))
    table(found).show()
    if arguments.json:
        write_json(arguments.json, [{**asdict(case), **asdict(r)} for case, r in found.items()])
    wrong = [f"{case.words}: {r.kernel} {', '.join(r.missed)}" for case, r in found.items() if r.missed]
    print("\n".join(wrong) if wrong else f"{len(found)} kernels, none misses what it is held to")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
