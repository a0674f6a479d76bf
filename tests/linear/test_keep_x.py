"""What is kept of x for wgrad: the same numbers whichever way, and the ways that are refused or warned of."""

import functools
import warnings

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import f8sub
from f8sub.delayed import state
from f8sub.delayed.state import states_of
from tests.compiling import compile_blocks
from tests.convert.models import K, mlp
from tests.data_sets import gaussian, generator
from tests.kept_x import (
    RE_ENCODED,
    RECIPES,
    TOKENS,
    WAYS,
    WIDTH,
    blocks,
    is_derivable,
    is_exact,
    model_of,
    on_each_exact_way,
    tokens,
    trained,
)
from tests.layers import x_of
from tests.models import equal, float8_layers, seed_weights
from tests.selection import long_but


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "autocast"])
@on_each_exact_way
def test_all_ways_have_the_same_numbers(recipe, way, dtype):
    def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=dtype is torch.bfloat16):
            return model(x)

    model, float8 = model_of(recipe, way), model_of(recipe, "float8")
    found, expected = (trained(each, functools.partial(run, each)) for each in (model, float8))
    assert equal(found, expected)
    assert len(found) == 3 * (2 + 8)


@pytest.mark.parametrize("options", [{"hadamard": True}, {"stochastic_rounding": True}], ids=str)
def test_transforms_and_draws_of_dy_are_those_of_float8_too(options):
    recipe, results = f8sub.get_recipe("nvfp4", **options), []
    for way in ("float8", "high_precision"):
        torch.manual_seed(0)
        results.append(trained(model_of(recipe, way)))
    assert equal(*results)


@pytest.mark.parametrize("recipe", [recipe for recipe, _ in RE_ENCODED])
def test_re_encoded_codes_are_those_that_a_weight_would_have(recipe):
    """dw of codes that were re-scaled by columns, of a float64 oracle that knows nothing of the layer."""
    layer = model_of(recipe, "recompute", nn.Sequential(nn.Linear(WIDTH, 48, bias=False)))
    x, dy = tokens()[0].detach(), gaussian((TOKENS, 48), generator(2))
    layer(x).backward(dy)
    row = f8sub.quantize(x, recipe, operand="x", columnwise=False)
    again = f8sub.quantize(row.dequantize().float(), recipe, operand="x", rowwise=False)
    dy_col = f8sub.quantize(dy, recipe, operand="dy", rowwise=False)
    expected = dy_col.dequantize().double().t() @ again.dequantize().double()
    error = (layer[0].weight.grad.double() - expected).norm() / expected.norm()
    assert error < 1e-5


@pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "not reentrant"])
@pytest.mark.parametrize("way", ["auto", *WAYS])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", "gridquant"])
def test_activation_checkpointing(recipe, way, reentrant):
    def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(model, x, use_reentrant=reentrant)

    def around_the_last(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        """What o reads is made outside of what is repeated."""
        block = model.blocks[0]
        x = x + checkpoint(block.o, block.attention(x), use_reentrant=reentrant)
        return x + block.down(torch.relu(block.up(x)))

    expected = trained(model_of(recipe, "float8"))
    for how in (run, around_the_last):
        model = model_of(recipe, way)
        assert equal(trained(model, functools.partial(how, model)), expected)


@pytest.mark.parametrize("way", ["auto", "high_precision"])
def test_a_delayed_scale_is_that_of_forward_though_histories_rolled_since(way):
    results = []
    for keep_x in ("float8", way):
        model = model_of("delayed", keep_x)
        trained(model)
        x = tokens(7)
        y = model(x)
        states = [state for layer in float8_layers(model) for state in states_of(layer)]
        before = torch.stack([state.scale for state in states])
        state.roll(states, torch.full((len(states), 3), 1e15))
        assert (torch.stack([state.scale for state in states]) < before / 100).all()
        y.backward(gaussian(tuple(y.shape), generator(9)))
        results.append([y.detach(), x.grad, *(p.grad for p in model.parameters())])
    assert equal(*results)


@pytest.mark.parametrize("way", ["auto", "high_precision"])
def test_backward_stages_no_amax_of_x(way):
    for model in (model_of("delayed", way), model_of("delayed", "float8")):
        y = model(tokens())
        staged = [state.history_x.clone() for layer in float8_layers(model) for state in states_of(layer)]
        y.backward(gaussian(tuple(y.shape), generator(9)))
        after = [state.history_x for layer in float8_layers(model) for state in states_of(layer)]
        assert equal(after, staged)
        assert all(history[0] > 0 for history in after)


def test_an_x_that_is_kept_and_changed_is_an_error_as_of_any_linear_layer():
    layer = model_of("tensorwise", "high_precision", nn.Sequential(nn.Linear(64, 96)))
    x = x_of(24, 64) * 1
    y = layer(x)
    x.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(gaussian(tuple(y.shape), generator(9)))


QUICK = [next(iter(RE_ENCODED))]
COMPILED = [("tensorwise", "auto"), ("delayed", "high_precision"), *QUICK]


@pytest.mark.parametrize(("recipe", "way"), long_but(QUICK, COMPILED))
def test_compiled_code_has_the_same_numbers(recipe, way):
    torch._dynamo.reset()
    same_as = "recompute" if (recipe, way) in RE_ENCODED else "float8"
    eager, compiled = model_of(recipe, same_as), compile_blocks(model_of(recipe, way))
    assert equal(trained(compiled), trained(eager))
    torch._dynamo.reset()


def test_contexts_of_other_recipes():
    model, x = model_of("tensorwise", "recompute"), tokens()
    for context in (f8sub.autocast("gridquant"), f8sub.autocast("rowwise_with_gw_hp")):
        with context:
            y = model(x)
            y.backward(gaussian(tuple(y.shape), generator(9)))
    with f8sub.autocast(enabled=False):
        found = model(x)
    assert torch.equal(found, seed_weights(blocks())(x))
    with (
        f8sub.autocast("nvfp4"),
        pytest.raises(f8sub.Float8ConfigError, match=r"blocks.0.q.*'nvfp4'.*keep_x='recompute'.*convert the"),
    ):
        model(x)


REFUSED = {
    "nvfp4": ("nvfp4", "recompute", "scales are not powers of two"),
    "float scales": (f8sub.get_recipe("blockwise", power_of_2_scales=False), "recompute", "powers of two"),
    "no cast in fprop": (
        f8sub.get_recipe("tensorwise").with_high_precision(fprop=True),
        "recompute",
        "fprop does not cast x",
    ),
    "no amax in fprop": (
        f8sub.get_recipe("delayed").with_high_precision(fprop=True),
        "high_precision",
        "whose amax DelayedScaling takes",
    ),
    "no such word": ("tensorwise", "bf16", "choose one of auto, float8, high_precision, recompute"),
    "no pattern": ("tensorwise", {3: "auto"}, "keep_x for layers goes by glob patterns.*got 3"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused_leaves_the_model_as_it_was(case):
    recipe, keep_x, message = REFUSED[case]
    model = mlp()
    with pytest.raises(f8sub.Float8ConfigError, match=message):
        f8sub.convert_to_float8(model, recipe=recipe, keep_x=keep_x)
    assert type(model.up) is nn.Linear


@pytest.mark.parametrize("recipe", RECIPES)
def test_codes_that_are_re_encoded_are_warned_of(recipe):
    if not is_derivable(recipe):
        pytest.skip("refused")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        f8sub.convert_to_float8(mlp(), recipe=recipe, keep_x="recompute")
    expected = [] if is_exact(recipe, "recompute") else [f"by columns in up ({recipe}) and 1 more"]
    assert [part for part in expected if part in str(caught[0].message)] == expected
    assert len(caught) == len(expected)


def test_layers_by_pattern_and_what_says_so():
    model = mlp()
    with pytest.warns(f8sub.Float8Warning, match="keep_x that decide for no layer: 'wo' matches no"):
        f8sub.convert_to_float8(model, keep_x={"down": "high_precision", "wo": "float8"})
    assert (model.up._f8sub.keep_x, model.down._f8sub.keep_x) == ("auto", "high_precision")
    assert "keep_x=high_precision" in repr(model.down)
    report = f8sub.conversion_report(model)
    assert ["keep_x=high_precision" in layer.detail for layer in report.layers[:2]] == [False, True]
    assert report.idle_patterns == ("'wo' matches no linear layer",)
    f8sub.convert_from_float8(model)
    assert not hasattr(model.down, "_f8sub")
    assert torch.equal(model(x_of(8, K)), mlp()(x_of(8, K)))
