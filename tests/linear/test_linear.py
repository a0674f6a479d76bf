"""Float8Linear: what it accepts, what it refuses, and that it computes nothing it need not."""

import copy
import dataclasses
import gc

import pytest
import torch
from torch import nn

import f8sub
from tests.data_sets import DTYPES, gaussian, generator
from tests.layers import K, M, N, assert_close, dy_of, gradients, made, on_each_recipe, x_of
from tests.models import equal, seed_weights


@pytest.mark.parametrize("lead", [(), (1,), (5,), (2, 3), (2, 3, 4), (1, 1, 1, 6)], ids=str)
@on_each_recipe
def test_any_leading_dims(recipe, lead):
    layer, flat = made(recipe), made(recipe)
    x = x_of(*lead, K)
    found = gradients(layer, x)
    expected = gradients(flat, x.detach().reshape(-1, K).clone().requires_grad_())
    assert found["y"].shape == (*lead, N)
    assert found["dx"].shape == (*lead, K)
    found |= {"y": found["y"].reshape(-1, N), "dx": found["dx"].reshape(-1, K)}
    assert equal(found, expected)


@pytest.mark.parametrize("shape", [(0, K), (2, 0, K), (0, 3, K)], ids=str)
@on_each_recipe
def test_a_batch_of_no_rows(recipe, shape):
    found = gradients(made(recipe), x_of(*shape))
    assert found["y"].shape == (*shape[:-1], N)
    assert found["dx"].shape == shape
    assert torch.equal(found["dw"], torch.zeros(N, K))
    assert torch.equal(found["db"], torch.zeros(N))


LAYOUTS = {
    "transposed": lambda: gaussian((K, M), generator(1)).t(),
    "every-other-row": lambda: gaussian((2 * M, K), generator(1))[::2],
    "columns-of-a-wider-one": lambda: gaussian((M, 3 * K), generator(1))[:, K : 2 * K],
    "expanded": lambda: gaussian((1, K), generator(1)).expand(M, K),
}


@pytest.mark.parametrize("layout", LAYOUTS, ids=list(LAYOUTS))
@on_each_recipe
def test_any_memory_layout(recipe, layout):
    x = LAYOUTS[layout]()
    assert not x.is_contiguous()
    found = gradients(made(recipe), x.detach().requires_grad_())
    expected = gradients(made(recipe), x.contiguous().requires_grad_())
    assert equal(found, expected)


COTANGENTS = {
    "transposed": lambda: gaussian((N, M), generator(2)).t(),
    "expanded": lambda: gaussian((1, N), generator(2)).expand(M, N),
}


@pytest.mark.parametrize("layout", COTANGENTS)
@on_each_recipe
def test_a_cotangent_of_any_layout(recipe, layout):
    results = []
    for dy in (COTANGENTS[layout](), COTANGENTS[layout]().contiguous()):
        layer, x = made(recipe), x_of(M, K)
        layer(x).backward(dy)
        results.append([x.grad, layer.weight.grad, layer.bias.grad])
    found, expected = results
    assert equal(found[:2], expected[:2])
    assert torch.allclose(found[2], expected[2], rtol=1e-5, atol=1e-5)  # summed in another order


@pytest.mark.parametrize("x_dtype", DTYPES.values(), ids=list(DTYPES))
@pytest.mark.parametrize("w_dtype", DTYPES.values(), ids=list(DTYPES))
def test_x_and_w_of_different_dtypes(x_dtype, w_dtype):
    found = gradients(made(dtype=w_dtype), x_of(M, K, dtype=x_dtype))
    expected = gradients(seed_weights(nn.Sequential(nn.Linear(K, N)))[0], x_of(M, K))
    dtypes = {"y": x_dtype, "dx": x_dtype, "dw": w_dtype, "db": w_dtype}
    assert {name: tensor.dtype for name, tensor in found.items()} == dtypes
    for name, tensor in found.items():
        assert_close(tensor, expected[name])


@on_each_recipe
def test_backward_inside_autocast_is_that_outside(recipe):
    found = []
    for inside in (True, False):
        layer, x = made(recipe), x_of(M, K)
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
            if inside:
                y.backward(dy_of(y))
        if not inside:
            y.backward(dy_of(y))
        found.append((x.grad, layer.weight.grad, layer.bias.grad))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@on_each_recipe
def test_no_grad_and_inference_mode_give_the_same_y(recipe):
    layer, x = made(recipe), x_of(M, K)
    expected = layer(x)
    with torch.no_grad():
        y = made(recipe)(x)
    assert torch.equal(y, expected)
    assert y.grad_fn is None
    with torch.inference_mode():
        y = made(recipe)(x)
    assert y.is_inference()
    assert torch.equal(y.clone(), expected.detach())


@on_each_recipe
def test_training_after_inference_mode(recipe):
    """What inference_mode leaves behind (cast codes) serves training, bitwise."""
    layer = made(recipe)
    with torch.inference_mode():
        layer(gaussian((M, K), generator(1)))
        layer(gaussian((M, K), generator(1)))
    found, expected = gradients(layer, x_of(M, K)), gradients(made(recipe), x_of(M, K))
    assert equal(found, expected)
    assert not any(tensor.is_inference() for tensor in found.values())


@on_each_recipe
def test_one_layer_used_twice(recipe):
    layer, xs = made(recipe), [x_of(M, K), x_of(M, K, seed=5)]
    y = layer(xs[0]) + layer(xs[1])
    y.backward(dy_of(y))
    once = [gradients(made(recipe), x.detach().clone().requires_grad_()) for x in xs]
    assert torch.equal(y, once[0]["y"] + once[1]["y"])
    assert [torch.equal(x.grad, found["dx"]) for x, found in zip(xs, once, strict=True)] == [True, True]
    assert torch.equal(layer.weight.grad, once[0]["dw"] + once[1]["dw"])
    assert torch.equal(layer.bias.grad, once[0]["db"] + once[1]["db"])


def test_backends_are_those_of_the_device_it_is_called_on():
    """A plan for another device, as of a layer that was moved by ``p.data = t``."""
    layer = made()
    expected = layer(x_of(M, K)).detach()
    plan = dataclasses.replace(layer._f8sub.plan, device=torch.device("meta"), fprop="none", any_layout=False)
    away = copy.copy(plan)  # which has a key of its own
    layer._f8sub.plan = away
    torch._dynamo.reset()
    with pytest.raises(Exception, match="converted for meta, and compiled for cpu"):
        torch.compile(layer, backend="eager", fullgraph=True)(x_of(M, K))
    torch._dynamo.reset()
    gc.collect()  # dynamo of torch 2.11 refers to the weight, which then cannot be swapped for another
    assert torch.equal(layer(x_of(M, K)).detach(), expected)
    assert layer._f8sub.plan.device.type == "cpu"
    layer._f8sub.plan = away
    assert layer.to(torch.bfloat16)._f8sub.plan.device.type == "cpu"


@pytest.mark.filterwarnings("ignore::f8sub.Float8Warning")
@pytest.mark.parametrize("sent", ["rowwise", "tensorwise", "blockwise"])
@pytest.mark.parametrize("recipe", ["rowwise", "tensorwise", "delayed", "rowwise_with_gw_hp"])
def test_an_x_in_float8_is_read_by_its_values(recipe, sent):
    x = f8sub.quantize(x_of(M, K).detach(), sent)
    results = []
    for given in (x, x.dequantize()):
        layer = made(recipe)
        y = layer(given)
        y.backward(dy_of(y))
        results.append([y, layer.weight.grad])
    assert all(torch.equal(found, right) for found, right in zip(*results, strict=True))
