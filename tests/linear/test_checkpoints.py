"""Recipe contexts and activation checkpointing: a repeated forward computes as it first ran, to the bit, or raises."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import f8sub
from f8sub.linear import autocast
from tests.layers import OTHER, OWN, Block, K, M, N, block, dy_of, on_each_recipe, results, under, x_of
from tests.models import equal, seed_weights

REENTRANT = pytest.mark.parametrize("reentrant", [True, False], ids=["reentrant", "non-reentrant"])


def checkpointed(reentrant: bool, *contexts: f8sub.autocast):
    """The context around the checkpoint, left when backward repeats the forward."""

    def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return under(*contexts)(lambda y: checkpoint(model, y, use_reentrant=reentrant), x)

    return run


@on_each_recipe
def test_a_repeated_forward_uses_the_context_of_the_first(recipe):
    expected = results(block(recipe))
    for around in (None, f8sub.autocast(enabled=False)):
        found = results(block(), checkpointed(False, f8sub.autocast(recipe)), around)
        assert equal(found, expected)


OUTSIDE = r"gate: .*repeated inside backward.*run with {} before.*inside the checkpointed function"


@pytest.mark.parametrize("recipe", [OTHER, "blockwise"])
def test_a_context_around_a_reentrant_checkpoint_is_an_error_in_backward_until_the_weights_change(recipe):
    model, x = block(), x_of(M, K)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    y = checkpointed(True, f8sub.autocast(recipe))(model, x)
    for _ in range(2):
        with pytest.raises(f8sub.Float8ConfigError, match=OUTSIDE.format(recipe)):
            y.backward(dy_of(y), retain_graph=True)
    model.zero_grad()
    optimizer.step()
    twin = f8sub.convert_to_float8(seed_weights(Block()), recipe=OWN)
    twin.load_state_dict(model.state_dict())
    assert equal(results(model, checkpointed(True)), results(twin))


def test_an_optimizer_that_steps_in_backward_does_not_hide_a_context_around_a_reentrant_checkpoint():
    layers = nn.Sequential(nn.Linear(K, N), nn.Linear(N, K))
    model = f8sub.convert_to_float8(seed_weights(layers), recipe=OWN)
    optimizer = torch.optim.SGD([model[1].weight], lr=1e-3)
    model[1].weight.register_post_accumulate_grad_hook(lambda weight: optimizer.step())
    y = model[1](checkpointed(True, f8sub.autocast(OTHER))(model[0], x_of(M, K)))
    with pytest.raises(f8sub.Float8ConfigError, match="inside the checkpointed function"):
        y.backward(dy_of(y))


@on_each_recipe
def test_a_repeated_forward_whose_layer_backward_begins_with(recipe):
    """As the last layer of a pipeline's stage is: the engine does not count the node that it begins with."""

    def layers(recipe: str) -> nn.Module:
        model = nn.Sequential(nn.Linear(K, N), nn.Linear(N, K))
        return f8sub.convert_to_float8(seed_weights(model), recipe=recipe)

    found = results(layers(OWN), checkpointed(False, f8sub.autocast(recipe)))
    assert equal(found, results(layers(recipe)))


@REENTRANT
def test_a_repeated_forward_outside_of_contexts_uses_the_layers_own(reentrant):
    with f8sub.autocast(OTHER):
        block()(x_of(M, K))
    assert equal(results(block(), checkpointed(reentrant), f8sub.autocast(OTHER)), results(block()))
    assert equal(results(block(), checkpointed(reentrant)), results(block()))
    assert equal(results(block(), checkpointed(reentrant, f8sub.autocast(OWN))), results(block()))


@REENTRANT
def test_a_context_inside_the_checkpointed_function(reentrant):
    def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        def both(x: torch.Tensor) -> torch.Tensor:
            with f8sub.autocast(OTHER):
                h = model(x)
            return model(h)

        return checkpoint(both, x, use_reentrant=reentrant)

    def plainly(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model(under(f8sub.autocast(OTHER))(model, x))

    assert equal(results(block(), run), results(block(), plainly))


def test_microbatches_of_several_contexts_are_told_apart_by_their_graphs():
    """Each backward executes one graph: its nodes say what their forward used."""
    model, recipes = block(), [OWN, OTHER, "high precision", OTHER]
    xs = [x_of(M, K, seed=10 + i) for i in range(len(recipes))]

    def forward(x: torch.Tensor, recipe: str) -> torch.Tensor:
        entered = f8sub.autocast(enabled=False) if recipe == "high precision" else f8sub.autocast(recipe)
        with entered:
            return checkpoint(model, x, use_reentrant=False)

    ys = [forward(x, recipe) for x, recipe in zip(xs, recipes, strict=True)]
    for i in (2, 0, 3, 1):
        model.zero_grad()
        ys[i].backward(dy_of(ys[i]))
        alone = block(None if recipes[i] == "high precision" else recipes[i])
        x = xs[i].detach().clone().requires_grad_()
        y = alone(x)
        y.backward(dy_of(y))
        assert equal([ys[i], xs[i].grad], [y, x.grad])
        assert equal([p.grad for p in model.parameters()], [p.grad for p in alone.parameters()])


def test_several_contexts_in_one_graph_cannot_be_told_apart():
    model, x = block(), x_of(M, K)
    with f8sub.autocast(OTHER):
        y = checkpoint(model, x, use_reentrant=False)
    y = y + checkpoint(model, x, use_reentrant=False)
    with pytest.raises(f8sub.Float8ConfigError, match=OUTSIDE.format("rowwise, tensorwise")):
        y.backward(dy_of(y))


def test_evaluation_in_a_context_does_not_stop_a_reentrant_checkpoint():
    model, x = block(), x_of(M, K)
    y = checkpointed(True)(model, x)
    model.eval()
    with torch.no_grad(), f8sub.autocast(OTHER):
        model(x)
    model.train()
    y.backward(dy_of(y))
    assert equal([y, x.grad, *(p.grad for p in model.parameters())], results(block()))


def test_nothing_is_remembered_where_no_context_was_entered_or_nothing_is_repeated(monkeypatch):
    model = block()
    results(model, under(f8sub.autocast(OTHER)))
    assert not any(layer in autocast._records for layer in model.modules())
    monkeypatch.setattr(autocast, "was_entered", False)
    model = block()
    for reentrant in (True, False):
        results(model, checkpointed(reentrant))
    assert not any(layer in autocast._records for layer in model.modules())
    with f8sub.autocast():
        pass
    results(model, checkpointed(False))
    assert all(layer in autocast._records for layer in (model.gate, model.up, model.down))


def test_what_is_remembered_dies_with_the_graph():
    model, run = block(), checkpointed(False, f8sub.autocast(OTHER))
    y = run(model, x_of(M, K))
    record = autocast._records[model.gate]
    assert len(record._nodes) == 1
    y.backward(dy_of(y))
    del y
    assert len(record._nodes) == 0
