"""Kernels that read whole tiles of bfloat16 as pairs, interpreted on the CPU, equal the reference bitwise."""

import pytest
import torch

from f8sub.kernels.scales import PriorScale
from f8sub.kernels.triton import support
from tests.data_sets import gaussian, generator
from tests.kernels.interpreted import interpreted, needs_triton
from tests.kernels.quantized import FORMATS, INF, NAN, check, check_priors, usages_of

PAIRED = {
    "1x128": "quantize_paired_vectors",
    "1x128-float": "quantize_paired_vectors",
    "128x128": "quantize_paired_squares",
    "256x256-e5m2": "quantize_paired_squares",
}
"""Formats whose columns kernels of pairs make, and by which."""


def tiles_of_every_kind() -> torch.Tensor:
    """Twelve 128x128 tiles; three 256x256 ones: finite, not finite, finite and beyond 1.75 * 2**127."""
    x = gaussian((256, 768), generator(1))
    x *= torch.exp2(torch.randint(-12, 12, (256, 1), generator=generator(2)).float())
    x[10], x[:, 200], x[129, 57], x[:, 40:42] = 0.0, 0.0, -0.0, -0.0
    x[128:, :128] *= 2.0**-132  # Subnormal.
    x[:128, 128:256] *= 2.0**100
    x[3, 255] = 1.75 * 2.0**127
    x[5, 258], x[100, 301], x[101, 301] = INF, NAN, -INF
    x[:128, 384:512] = NAN
    x[128:, 256:384:3] = INF
    x[128:, 384:512] = -3.3e38
    x[9, 600] = torch.finfo(torch.bfloat16).max
    x[200, 700] = 1.7578125 * 2.0**127
    return x.bfloat16()


@pytest.mark.parametrize("name", PAIRED)
@interpreted
def test_whole_tiles(name, device):
    """Each usage and both, bitwise; by pairs where there are columns."""
    from f8sub.kernels.triton import quantize_launch

    x = tiles_of_every_kind()
    for row, col in usages_of(name):
        check(x, row, col, device=device)
        (launched,) = quantize_launch.quantization(x, row, col).launches
        assert (launched.kernel.fn.__name__ == PAIRED[name]) == (col is not None)


@pytest.mark.long
@pytest.mark.parametrize("name", PAIRED)
@interpreted
def test_what_is_not_paired(name, device):
    """Other dtypes, tiles cut at an edge, and matrices that begin within a word: by other kernels, to the same bits."""
    from f8sub.kernels.triton import quantize_launch

    format, x = FORMATS[name], tiles_of_every_kind().to(device)
    within = x.new_empty(x.numel() + 1)[1:].view(x.shape).copy_(x)
    for other in (x.half(), x.float(), x[:250], x[:, :508].contiguous(), within):
        (launched,) = quantize_launch.quantization(other, format, format).launches
        assert launched.kernel.fn.__name__ not in PAIRED.values()
        check(other.cpu(), format, format, device=device)


@needs_triton
@pytest.mark.parametrize("name", PAIRED)
def test_gpus_that_compare_no_pairs_run_none(monkeypatch, name):
    """Ada, whose ptxas refuses max.s16x2."""
    from f8sub.kernels.triton import quantize_launch

    format, x = FORMATS[name], torch.empty(256, 256, dtype=torch.bfloat16, device="meta")
    for pairs in (True, False):
        monkeypatch.setattr(support, "compares_pairs", lambda device, pairs=pairs: pairs)
        (launched,) = quantize_launch.quantization(x, format, format).launches
        assert (launched.kernel.fn.__name__ == PAIRED[name]) == pairs


@pytest.mark.parametrize(("capability", "found"), [((8, 9), False), ((9, 0), True), ((12, 0), True)])
def test_which_gpus_compare_pairs(monkeypatch, capability, found):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    support.compares_pairs.cache_clear()
    assert support.compares_pairs(torch.device("cuda", 0)) == found
    support.compares_pairs.cache_clear()


@pytest.mark.parametrize(
    ("name", "parts"), [("tensorwise", 1), pytest.param("tensorwise-e5m2", 3, marks=pytest.mark.long)]
)
@interpreted
def test_pasts(name, parts, device):
    """Of finite tiles and of all kinds of them; by pairs where there are columns."""
    from f8sub.kernels.triton import quantize_launch

    x = tiles_of_every_kind()
    check_priors(name, (x[128:, 384:].contiguous(), x[128:, :128].contiguous(), x[:128])[:parts], device)
    for row, col in usages_of(name):
        plan = quantize_launch.quantization(x, row, col, PriorScale(torch.ones(1, 1), 1.0, False))
        assert (plan.launches[-1].kernel.fn.__name__ == "cast_pairs_with_prior") == (col is not None)
