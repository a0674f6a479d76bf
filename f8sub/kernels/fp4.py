"""Four-bit codes (e2m1), which torch stores but does not compute with, and the Hadamard transform of their operands."""

import functools

import torch

from f8sub.formats import E2M1, Rounding
from f8sub.torch_compat import no_dispatch_modes

VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The values that the codes 0 to 7 stand for; bit 3 is the sign. Source: OCP Microscaling Formats (MX) v1.0, 5.3.3."""


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


def rotate(x: torch.Tensor, size: int, *, inverse: bool = False) -> torch.Tensor:
    """Multiply every ``size`` neighbours of a row by a random orthogonal matrix: it spreads outliers over them.

    ``x`` is (rows, K), of any float dtype, K a multiple of ``size``; the result is float32. ``inverse`` undoes it.
    """
    parts = x.float().unflatten(1, (-1, size))
    # A tensor of a subclass, such as a FakeTensor, is multiplied by no plain matrix.
    is_plain = type(parts) is torch.Tensor
    matrix = _hadamard_on(parts.device, size) if is_plain else parts.new_tensor(_hadamard_rows(size))
    rotated: torch.Tensor = parts @ (matrix.t() if inverse else matrix)
    return rotated.flatten(1)


@functools.cache
def _hadamard_on(device: torch.device, size: int) -> torch.Tensor:
    # Kept, because a copy from the host waits for the stream; made outside of all modes, which it outlives.
    with torch.inference_mode(mode=False), no_dispatch_modes():
        return torch.tensor(_hadamard_rows(size), dtype=torch.float32, device=device)


@functools.cache
def _hadamard_rows(size: int) -> list[list[float]]:
    """A Hadamard matrix with random signs, the same in every process: both operands of a GEMM need one matrix."""
    with no_dispatch_modes():
        matrix = torch.ones(1, 1, dtype=torch.float32, device="cpu")
        while matrix.shape[0] < size:
            matrix = torch.cat([torch.cat([matrix, matrix], 1), torch.cat([matrix, -matrix], 1)])
        generator = torch.Generator("cpu").manual_seed(size)
        drawn = torch.randint(0, 2, (size, 1), generator=generator, dtype=torch.int64, device="cpu")
        transform: torch.Tensor = (drawn * 2 - 1) * matrix / size**0.5
        return transform.tolist()
