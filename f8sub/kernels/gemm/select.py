"""Selects the kernel for each GEMM: once, at conversion, shown in ``repr``, never replaced."""

import functools
import hashlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from f8sub.errors import Float8ConfigError, unknown
from f8sub.formats import MULTIPLE, Float8Format, Operand
from f8sub.kernels import cuda, ops, reference
from f8sub.kernels.gemm import blockwise, measured, scaled_mm
from f8sub.kernels.grouped import gemm as grouped_gemm
from f8sub.kernels.grouped.gemm import GroupedBackend
from f8sub.kernels.triton import support
from f8sub.torch_compat import autocast_dtype

if TYPE_CHECKING:
    from f8sub.recipe import GemmSpec, Recipe

SCALED_MM = "scaled_mm"
REFERENCE = "reference"
"""The backend that runs everything, everywhere, and slowly."""


@dataclass(slots=True)
class Backend:
    """A backend of GEMMs of two float8 operands.

    Attributes:
        why_not: why it cannot run a GEMM of two formats on a device; None when it can.
        gemm_nt: ``a @ b.t()``: (M, K) x (N, K) -> (M, N) of a dtype, with or without fast accumulation.
        takes_any_layout: whether operands need not be row-major on a device.
        is_traceable: whether ``torch.compile`` may look into the GEMM of two operands.
    """

    why_not: Callable[[Float8Format, Float8Format, torch.device], str | None]
    gemm_nt: Callable[[Operand, Operand, torch.dtype, bool], torch.Tensor]
    takes_any_layout: Callable[[torch.device], bool] = lambda device: False
    is_traceable: Callable[[Operand, Operand], bool] = lambda a, b: False


GEMM = {
    "measured": Backend(measured.why_not, measured.gemm_nt, is_traceable=measured.is_traceable),
    # On the CPU it multiplies float32 matrices.
    SCALED_MM: Backend(
        scaled_mm.why_not, scaled_mm.gemm_nt, lambda device: device.type == "cpu", scaled_mm.is_traceable
    ),
    "triton": Backend(blockwise.why_not, blockwise.gemm_nt),
    # It multiplies everything; ``torch.compile`` would unroll its partial sums.
    REFERENCE: Backend(lambda a, b, device: None, reference.gemm_nt, takes_any_layout=lambda device: True),
}
"""Backends by name, the preferred one first: what was measured on this GPU; without that cuBLASLt, then our own."""


def _why_not_scaled_mm(a: Float8Format, b: Float8Format, device: torch.device) -> str | None:
    if device.type != "cpu":
        return f"multiplies experts one by one on a CPU, not on {device.type}"
    return GEMM[SCALED_MM].why_not(a, b, device)


def _one_by_one(name: str, why_not: Callable[..., str | None]) -> GroupedBackend:
    return grouped_gemm.one_by_one(lambda *operands: gemm_nt(name, *operands), why_not)


GROUPED = {
    "triton": grouped_gemm.TRITON,
    "scaled_grouped_mm": grouped_gemm.SCALED,
    "dequantize": grouped_gemm.DEQUANTIZE,
    SCALED_MM: _one_by_one(SCALED_MM, _why_not_scaled_mm),
    REFERENCE: _one_by_one(REFERENCE, lambda a, b, device: None),
}
"""Backends of grouped products, the fastest first (figures: docs/measurements). The last two read on the host where
groups lie, so that they would make a GPU wait."""

FAST_OF_GROUPS = "triton", "scaled_grouped_mm"
"""Those that multiply float8 data; the others take as long as bf16, or longer."""

BACKENDS: dict[bool, Mapping[str, Backend | GroupedBackend]] = {False: GEMM, True: GROUPED}
"""Backends of all products by ``Plan.grouped``."""

ON_CPU = SCALED_MM, REFERENCE
"""What "auto" takes for groups on a CPU: what multiplies a linear layer there, so that both have the same bits."""

ASKED_AS = {SCALED_MM: "scaled_grouped_mm"}
"""What ``convert_to_float8`` calls a backend of linear layers, and its counterpart for groups on a GPU."""

_ONE_NODE = {name: ops.gemm_as_one_node(name, one.gemm_nt) for name, one in GEMM.items()}
"""The same GEMMs behind operators, for what ``torch.compile`` may not look into."""


