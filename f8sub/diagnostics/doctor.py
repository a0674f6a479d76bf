"""Diagnoses a machine: what is native, what is not and why, and what to do about it; as a page of 80 columns.

What f8sub needs of torch beyond what that documents is looked at, and FSDP2's part tried with one small layer.
"""

import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from f8sub.convert.convert import convert_to_float8
from f8sub.diagnostics.machine import Machine, look
from f8sub.diagnostics.proofs import Proof, prove
from f8sub.errors import Float8ConfigError
from f8sub.kernels.gemm import tuning
from f8sub.kernels.gemm.blockwise import CAPABILITY
from f8sub.kernels.triton.support import OLDEST, why_no_triton
from f8sub.recipe import get_recipe, recipe_names
from f8sub.text_table import text_table
from f8sub.torch_compat import GATHER, NEEDS, REDUCTION, WORKS_WITH, Need, problems, reduced_groups
from f8sub.version import __version__

ROWS, COLS = 32, 48


@dataclass(frozen=True, slots=True)
class TorchNames:
    """Holds what was found of one ``torch_compat.Need``.

    Attributes:
        purpose: what it is needed for.
        instead: what works without; empty where nothing does.
        problem: what is missing, or is not as f8sub knows it; None where all is.
    """

    purpose: str
    instead: str
    problem: str | None


def look_at_torch() -> tuple[TorchNames, ...]:
    """Look at every need of torch; try those of FSDP2 on a layer sharded over one rank, if there are no ranks yet."""
    found = {need: "; ".join(problems(need)) or None for need in NEEDS}
    # A process group that the user has is left alone.
    if not any(found.values()) and not dist.is_initialized():
        distributed: Any = dist
        # A store in memory: no port, and no other process.
        dist.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        try:
            found |= _tried()
        finally:
            dist.destroy_process_group()
    return tuple(TorchNames(need.purpose, need.instead, problem) for need, problem in found.items())


def _tried() -> dict[Need, str | None]:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    rng = torch.Generator().manual_seed(0)
    x = torch.randn(ROWS, COLS, generator=rng, dtype=torch.float32, device="cpu")
    whole, sharded = _layer(rng), _layer(rng)
    # The same weight: outputs must be equal, bitwise.
    sharded.load_state_dict(whole.state_dict())
    fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
    found: dict[Need, str | None] = dict.fromkeys((GATHER, REDUCTION))
    try:
        if not torch.equal(sharded(x), whole(x)):
            found[GATHER] = "a gathered layer's output is not that of a whole one"
    except (Float8ConfigError, AttributeError, TypeError) as error:
        found[GATHER] = str(error)
    try:
        reduced_groups(sharded)
    except Float8ConfigError as error:
        found[REDUCTION] = str(error)
    return found


def _layer(rng: torch.Generator) -> Any:
    layer = torch.nn.Linear(COLS, ROWS, bias=False, dtype=torch.float32, device="cpu")
    with torch.no_grad():
        layer.weight.normal_(generator=rng)
    # By default so small a layer is not converted.
    return convert_to_float8(torch.nn.Sequential(layer), min_dim=1, skip_defaults=False)


WITH_CUDA = "pip install torch --index-url https://download.pytorch.org/whl/cu130"

BLOCKS_ON_HOPPER = (12, 9)
"""The first CUDA whose cuBLASLt multiplies with float32 scales of rows and blocks on Hopper; see ``scaled_mm``."""


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """Holds what ``doctor`` found.

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
        """The names of the recipes that gain speed here."""
        return [proof.recipe for proof in self.proofs if proof.is_native]

    @property
    def status(self) -> int:
        """The exit status: 0 where a recipe is native and nothing that ran or was looked at is wrong, else 1."""
        wrong = [proof for proof in self.proofs if not proof.is_right]
        return 0 if self.native and not wrong and all(n.problem is None for n in self.torch_names) else 1

    def as_dict(self) -> dict[str, Any]:
        """Return all of it, as JSON takes it."""
        found = asdict(self)
        # asdict leaves properties out.
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
    """Say what to do where torch is not as f8sub knows it."""
    for found in names:
        if found.problem is not None:
            instead = f", or {found.instead}" if found.instead else ""
            yield (
                f"torch {machine.torch} is not known to f8sub for {found.purpose}: install torch {WORKS_WITH}{instead}."
            )


def _gemm_table(machine: Machine) -> tuple[str | None, bool]:
    """Return a description of the first GPU's table, and whether one should be measured."""
    # Products have two kernels to choose from on this capability alone.
    if not machine.gpus or machine.gpus[0].capability != CAPABILITY or machine.triton is None:
        return None, False
    name = machine.gpus[0].name
    if tuning.file_of(name).exists():
        return f"measured for an {name}, and shipped", False
    return f"not measured for an {name}: scripts/tune_gemm.py does it", True


