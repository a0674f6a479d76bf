"""A gradient as blocks of e4m3 codes with an exponent each, in plain PyTorch: the specification of the kernels.

[Note] A block is 128 elements of one gradient that go to one rank. Its exponent is that of the smallest power of two
with which the largest finite element is at most 416, so scaling is exact and a code is rounded once. e4m3 is chosen
for its range: Adam divides each element by its own size, and integers or e3m4 lose most of the small ones. Two codes
are taken from the largest numbers: 0x7E is infinity and 0x7F is NaN. So both arrive at exactly their elements and
their neighbours keep their bits. Finite values above 3.2e38 become 3.2e38, the largest code that float32 holds, and
so stay finite.
"""

import torch
import torch.nn.functional as F

from f8sub.gradients.layout import BLOCK

INFINITY, NAN = 0x7E, 0x7F
TOP_EXPONENT, TOP_MANTISSA = 8, 0x500000
"""416 = 1.625 * 2**8, the largest code below those of infinity and NaN."""

LARGEST = 1.875 * 2.0**127
"""The largest float32 number with e4m3's digits. Those that are nearer to 2**128 would be decoded to infinity."""


def encode(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and exponents, uint8, (rows, size) and (rows, ceil(size / 128)), of float32, (rows, size)."""
    size = x.shape[-1]
    finite = torch.where(x.isfinite(), x.clamp(-LARGEST, LARGEST), 0.0)
    blocks = F.pad(finite, (0, -size % BLOCK)).unflatten(-1, (-1, BLOCK))
    largest = blocks.abs().amax(-1).view(torch.int32)
    exponent = (largest >> 23) - TOP_EXPONENT + ((largest & 0x7FFFFF) > TOP_MANTISSA).to(torch.int32)
    exponent = exponent.clamp(1, 254)  # of finite float32, biased by 127
    scaled = blocks * _power_of_2(254 - exponent)[..., None]
    codes = scaled.to(torch.float8_e4m3fn).view(torch.uint8).flatten(-2)[..., :size]
    codes = torch.where(x.isinf(), (x.signbit().to(torch.uint8) << 7) | INFINITY, codes)
    return torch.where(x.isnan(), NAN, codes), exponent.to(torch.uint8)


def decode(codes: torch.Tensor, exponents: torch.Tensor) -> torch.Tensor:
    """float32, (rows, size), of what ``encode`` made."""
    size = codes.shape[-1]
    values = codes.view(torch.float8_e4m3fn).float()
    values = torch.where(codes & 0x7F == INFINITY, values * torch.inf, values)
    blocks: torch.Tensor = F.pad(values, (0, -size % BLOCK)).unflatten(-1, (-1, BLOCK))
    return (blocks * _power_of_2(exponents.to(torch.int32))[..., None]).flatten(-2)[..., :size]


def _power_of_2(biased: torch.Tensor) -> torch.Tensor:
    return (biased * 2**23).view(torch.float32)
