"""Runs each product and each cast of a recipe once on a small layer, and compares them with the reference.

Codes and scales are compared bitwise with the reference's. A product is compared with the float64 product of the same
operands, within what its accumulator and the rounding of its result may lose: that is the bound.
"""

import itertools
import math
from dataclasses import dataclass

import torch

from f8sub.errors import Float8ConfigError
from f8sub.formats import Operand
from f8sub.kernels import reference
from f8sub.kernels.cuda import derive_columnwise
from f8sub.kernels.gemm.select import GEMM, REFERENCE, Plan, gemm_nt
from f8sub.kernels.quantize import quantize
from f8sub.kernels.reference import Quantized
from f8sub.kernels.scales import CURRENT, GivenScale, PriorScale, ScaleSource, amax, scale_from_amax
from f8sub.kernels.triton import support
from f8sub.recipe import GemmSpec, Recipe

TOKENS, OUT, IN = 256, 384, 512
"""Sizes of the layer: several blocks of 128 each, and no square."""

STEP, UNIT, PROMOTED = 32, 2.0**-12, 128
"""Products that an instruction of Hopper's tensor cores adds, what each may lose as a share of the largest, and after
how many float32 takes the sum. Source: arXiv 2412.19437, section 3.3.2, as ``scripts/tune_gemm.py``."""


@dataclass(frozen=True, slots=True)
class Product:
    """Holds the outcome of one of a recipe's products.

    Attributes:
        gemm: "fprop", "dgrad" or "wgrad".
        backend: what multiplies; None where it stays in high precision.
        error: the largest error in units of the bound; None where nothing was run.
        problem: what went wrong when it was run.
        reasons: why each preferred backend was not taken, by its name.
    """

    gemm: str
    backend: str | None
    error: float | None
    problem: str | None
    reasons: dict[str, str]

    @property
    def is_right(self) -> bool:
        """True if nothing was run, or the error is within the bound."""
        return self.problem is None and (self.error is None or self.error <= 1)


@dataclass(frozen=True, slots=True)
class Cast:
    """Holds the outcome of the casts of one operand.

    Attributes:
        operand: "x", "w" or "dy".
        by: "ours" for a kernel of f8sub's, or "reference".
        is_right: whether codes and scales equal the reference's, bitwise.
        problem: what went wrong when it was run.
    """

    operand: str
    by: str
    is_right: bool
    problem: str | None


@dataclass(frozen=True, slots=True)
class Proof:
    """Holds the outcome of a recipe on a device.

    Attributes:
        recipe: its name.
        device: type of the device.
        products: the outcomes of fprop, dgrad and wgrad.
        casts: the outcomes of the operands that are cast.
    """

    recipe: str
    device: str
    products: tuple[Product, ...]
    casts: tuple[Cast, ...]

    @property
    def is_right(self) -> bool:
        """True if all of it ran and gave what it must."""
        return all(p.is_right for p in self.products) and all(cast.is_right for cast in self.casts)

    @property
    def is_native(self) -> bool:
        """True if it gains speed: on an accelerator, with no product by the reference, and all of it right."""
        backends = {product.backend for product in self.products}
        return self.device != "cpu" and REFERENCE not in backends and self.is_right

    @property
    def verdict(self) -> str:
        """The outcome in one word or two."""
        if not self.is_right:
            return "failed"
        if self.device == "cpu":
            return "no speed"
        return "native" if self.is_native else "slow"


def prove(recipe: Recipe, device: torch.device) -> Proof:
    """Run and compare all of a recipe on a device; what fails there is a part of the result."""
    plan = Plan.make(recipe, device)
    rng = torch.Generator().manual_seed(0)
    shapes = {"x": (TOKENS, IN), "w": (OUT, IN), "dy": (TOKENS, OUT)}
    operands: dict[str, Quantized] = {}
    casts = []
    for name, shape in shapes.items():
        # Drawn on the CPU: the same values for every device.
        values = torch.randn(shape, generator=rng, dtype=torch.float32, device="cpu").to(
            device, torch.bfloat16
        )
        cast, operands[name] = _cast(plan, name, values)
        if cast is not None:
            casts.append(cast)
    pairs = {
        "fprop": (operands["x"].rowwise, operands["w"].rowwise),  # y [M, N] = x @ w.t()
        "dgrad": (operands["dy"].rowwise, operands["w"].columnwise),  # dx [M, K] = dy @ w
        "wgrad": (operands["dy"].columnwise, operands["x"].columnwise),  # dw [N, K] = dy.t() @ x
    }
    products = tuple(_product(plan, gemm, *pair) for gemm, pair in pairs.items())
    return Proof(recipe.name, device.type, products, tuple(casts))