def select_gemm(
    spec: "GemmSpec", device: torch.device, backend: str = "auto", grouped: bool = False
) -> str | None:
    """Return the name of the backend that runs ``spec`` on ``device``; None when the GEMM stays in high precision.

    No such backend, or none that can, is a ``Float8ConfigError``, which carries every candidate's reason.
    """
    backends = BACKENDS[grouped]
    if backend != "auto" and backend not in backends:
        if not grouped:
            raise unknown("backend", backend, ["auto", *backends])
        raise Float8ConfigError(
            f"backend {backend!r} has no grouped products for experts; take 'auto' or one of {list(backends)}"
        )
    # A GEMM with one operand in high precision has both in high precision.
    if spec.a is None or spec.b is None:
        return None
    reasons = {}
    # In order of preference: the first that can is taken. A backend asked for by name is never replaced.
    preferred = ON_CPU if grouped and device.type in ("cpu", "meta") else backends
    for name in preferred if backend == "auto" else [backend]:
        reason = backends[name].why_not(spec.a, spec.b, device)
        if reason is None:
            return name
        reasons[name] = reason
    listed = "; ".join(f"{name} {reason}" for name, reason in reasons.items())
    if grouped:
        raise Float8ConfigError(f"no grouped product of {spec.a} by {spec.b} on {device}: {listed}")
    raise Float8ConfigError(
        f"no backend can multiply {spec.a} by {spec.b} on {device}: {listed}. "
        "Choose another recipe, or backend='reference' (slow, any device)"
    )


def gemm_nt(
    backend: str,
    a: Operand,
    b: Operand,
    out_dtype: torch.dtype,
    fast_accum: bool = False,
    traced: bool = False,
) -> torch.Tensor:
    """Compute y [M, N] = a [M, K] @ b [N, K].t() by the backend of that name, in ``out_dtype``; zeros for an empty K.

    ``traced`` for a graph that is compiled: a backend that the compiler must not look into is one node there.
    """
    # cuBLASLt and kernels take no empty operand; an expert may have no tokens, a batch no rows.
    if a.data.numel() == 0 or b.data.numel() == 0:
        return a.scale_inv.new_zeros((a.data.shape[0], b.data.shape[0]), dtype=out_dtype)
    run = GEMM[backend].gemm_nt
    if (traced or torch.compiler.is_compiling()) and not GEMM[backend].is_traceable(a, b):
        run = _ONE_NODE[backend]
    device = "cpu" if a.data.is_cpu else a.data.device.type
    if autocast_dtype(device) is None:
        return run(a, b, out_dtype, fast_accum)
    # The operands are cast already; autocast would round the matmuls inside the CPU's _scaled_mm once more.
    with torch.autocast(device, enabled=False):
        return run(a, b, out_dtype, fast_accum)


@functools.cache
def source_digest() -> str:
    """32 hexadecimal digits that follow from every source file of the library, its version among them."""
    digest, folder = hashlib.blake2b(digest_size=16), Path(__file__).parents[2]
    for path in sorted(folder.rglob("*.py")):
        digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


