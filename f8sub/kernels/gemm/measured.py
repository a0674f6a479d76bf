"""For each shape the faster one of ``scaled_mm`` and ``triton_mm``, as it was measured.

It runs where this GPU was measured and ``triton_mm`` won at some shape; ``scripts/tune_gemm.py`` measures.
"""

import functools

import torch

from f8sub.formats import Float8Format, Operand
from f8sub.kernels.gemm import blockwise, scaled_mm, tuning


def why_not(a: Float8Format, b: Float8Format, device: torch.device) -> str | None:
    """See ``select.Backend``."""
    for name, reason in (
        ("triton", blockwise.why_not(a, b, device)),
        ("scaled_mm", scaled_mm.why_not(a, b, device)),
    ):
        if reason is not None:
            return f"has to have both others, and {name} {reason}"
    gpu = torch.cuda.get_device_name(device)
    found = tuning.of(gpu, a, b)
    if not found:
        return f"has no measurement of {a} by {b} on {gpu}; scripts/tune_gemm.py makes them"
    if all(measured.winner == "scaled_mm" for measured in found):
        return f"is not needed: scaled_mm was faster at every shape ({'; '.join(map(str, found))})"
    return None


def gemm_nt(a: Operand, b: Operand, out_dtype: torch.dtype, fast_accum: bool) -> torch.Tensor:
    """See ``select.Backend``."""
    shape = (*a.data.shape, b.data.shape[0])
    if _winner(a.format, b.format, a.data.device, shape) == "triton":
        return blockwise.gemm_nt(a, b, out_dtype, fast_accum)
    return scaled_mm.gemm_nt(a, b, out_dtype, fast_accum)


@functools.lru_cache(maxsize=4096)
def _winner(
    a: Float8Format, b: Float8Format, device: torch.device, shape: tuple[int, int, int]
) -> str | None:
    found = tuning.nearest(torch.cuda.get_device_name(device), a, b, shape)
    return None if found is None else found.winner
