"""SwiGLU's kernels on a GPU: bitwise torch's own operators there and the casts, and what a fused feed-forward runs."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import f8sub
from f8sub.kernels import fused, producers
from f8sub.kernels.delayed import PastScale
from f8sub.kernels.producers import Wanted
from tests.cuda.products import assert_same_bits
from tests.cuda.test_fused import runs  # noqa: F401
from tests.kernels.interpreted import needs_triton
from tests.kernels.test_paired import tiles_of_every_kind
from tests.kernels.test_producers import KINDS, PAIRED, inputs
from tests.test_feed_forward import FeedForward, results

SHAPES = [(48, 160), (256, 512), (272, 400), (130, 144), (129, 130), (1, 300), (300, 1), (2048, 1536)]
pytestmark = needs_triton


def check(given: tuple, name: str, pasts: tuple[PastScale, ...] | None = None) -> None:
    """Kernels next to torch's operators and the casts' kernels, all on the GPU."""
    h_format, format = KINDS[name]
    dh, gate, up = (tensor.cuda() for tensor in given)
    leaves = [tensor.clone().requires_grad_() for tensor in (gate, up)]
    h = F.silu(leaves[0]) * leaves[1]
    expected = [h.detach(), *torch.autograd.grad(h, leaves, dh)]
    h_past, *of_gradients = pasts or (None, None, None)
    made = producers.quantize_swiglu(gate, up, h_format, h_past)
    wanted = Wanted(
        (format, format), (format, format), h_format, None if pasts is None else tuple(of_gradients)
    )
    assert producers.why_no_kernel(wanted, made.scale) is None
    found = producers.quantize_swiglu_backward(dh, gate, up, wanted, made.scale)
    pairs = [(made.row, found.h_col), found.dgate[:2], found.dup[:2]]
    for ours, matrix, kind, past in zip(
        pairs, expected, (h_format, format, format), (h_past, *of_gradients), strict=True
    ):
        right = (
            fused.quantize(matrix, kind, kind)
            if past is None
            else fused.quantize_delayed(matrix, past, kind, kind)[:2]
        )
        for operand, other in zip(ours, right, strict=True):
            assert_same_bits(operand, other)


@pytest.mark.parametrize("dtype", producers.HALF, ids=str)
@pytest.mark.parametrize("name", KINDS)
def test_every_shape_is_bitwise_torchs(name, dtype, runs):  # noqa: F811
    for shape in SHAPES:
        check(inputs("gaussian", shape, dtype), name)
        check(inputs("lognormal", shape, dtype), name)
    assert {kernel for kernel in runs if "swiglu" in kernel}


@pytest.mark.parametrize("name", PAIRED)
def test_whole_tiles_of_every_kind(name):
    """NaN, infinity and what needs a clamp, as one of dh, gate and up and as all of them, by kernels of pairs."""
    kinds = tiles_of_every_kind()
    finite = inputs("gaussian", tuple(kinds.shape))
    for index in range(3):
        check(tuple(kinds if index == at else tensor for at, tensor in enumerate(finite)), name)
    check((kinds, kinds, kinds), name)


def test_every_gate_is_bitwise_torchs():
    """All bfloat16 and all float16, NaN and infinity too."""
    for dtype in producers.HALF:
        bits = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype).view(256, 256)
        for other in (1.0, -0.75, 2.0**-12):
            ones = torch.full_like(bits, other)
            check((ones, bits, ones), "1x128")
            check((bits, ones, ones), "1x128")


@pytest.mark.parametrize("name", ["tensorwise", "tensorwise-power_of_2"])
def test_scales_of_the_past(name):
    for scales in ((0.0, 0.0, 0.0), (3.0, 500.0, 7e3), (2.0**-20, 2.0**20, 0.0)):
        for is_known in {False, all(scales)}:
            pasts = tuple(
                PastScale(torch.full((1, 1), scale, device="cuda"), 1.0, False, is_known) for scale in scales
            )
            check(inputs("lognormal", (272, 400)), name, pasts)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "gridquant", "delayed"])
def test_a_fused_feed_forward_is_bitwise_the_layers(recipe, runs):  # noqa: F811
    class Wide(FeedForward):
        def __init__(self) -> None:
            nn.Module.__init__(self)
            self.w1, self.w3 = nn.Linear(256, 512, bias=False), nn.Linear(256, 512, bias=False)
            self.w2 = nn.Linear(512, 256, bias=False)

    torch.manual_seed(0)
    plain = f8sub.convert_to_float8(Wide().cuda().bfloat16(), recipe=recipe)
    both = f8sub.fuse_producers(copy.deepcopy(plain)), plain
    for _ in range(3 if recipe == "delayed" else 1):
        x, dy = (torch.randn(384, 256, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        runs.clear()
        found = results(both[0], x, dy)
        assert sum("swiglu" in kernel for kernel in runs) >= 2
        for ours, theirs in zip(found, results(both[1], x, dy), strict=True):
            assert torch.equal(ours, theirs)
        for model in both:
            f8sub.precompute_scales(model)


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise", "blockwise", "delayed"])
def test_compiled_it_is_bitwise_eager(recipe):
    torch._dynamo.reset()
    torch.manual_seed(0)
    eager = f8sub.fuse_producers(f8sub.convert_to_float8(FeedForward().cuda().bfloat16(), recipe=recipe))
    compiled = copy.deepcopy(eager)
    run = torch.compile(compiled, fullgraph=True)
    x, dy = (torch.randn(128, 64, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for ours, theirs in zip(results(compiled, x, dy, run), results(eager, x, dy), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)
