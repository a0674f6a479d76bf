"""Kernels of quotients alone. Imported where Triton is to compile or to interpret them, which it decides once."""

import torch
import triton
import triton.language as tl

from f8sub.kernels.triton.tile_ops import Cast, inverse, scale_from_amax


@triton.jit
def store_scales(amax_ptr, scale_ptr, CAST: tl.constexpr, SIZE: tl.constexpr):
    """``scale_from_amax`` of float32 elements, and not of powers of two."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(scale_ptr + at, scale_from_amax(tl.load(amax_ptr + at), CAST))


@triton.jit
def store_inverses(scale_ptr, inverse_ptr, SIZE: tl.constexpr):
    """``inverse`` of float32 elements, and not of powers of two."""
    at = tl.program_id(0) * SIZE + tl.arange(0, SIZE)
    tl.store(inverse_ptr + at, inverse(tl.load(scale_ptr + at), False))


def scales(amax: torch.Tensor, top: float, at_once: int = 1 << 20) -> torch.Tensor:
    """Of amaxes for a format whose largest code is ``top``, a multiple of ``at_once`` unless less."""
    made, size = torch.empty_like(amax), min(at_once, amax.numel())
    store_scales[(amax.numel() // size,)](amax, made, Cast(top, tl.float8e5, False), size)
    return made


def inverses(scale: torch.Tensor, at_once: int = 1 << 20) -> torch.Tensor:
    """Of scales, a multiple of ``at_once`` unless less."""
    made, size = torch.empty_like(scale), min(at_once, scale.numel())
    store_inverses[(scale.numel() // size,)](scale, made, size)
    return made
