"""What the GEMM kernels compile to for Hopper (sm_90a), on any machine: registers, spills, tensor core instructions.

Needs triton, no GPU. Ends with status 1 where a kernel misses what it is held to: no spilled register; float8 tensor
core instructions that no other instruction is made to wait for one by one, both operands loaded by the tensor memory
accelerator; of persistent kernels warps that are given different numbers of registers; and no more shared memory than
Hopper has.

    python scripts/gemm_report.py
"""

from __future__ import annotations

import re
import sys
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch
from kernel_report import CAPABILITY, WARP, disassembled
from kernel_report import TYPES as POINTERS
from tables import Table, parser, write_json

from f8sub import ALL, Float8Format, Operand, Tile

if TYPE_CHECKING:
    from f8sub.kernels.triton.gemm_launch import Config
    from f8sub.kernels.triton.launcher import Launch

SHARED_MEMORY = 232448
"""Bytes that a program may have. Source: CUDA C++ Programming Guide, compute capability 9.0."""

STEPS = 4
"""Tensor core instructions of 32 elements of K that are waited for at once, after a block of 128."""

MULTIPROCESSORS = 132
"""Of an H200."""

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
CODES = {E4M3: "fp8e4nv", E5M2: "fp8e5", torch.float32: "fp32"}
VECTOR, SQUARE = Float8Format(E4M3, Tile(1, 128)), Float8Format(E4M3, Tile(128, 128))
GRID, GRID_E5M2 = Float8Format(E4M3, Tile(256, 256)), Float8Format(E5M2, Tile(256, 256))
PAIRS = {
    "1x128 x 128x128": (VECTOR, SQUARE),
    "1x128 x 1x128": (VECTOR, VECTOR),
    "256x256 x 256x256": (GRID, GRID),
    "256x256 e5m2 x 256x256": (GRID_E5M2, GRID),
    "row x 128x128": (Float8Format(E4M3, Tile(1, ALL)), SQUARE),
    "128x128 x 1x128": (SQUARE, VECTOR),
}
"""fprop and dgrad of ``blockwise``, its wgrad, fprop of ``gridquant``, its dgrad and wgrad, and mixed ones."""

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
POINTERS = {**POINTERS, torch.float32: "*fp32", torch.bfloat16: "*bf16"}


def configs() -> list[Config]:
    """The tiles that ``scripts/tune_gemm.py`` chooses from: of many rows, then of few."""
    from f8sub.kernels.triton.gemm_launch import Config

    persistent = [Config(128, 256, 4, persistent=True, group=group) for group in (16, 8, 32)]
    few = [Config(64, cols, stages, group=1) for cols, stages in ((32, 8), (64, 6), (64, 8), (128, 6))]
    return [
        *persistent,
        *few,
        Config(64, 64, 6, group=1, parts=2),
        Config(64, 128, 6, group=1, parts=2),
    ]


@dataclass(frozen=True)
class Case:
    """One kernel.

    Attributes:
        pair: ``PAIRS``' name of the formats.
        out: ``DTYPES``' name of the result's.
        config: the tiles.
    """

    pair: str
    out: str
    config: Config

    @property
    def words(self) -> str:
        """What it is, in words."""
        return f"{self.pair} -> {self.out}, {self.config}"


@dataclass(frozen=True)
class Report:
    """What a kernel compiled to.

    Attributes:
        registers: a thread's, of those that multiply.
        spilled: loads and stores of spilled registers.
        undefined: instructions that read R1, the stack's pointer, which a kernel without a stack only loads.
        shared: bytes of shared memory a program.
        products: float8 tensor core instructions.
        descriptors: loads by the tensor memory accelerator.
        resized: places where warps change their number of registers.
        missed: what it is held to and misses.
    """

    registers: int
    spilled: int
    undefined: int
    shared: int
    products: int
    descriptors: int
    resized: int
    missed: tuple[str, ...] = ()


def cases() -> list[Case]:
    """Every tile of every pair of formats into bfloat16, and the first into float32."""
    made = [Case(pair, "bf16", config) for pair in PAIRS for config in unique(configs())]
    return made + [Case(pair, "fp32", configs()[0]) for pair in PAIRS]


def unique(chosen: list[Config]) -> list[Config]:
    """One of those that differ in their group alone: it is a number to compiled code's tile order."""
    seen: dict[Any, Config] = {}
    for config in chosen:
        seen.setdefault((config.rows, config.cols, config.stages, config.parts > 1), config)
    return list(seen.values())


def launch_of(case: Case) -> Launch:
    """Its launch, over matrices that are not read."""
    from f8sub.kernels.triton.gemm_launch import multiplication

    rows = 8192 if case.config.rows > 64 else 64
    shapes = (rows, 512), (1024, 512)
    a, b = (
        Operand(torch.empty(shape, dtype=format.dtype), torch.empty(format.tile.scale_shape(shape)), format)
        for shape, format in zip(shapes, PAIRS[case.pair], strict=True)
    )
    return multiplication(a, b, DTYPES[case.out], case.config, MULTIPROCESSORS)[0][0]


