"""RMSNorm's kernels on a GPU: bitwise torch's operators there for one and the same rstd, held to its budget."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import f8sub
from f8sub.kernels import fused, normed
from f8sub.kernels.delayed import PastScale
from f8sub.kernels.norms import Norm, by_torch, normalize, normalize_backward
from f8sub.kernels.producers import has_one_scale
from f8sub.tensor import normed_tensor
from tests.cuda.products import assert_same_bits
from tests.cuda.test_fused import runs  # noqa: F401
from tests.kernels.interpreted import needs_triton
from tests.kernels.test_normed import EPS, KINDS, USAGES, check_rstd, inputs
from tests.test_feed_forward import results
from tests.test_norm import NORMS, RECIPES, WIDTH, Block, roll_histories

SHAPES = [
    (48, 160),
    (256, 512),
    (272, 400),
    (130, 144),
    (129, 130),
    (2, 300),
    (300, 1),
    (2048, 1536),
    (1024, 8192),
]
pytestmark = needs_triton


def check(
    given: tuple, name: str, rounds: bool, usages: tuple[bool, bool], past: PastScale | None = None
) -> None:
    """Kernels next to torch's operators, of the rstd that they found, and the casts' kernels, all on the GPU."""
    x, weight = (tensor.cuda() for tensor in given)
    format, norm = KINDS[name][0], Norm(EPS, rounds)
    wanted = tuple(format if usage else None for usage in usages)
    assert normed.takes(x, weight)
    measured = normed.measure(x, weight, norm, has_one_scale(format))
    if measured.rstd.isfinite().all() and measured.rstd.all():
        check_rstd(x, measured.rstd)
    h = normalize(x, weight, norm, measured.rstd)
    found = normed.quantize(x, weight, norm, measured, wanted, past)
    right = fused.quantize(h, *wanted) if past is None else fused.quantize_delayed(h, past, *wanted)
    for operand, other in zip(found[:2], right[:2], strict=True):
        assert (operand is None) == (other is None)
        if other is not None:
            assert_same_bits(operand, other)
    if past is not None:
        torch.testing.assert_close(found[2], right[2], rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("rounds", [False, True], ids=["", "rounds"])
@pytest.mark.parametrize("name", KINDS)
def test_every_shape_is_bitwise_torchs_with_that_rstd(name, rounds, runs):  # noqa: F811
    for shape in SHAPES:
        for dtype in normed.HALF:
            for usages in USAGES if shape in SHAPES[:2] else USAGES[:1]:
                check(inputs("lognormal", shape, dtype), name, rounds, usages)
    assert sum("normed" in kernel for kernel in set(runs)) >= 2


def test_elements_that_are_not_finite():
    for name in KINDS:
        for bad in ("nan", "inf", "-inf"):
            x, weight = inputs("gaussian", (272, 400), torch.bfloat16)
            x[3, 5] = x[140, 300] = float(bad)
            check((x, weight), name, False, (True, True))


@pytest.mark.parametrize("name", ["tensorwise", "tensorwise-power_of_2"])
def test_scales_of_the_past(name):
    for scale in (0.0, 3.0, 2.0**-20):
        for is_known in {False, scale > 0}:
            past = PastScale(torch.full((1, 1), scale, device="cuda"), 1.0, False, is_known)
            check(inputs("lognormal", (272, 400), torch.bfloat16), name, False, (True, True), past)


@pytest.mark.parametrize("rounds", [False, True], ids=["", "rounds"])
def test_with_torchs_rstd_its_gradients_are_torchs(rounds):
    """Bitwise, as torch's operators make them; and how far the kernel's rstd and bf16 elements are from torch's."""
    for shape in ((64, 160), (3, 50, 4096)):
        x = torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        norm = Norm(EPS, rounds)
        module = NORMS["llama" if rounds else "torch"](shape[-1], eps=EPS).cuda().bfloat16()
        weight = nn.init.normal_(module.weight)
        dh = torch.randn_like(x)
        y = module(x)
        right = torch.autograd.grad(y, (x, weight), dh)
        given, leaf = x.detach(), weight.detach()
        if rounds:
            rstd = torch.rsqrt(given.float().pow(2).mean(-1, keepdim=True) + EPS)
        else:
            rstd = torch.ops.aten._fused_rms_norm(given, [shape[-1]], leaf, EPS)[1]
        for ours, theirs in zip(normalize_backward(dh, given, leaf, norm, rstd), right, strict=True):
            assert torch.equal(ours, theirs)
        rows = given.reshape(-1, shape[-1])
        found = normed.measure(rows, leaf, norm, needs_amax=False).rstd.view_as(rstd)
        off = ((found - rstd) / rstd).abs().max().item() * 2**24
        others = (normalize(given, leaf, norm, found) != y).float().mean().item()
        print(
            f"{shape}: rstd off by {off:.1f} * 2^-24, {others:.1e} of the bf16 elements are others than torch's"
        )
        assert others < 1e-3


