"""A gradient that is not rounded yet: bf16 to every operator, float32 to sums and to casts."""

import copy
import io

import pytest
import torch
from torch import nn

import f8sub
from f8sub.tensor.float8_tensor import UnroundedGradient
from tests.data_sets import gaussian, generator


def made(seed: int = 0) -> UnroundedGradient:
    return UnroundedGradient(gaussian((4, 6), generator(seed)), torch.bfloat16)


def values(gradient: torch.Tensor) -> torch.Tensor:
    assert type(gradient) is UnroundedGradient
    assert gradient.dtype == torch.bfloat16
    return gradient.exact


def test_operators_see_bf16():
    gradient, right = made(), made().exact.bfloat16()
    assert (gradient.dtype, gradient.shape, gradient.is_contiguous()) == (torch.bfloat16, (4, 6), True)
    for found, expected in [
        (gradient * 2, right * 2),
        (gradient.abs().amax(), right.abs().amax()),
        (gradient.view(torch.int16), right.view(torch.int16)),
        (gradient.bfloat16() + 0, right),
        (gradient.to(torch.float64), made().exact.double()),
        (torch.stack([gradient, right]), torch.stack([right, right])),
        (gradient + 1, right + 1),
        (gradient + right.float(), right + right.float()),
    ]:
        assert type(found) is torch.Tensor
        assert torch.equal(found, expected)
    assert gradient.tolist() == right.tolist()
    half = UnroundedGradient(gradient.exact, torch.float16)
    assert (half.numpy() == half.exact.half().numpy()).all()
    assert repr(gradient) == "UnroundedGradient((4, 6), dtype=torch.bfloat16)"


def test_what_does_not_round():
    one, other, wide = made(0), made(1), torch.ones(4, 6)
    sums = one.exact + other.exact
    assert torch.equal(values(one + other), sums)
    assert torch.equal(values(one + other.exact.bfloat16()), one.exact + other.exact.bfloat16())
    assert torch.equal(one.float(), one.exact)
    assert one.float().data_ptr() != one.exact.data_ptr()
    for same in (one.detach(), one.clone(), copy.deepcopy(one)):
        assert torch.equal(values(same), one.exact)
    assert one.detach().exact.data_ptr() == one.exact.data_ptr()
    wide += one
    assert torch.equal(wide, 1 + one.exact)
    one += other
    assert torch.equal(values(one), sums)


def test_what_is_written_is_written_unrounded():
    gradient = made()
    right = gradient.exact.clone() / 3
    found = gradient.div_(3)
    assert found is gradient
    assert torch.equal(values(gradient), right)
    torch._foreach_mul_([gradient, wide := torch.ones(4, 6)], 2.0)
    assert torch.equal(values(gradient), 2 * right)
    assert torch.equal(wide, torch.full((4, 6), 2.0))
    gradient.zero_()
    assert not gradient.exact.any()


