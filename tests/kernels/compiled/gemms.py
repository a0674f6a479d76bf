"""What the GEMM kernels compile to for Hopper (sm_90a), on any machine: registers, spills, tensor core instructions.

Needs triton, no GPU. A kernel is held to: no spilled register; float8 tensor core instructions that no other
instruction is made to wait for one by one, both operands loaded by the tensor memory accelerator; of persistent kernels
warps that are given different numbers of registers; and no more shared memory than Hopper has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

import torch

from f8sub import ALL, Float8Format, Operand, Tile
from scripts import tune_gemm
from scripts.bench.formats import E4M3
from scripts.tune_gemm import SQUARE, VECTOR, configs
from tests.kernels.compiled import compiler
from tests.kernels.compiled.compiler import CAPABILITY, SHARED

if TYPE_CHECKING:
    from f8sub.kernels.triton.gemm_launch import Config
    from f8sub.kernels.triton.launch import Launch

STEPS = 4
"""Tensor core instructions of 32 elements of K that are waited for at once, after a block of 128."""

MULTIPROCESSORS = 132
"""Of an H200."""

PAIRS = {
    **tune_gemm.PAIRS,
    "row x 128x128": (Float8Format(E4M3, Tile(1, ALL)), SQUARE),
    "128x128 x 1x128": (SQUARE, VECTOR),
}
"""fprop and dgrad of ``blockwise``, its wgrad, fprop of ``gridquant``, its dgrad and wgrad, and mixed ones."""

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


@dataclass(frozen=True)
class Case:
    """One kernel: ``PAIRS``' name of its formats, ``DTYPES``' name of its result's, and its tiles."""

    pair: str
    out: str
    config: Config

    @property
    def words(self) -> str:
        """What it is, in words."""
        return f"{self.pair} -> {self.out}, {self.config}"


def cases() -> list[Case]:
    """Every tile of every pair of formats into bfloat16, and the first into float32."""
    # Those that differ in their group alone are compiled alike.
    unique = {(c.rows, c.cols, c.stages, c.parts > 1): c for c in reversed(configs())}
    made = [Case(pair, "bf16", config) for pair in PAIRS for config in reversed(unique.values())]
    return made + [Case(pair, "fp32", configs()[0]) for pair in PAIRS]


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


def is_serialized(sass: str) -> bool:
    """Whether any tensor core instruction but a block's last one is waited for (ptxas's warning C7514)."""
    products = re.findall(r"\bQGMMA\.[^;]*", sass)
    return sum("gsb0" in product for product in products) * STEPS > len(products)


def report(case: Any, launch_of: Callable[[Any], Launch] = launch_of) -> dict[str, Any]:
    """Compile a case and look at it."""
    made = compiler.compiled(launch_of(case))
    sass, _ = compiler.disassembled(made.asm["cubin"])

    def count(pattern: str) -> int:
        return len(re.findall(pattern, sass))

    found = {
        "case": case.words,
        **asdict(case.config),
        "spilled": count(r"\b(?:LDL|STL)\b"),  # loads and stores
        "undefined": compiler.undefined(sass),
        "shared": made.metadata.shared,  # bytes a program
        "products": count(r"\bQGMMA\."),  # float8 tensor core instructions
        "descriptors": count(r"\bUTMALDG\."),  # loads by the tensor memory accelerator
        "resized": count(r"\bUSETMAXREG\b"),  # where warps change their number of registers
    }
    is_specialized = found["resized"] > 0 and "ttg.warp_specialize" in made.asm["ttgir"]
    return {**found, "missed": list(missed(case, found, sass, is_specialized))}


def missed(case: Any, found: dict[str, Any], sass: str, is_specialized: bool) -> Iterator[str]:
    """What a kernel is held to and does not keep."""
    if found["spilled"]:
        yield f"{found['spilled']} loads and stores of spilled registers"
    elif found["undefined"]:
        yield f"{found['undefined']} instructions read R1, which ptxas puts for a register it lost"
    if not found["products"] or re.search(r"\bHGMMA\.|\bHMMA\.", sass):
        yield "multiplies without float8 tensor core instructions alone"
    if is_serialized(sass):
        yield "waits for every tensor core instruction by itself, which ptxas makes of sums read too early"
    if found["descriptors"] < 2:
        yield "loads operands without the tensor memory accelerator"
    if found["shared"] > SHARED[CAPABILITY]:
        yield f"takes {found['shared']} bytes of shared memory of {SHARED[CAPABILITY]}"
    if case.config.persistent and not is_specialized:
        yield "warps are not specialized"
