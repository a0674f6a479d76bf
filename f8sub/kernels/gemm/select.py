"""Selects the kernel for each GEMM: once, at conversion, shown in ``repr``, never replaced."""

import functools
import itertools
from collections.abc import Callable
from dataclasses import dataclass, fields
from typing import Any, ClassVar

import torch

from f8sub.errors import Float8ConfigError, unknown
from f8sub.formats import Float8Format, Operand
from f8sub.kernels import ops, reference
from f8sub.kernels.gemm import blockwise, scaled_mm
from f8sub.kernels.triton import support
from f8sub.recipe import GemmSpec, Recipe
from f8sub.torch_compat import autocast_dtype

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
    "measured": Backend(blockwise.why_not_measured, blockwise.measured_gemm_nt),
    # On the CPU it multiplies float32 matrices.
    SCALED_MM: Backend(
        scaled_mm.why_not, scaled_mm.gemm_nt, lambda device: device.type == "cpu", scaled_mm.is_traceable
    ),
    "triton": Backend(blockwise.why_not, blockwise.gemm_nt),
    # It multiplies everything; ``torch.compile`` would unroll its partial sums.
    REFERENCE: Backend(lambda a, b, device: None, reference.gemm_nt, takes_any_layout=lambda device: True),
}
"""Backends by name, the preferred one first: what was measured on this GPU; without that cuBLASLt, then our own."""

_ONE_NODE = {name: ops.gemm_as_one_node(name, one.gemm_nt) for name, one in GEMM.items()}
"""The same GEMMs behind operators, for what ``torch.compile`` may not look into."""


def select_gemm(spec: GemmSpec, device: torch.device, backend: str = "auto") -> str | None:
    """Return the name of the backend that runs ``spec`` on ``device``; None when the GEMM stays in high precision.

    No such backend, or none that can, is a ``Float8ConfigError``, which carries every candidate's reason.
    """
    if backend != "auto" and backend not in GEMM:
        raise unknown("backend", backend, ["auto", *GEMM])
    # A GEMM with one operand in high precision has both in high precision.
    if spec.a is None or spec.b is None:
        return None
    reasons = {}
    # In order of preference: the first that can is taken. A backend asked for by name is never replaced.
    for name in GEMM if backend == "auto" else [backend]:
        reason = GEMM[name].why_not(spec.a, spec.b, device)
        if reason is None:
            return name
        reasons[name] = reason
    listed = "; ".join(f"{name} {reason}" for name, reason in reasons.items())
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


plan_numbers = itertools.count()


@dataclass(frozen=True, slots=True)
class Plan:
    """A recipe bound to a device: the backend of each GEMM, None where it stays in high precision.

    A frozen value, so ``torch.compile`` takes it for a constant; ``key`` is its own in ``made``: no int, which dynamo
    takes for a dynamic one where plans differ. ``any_layout`` says whether all GEMMs read transposed views, so that no
    codes are ever copied transposed; ``backend`` is what was asked for, see ``select_gemm``.
    """

    made: ClassVar[dict[str, Any]] = {}
    """By key: these, and the plans of other products, which have recipe, device, backend, key and ``make`` as well."""

    recipe: Recipe
    fprop: str | None
    dgrad: str | None
    wgrad: str | None
    any_layout: bool
    device: torch.device
    backend: str
    key: str

    @property
    def gemms(self) -> dict[str, str | None]:
        """The backend of each GEMM by its name."""
        return {"fprop": self.fprop, "dgrad": self.dgrad, "wgrad": self.wgrad}

    @property
    def described(self) -> str:
        """The backend of most GEMMs, and what the others have; on a GPU also a slow cast."""
        gemms = self.gemms
        used = [name for name in gemms.values() if name is not None]
        most = max(used, key=used.count) if used else None
        parts = ["high precision" if most is None else most]
        for name in dict.fromkeys(gemms.values()):
            if name != most:
                which = " and ".join(gemm for gemm, own in gemms.items() if own == name)
                parts.append(f"{which} {'in high precision' if name is None else f'by {name}'}")
        specs = (self.recipe.fprop, self.recipe.dgrad, self.recipe.wgrad)
        formats = [format for spec in specs for format in (spec.a, spec.b) if format is not None]
        slow = [f for f in formats if support.why_no_triton(self.device) or support.why_no_kernel(f)]
        if self.device.type != "cpu" and slow:
            parts.append(f"cast by {REFERENCE}")
        return ", ".join(parts)

    @classmethod
    @functools.cache
    def make(cls, recipe: Recipe, device: torch.device, backend: str = "auto") -> "Plan":
        """Select the backends of the three GEMMs; equal questions get the same plan, so compiled code is shared."""
        gemms = [select_gemm(spec, device, backend) for spec in (recipe.fprop, recipe.dgrad, recipe.wgrad)]
        any_layout = all(GEMM[name].takes_any_layout(device) for name in gemms if name is not None)
        return cls._of(recipe, *gemms, any_layout, device, backend)

    @classmethod
    @functools.cache
    def _of(cls, *fields: Any) -> "Plan":
        """Return the plan of these fields, its key excepted, which is given here."""
        # Numbered: two plans that are equal in another process have keys of their own there.
        plan = cls(*(*fields, str(next(plan_numbers))))
        cls.made[plan.key] = plan
        return plan

    def __reduce__(self) -> tuple[Callable[..., "Plan"], tuple[Any, ...]]:
        """Copy to the plan itself; one that is unpickled, maybe on another device, gets a key of this process."""
        return Plan._of, tuple(getattr(self, field.name) for field in fields(self) if field.name != "key")
