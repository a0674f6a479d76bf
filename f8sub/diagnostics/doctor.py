"""The diagnosis of a machine: what is native, what is not and why, and what to do about it."""

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch

from f8sub.diagnostics.machine import Machine, look
from f8sub.diagnostics.proofs import Proof, prove
from f8sub.diagnostics.torch_names import TorchNames, look_at_torch
from f8sub.kernels.gemm import tuning
from f8sub.kernels.gemm.blockwise import CAPABILITY
from f8sub.kernels.triton.support import OLDEST, why_no_triton
from f8sub.recipe import get_recipe, recipe_names
from f8sub.torch_compat import WORKS_WITH
from f8sub.version import __version__

WITH_CUDA = "pip install torch --index-url https://download.pytorch.org/whl/cu130"

BLOCKS_ON_HOPPER = (12, 9)
"""The first CUDA whose cuBLASLt multiplies with float32 scales of rows and blocks on Hopper; see ``scaled_mm``."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What ``doctor`` found.

    Attributes:
        version: of f8sub.
        machine: what the machine has.
        proofs: one a recipe, on the first GPU, or on the CPU where there is none.
        gemm_table: where the GPU's measured products are, or how to measure them; None where none are needed.
        advice: what to install, to set or to know.
        torch_names: what f8sub needs of torch beyond what that documents.
    """

    version: str
    machine: Machine
    proofs: tuple[Proof, ...]
    gemm_table: str | None
    advice: tuple[str, ...]
    torch_names: tuple[TorchNames, ...] = ()

    @property
    def native(self) -> list[str]:
        """Names of the recipes that gain speed here."""
        return [proof.recipe for proof in self.proofs if proof.is_native]

    @property
    def status(self) -> int:
        """The exit status: 0 where a recipe is native and nothing that ran or was looked at is wrong, else 1."""
        wrong = [proof for proof in self.proofs if not proof.is_right]
        return 0 if self.native and not wrong and all(n.problem is None for n in self.torch_names) else 1

    def as_dict(self) -> dict[str, Any]:
        """All of it, as JSON takes it."""
        found = asdict(self)
        for proof, row in zip(self.proofs, found["proofs"], strict=True):
            row["native"], row["right"], row["verdict"] = proof.is_native, proof.is_right, proof.verdict
        return {**found, "native": self.native, "status": self.status}


def doctor() -> Diagnosis:
    """Look at this machine and run every recipe once, on its first GPU or on the CPU."""
    machine = look()
    device = torch.device("cuda", 0) if machine.gpus else torch.device("cpu")
    proofs = tuple(prove(get_recipe(name), device) for name in recipe_names())
    table, is_missing = _gemm_table(machine)
    names = look_at_torch()
    advice = (*_of_torch(names, machine), *_advice(machine, proofs, device, is_missing))
    return Diagnosis(__version__, machine, proofs, table, advice, names)


def _of_torch(names: tuple[TorchNames, ...], machine: Machine) -> Iterator[str]:
    """What to do where torch is not as f8sub knows it."""
    for found in names:
        if found.problem is not None:
            instead = f", or {found.instead}" if found.instead else ""
            yield (
                f"torch {machine.torch} is not known to f8sub for {found.purpose}: install torch {WORKS_WITH}{instead}."
            )


def _gemm_table(machine: Machine) -> tuple[str | None, bool]:
    """What to say of the first GPU's table, and whether one should be made."""
    if not machine.gpus or machine.gpus[0].capability != CAPABILITY or machine.triton is None:
        return None, False
    name = machine.gpus[0].name
    if tuning.file_of(name).exists():
        return f"measured for an {name}, and shipped", False
    return f"not measured for an {name}: scripts/tune_gemm.py does it", True


