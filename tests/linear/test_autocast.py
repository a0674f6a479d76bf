"""Recipe contexts: inside one a layer computes, bit for bit, as a layer converted with that recipe does."""

import copy
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import f8sub
from f8sub.kernels.gemm.select import select_gemm
from f8sub.linear import autocast
from tests.data_sets import gaussian, generator
from tests.layers import OTHER, OWN, Block, K, M, N, block, on_each_recipe, results, under, x_of
from tests.models import equal, seed_weights


@on_each_recipe
def test_inside_is_a_model_converted_with_that_recipe(recipe):
    for own in (OWN, OTHER):
        model, expected = block(own), results(block(recipe))
        assert equal(results(model, under(f8sub.autocast(recipe=recipe))), expected)
        assert equal(results(model), results(block(own)))


def test_a_recipe_by_value():
    recipe = f8sub.get_recipe(OTHER).with_high_precision(dgrad=True)
    assert equal(results(block(), under(f8sub.autocast(recipe))), results(block(recipe)))
    assert not equal(results(block(), under(f8sub.autocast(recipe))), results(block(OTHER)))


@on_each_recipe
def test_disabled_is_the_plain_model(recipe):
    """The master weight itself: nothing was rounded to float8 on the way."""
    plain = results(block(None))
    assert equal(results(block(recipe), under(f8sub.autocast(enabled=False))), plain)
    assert equal(results(block(recipe), under(f8sub.autocast(recipe, enabled=False))), plain)
    assert not equal(results(block(recipe)), plain)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("shape", [(M, K), (2, 16, K)], ids=str)
def test_disabled_a_bias_is_added_as_in_the_plain_layer(dtype, shape):
    """Before the sum is rounded to 16 bits."""
    plain = nn.Sequential(seed_weights(nn.Linear(K, N)).to(dtype))
    model = f8sub.convert_to_float8(copy.deepcopy(plain), skip_defaults=False)
    x = gaussian(shape, generator(1)).to(dtype)
    with f8sub.autocast(enabled=False):
        y = model(x)
    assert torch.equal(y, plain(x))


def test_no_recipe_is_each_layers_own():
    model = block(OTHER)
    assert equal(results(model, under(f8sub.autocast())), results(block(OTHER)))
    assert equal(results(model, under(f8sub.autocast(OWN), f8sub.autocast())), results(block(OTHER)))


def test_the_inner_one_overrides_and_the_outer_one_comes_back():
    model, x = block(), gaussian((M, K), generator(1))
    with f8sub.autocast(OTHER):
        before = model(x)
        with f8sub.autocast(enabled=False):
            inner = model(x)
            with f8sub.autocast(OWN):
                innermost = model(x)
            assert torch.equal(model(x), inner)
        after = model(x)
    outside = model(x)
    assert torch.equal(before, block(OTHER)(x))
    assert torch.equal(after, before)
    assert torch.equal(inner, block(None)(x))
    assert torch.equal(innermost, outside)
    assert torch.equal(outside, block()(x))


def test_one_instance_entered_again_and_inside_itself():
    model, once = block(), f8sub.autocast(OTHER)
    expected = results(block(OTHER))
    for _ in range(2):
        assert equal(results(model, under(once)), expected)
    assert equal(results(model, under(once, f8sub.autocast(enabled=False), once)), expected)
    assert equal(results(model), results(block()))


def test_a_thread_has_its_own_contexts():
    """Two threads inside one instance at once, and one outside of any."""
    model, x, shared = block(), gaussian((M, K), generator(1)), f8sub.autocast(OTHER)
    meet = threading.Barrier(3, timeout=30)

    def work(inside: bool) -> tuple[torch.Tensor, torch.Tensor]:
        with shared if inside else f8sub.autocast():
            meet.wait()
            y = model(x)
            meet.wait()
        return y, model(x)

    other, own = block(OTHER)(x), block()(x)
    with ThreadPoolExecutor(3) as pool:
        assert equal(list(pool.map(work, (True, True, False))), [(other, own), (other, own), (own, own)])


