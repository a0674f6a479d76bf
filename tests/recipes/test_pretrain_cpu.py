"""Products of bfloat16 in float32, where a CPU has no instructions for them."""

from contextlib import nullcontext

import pytest
import torch
from f8sub_pretrain import cpu


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float64])
@pytest.mark.parametrize("name", cpu.PRODUCTS)
def test_products_are_those_of_float64_rounded(name, dtype):
    torch.manual_seed(0)
    a, b, bias = (torch.randn(2, *shape, dtype=dtype) for shape in ((5, 7), (7, 3), (5, 3)))
    more: dict[str, float] = {}
    if name == "bmm":
        given: tuple[torch.Tensor, ...] = (a, b)
    elif name == "mm":
        given = (a[0], b[0].t().contiguous().t())
    else:
        given, more = (bias[0], a[0], b[0]), {"beta": 0.5, "alpha": 2.0}
    operator = getattr(torch, name)
    usual = operator(*given, **more)
    with cpu.bfloat16_products_in_float32():
        found = operator(*given, **more)
    right = operator(*(each.double() for each in given), **more)
    if dtype == torch.bfloat16:
        # Rounded once, after additions in float32: half of the last place, and little more.
        assert ((found.double() - right).abs() <= right.abs() * 2.0**-8 * 1.001 + 1e-6).all()
    else:
        assert torch.equal(found, usual)
    assert found.dtype == dtype
    assert torch.equal(operator(*given, **more), usual)  # torch's own again


def test_they_are_products_that_torch_would_make_one_element_at_a_time(monkeypatch):
    said = {}
    for capability in ("DEFAULT", "AVX2", "AVX512"):
        monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda is_now=capability: is_now)
        said[capability] = cpu.is_bfloat16_slow()
    assert said == {"DEFAULT": True, "AVX2": True, "AVX512": False}


def test_a_linear_layer_trains_through_them():
    torch.manual_seed(0)
    layer = torch.nn.Linear(8, 4, dtype=torch.bfloat16)
    x = torch.randn(3, 5, 8, dtype=torch.bfloat16, requires_grad=True)
    dy = torch.randn(3, 5, 4, dtype=torch.bfloat16)
    made = []
    for products in (nullcontext(), cpu.bfloat16_products_in_float32()):
        with products:
            y = layer(x)
            made.append((y, *torch.autograd.grad(y, (x, layer.weight, layer.bias), dy)))
    for usual, found in zip(*made, strict=True):
        torch.testing.assert_close(found, usual, rtol=2.0**-7, atol=2.0**-7)
