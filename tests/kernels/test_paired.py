"""Kernels that read whole tiles of bfloat16 as pairs, interpreted on the CPU, equal the reference bitwise."""

import pytest
import torch

from f8sub.kernels import fused, reference
from tests.cuda.products import assert_same_bits
from tests.data_sets import gaussian, generator
from tests.kernels.interpreted import interpreter, needs_triton  # noqa: F401
from tests.kernels.test_fused import FORMATS

NAN, INF = float("nan"), float("inf")
PAIRED = {"1x128": "quantize_paired_vectors"}
"""Formats whose columns kernels of pairs make, and by which."""


def tiles_of_every_kind() -> torch.Tensor:
    """Twelve 128x128 tiles, three 256x256 ones of which the first is finite and needs no clamp."""
    x = gaussian((256, 768), generator(1))
    x *= torch.exp2(torch.randint(-12, 12, (256, 1), generator=generator(2)).float())
    x[10], x[:, 200], x[129, 57], x[:, 40:42] = 0.0, 0.0, -0.0, -0.0
    x[128:, :128] *= 2.0**-132  # Subnormal.
    x[:128, 128:256] *= 2.0**100
    x[3, 255] = 1.75 * 2.0**127  # The largest that needs no clamp.
    x[5, 258], x[100, 301], x[101, 301] = INF, NAN, -INF
    x[128:, 384:512] = -3.3e38
    x[9, 400] = torch.finfo(torch.bfloat16).max
    x[:128, 512:640] = NAN
    x[128:, 512:640:3] = INF
    x[200, 700] = 1.765625 * 2.0**127  # The smallest that needs a clamp, 1.75's neighbour in bfloat16.
    return x.bfloat16()


def check_tiles(name: str, device: str = "cpu") -> None:
    """Each usage and both, bitwise; by pairs where there are columns."""
    from f8sub.kernels.triton import launch

    format, x = FORMATS[name], tiles_of_every_kind()
    for row, col in ((format, format), (format, None), (None, format)):
        for ours, right in zip(
            fused.quantize(x.to(device), row, col), reference.quantize(x, row, col), strict=True
        ):
            assert (ours is None) == (right is None)
            assert_same_bits(ours, right)
        (launched,) = launch.quantization(x, row, col).launches
        assert (launched.kernel.fn.__name__ == PAIRED[name]) == (col is not None)


@needs_triton
@pytest.mark.parametrize("name", PAIRED)
def test_whole_tiles(interpreter, name):  # noqa: F811
    interpreter(check_tiles, name)


def check_what_is_not_paired(name: str, device: str = "cpu") -> None:
    """Other dtypes, tiles cut at an edge, and matrices that begin within a word: by other kernels, to the same bits."""
    from f8sub.kernels.triton import launch

    format, x = FORMATS[name], tiles_of_every_kind().to(device)
    within = x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
    for other in (x.half(), x.float(), x[:250], x[:, :508].contiguous(), within):
        (launched,) = launch.quantization(other, format, format).launches
        assert launched.kernel.fn.__name__ not in PAIRED.values()
        found = fused.quantize(other, format, format)
        for ours, right in zip(found, reference.quantize(other.cpu(), format, format), strict=True):
            assert_same_bits(ours, right)


@needs_triton
@pytest.mark.parametrize("name", PAIRED)
def test_what_is_not_paired(interpreter, name):  # noqa: F811
    interpreter(check_what_is_not_paired, name)