def compiled(launch: Launch) -> Any:
    """The kernel compiled for Hopper with the launch's arguments, specialized as Triton does when it launches."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        value = launch.arguments[parameter.name]
        if hasattr(value, "block_shape"):
            layout = f",{value.layout!r}" if hasattr(value, "layout") else ""
            block = ",".join(map(str, value.block_shape))
            signature[parameter.name] = f"tensordesc<{CODES[value.base.dtype]}[{block}]{layout}>"
            continue
        if isinstance(value, torch.Tensor):
            signature[parameter.name] = POINTERS[value.dtype]
            aligned = True
        elif parameter.is_constexpr or (value == 1 and not parameter.do_not_specialize):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
            continue
        else:
            signature[parameter.name] = "i32"
            aligned = value % 16 == 0 and not parameter.do_not_specialize
        if aligned:
            attributes[(index,)] = [["tt.divisibility", 16]]
    source = GluonASTSource if isinstance(launch.kernel, GluonJITFunction) else ASTSource
    target = GPUTarget("cuda", CAPABILITY, WARP)
    return triton.compile(
        source(launch.kernel, signature, constants, attributes), target=target, options=launch.options
    )


def is_serialized(sass: str) -> bool:
    """Whether any tensor core instruction but a block's last one is waited for (ptxas's warning C7514)."""
    products = re.findall(r"\bQGMMA\.[^;]*", sass)
    return sum("gsb0" in product for product in products) * STEPS > len(products)


def report(case: Case) -> Report:
    """Compile a case and look at it."""
    made = compiled(launch_of(case))
    sass, _ = disassembled(made.asm["cubin"])
    found = Report(
        1 + max(map(int, re.findall(r"\bR(\d+)\b", sass))),
        len(re.findall(r"\b(?:LDL|STL)\b", sass)),
        len(re.findall(r"^\s+/\*[0-9a-f]{4,}\*/[^;\n]*,[^;\n]*\bR1\b", sass, re.MULTILINE)),
        made.metadata.shared,
        len(re.findall(r"\bQGMMA\.", sass)),
        len(re.findall(r"\bUTMALDG\.", sass)),
        len(re.findall(r"\bUSETMAXREG\b", sass)),
    )
    wrong = []
    if found.spilled:
        wrong.append(f"{found.spilled} loads and stores of spilled registers")
    elif found.undefined:
        wrong.append(f"{found.undefined} instructions read R1, which ptxas puts for a register it lost")
    if not found.products or re.search(r"\bHGMMA\.|\bHMMA\.", sass):
        wrong.append("multiplies without float8 tensor core instructions alone")
    if is_serialized(sass):
        wrong.append(
            "waits for every tensor core instruction by itself, which ptxas makes of sums read too early"
        )
    if found.descriptors < 2:
        wrong.append("loads operands without the tensor memory accelerator")
    if found.shared > SHARED_MEMORY:
        wrong.append(f"takes {found.shared} bytes of shared memory of {SHARED_MEMORY}")
    if case.config.persistent and not (found.resized and "ttg.warp_specialize" in made.asm["ttgir"]):
        wrong.append("warps are not specialized")
    return Report(**{**asdict(found), "missed": tuple(wrong)})


def main() -> None:
    arguments_parser = parser(__doc__)
    arguments_parser.add_argument("--only", nargs="+", default=[""], help="what begins with one of these")
    arguments_parser.add_argument("--jobs", type=int, default=2, help="kernels compiled at a time")
    arguments = arguments_parser.parse_args()
    chosen = [case for case in cases() if case.words.startswith(tuple(arguments.only))]
    with ProcessPoolExecutor(arguments.jobs) as pool:
        found = dict(zip(chosen, pool.map(report, chosen), strict=True))
    import triton

    columns = (
        "formats, tile",
        "registers",
        "spilled",
        "shared KB",
        "QGMMA",
        "UTMALDG",
        "USETMAXREG",
    )
    rows = [
        (
            case.words,
            *map(
                str,
                (r.registers, r.spilled, r.shared // 1024, r.products, r.descriptors, r.resized),
            ),
        )
        for case, r in found.items()
    ]
    Table(f"sm_{CAPABILITY}a, triton {triton.__version__}", columns, rows).show()
    if arguments.json:
        write_json(
            arguments.json,
            [{"case": case.words, **asdict(case.config), **asdict(r)} for case, r in found.items()],
        )
    wrong = [f"{case.words}: {', '.join(r.missed)}" for case, r in found.items() if r.missed]
    print("\n".join(wrong) if wrong else f"{len(found)} kernels, none misses what it is held to")
    sys.exit(bool(wrong))


if __name__ == "__main__":
    main()