def test_backward_uses_what_its_forward_used():
    """The context is left, and another one is around backward."""
    expected = results(block(OTHER))
    for around in (None, f8sub.autocast(enabled=False), f8sub.autocast(OWN)):
        assert equal(results(block(), under(f8sub.autocast(OTHER)), around), expected)
        assert equal(results(block(), under(), around), results(block()))


def test_a_backend_asked_for_by_name_is_kept():
    """Both run on the CPU; which one did shows in which kernels ran."""
    model = f8sub.convert_to_float8(nn.Sequential(nn.Linear(K, N)), recipe=OWN, backend="reference")
    with f8sub.autocast(OTHER):
        plan = autocast.plan_in_use(model[0], model[0].weight)
    assert plan.recipe.name == OTHER
    assert (plan.fprop, plan.dgrad, plan.wgrad) == ("reference",) * 3
    automatic = f8sub.convert_to_float8(nn.Sequential(nn.Linear(K, N)), recipe=OWN)
    spec = f8sub.get_recipe(OTHER).fprop
    with f8sub.autocast(OTHER):
        plan = autocast.plan_in_use(automatic[0], automatic[0].weight)
    assert plan.fprop == select_gemm(spec, torch.device("cpu"))
    assert automatic[0]._f8sub.plan.fprop == "scaled_mm"


def test_a_backend_that_cannot_run_the_recipe_names_the_layer():
    blocks = f8sub.Float8Format(torch.float8_e4m3fn, f8sub.Tile(32, 32))
    gemm = f8sub.GemmSpec(a=blocks, b=blocks)
    recipe = f8sub.Recipe(name="blocks", fprop=gemm, dgrad=gemm, wgrad=gemm)
    model = f8sub.convert_to_float8(block(None), recipe=OWN, backend="scaled_mm")
    with (
        pytest.raises(f8sub.Float8ConfigError, match=r"gate: recipe 'blocks' of the context.*32x32"),
        f8sub.autocast(recipe),
    ):
        model(x_of(M, K))
    assert equal(results(model), results(block()))


@pytest.mark.parametrize("recipe", ["int8", "", True, False], ids=repr)
def test_what_is_no_recipe_is_refused_before_it_is_entered(recipe):
    """TransformerEngine's contexts begin with ``enabled``."""
    told = "unknown recipe" if isinstance(recipe, str) else rf"write autocast\(enabled={recipe}\)"
    for enabled in (True, False):
        with pytest.raises(f8sub.Float8ConfigError, match=told):
            f8sub.autocast(recipe, enabled)


def test_it_decorates_functions():
    @f8sub.autocast(OTHER)
    def other(model, x):
        return under(f8sub.autocast(enabled=False))(model, x) + model(x)

    def by_hand(model, x):
        return under(f8sub.autocast(enabled=False))(model, x) + under(f8sub.autocast(OTHER))(model, x)

    model = block()
    assert equal(results(model, other), results(model, by_hand))
    assert equal(results(model), results(block()))


def test_primary_weights_are_read_from_the_master_until_it_is_dropped():
    model, x = seed_weights(Block()), gaussian((M, K), generator(1))
    f8sub.convert_to_float8(model, primary_weights=True)
    f8sub.optim.MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1))
    for entered, alone in ((f8sub.autocast(OTHER), OTHER), (f8sub.autocast(enabled=False), None)):
        with entered, torch.no_grad():
            assert torch.equal(model(x), block(alone)(x))
    f8sub.drop_high_precision(model.requires_grad_(False))
    told = r"gate: .*kept of it is tensorwise e4m3"
    with pytest.raises(f8sub.Float8ConfigError, match=told), f8sub.autocast(OTHER):
        model(x)
    assert torch.equal(model(x), block(OWN)(x))
    dequantized = block(None)
    with torch.no_grad():
        for layer in dequantized.children():
            layer.weight.copy_(f8sub.quantize(layer.weight, OWN, operand="w").dequantize())
    with f8sub.autocast(enabled=False):
        assert torch.equal(model(x), dequantized(x))
