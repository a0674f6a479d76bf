"""Four-bit codes (e2m1), which torch stores but does not compute with."""

from collections.abc import Callable

import torch

from f8sub.formats import E2M1, Rounding

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the codes 0 to 7 stand for; bit 3 is the sign. Source: OCP Microscaling Formats (MX) v1.0, 5.3.3."""


rotate: Callable[..., torch.Tensor]
"""Multiplies a matrix along its rows by a Hadamard transform of a size, float32; ``inverse=True`` undoes it."""


def cast(scaled: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    """uint8 codes 0 to 15, one an element, of float32 values; magnitudes beyond 6 become 6, NaN becomes 0."""
    scaled = scaled.nan_to_num(0.0)  # the sign of a NaN too is that of whatever made it
    magnitude = scaled.abs().clamp(max=VALUES[-1])
    # The codes are 1/2 apart up to 2, 1 up to 4, 2 beyond; every even step is an even code.
    steps = torch.where(magnitude < 2, 2 * magnitude, torch.where(magnitude < 4, magnitude, magnitude / 2))
    first = torch.where(magnitude < 2, 0, torch.where(magnitude < 4, 2, 4)).to(torch.uint8)
    # Not floor(steps + draw): float32 has no room for the last bits of a draw, and 6 would carry into the sign.
    whole = (
        steps.round()
        if rounding is Rounding.NEAREST
        else steps.floor() + (torch.rand_like(steps) < steps.frac())
    )
    return (whole.to(torch.uint8) + first).bitwise_or(scaled.signbit().to(torch.uint8) << 3)


def values(codes: torch.Tensor) -> torch.Tensor:
    """float32 values of uint8 codes 0 to 15."""
    # An e2m1 is a float16 with fewer digits, of another exponent: 2 ** -14 times the value.
    halves = ((codes & 7).to(torch.int16) << 9) | ((codes & 8).to(torch.int16) << 12)
    return halves.view(torch.float16).float() * 2.0**14


def pack(codes: torch.Tensor) -> torch.Tensor:
    """(rows, K) codes 0 to 15 -> (rows, K / 2) ``float4_e2m1fn_x2``, the first of two in the low half; K even."""
    first, second = codes.unflatten(1, (-1, 2)).unbind(-1)
    packed: torch.Tensor = first | second << 4
    return packed.contiguous().view(E2M1)


def unpack(data: torch.Tensor) -> torch.Tensor:
    """(rows, K / 2) ``float4_e2m1fn_x2`` -> (rows, K) uint8."""
    both = data.view(torch.uint8)
    return torch.stack((both & 0xF, both >> 4), dim=-1).flatten(1)