@dataclass(frozen=True, slots=True)
class Plan:
    """A recipe bound to a device: the backend of each product, None where it stays in high precision.

    A frozen value, so ``torch.compile`` takes it for a constant. ``key`` stands for it in compiled code, which torch
    keeps on disk: it follows from the plan and from the library's code, and so is another one for anything else that
    would be computed, in any process. It is no int, which dynamo takes for a dynamic one. ``any_layout`` says whether
    all GEMMs read transposed views, so that no codes are ever copied transposed; ``backend`` is what was asked for, see
    ``select_gemm``; ``grouped``, whether rows are of several experts, whose products are grouped.
    """

    made: ClassVar[dict[str, "Plan"]] = {}
    """By key."""

    recipe: "Recipe"
    fprop: str | None
    dgrad: str | None
    wgrad: str | None
    any_layout: bool
    device: torch.device
    backend: str
    grouped: bool
    key: str

    @property
    def gemms(self) -> dict[str, str | None]:
        """The backend of each GEMM by its name."""
        return {"fprop": self.fprop, "dgrad": self.dgrad, "wgrad": self.wgrad}

    @property
    def multiple(self) -> int:
        """Of groups, see ``GroupedBackend.multiple``: of wgrad's; on a GPU at least what its casts align groups to."""
        least = MULTIPLE if self.device.type == "cuda" else 1
        return least if self.wgrad is None else max(least, GROUPED[self.wgrad].multiple)

    @property
    def described(self) -> str:
        """The backend of most GEMMs, and what the others have unless the recipe's name says it; a GPU's slow casts."""
        gemms = self.gemms
        used = [name for name in gemms.values() if name is not None]
        most = max(used, key=used.count) if used else None
        parts = ["high precision" if most is None else most]
        # ``Recipe.with_high_precision`` names them: "tensorwise, dgrad in high precision".
        named = self.recipe.name.partition(", ")[2]
        for name in dict.fromkeys(gemms.values()):
            others = [gemm for gemm, own in gemms.items() if own == name and name != most]
            which = " and ".join(gemm for gemm in others if name is not None or gemm not in named)
            if which:
                parts.append(f"{which} {'in high precision' if name is None else f'by {name}'}")
        specs = (self.recipe.fprop, self.recipe.dgrad, self.recipe.wgrad)
        formats = [format for spec in specs for format in (spec.a, spec.b) if format is not None]
        why_no_kernel = cuda.why_no_kernel_of_groups if self.grouped else support.why_no_kernel
        slow = [f for f in formats if support.why_no_triton(self.device) or why_no_kernel(f)]
        if self.device.type != "cpu" and slow:
            parts.append(f"cast by {REFERENCE}")
        return ", ".join(parts)

    @classmethod
    @functools.cache
    def make(
        cls, recipe: "Recipe", device: torch.device, backend: str = "auto", grouped: bool = False
    ) -> "Plan":
        """Select the backends of the three GEMMs; equal questions get the same plan, so compiled code is shared.

        Args:
            recipe: of the three products.
            device: that they run on.
            backend: "auto", or the name of one; of groups also ``convert_to_float8``'s name of one.
            grouped: see ``Plan``.

        Raises:
            Float8ConfigError: a backend that cannot run the recipe.
        """
        asked = _asked_of_groups(recipe, device, backend) if grouped else backend
        specs = recipe.fprop, recipe.dgrad, recipe.wgrad
        gemms = [select_gemm(spec, device, asked, grouped) for spec in specs]
        found = [GEMM[name] for name in gemms if name is not None] if not grouped else []
        any_layout = not grouped and all(one.takes_any_layout(device) for one in found)
        return cls._of(recipe, *gemms, any_layout, device, backend, grouped)

    def with_recipe(self, recipe: "Recipe") -> "Plan":
        """Return the plan of another recipe for the same products."""
        return Plan.make(recipe, self.device, self.backend, self.grouped)

    def on(self, device: torch.device) -> "Plan":
        """Return the plan of the same products on another device."""
        return Plan.make(self.recipe, device, self.backend, self.grouped)

    @classmethod
    @functools.cache
    def _of(cls, *fields: Any) -> "Plan":
        """Return the plan of these fields, its key excepted, which is made here."""
        told = f"{source_digest()} {fields!r}"
        plan = cls(*(*fields, hashlib.blake2b(told.encode(), digest_size=16).hexdigest()))
        cls.made[plan.key] = plan
        return plan

    def __reduce__(self) -> tuple[Callable[..., "Plan"], tuple[Any, ...]]:
        """Copy to the plan itself; one that is unpickled gets the key of this process's code."""
        return Plan._of, tuple(getattr(self, field.name) for field in fields(self) if field.name != "key")


def _asked_of_groups(recipe: "Recipe", device: torch.device, backend: str) -> str:
    """The backend of groups that ``convert_to_float8``'s name of one is; Float8ConfigError where there is none."""
    asked = ASKED_AS.get(backend, backend) if device.type == "cuda" else backend
    if not grouped_gemm.is_one_by_one(recipe):
        return asked
    if device.type not in ("cpu", "meta") or asked not in ("auto", REFERENCE):
        raise Float8ConfigError(
            f"experts take recipe {recipe.name!r} by backend 'reference' on a CPU alone, not by {backend!r} on "
            f"{device}: {grouped_gemm.ONE_BY_ONE}"
        )
    return REFERENCE
