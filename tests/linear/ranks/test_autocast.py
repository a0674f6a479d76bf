"""Recipe contexts under FSDP2: what the gathered weight allows, and bitwise what a model of that recipe computes."""

import functools

import pytest
import torch
from torch import nn

import f8sub
from tests import models
from tests.counting import Float8Work
from tests.data_sets import gaussian, generator
from tests.models import BF16, Stack, Transformer, float8_layers, seed_weights, shard, train, transformer
from tests.selection import long_but

NO_GEMM = f8sub.get_recipe("rowwise").with_high_precision(fprop=True, dgrad=True, wgrad=True)
ANY = {"rowwise": "rowwise", "tensorwise": "tensorwise", "disabled": NO_GEMM}
KEPT = [("rowwise", False), ("tensorwise", True), ("disabled", False), ("disabled", True)]


def model_of(recipe: str | f8sub.Recipe, *, all_gather: bool = True, repeated: bool = False) -> nn.Module:
    model = transformer(recipe, spread=2.0, all_gather=all_gather)
    return shard(models.checkpointed(model) if repeated else model, BF16)


@pytest.mark.parametrize(("name", "repeated"), long_but(KEPT[:3], KEPT))
def test_any_recipe_where_the_weight_is_gathered_in_high_precision(rank, world, name, repeated):
    """The weight was rounded to the policy's param_dtype and nothing else: as in a model of that recipe alone."""
    model = model_of("tensorwise", all_gather=False, repeated=repeated)
    options = {"enabled": False} if ANY[name] is NO_GEMM else {"recipe": ANY[name]}
    found = train(model, rank, around=functools.partial(f8sub.autocast, **options))
    expected = train(model_of(ANY[name], all_gather=False), rank)
    assert found == expected
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("repeated", long_but([True], [False, True]), ids=["kept", "checkpointed"])
def test_a_recipe_that_reads_what_was_gathered(rank, world, repeated):
    model = model_of("rowwise", repeated=repeated)
    inside = train(model, rank, around=lambda: f8sub.autocast("rowwise_with_gw_hp"))
    alone, own = train(model_of("rowwise_with_gw_hp"), rank), train(model_of("rowwise"), rank)
    assert inside == alone
    assert inside != own


@pytest.mark.parametrize("recipe", f8sub.recipe_names(), ids=f8sub.recipe_names())
def test_disabled_with_a_float8_wire_is_the_dequantized_weight(rank, world, recipe):
    weight = seed_weights(Transformer(blocks=1), 2.0).blocks[0].q.weight.detach()
    plain = nn.Linear(32, 32, bias=False)
    with torch.no_grad():
        plain.weight.copy_(f8sub.quantize(weight, recipe, operand="w", columnwise=False).dequantize())
    stack = Stack(32, 32)
    with torch.no_grad():
        stack.layers[0].weight.copy_(weight)
    sharded = shard(f8sub.convert_to_float8(stack, recipe=recipe))
    f8sub.precompute_scales(sharded)
    found = []
    for layer in (sharded.layers[0], plain):
        x = gaussian((16, 32), generator(1)).requires_grad_()
        with f8sub.autocast(enabled=False):
            y = layer(x)
        y.backward(gaussian((16, 32), generator(2)))
        dw = layer.weight.grad
        found.append((y, x.grad, dw.full_tensor() if hasattr(dw, "full_tensor") else dw))
    assert tuple(torch.equal(a, b) for a, b in zip(*found, strict=True)) == (True, True, True)


def test_a_recipe_that_cannot_read_what_was_gathered_is_refused(rank, world):
    tensorwise, rowwise = (f8sub.get_recipe(name) for name in ("tensorwise", "rowwise"))
    model, x = shard(transformer("tensorwise", spread=2.0)), gaussian((4, 4, 32), generator(1))
    for recipe, gemm in ((rowwise, "fprop"), (rowwise.with_high_precision(fprop=True), "dgrad")):
        with f8sub.autocast(recipe):
            message = models.refusal(f8sub.Float8ConfigError, model, x)
        assert message.startswith("blocks.0.q: recipe 'rowwise")
        assert f"its {gemm} reads the weight as rowwise e4m3 (power-of-two scales)" in message
        assert "gathered or kept of it is tensorwise e4m3" in message
        assert "convert with float8_all_gather=False" in message
    with f8sub.autocast(tensorwise.with_high_precision(fprop=True)):
        y = model(x)
    y.backward(gaussian(tuple(y.shape), generator(2)).to(y.dtype))
    assert all(layer.weight.grad is not None for layer in float8_layers(model))


def test_dgrad_reads_the_gathered_codes_where_fprop_reads_what_they_stand_for(rank, world):
    """It transposes their bytes: no weight is cast a second time.

    dx of one layer and the casts of its backward, outside of contexts and with fprop in high precision.
    """
    stack = f8sub.convert_to_float8(seed_weights(Stack(32, 48)), recipe="tensorwise")
    sharded, found = shard(stack, BF16), []
    f8sub.precompute_scales(sharded)
    recipe = stack.layers[0]._f8sub.plan.recipe
    for entered in (f8sub.autocast(), f8sub.autocast(recipe.with_high_precision(fprop=True))):
        x = gaussian((16, 32), generator(1)).bfloat16().requires_grad_()
        with entered:
            y = sharded(x)
        with Float8Work() as work:
            y.backward(gaussian((16, 48), generator(2)).bfloat16())
        found.append((x.grad, work.casts))
    (own_dx, own_casts), (dx, casts) = found
    assert torch.equal(dx, own_dx)
    assert casts == own_casts == [(16, 48)]
