"""RMSNorm's kernels, interpreted on the CPU: bitwise torch's operators and the reference for one and the same rstd."""

import copy
import math
from unittest import mock

import pytest
import torch

from f8sub.kernels import delayed, fused, normed, reference
from f8sub.kernels.delayed import PastScale
from f8sub.kernels.norms import Norm, normalize
from f8sub.kernels.producers import has_one_scale
from tests.data_sets import DATA_SETS, make
from tests.kernels.interpreted import interpreter, needs_triton  # noqa: F401
from tests.kernels.quantized import same_bits, with_long
from tests.kernels.test_paired import tiles_of_every_kind
from tests.kernels.test_producers import KINDS
from tests.selection import long_but

SHAPES = [(130, 144), (3, 1100)]
MORE_SHAPES = [(256, 256), (129, 130), (33, 300), (4, 2048)]
"""Whole tiles; tiles cut at both edges, where rows are and are not pairs and of whole 16 bytes; parts of a row, whole
and cut."""

USAGES = [(True, True), (True, False), (False, True)]
EPS = 1e-5
UNIT = 2.0**-24

on_each_kind = pytest.mark.parametrize("name", KINDS)
on_each_walk = with_long(KINDS, ("rowwise", "1x128"))
on_each_rule = with_long(KINDS, ("1x128",))


def rstd_budget(cols: int) -> float:
    """Relative: roundings of a square, of a sum a part and of a tree over the parts' width, of mean and eps, halved by
    the root; of the root and its inverse."""
    from f8sub.kernels.triton.norm_launch import MEASURED

    _, width = MEASURED
    adds = math.ceil(cols / width) + math.log2(width)
    return (adds + 3) * UNIT / 2 + 2 * UNIT


def check_rstd(x: torch.Tensor, rstd: torch.Tensor) -> None:
    exact = (x.double().pow(2).mean(-1, keepdim=True) + EPS).rsqrt()
    off = ((rstd.double() - exact) / exact).abs().max().item()
    assert off <= rstd_budget(x.shape[1])