def _cast(plan: Plan, name: str, values: torch.Tensor) -> tuple[Cast | None, Quantized]:
    """Return the comparison, None if nothing is cast, and the reference's operands, which products read."""
    row, col = plan.recipe.formats(name)  # type: ignore[arg-type]
    formats = [format for format in (row, col) if format is not None]
    if not formats:
        return None, Quantized(None, None, None)
    source: ScaleSource = CURRENT
    if plan.recipe.delayed is not None:
        # A delayed recipe casts with a scale that is known: here the one of these values.
        scale = scale_from_amax(amax(values, formats[0].tile), formats[0])
        source = GivenScale(PriorScale(scale, 0.0, covers=False, is_known=True))
    # The columnwise operand of a weight is computed from the rowwise one.
    is_derived = name == "w" and row is not None and col is not None
    if values.is_cpu:
        slow = [format for format in formats if not (format.is_plain and format.tile.is_whole)]
    else:
        slow = [f for f in formats if support.why_no_triton(values.device) or support.why_no_kernel(f)]
    shown = REFERENCE if slow else "ours"
    right = reference.quantize(
        values, row, None if is_derived else col, plan.any_layout, source.prior(), source.reduce
    )
    if is_derived and right.rowwise is not None and col is not None:
        derived = reference.derive_columnwise(right.rowwise, col, plan.any_layout)
        right = right._replace(columnwise=derived)
    try:
        made = quantize(values, row, None if is_derived else col, source, plan.any_layout)
        if is_derived and made.rowwise is not None and col is not None:
            made = made._replace(columnwise=derive_columnwise(made.rowwise, col))
        same = _same(made.rowwise, right.rowwise) and _same(made.columnwise, right.columnwise)
        return Cast(name, shown, same, None if same else "other codes or scales than the reference's"), right
    except Exception as error:  # whatever a device or compiler raises is what the doctor is asked about
        return Cast(name, shown, False, _first_line(error)), right


def _same(one: Operand | None, other: Operand | None) -> bool:
    if one is None or other is None:
        return one is other
    return all(
        a.shape == b.shape and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
        for a, b in zip(one.tensors, other.tensors, strict=True)
    )


def _product(plan: Plan, gemm: str, a: Operand | None, b: Operand | None) -> Product:
    spec: GemmSpec = getattr(plan.recipe, gemm)
    backend = plan.gemms[gemm]
    if backend is None or a is None or b is None or spec.a is None or spec.b is None:
        return Product(gemm, None, None, None, {})
    reasons = why_not(plan, gemm)
    try:
        if backend != REFERENCE and not plan.any_layout:
            # The GEMMs of this device take no transposed views.
            a, b = (each._replace(data=each.data.contiguous()) for each in (a, b))
        found = gemm_nt(backend, a, b, torch.bfloat16, spec.fast_accum)
        by_tensor_cores = plan.device.type != "cpu" and backend != REFERENCE
        # With fast accumulation no partial sum becomes float32 before the end.
        promoted = (IN if spec.fast_accum else PROMOTED) if by_tensor_cores else None
        error = error_in_bounds(found, a, b, promoted)
        if error == math.inf:
            return Product(gemm, backend, None, "its result has NaN or infinity", reasons)
        return Product(gemm, backend, error, None, reasons)
    except Exception as error:  # as above
        return Product(gemm, backend, None, _first_line(error), reasons)


def why_not(plan: Plan, gemm: str) -> dict[str, str]:
    """Return why each backend that is preferred to the plan's does not multiply, by its name."""
    spec: GemmSpec = getattr(plan.recipe, gemm)
    if spec.a is None or spec.b is None:
        return {}
    preferred = itertools.takewhile(lambda name: name != plan.gemms[gemm], GEMM)
    return {name: GEMM[name].why_not(spec.a, spec.b, plan.device) or "" for name in preferred}


def error_in_bounds(found: torch.Tensor, a: Operand, b: Operand, promoted: int | None) -> float:
    """Return the largest error of ``found``, which should be ``a @ b.t()``, in units of the bound; inf for NaN.

    Args:
        found: (M, N), any dtype.
        a: (M, K).
        b: (N, K).
        promoted: elements of K that stay in a tensor core's accumulator; None where every sum is in float32.
    """
    left, right = (reference.dequantize(each, torch.float64) for each in (a, b))
    exact, depth = left @ right.t(), left.shape[1]
    # sums in float32, which has 2**-23 between 1 and the next number
    sums = (depth + 4) * 2.0**-23 * (left.abs() @ right.abs().t())
    for start in range(0, depth if promoted is not None else 0, STEP):
        if promoted is not None and start % promoted == 0:
            # float32 took the partial sum, and the accumulator is 0 again.
            accumulator = torch.zeros_like(exact)
        parts = left[:, start : start + STEP], right[:, start : start + STEP]
        largest = torch.maximum(
            parts[0].abs().amax(1)[:, None] * parts[1].abs().amax(1)[None], accumulator.abs()
        )
        accumulator = accumulator + parts[0] @ parts[1].t()
        sums = sums + (STEP + 1) * UNIT * torch.maximum(largest, accumulator.abs())
    # The rounding of the result may lose half of the distance between two numbers of its dtype.
    bound = sums + torch.finfo(found.dtype).eps / 2 * (exact.abs() + sums) + torch.finfo(found.dtype).tiny
    ratio = (found.to(torch.float64) - exact).abs() / bound
    return float(ratio.max()) if bool(ratio.isfinite().all()) else math.inf


def _first_line(error: Exception) -> str:
    if isinstance(error, Float8ConfigError):
        return str(error)
    return f"{type(error).__name__}: {str(error).strip().splitlines()[0] if str(error).strip() else ''}"
