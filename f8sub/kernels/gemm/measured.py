"""The backend "measured": for each shape the kernel that was the fastest one on this GPU, of those that take it.

Beside ``scaled_mm`` stands what may be faster: our own GEMM of scales of blocks, and for two operands with one scale
each torch's kernel of scales by row, which is given that scale once for every row. The backend runs where this GPU was
measured and ``scaled_mm`` lost at some shape; ``scripts/tune_gemm.py`` measures.
"""

import functools
from typing import TYPE_CHECKING

import torch

from f8sub.kernels.gemm import blockwise, scaled_mm, tuning

if TYPE_CHECKING:
    from f8sub.formats import Float8Format, Operand

KERNELS = {"scaled_mm": scaled_mm.gemm_nt, "by_row": scaled_mm.gemm_nt_by_row, "triton": blockwise.gemm_nt}
"""By the names that measurements have for them: ``a @ b.t()``, see ``select.Backend.gemm_nt``."""


FARTHEST = 3
"""Doublings of M, K and N, in all, up to which a measurement stands for another shape of whole tensors."""


def rival(a: "Float8Format", b: "Float8Format") -> str:
    """Return the kernel that two formats are measured with beside ``scaled_mm``."""
    return "by_row" if a.tile.is_whole and b.tile.is_whole else "triton"


def why_not(a: "Float8Format", b: "Float8Format", device: torch.device) -> str | None:
    """Return why it cannot run, see ``select.Backend``."""
    other = rival(a, b)
    reasons = {
        other: scaled_mm.why_not_by_row(device) if other == "by_row" else blockwise.why_not(a, b, device),
        "scaled_mm": scaled_mm.why_not(a, b, device),
    }
    for name, reason in reasons.items():
        if reason is not None:
            return f"has to have both others, and {name} {reason}"
    gpu = torch.cuda.get_device_name(device)
    found = tuning.of(gpu, a, b)
    if not found:
        return f"has no measurement of {a} by {b} on {gpu}; scripts/tune_gemm.py makes them"
    # Then the name would promise a choice that there is none of.
    if all(measured.winner == "scaled_mm" for measured in found):
        return f"is not needed: scaled_mm was faster at every shape ({'; '.join(map(str, found))})"
    return None


def gemm_nt(a: "Operand", b: "Operand", out_dtype: torch.dtype, fast_accum: bool) -> torch.Tensor:
    """Compute y [M, N] = a [M, K] @ b [N, K].t() by the kernel that was faster at the nearest measured shape."""
    shape = (*a.data.shape, b.data.shape[0])
    return KERNELS[winner(a.format, b.format, a.data.device, shape, fast_accum)](a, b, out_dtype, fast_accum)


def is_traceable(a: "Operand", b: "Operand") -> bool:
    """Return whether ``torch.compile`` may look into this GEMM: where it knows the shape, and so the kernel."""
    is_static = all(type(size) is int for size in (*a.data.shape, b.data.shape[0]))
    return is_static and rival(a.format, b.format) == "by_row"


@functools.lru_cache(maxsize=4096)
def winner(
    a: "Float8Format", b: "Float8Format", device: torch.device, shape: tuple[int, int, int], fast_accum: bool
) -> str:
    """Return the name of the kernel for a shape (M, K, N): ``scaled_mm`` where nothing was measured of its class.

    And where whole tensors have a shape that is far from all that was measured: repeating scales, which takes the same
    time for small products as for large ones, may cost more than the kernel gains.
    """
    found = tuning.nearest(torch.cuda.get_device_name(device), a, b, shape, fast_accum)
    if found is None or (found.winner == "by_row" and tuning.distance(found.shape, shape) > FARTHEST):
        return "scaled_mm"
    return found.winner