VIEWS = {
    "rows": lambda g: g[1:3],
    "element": lambda g: g[1, 2],
    "flat": lambda g: g.view(-1),
    "reshaped": lambda g: g.reshape(2, 12),
    "transposed": lambda g: g.t(),
    "diagonal": lambda g: g.diagonal(),
    "part": lambda g: g.chunk(2)[1],
    "detached": lambda g: g.detach(),
    "of a view": lambda g: g[1:][:, 2:],
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_writes_to_views_reach_the_gradient(view):
    gradient, right = made(), made().exact
    assert torch.equal(values(view(gradient)), view(right))
    view(gradient).mul_(3)
    view(right).mul_(3)
    assert torch.equal(values(gradient), right)
    gradient[0, :2] = 7
    right[0, :2] = 7
    assert torch.equal(values(gradient), right)


def test_outputs_are_what_was_given():
    gradient, plain = made(), torch.zeros(4, 6, dtype=torch.bfloat16)
    right = 2 * gradient.exact.bfloat16()
    assert torch.ops.aten.mul.out(gradient, torch.tensor(2), out=plain) is plain
    assert torch.equal(plain, right)
    assert torch.ops.aten.mul.out(plain, torch.tensor(2), out=gradient) is gradient
    assert torch.equal(values(gradient), 2 * right.float())


def test_operators_that_take_tensors_of_one_dtype():
    """They write what they would to the rounded gradient."""
    other = gaussian((4, 6), generator(1)).bfloat16()
    for change in [
        lambda g: g.lerp_(other, 0.5),
        lambda g: torch.fmax(g, other, out=g),
        lambda g: torch._foreach_copy_([g], [other]),
    ]:
        gradient, right = made(), made().exact.bfloat16()
        change(gradient), change(right)
        assert torch.equal(values(gradient), right.float())
    parameters = [nn.Parameter(other.clone()) for _ in range(2)]
    for parameter, given in zip(parameters, (made(), made().exact.bfloat16()), strict=True):
        parameter.grad = given
        torch.optim.AdamW([parameter], fused=True).step()
    assert torch.equal(*parameters)


def test_what_is_stored_is_rounded():
    gradient, file = made(), io.BytesIO()
    torch.save(gradient, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded) is torch.Tensor
    assert torch.equal(loaded, gradient.exact.bfloat16())


def test_a_gradient_that_something_holds_is_not_rounded():
    weight, held = nn.Parameter(gaussian((4, 6), generator(2)).bfloat16()), []
    given = made()

    class Gives(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            return w.sum()

        @staticmethod
        def backward(ctx, dy):
            return given.clone()

    weight.register_hook(held.append)
    Gives.apply(weight).backward()
    assert held[0] is not weight.grad
    assert torch.equal(values(weight.grad), given.exact)


def test_accumulation_of_autograd():
    """A weight that two layers read, and a second backward pass."""
    weight = nn.Parameter(gaussian((4, 6), generator(2)).bfloat16())
    given = [made(seed) for seed in range(3)]

    class Gives(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w, number):
            ctx.number = number
            return w.sum()

        @staticmethod
        def backward(ctx, dy):
            return given[ctx.number].clone(), None

    (Gives.apply(weight, 0) + Gives.apply(weight, 1)).backward()
    assert torch.equal(values(weight.grad), given[0].exact + given[1].exact)
    Gives.apply(weight, 2).backward()
    assert torch.equal(values(weight.grad), given[0].exact + given[1].exact + given[2].exact)


def test_dtype_of_a_gradient():
    weight = f8sub.quantize(gaussian((16, 16), generator(0)).bfloat16(), "tensorwise")
    assert weight.wgrad_dtype == torch.bfloat16
    weight.gradient_dtype = torch.float32
    assert weight.wgrad_dtype == torch.float32
    # Values that were made of it have gradients of their own.
    torch.save(weight, file := io.BytesIO())
    file.seek(0)
    for made_of_it in (weight.detach(), copy.deepcopy(weight), torch.load(file, weights_only=True)):
        assert made_of_it.wgrad_dtype == torch.bfloat16


@pytest.mark.parametrize("backend", [None, "aot_eager"])
def test_a_layer_gives_one(backend):
    layer = f8sub.convert_to_float8(nn.Sequential(nn.Linear(32, 48, bias=False)), min_dim=1)[0].bfloat16()
    codes = f8sub.quantize(gaussian((48, 32), generator(1)).bfloat16(), "tensorwise", operand="w")
    layer._parameters["weight"] = nn.Parameter(codes)
    call = layer if backend is None else torch.compile(layer, backend=backend, fullgraph=True)
    x, dy = gaussian((16, 32), generator(2)).bfloat16(), gaussian((16, 48), generator(3)).bfloat16()
    found = []
    for dtype in (None, torch.float32):
        layer.weight.gradient_dtype = dtype
        call(x).backward(dy)
        found.append(layer.weight.grad)
        layer.weight.grad = None
    rounded, gradient = found
    assert type(rounded) is torch.Tensor
    assert torch.equal(values(gradient).bfloat16(), rounded)
    assert not torch.equal(gradient.exact.bfloat16().float(), gradient.exact)
