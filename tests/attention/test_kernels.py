"""The kernels around cuDNN's, interpreted, against the operators that a CPU runs in their place."""

from unittest import mock

import pytest
import torch

from f8sub.attention import casts, scaling
from f8sub.attention.problem import E4M3, E5M2, Problem
from f8sub.formats import Operand
from f8sub.kernels import reference
from tests.data_sets import generator
from tests.kernels.interpreted import interpreted, launched, needs_triton

pytestmark = [interpreted, needs_triton]

PROBLEM = Problem(2, 8, 2, 100, 300, 64, False, 0.1, (True, True, True))


def floats(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.rand(shape, generator=generator(seed)) + 0.1


def test_forward_scales():
    from f8sub.kernels.triton import attention_launch

    given = [floats(1, 1, seed=i) for i in range(3)]
    out = torch.full((7,), torch.nan)
    attention_launch.forward_scales(*given, out, scaling.HEADROOM, scaling.OF_1).run()
    torch.testing.assert_close(out, torch.cat(scaling.forward_scales(*given)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("case", ["no past", "a past", "a part of it", "zero", "NaN"])
@pytest.mark.parametrize("format", [E4M3, E5M2])
def test_backward_scales(case, format):
    from f8sub.kernels.triton import attention_launch

    inverse, of_do, history = floats(4), floats(1), torch.zeros(scaling.HISTORY, 4)
    if case in ("a past", "a part of it"):
        history[3:9] = floats(6, 4, seed=3)
    if case == "a part of it":
        history[:, 1] = 0
    if case in ("zero", "NaN"):
        of_do[:] = 0.0 if case == "zero" else torch.nan
    expected = scaling.backward_scales(PROBLEM, inverse, of_do, history, format.max)
    out = torch.full((10,), torch.inf)
    numbers = (*scaling.factors_of_bounds(PROBLEM), format.max, scaling.MARGIN, scaling.OF_1, scaling.LARGEST)
    attention_launch.backward_scales((inverse, of_do, history, out), numbers).run()
    torch.testing.assert_close(out, torch.cat(expected), rtol=1e-6, atol=0, equal_nan=True)


@pytest.mark.parametrize("newest", [[1.0, 2.0, 3.0, 4.0], [torch.inf, torch.nan, 1e9, 0.0]])
def test_roll(newest):
    from f8sub.kernels.triton import attention_launch

    amaxes, scales = torch.tensor(newest), torch.tensor([200.0, 224.0, 150.0, 1e-3])
    found, expected = ((floats(scaling.HISTORY, 4), torch.arange(4.0)) for _ in range(2))
    scaling.roll(*expected, amaxes, scales, E4M3.max)
    attention_launch.roll(*found, amaxes, scales, E4M3.max, scaling.OF_1).run()
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("format", [E4M3, E5M2])
def test_dequantize(dtype, format):
    from f8sub.kernels.triton import attention_launch

    codes = torch.arange(256).repeat(40).to(torch.uint8)[:10001].view(1, -1).view(format.dtype)
    scale_inv = torch.tensor([[0.0123]])
    out = torch.empty(codes.shape, dtype=dtype)
    attention_launch.dequantize(codes, scale_inv, out).run()
    expected = reference.dequantize(Operand(codes, scale_inv, format), dtype)
    # The reference clamps; these numbers are small but for infinity, which only e5m2 has.
    assert torch.equal(out[expected.isfinite()], expected[expected.isfinite()]) or format == E5M2
    finite = codes.float().isfinite()
    assert torch.equal(out[finite], expected[finite])


def given(by_rows: bool, dtype: torch.dtype) -> list[torch.Tensor]:
    """q, k and v."""
    made = [
        torch.randn(2, 40, h, 32, generator=generator(i)).to(dtype).transpose(1, 2)
        for i, h in enumerate((4, 2, 2))
    ]
    return made if by_rows else [x.contiguous() for x in made]


def by_operators(function, *arguments):
    """What a CPU runs."""
    with mock.patch.object(casts.support, "takes", return_value=False):
        return function(*arguments)


def check(found, expected, *, like=()) -> None:
    """Codes and histories are equal, scales nearly."""
    for a, b in zip(found, expected, strict=True):
        assert a.dtype == b.dtype
        if a.dtype == torch.float32:
            torch.testing.assert_close(a.view(b.shape), b, rtol=1e-6, atol=0)
        else:
            assert torch.equal(a.float(), b.float())
    for a, x in zip(found, like, strict=False):
        assert a.stride() == x.stride()


@pytest.mark.parametrize("by_rows", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_casts_that_are_prepared_together(by_rows, dtype):
    qkv = given(by_rows, dtype)
    problem = Problem.of(*qkv, True, 0.1)
    with launched() as kernels:
        casts.cast_forward(*qkv)
    assert kernels == [*3 * ["amax_of_matrix", "cast_with_one"], "forward_scales"]
    (codes, scales), (expected, of_them) = casts.cast_forward(*qkv), by_operators(casts.cast_forward, *qkv)
    check(codes, expected, like=qkv)
    check(scales, of_them)
    check(
        casts.back(codes, scales.inverse[:3], dtype),
        by_operators(casts.back, codes, scales.inverse[:3], dtype),
    )
    do = (1e-3 * qkv[0]).flip(1) if by_rows else 1e-3 * qkv[0]
    do = do.transpose(1, 2).contiguous().transpose(1, 2)
    for history in (torch.zeros(scaling.HISTORY, 4), floats(scaling.HISTORY, 4)):
        for format in (E4M3, E5M2):
            arguments = problem, do, scales.inverse, history, format
            found, wanted = casts.cast_backward(*arguments), by_operators(casts.cast_backward, *arguments)
            check(found[:2], wanted[:2], like=[do])
            check(found[2], wanted[2])
            kept, same = ([history.clone(), torch.arange(4.0)] for _ in range(2))
            amaxes = floats(4, seed=5)
            last = codes, wanted[2], amaxes, format.max, dtype
            found = casts.finish_backward(*last[:3], casts.Remembered(*kept), *last[3:])
            check(
                found,
                by_operators(casts.finish_backward, *last[:3], casts.Remembered(*same), *last[3:]),
                like=qkv,
            )
            check(kept, same)
            assert torch.equal(kept[0][0], amaxes)
