"""Triton's kernels compiled for GPUs that are not there."""

from __future__ import annotations

import functools
import re
import subprocess
import tempfile
from collections.abc import Callable, Iterable
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon._runtime import GluonASTSource, GluonJITFunction

if TYPE_CHECKING:
    from f8sub.kernels.triton.launch import Launch

CAPABILITY, WARP = 90, 32
SHARED = {89: 101376, 90: 232448, 100: 232448, 120: 101376}
"""Bytes of shared memory that a program may have, by compute capability: of Ada, Hopper and both Blackwells. Source:
CUDA C++ programming guide, technical specifications per compute capability."""
TYPES = {
    torch.float32: "fp32",
    torch.float16: "fp16",
    torch.bfloat16: "bf16",
    torch.float8_e4m3fn: "fp8e4nv",
    torch.float8_e5m2: "fp8e5",
    torch.int32: "i32",
    torch.int64: "i64",
    torch.uint8: "u8",
    torch.uint16: "u16",
}


def compiled(launch: Launch, capability: int = CAPABILITY) -> Any:
    """The kernel compiled with the launch's arguments, specialized as Triton does when it launches."""
    signature, constants, attributes = {}, {}, {}
    for index, parameter in enumerate(launch.kernel.params):
        value, is_free = launch.arguments[parameter.name], not parameter.do_not_specialize
        if hasattr(value, "block_shape"):
            layout = f",{value.layout!r}" if hasattr(value, "layout") else ""
            block = ",".join(map(str, value.block_shape))
            signature[parameter.name] = f"tensordesc<{TYPES[value.base.dtype]}[{block}]{layout}>"
        elif isinstance(value, torch.Tensor):
            signature[parameter.name] = f"*{TYPES[value.dtype]}"
            # torch's allocations begin at multiples of 512 bytes, and views of them here at multiples of 16.
            attributes[(index,)] = [["tt.divisibility", 16]]
        elif isinstance(value, float) and not parameter.is_constexpr:
            signature[parameter.name] = "fp32"
        elif parameter.is_constexpr or value is None or (value == 1 and is_free):
            signature[parameter.name] = "constexpr"
            constants[parameter.name] = value
        else:
            signature[parameter.name] = "i32" if value < 2**31 else "i64"
            if value % 16 == 0 and is_free:
                attributes[(index,)] = [["tt.divisibility", 16]]
    source = GluonASTSource if isinstance(launch.kernel, GluonJITFunction) else ASTSource
    target = GPUTarget("cuda", capability, WARP)
    return triton.compile(
        source(launch.kernel, signature, constants, attributes), target=target, options=launch.compile_options
    )


@functools.cache
def disassembled(cubin: bytes) -> tuple[str, str]:
    """SASS and resource usage, by the cuobjdump of Triton's wheel, which takes longer than compiling."""
    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        sass, usage = (
            subprocess.run([tool, option, file.name], check=True, capture_output=True, text=True).stdout
            for option in ("--dump-sass", "--dump-resource-usage")
        )
    return sass, usage


def undefined(sass: str) -> int:
    """Instructions that read R1, the stack's pointer, which a kernel without a stack only loads.

    ptxas puts it for a register that it lost. That of CUDA 13 also names it where a permutation of bytes needs but one
    register, and takes no byte of the other.
    """
    reads = re.findall(r"^\s+/\*[0-9a-f]{4,}\*/([^;\n]*,[^;\n]*\bR1\b[^;\n]*)", sass, re.MULTILINE)
    return sum(not _takes_no_byte(read) for read in reads)


def _takes_no_byte(instruction: str) -> bool:
    """Whether a permutation takes no byte of R1: digits 0 to 3 of a selector are of the first register."""
    found = re.search(r"\bPRMT R\d+, (R\w+)\S*, 0x([0-9a-f]+), (R\w+)", instruction)
    if found is None:
        return False
    first, selector, second = found.groups()
    taken = {(first, second)[(int(digit, 16) & 7) // 4] for digit in selector.zfill(4)}
    return "R1" not in taken


def of_all(report: Callable[[Any], Any], cases: Iterable[Any], *beginnings: str) -> list[Any]:
    """What a function says of each case, or of those whose words begin with one of these; two at a time."""
    chosen = [case for case in cases if case.words.startswith(beginnings or ("",))]
    with ProcessPoolExecutor(2, get_context("spawn")) as pool:
        return list(pool.map(report, chosen))
