"""A diagnosis as a page of 80 columns."""

import textwrap
from collections.abc import Iterator

from f8sub.diagnostics.doctor import Diagnosis
from f8sub.diagnostics.machine import Machine
from f8sub.diagnostics.proofs import Proof
from f8sub.diagnostics.torch_names import TorchNames

WIDTH = 80

WORDS = {
    "scaled_mm": "torch._scaled_mm, cuBLASLt's tensor-core products on a GPU",
    "triton": "f8sub's own kernels, for Hopper",
    "measured": "for each shape cuBLASLt's or f8sub's, whichever was faster on this GPU",
    "reference": "plain PyTorch: exact; on a GPU 30 times slower than bf16",
    "bf16": "the recipe leaves this product in high precision",
}
"""What backends are."""


def page(diagnosis: Diagnosis) -> str:
    """The whole page."""
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
        "beside": ", ".join(f"{name} {found}" for name, found in machine.peers.items() if found) or "nothing",
        "set": ", ".join(f"{name}={value}" for name, value in machine.variables.items()) or "nothing",
    }
    for name, value in rows.items():
        yield from _wrapped(value, f"  {name:<9}", " " * 11)


def _recipes(diagnosis: Diagnosis) -> Iterator[str]:
    yield "Recipes, each run once on a small layer: what makes y, dx and dw, and what casts"
    head = ("recipe", "y", "dx", "dw", "casts", "here")
    yield _row(head)
    for proof in diagnosis.proofs:
        backends = [product.backend or "bf16" for product in proof.products]
        by = {cast.by for cast in proof.casts}
        cells = (proof.recipe, *backends, " + ".join(sorted(by)) or "none", proof.verdict)
        yield _row(cells)
    used = {product.backend or "bf16" for proof in diagnosis.proofs for product in proof.products}
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
    yield "What f8sub needs of torch beyond what torch documents"
    known = [found.purpose for found in names if found.problem is None]
    if known:
        yield from _wrapped(f"as f8sub knows it: {'; '.join(known)}", "  ", "    ")
    for found in names:
        if found.problem is not None:
            yield from _wrapped(f"{found.purpose}: {found.problem}", "  ", "    ")


def _row(cells: tuple[str, ...]) -> str:
    widths = (19, 10, 10, 10, 16, 8)
    return ("  " + " ".join(f"{cell:<{width}}" for cell, width in zip(cells, widths, strict=True))).rstrip()


def _reasons(proofs: tuple[Proof, ...]) -> Iterator[str]:
    """Why products run by the reference, and what failed, recipes with the same reasons together."""
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