def inputs(data: str, shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x, and a weight of both signs."""
    x = make(data, shape, 1, torch.float32).clamp(-1e3, 1e3).to(dtype)
    return x, make("gaussian", (1, shape[1]), 2, torch.float32)[0].to(dtype)


def check(
    given: tuple[torch.Tensor, torch.Tensor],
    name: str,
    rounds: bool,
    usages: tuple[bool, bool] = (True, True),
    past: PastScale | None = None,
) -> None:
    """Codes, scales and amaxes next to torch's operators, of the rstd that the kernel found, and the casts."""
    x, weight = given
    format = KINDS[name][0]
    wanted = tuple(format if usage else None for usage in usages)
    norm = Norm(EPS, rounds)
    assert normed.takes(x, weight)
    assert normed.why_no_kernel(wanted) is None
    measured = normed.measure(x, weight, norm, has_one_scale(format))
    h = normalize(x, weight, norm, measured.rstd)
    found = normed.quantize(x, weight, norm, measured, wanted, past)
    right = (*reference.quantize(h, *wanted), None) if past is None else delayed.quantize(h, past, *wanted)
    same_bits(found[0], right[0])
    same_bits(found[1], right[1])
    if past is not None:
        torch.testing.assert_close(found[2], right[2], rtol=0, atol=0, equal_nan=True)
    if h.isfinite().all() and measured.rstd.all():
        check_rstd(x, measured.rstd)


def shapes(name: str, of: list[tuple[int, int]]) -> None:
    for index, shape in enumerate(of):
        check(inputs("gaussian", shape, normed.HALF[index % 2]), name, rounds=index % 2 == 0)


def each_usage(name: str) -> None:
    for usages in USAGES:
        check(inputs("lognormal", (40, 72), torch.bfloat16), name, True, usages)
        check(inputs("lognormal", (40, 72), torch.bfloat16), name, False, usages)


def data_sets(name: str) -> None:
    for index, data in enumerate(DATA_SETS):
        check(inputs(data, (40, 72), normed.HALF[index % 2]), name, rounds=index % 2 == 1)


def not_finite(name: str) -> None:
    for bad in ("nan", "inf", "-inf"):
        for which in range(2):
            given = inputs("gaussian", (40, 72), torch.bfloat16)
            given[which].view(-1, 72)[0, 5] = float(bad)
            check(given, name, rounds=which == 0)
    x, weight = inputs("gaussian", (40, 72), torch.bfloat16)
    check((torch.full_like(x, float("nan")), weight), name, False)
    check((x * 1e30, weight), name, False)  # squares beyond float32


def of_the_past(name: str) -> None:
    for scale in (0.0, 3.0, 2.0**-20, 1e4):
        for is_known in {False, scale > 0}:
            past = PastScale(torch.full((1, 1), scale), 1.0, covers=False, is_known=is_known)
            check(inputs("lognormal", (130, 144), torch.bfloat16), name, scale == 3.0, past=past)
            x, weight = inputs("gaussian", (40, 72), torch.bfloat16)
            x[3, 5] = float("inf")
            check((x, weight), name, False, past=past)


def whole_tiles(name: str) -> None:
    """Of every kind, by kernels of pairs; of finite elements by the others, too."""
    kinds = tiles_of_every_kind()
    weight = make("gaussian", (1, kinds.shape[1]), 2, torch.float32)[0].bfloat16()
    bad = weight.clone()
    bad[7], bad[130], bad[300] = float("nan"), float("inf"), -0.0
    for rounds in (True, False):
        check((kinds, weight), name, rounds)
        # Rows whose squares are finite, so that their rstd is no 0.
        check(((kinds.float() * 2.0**-80).bfloat16(), bad), name, rounds)
        with mock.patch.object(fused, "compares_pairs", return_value=False):
            check(inputs("gaussian", (256, 256), torch.bfloat16), name, rounds)
    for usages in USAGES[1:]:
        check((kinds, weight), name, True, usages)


def many_lines(name: str) -> None:
    """More rows than a program goes down for amaxes, of whole tiles and cut."""
    check(inputs("gaussian", (512, 256), torch.bfloat16), name, True)
    check(inputs("lognormal", (1100, 300), torch.float16), name, False)


def is_paired(x: torch.Tensor, weight: torch.Tensor, name: str) -> bool:
    """Whether what casts is a kernel of pairs."""
    from f8sub.kernels.triton import norm_launch

    format, norm = KINDS[name][0], Norm(EPS, False)
    _, measured = norm_launch.measurement(x, weight, norm, has_one_scale(format))
    launches = norm_launch.cast(x, weight, norm, measured, (format, format)).launches
    return any("paired" in launched.kernel.fn.__name__ for launched in launches)


def within_a_word(x: torch.Tensor) -> torch.Tensor:
    """Zeros like ``x`` that begin two bytes behind a word's begin."""
    return x.new_zeros(x.numel() + 1)[1:].view(x.shape)


def of_what_was_not_measured(name: str) -> None:
    """An amax is found where nobody asked for it before, and of the same rstd."""
    x, weight = inputs("gaussian", (40, 72), torch.bfloat16)
    format, norm = KINDS[name][0], Norm(EPS, False)
    measured = normed.measure(x, weight, norm, needs_amax=False)
    row, col, _ = normed.quantize(x, weight, norm, measured, (format, format))
    right = reference.quantize(normalize(x, weight, norm, measured.rstd), format, format)
    same_bits(row, right[0])
    same_bits(col, right[1])


def modules(recipe: str) -> list[str]:
    """A block with kernels next to one without, in eager code: no norm is made in high precision, and each is measured
    by one kernel, but in delayed scaling's first step.

    Its rstd differs by float32's last bits, so that a bf16 element does where it lies that near to the middle of two,
    and a code where the element does: a result is allowed what one such code in a thousand makes of it, each off by
    an eighth.
    """
    import f8sub
    from f8sub.kernels.triton import launch
    from f8sub.tensor import normed_tensor
    from tests.test_norm import Block, inputs, results, roll_histories, seed_weights

    plain = f8sub.convert_to_float8(seed_weights(Block()).bfloat16(), recipe=recipe, backend="reference")
    layers = [module for module in plain.modules() if isinstance(module, f8sub.Float8Linear)]
    for layer in layers:
        object.__setattr__(layer.plan, "any_layout", False)
    both = copy.deepcopy(plain), f8sub.fuse_producers(copy.deepcopy(plain))
    made = []
    by_torch, normed_tensor.by_torch = (
        normed_tensor.by_torch,
        lambda *args: made.append(args) or by_torch(*args),
    )
    kernels = []
    run = launch.Launch.run
    launch.Launch.run = lambda self: (kernels.append(self.kernel.__name__), run(self))
    runs, steps = [], 3 if recipe == "delayed" else 1
    for model in both:
        runs.append([])
        for step in range(steps):
            runs[-1] += results(model, *inputs(step=step))
            roll_histories(model)
    normed_tensor.by_torch, launch.Launch.run = by_torch, run
    assert not made
    # Of delayed scaling's first step amaxes are found where they turn out to be needed.
    assert kernels.count("measure_normed") == 2 * (steps + (recipe == "delayed"))
    assert isinstance(both[1].ffn_norm(inputs()[0].requires_grad_()), normed_tensor.NormedTensor)
    wrong = []
    for index, (right, found) in enumerate(zip(*runs, strict=True)):
        budget = (0.001**0.5 / 8 + torch.finfo(torch.bfloat16).eps) * right.float().norm()
        if (found.float() - right.float()).norm() > budget:
            wrong.append(f"{index} of shape {tuple(right.shape)}")
    return wrong


@needs_triton
@on_each_walk
def test_shapes_and_usages(interpreter, name):  # noqa: F811
    interpreter(shapes, name, SHAPES)
    interpreter(each_usage, name)


@needs_triton
@pytest.mark.long
@on_each_kind
def test_more_shapes(interpreter, name):  # noqa: F811
    interpreter(shapes, name, MORE_SHAPES)


@needs_triton
@pytest.mark.long
def test_more_rows_than_a_program_goes_down(interpreter):  # noqa: F811
    interpreter(many_lines, "rowwise")


@needs_triton
@on_each_rule
def test_data_sets(interpreter, name):  # noqa: F811
    interpreter(data_sets, name)


@needs_triton
@pytest.mark.parametrize("name", KINDS)
def test_what_is_paired(monkeypatch, name):
    """Vectors in whole tiles of bfloat16, x and weight of which begin at a word, on GPUs that compare pairs."""
    x, weight = torch.zeros(256, 128, dtype=torch.bfloat16), torch.zeros(128, dtype=torch.bfloat16)
    assert is_paired(x, weight, name) == name.startswith("1x128")
    for other in (x.half(), x[:250], x[:, :72].contiguous(), within_a_word(x)):
        assert not is_paired(other, weight[: other.shape[1]].to(other.dtype), name)
    assert not is_paired(x, within_a_word(weight), name)
    monkeypatch.setattr(fused, "compares_pairs", lambda device: False)
    assert not is_paired(x, weight, name)


@needs_triton
@pytest.mark.long
@pytest.mark.parametrize("name", ["1x128", "1x128-float"])
def test_whole_tiles(interpreter, name):  # noqa: F811
    interpreter(whole_tiles, name)


@needs_triton
@on_each_rule
def test_elements_that_are_not_finite(interpreter, name):  # noqa: F811
    interpreter(not_finite, name)


@needs_triton
@with_long(["tensorwise"], [])
def test_scales_of_the_past(interpreter, name):  # noqa: F811
    interpreter(of_the_past, name)


@needs_triton
@pytest.mark.parametrize("name", ["tensorwise", "tensorwise-power_of_2"])
def test_an_amax_that_was_not_asked_for(interpreter, name):  # noqa: F811
    interpreter(of_what_was_not_measured, name)


@needs_triton
@pytest.mark.parametrize(
    "recipe", long_but(["rowwise", "delayed"], ["tensorwise", "rowwise", "blockwise", "gridquant", "delayed"])
)
def test_fused_modules_make_no_norm_in_high_precision(interpreter, recipe):  # noqa: F811
    assert interpreter(modules, recipe) == []


@on_each_kind
def test_without_kernels_it_is_torch_and_the_reference(name):
    """On the CPU nothing is interpreted: the same numbers by torch's operators, and the amax of what they made."""
    format = KINDS[name][0]
    for rounds in (False, True):
        x, weight = inputs("lognormal", (40, 72), torch.bfloat16)
        norm = Norm(EPS, rounds)
        measured = normed.measure(x, weight, norm, needs_amax=True)
        h = normalize(x, weight, norm, measured.rstd)
        row, col, _ = normed.quantize(x, weight, norm, measured, (format, format))
        right = reference.quantize(h, format, format)
        same_bits(row, right[0])
        same_bits(col, right[1])
        assert torch.equal(measured.whole_amax, reference.amax(h, fused.TENSORWISE))


def test_what_no_kernel_makes():
    tensorwise, rowwise = KINDS["tensorwise"][0], KINDS["rowwise"][0]
    assert "one usage" in str(normed.why_no_kernel((None, None)))
    assert "both usages alike" in str(normed.why_no_kernel((tensorwise, rowwise)))
    assert normed.why_no_kernel((None, rowwise)) is None