def _advice(
    machine: Machine, proofs: tuple[Proof, ...], device: torch.device, measure: bool
) -> Iterator[str]:
    if failed := [proof.recipe for proof in proofs if not proof.is_right]:
        yield (
            f"{', '.join(failed)}: failed here. Do not train with it; report the lines above, with the output of "
            "python -m f8sub doctor --json."
        )
    yield from _of_gpus(machine, device)
    if measure:
        yield (
            "Run python scripts/tune_gemm.py, which takes minutes: it checks f8sub's own products of blocks on this "
            "GPU, and finds where they are faster than cuBLASLt's."
        )
    if machine.variables.get("TRITON_INTERPRET", "0") != "0":
        yield "Unset TRITON_INTERPRET: with it Triton's kernels run in Python, thousands of times slower."
    if machine.variables.get("CUDA_LAUNCH_BLOCKING", "0") != "0":
        yield "Unset CUDA_LAUNCH_BLOCKING: with it the host waits for every kernel."
    if any(
        machine.variables.get(name, "0") != "0" for name in ("TORCH_COMPILE_DISABLE", "TORCHDYNAMO_DISABLE")
    ):
        yield "torch.compile is turned off by a variable: float8 is hardly faster than compiled bf16 without it."
    yield from _of_packages(machine)
    if machine.gpu_count > 1 and "NCCL_MAX_CTAS" not in machine.variables:
        yield (
            "Where a profile shows products waiting for all-gathers, try NCCL_MAX_CTAS=16, or 8: NCCL then leaves "
            "more of the GPU to them."
        )
    native = [proof.recipe for proof in proofs if proof.is_native]
    if native:
        yield f"Train with one of {', '.join(native)}. What a model gains: python -m f8sub inspect MODEL."


def _of_gpus(machine: Machine, device: torch.device) -> Iterator[str]:
    if not machine.gpus:
        if machine.problem is not None:
            yield f"torch sees a GPU and cannot use it: {machine.problem}."
        elif machine.gpus_without_torch:
            built = f"built for CUDA {machine.cuda}, finds none" if machine.cuda else "built without CUDA"
            yield f"There is an NVIDIA GPU, and torch, {built}: {WITH_CUDA}, or update the driver."
        yield (
            "There is no GPU for torch: every recipe runs on this CPU, with the codes of a GPU, to try f8sub out and "
            "to test it; it gains no speed. For speed use a GPU of SM 8.9 or newer: Ada, Hopper, Blackwell."
        )
        return
    gpu = machine.gpus[0]
    if len(machine.gpus) > 1:
        yield "The GPUs are of several kinds; what is said here is of the first one."
    if machine.cuda is not None and machine.cuda.startswith("ROCm"):
        yield "f8sub has not been run on AMD's GPUs; MI300X multiplies e4m3fnuz, to which f8sub does not cast."
        return
    if gpu.capability < OLDEST:
        found = ".".join(map(str, gpu.capability))
        yield f"SM {found} has no float8 tensor cores: train in bf16 here. SM 8.9 (Ada) is the first that has."
        return
    if machine.triton is None:
        yield "pip install triton: without it casts run by the reference, many times slower."
    elif reason := why_no_triton(device):
        yield f"Casts run by the reference, because triton {reason}."
    cuda = tuple(map(int, (machine.cuda or "0").split(".")))
    if gpu.capability == CAPABILITY and cuda < BLOCKS_ON_HOPPER:
        yield f"CUDA {machine.cuda} lacks products of rows and blocks in cuBLASLt; 12.9 has them: {WITH_CUDA}."


def _of_packages(machine: Machine) -> Iterator[str]:
    titan, torch_version = machine.peers["torchtitan"], _release(machine.torch)
    if titan is not None and _release(titan) >= (0, 3) and torch_version < (2, 13):
        yield f"torchtitan {titan} needs torch 2.13 or newer, found {machine.torch}; 0.2.2 works with it."
    if machine.peers["torchao"] is not None and _release(machine.peers["torchao"]) < (0, 18):
        yield "torchao older than 0.18 is not tested beside f8sub: pip install -U torchao."
    if machine.peers["transformers"] is None and titan is None:
        yield "pip install transformers, or torchtitan, for inspect by a model's name, and for the recipes."


def _release(version: str) -> tuple[int, ...]:
    digits = version.partition("+")[0].split(".")[:2]
    return tuple(int(part) for part in digits if part.isdigit())