@pytest.mark.parametrize("kind", ["torch", "llama"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_fused_modules(recipe, kind, runs, monkeypatch):  # noqa: F811
    """No norm is made in high precision, and results are those of the modules but for what codes near the middle of
    two are: one in a thousand, off by an eighth."""
    plain = f8sub.convert_to_float8(Block(kind).cuda().bfloat16(), recipe=recipe)
    both = f8sub.fuse_producers(copy.deepcopy(plain)), plain
    made = []
    monkeypatch.setattr(normed_tensor, "by_torch", lambda *args: made.append(args) or by_torch(*args))
    for _ in range(3 if recipe == "delayed" else 1):
        x, dy = (torch.randn(4, 96, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        runs.clear()
        found = results(both[0], x, dy)
        assert sum("normed" in kernel for kernel in runs) >= 4
        assert not made
        assert_near(found, results(both[1], x, dy))
        for model in both:
            roll_histories(model)


ALLOWED = 0.001**0.5 / 8 + torch.finfo(torch.bfloat16).eps


def off(found: list[torch.Tensor], right: list[torch.Tensor]) -> list[float]:
    """Of each result, relative to its norm."""
    pairs = zip(found, right, strict=True)
    return [((a.float() - b.float()).norm() / b.float().norm().clamp(min=1e-12)).item() for a, b in pairs]


def assert_near(found: list[torch.Tensor], right: list[torch.Tensor]) -> None:
    assert max(off(found, right)) < ALLOWED, off(found, right)


@pytest.mark.parametrize("kind", ["torch", "llama"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_compiled_in_one_graph(recipe, kind):
    """As near to eager code as unfused modules are, of which Inductor leaves roundings to bf16 out, too."""
    plain = f8sub.convert_to_float8(Block(kind).cuda().bfloat16(), recipe=recipe)
    x, dy = (torch.randn(4, 96, WIDTH, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    distances = []
    for eager in (plain, f8sub.fuse_producers(copy.deepcopy(plain))):
        torch._dynamo.reset()
        compiled = copy.deepcopy(eager)
        run = torch.compile(compiled, fullgraph=True)
        distances.append(max(off(results(compiled, x, dy, run), results(eager, x, dy))))
    assert distances[1] < 1.5 * distances[0] + ALLOWED, distances


def test_a_norm_whose_readers_are_torchs_is_torchs():
    """Made in high precision it is the module's, bitwise: rstd and all."""
    for kind in NORMS:
        plain = f8sub.convert_to_float8(Block(kind).cuda().bfloat16())
        fused_model = f8sub.fuse_producers(copy.deepcopy(plain))
        x = torch.randn(4, 96, WIDTH, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        assert torch.equal(F.relu(fused_model.ffn_norm(x)), F.relu(plain.ffn_norm(x)))
