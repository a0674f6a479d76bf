"""Kernels that read whole tiles of bfloat16 as pairs, interpreted on the CPU, equal the reference bitwise."""

import pytest
import torch

from f8sub.kernels import reference
from f8sub.kernels.scales import PriorScale
from f8sub.kernels.triton import quantize_cuda, support
from tests.cuda.products import assert_same_bits
from tests.data_sets import gaussian, generator
from tests.kernels.interpreted import interpreter, needs_triton  # noqa: F401
from tests.kernels.quantized import FORMATS

NAN, INF = float("nan"), float("inf")
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


def check_tiles(name: str, device: str = "cpu") -> None:
    """Each usage and both, bitwise; by pairs where there are columns."""
    from f8sub.kernels.triton import launch

    format, x = FORMATS[name], tiles_of_every_kind()
    for row, col in ((format, format), (format, None), (None, format)):
        for ours, right in zip(
            quantize_cuda.quantize(x.to(device), row, col), reference.quantize(x, row, col), strict=True
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
        found = quantize_cuda.quantize(other, format, format)
        for ours, right in zip(found, reference.quantize(other.cpu(), format, format), strict=True):
            assert_same_bits(ours, right)


@needs_triton
@pytest.mark.long
@pytest.mark.parametrize("name", PAIRED)
def test_what_is_not_paired(interpreter, name):  # noqa: F811
    interpreter(check_what_is_not_paired, name)


@needs_triton
@pytest.mark.parametrize("name", PAIRED)
def test_gpus_that_compare_no_pairs_run_none(monkeypatch, name):
    """Ada, whose ptxas refuses max.s16x2."""
    from f8sub.kernels.triton import launch

    format, x = FORMATS[name], torch.empty(256, 256, dtype=torch.bfloat16, device="meta")
    for pairs in (True, False):
        monkeypatch.setattr(support, "compares_pairs", lambda device, pairs=pairs: pairs)
        (launched,) = launch.quantization(x, format, format).launches
        assert (launched.kernel.fn.__name__ == PAIRED[name]) == pairs


@pytest.mark.parametrize(("capability", "found"), [((8, 9), False), ((9, 0), True), ((12, 0), True)])
def test_which_gpus_compare_pairs(monkeypatch, capability, found):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    support.compares_pairs.cache_clear()
    assert support.compares_pairs(torch.device("cuda", 0)) == found
    support.compares_pairs.cache_clear()


def check_pasts(name: str, device: str = "cpu", parts: int = 3) -> None:
    """Scales of no past, covering and known, that saturate and do not; of finite tiles and of all kinds of them."""
    from f8sub.kernels.triton import launch

    format, x = FORMATS[name], tiles_of_every_kind()
    for part in (x[128:, 384:].contiguous(), x[128:, :128].contiguous(), x[:128])[:parts]:
        for scale in (0.0, 1.37, 3.7e3, 2.0**-120):
            for covers, known in ((False, False), (True, False), (False, scale != 0), (True, scale != 0)):
                past = PriorScale(torch.full((1, 1), scale), 1.0, covers, known)
                on_device = past._replace(scale=past.scale.to(device))
                for row, col in ((format, format), (None, format), (format, None)):
                    expected = reference.quantize(part, row, col, prior=past)
                    found = quantize_cuda.quantize(part.to(device), row, col, prior=on_device)
                    assert_same_bits(found[0], expected[0])
                    assert_same_bits(found[1], expected[1])
                    torch.testing.assert_close(found[2].cpu(), expected[2], rtol=0, atol=0, equal_nan=True)
                    plan = launch.quantization(part, row, col, past)
                    is_paired = plan.launches[-1].kernel.fn.__name__ == "cast_pairs_with_prior"
                    assert is_paired == (col is not None)


@needs_triton
def test_pasts(interpreter):  # noqa: F811
    interpreter(check_pasts, "tensorwise", "cpu", 1)


@needs_triton
@pytest.mark.long
def test_pasts_of_every_kind_of_tile(interpreter):  # noqa: F811
    interpreter(check_pasts, "tensorwise-e5m2")