def _advice(
    machine: Machine, proofs: tuple[Proof, ...], device: torch.device, measure: bool
) -> Iterator[str]:
    # First what is wrong, then what is slow, and last what to train with.
    if failed := [proof.recipe for proof in proofs if not proof.is_right]:
        yield (
            f"{', '.join(failed)}: failed here. Do not train with it; report the lines above, with the output of "
            "python -m f8sub doctor --json."
        )
    yield from _of_gpus(machine, device)
    if measure:
        yield (
            "Run python scripts/tune_gemm.py, which takes minutes: it checks products on this GPU, f8sub's of blocks "
            "and torch's by row, and finds where they are faster than cuBLASLt's usual ones."
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
        # nvidia-smi sees GPUs that torch does not.
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
    # ROCm returned above.
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


WIDTH = 80

WORDS = {
    "scaled_mm": "torch._scaled_mm, cuBLASLt's tensor-core products on a GPU",
    "triton": "f8sub's own kernels, for Hopper",
    "measured": "for each shape the kernel that was faster on this GPU: torch's, or f8sub's of blocks",
    "reference": "plain PyTorch: exact; on a GPU 30 times slower than bf16",
    "bf16": "the recipe leaves this product in high precision",
}
"""What backends are."""


def page(diagnosis: Diagnosis) -> str:
    """Return the whole page."""
    found = len(diagnosis.native)
    verdict = f"{found} of {len(diagnosis.proofs)} recipes are native" if found else "no recipe is native"
    lines = [f"f8sub {diagnosis.version}: {verdict} on this machine", "", *_machine(diagnosis.machine), ""]
    lines += [*_recipes(diagnosis), ""]
    if diagnosis.torch_names:
        lines += [*_torch_names(diagnosis.torch_names), ""]
    if reasons := list(_reasons(diagnosis.proofs)):
        lines += ["Why not", *reasons, ""]
    lines.append("What to do")
    for sentence in diagnosis.advice:
        lines += _wrapped(sentence, "  - ", "    ")
    return "\n".join(lines)


def _machine(machine: Machine) -> Iterator[str]:
    yield "Machine"
    gpus = [
        f"{gpu.count} x {gpu.name}, SM {gpu.capability[0]}.{gpu.capability[1]}, {gpu.memory / 2**30:.0f} GiB"
        for gpu in machine.gpus
    ]
    rows = {
        "GPUs": "; ".join(gpus) or "none",
        "torch": f"{machine.torch}, CUDA {machine.cuda or 'none'}, driver {machine.driver or 'none'}",
        "kernels": f"Triton {machine.triton or 'not installed'}, NCCL {machine.nccl or 'none'}",
        "system": f"{machine.system}, Python {machine.python}",
        "packages": ", ".join(f"{name} {found}" for name, found in machine.peers.items() if found)
        or "nothing",
        "env vars": ", ".join(f"{name}={value}" for name, value in machine.variables.items()) or "nothing",
    }
    for name, value in rows.items():
        yield from _wrapped(value, f"  {name:<9}", " " * 11)


def _recipes(diagnosis: Diagnosis) -> Iterator[str]:
    yield "Recipes, each run once on a small layer: what computes y, dx, dw and casts"
    head, rows = ("recipe", "y", "dx", "dw", "casts", "here"), []
    for proof in diagnosis.proofs:
        backends = [product.backend or "bf16" for product in proof.products]
        by = {cast.by for cast in proof.casts}
        rows.append((proof.recipe, *backends, " + ".join(sorted(by)) or "none", proof.verdict))
    yield from text_table(head, rows, "llllll", widths=(19, 10, 10, 10, 16, 8), gap=1, indent=2)
    used = {product.backend or "bf16" for proof in diagnosis.proofs for product in proof.products}
    # Backends that the table has, in one order.
    for name in WORDS:
        if name in used:
            yield from _wrapped(WORDS[name], f"  {name + ':':<11}", " " * 13)
    errors = [p.error for proof in diagnosis.proofs for p in proof.products if p.error is not None]
    if all(proof.is_right for proof in diagnosis.proofs):
        yield from _wrapped(
            f"All casts are bitwise the reference's. Products are within {max(errors, default=0):.2f} of the bound "
            "that accumulators and the rounding to bf16 allow.",
            "  ",
            "  ",
        )
    if diagnosis.gemm_table:
        yield from _wrapped(f"Products of blocks are {diagnosis.gemm_table}.", "  ", "  ")


def _torch_names(names: tuple[TorchNames, ...]) -> Iterator[str]:
    yield "Private names of torch that f8sub needs"
    known = [found.purpose for found in names if found.problem is None]
    if known:
        yield from _wrapped(f"present, for: {'; '.join(known)}", "  ", "    ")
    for found in names:
        if found.problem is not None:
            yield from _wrapped(f"{found.purpose}: {found.problem}", "  ", "    ")


def _reasons(proofs: tuple[Proof, ...]) -> Iterator[str]:
    """Say why products run by the reference, and what failed, recipes with the same reasons together."""
    found: dict[str, list[str]] = {}
    for proof in proofs:
        own: dict[str, None] = {}
        for product in proof.products:
            if product.problem or not product.is_right:
                error = product.problem or f"its error is {product.error:.2f} times the bound"
                own[f"{product.gemm} by {product.backend} failed: {error}"] = None
            elif product.backend == "reference" and product.reasons.get("scaled_mm"):
                own[f"torch._scaled_mm {product.reasons['scaled_mm']}"] = None
        for cast in proof.casts:
            if not cast.is_right:
                own[f"the cast of {cast.operand} failed: {cast.problem}"] = None
        # All that failed; of a recipe that is only slow the first reason.
        for reason in own if not proof.is_right else list(own)[:1]:
            found.setdefault(reason, []).append(proof.recipe)
    for reason, recipes in found.items():
        yield from _wrapped(f"{', '.join(recipes)}: {reason}", "  ", "    ")


def _wrapped(text: str, first: str, others: str) -> list[str]:
    return textwrap.wrap(
        text,
        WIDTH,
        initial_indent=first,
        subsequent_indent=others,
        break_long_words=False,
        break_on_hyphens=False,
    )
