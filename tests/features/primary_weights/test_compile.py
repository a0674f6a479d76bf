"""Primary weights under torch.compile: one graph, eager's results, and the codes alone once masters were dropped."""

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef

import f8sub
from tests.features.primary_weights.test_primary_weights import RECIPES, made, on_each_recipe, step, wrapped
from tests.layers import K, x_of
from tests.models import float8_layers
from tests.selection import long_but

pytestmark = pytest.mark.usefixtures("fresh_compiler")


@pytest.mark.parametrize("recipe", long_but(["tensorwise", "mxfp8", "rowwise_with_gw_hp"], RECIPES))
@pytest.mark.parametrize(
    "dtype", long_but([torch.bfloat16], [torch.float32, torch.bfloat16]), ids=["fp32", "bf16"]
)
def test_compiled_training_is_bitwise_eager(recipe, dtype):
    model, expected = made(recipe, dtype), made(recipe, dtype)
    optimizer, other = wrapped(model), wrapped(expected)
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for seed in range(2):
        assert torch.equal(step(compiled, optimizer, seed), step(expected, other, seed))
    with torch._dynamo.config.patch(error_on_recompile=True):
        assert torch.equal(step(compiled, optimizer, 2), step(expected, other, 2))
    for name, value in expected.state_dict().items():
        assert torch.equal(model.state_dict()[name], value), name


@on_each_recipe
def test_a_model_that_is_compiled_only_lets_go_of_its_high_precision_values_too(recipe):
    model, expected = made(recipe), made(recipe)
    x = x_of(8, K)
    held = [StorageWeakRef(layer.weight.untyped_storage()) for layer in float8_layers(model)]
    for converted in (model, expected):
        f8sub.drop_high_precision(converted.requires_grad_(False))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x), expected(x))
    assert all(storage.expired() for storage in held)
