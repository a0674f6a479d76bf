"""Delayed scaling across ranks: one all-reduce a step over all that hold a layer, the same bits on each."""

import copy
import datetime
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.fsdp import fully_shard

import f8sub
from f8sub.delayed import rolling
from f8sub.weights import agreement
from tests.data_sets import gaussian, generator
from tests.models import Stack, equal, heard, refusal, seed_weights, shard
from tests.selection import long_but
from tests.wire import Wire

WIDTHS = (32, 48, 80, 32)
STEPS = 5
on_and_off = pytest.mark.parametrize("all_gather", [True, False], ids=["float8-wire", "high-precision-wire"])


def model_of(all_gather: bool = True, **options) -> nn.Module:
    recipe = f8sub.get_recipe("delayed", **{"amax_history_len": 3, **options})
    return f8sub.convert_to_float8(seed_weights(Stack(*WIDTHS)), recipe=recipe, float8_all_gather=all_gather)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    rng = generator(100 * step + rank)
    size = 4.0 ** ((3 * step + rank) % 4)
    return size * gaussian((8, WIDTHS[0]), rng), size * gaussian((8, WIDTHS[-1]), rng)


def states_of(model: nn.Module) -> list[dict[str, torch.Tensor]]:
    model.state_dict()  # what is under way is finished before a state is read
    states = [layer.scaling_states[0] for layer in model.layers]
    return [
        {"history": torch.stack(state.histories, 1), "scale": state.scale.clone(), "age": state.age.clone()}
        for state in states
    ]


def train(model, rank: int, steps=STEPS, precompute=True, between=lambda: None) -> tuple[list, list[int]]:
    """Outputs of every step, and the all-reduces of amaxes in each; ``between`` runs before scales are made."""
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    f8sub.precompute_scales(model)
    outputs, reduces = [], []
    for step in range(steps):
        x, dy = batch(step, rank)
        y = model(x)
        y.backward(dy.to(y.dtype))
        outputs.append(y.detach())
        with Wire() as wire:
            optimizer.step()
            optimizer.zero_grad()
            between()
            if precompute:
                f8sub.precompute_scales(model)
        reduces.append(wire.all_reduces)
    return outputs, reduces


@on_and_off
@pytest.mark.parametrize("operand", ["x", "dy"])
def test_one_rank_s_bad_activation_is_told_on_every_rank(rank, world, operand, all_gather):
    name = f"{operand} of layers.{0 if operand == 'x' else len(WIDTHS) - 2} "
    model = shard(model_of(all_gather))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    train(model, rank, 2)
    x, dy = batch(2, rank)
    if rank == 1:
        (x if operand == "x" else dy)[1, 2] = float("inf")
    layer = model.layers[0 if operand == "x" else -1]
    layer(x if operand == "x" else gaussian((8, WIDTHS[-2]), generator(0))).backward(
        dy if operand == "dy" else gaussian((8, WIDTHS[1]), generator(0))
    )
    for parameter in model.parameters():
        parameter.grad = None
    layer.weight.grad = torch.zeros_like(layer.weight)
    optimizer.step()
    f8sub.precompute_scales(model)
    assert all(state["history"].isfinite().all() for state in states_of(model))
    layer.weight.grad = torch.zeros_like(layer.weight)
    optimizer.step()
    message = refusal(f8sub.Float8NumericsError, f8sub.precompute_scales, model)
    assert name in message
    assert "master weight" not in message


def train_with_optimizers(model: nn.Module, ranks: range, frozen: bool) -> list[dict[str, torch.Tensor]]:
    """With the batches of ``ranks``; the first layer has an optimizer of its own, or none where it is frozen."""
    first, *others = (layer.weight for layer in model.layers)
    first.requires_grad_(not frozen)
    groups = [others] if frozen else [[first], others]
    optimizers = [torch.optim.SGD(weights, lr=1e-3 / len(ranks)) for weights in groups]
    f8sub.precompute_scales(model)
    for step in range(STEPS - 1):
        for rank in ranks:
            x, dy = batch(step, rank)
            model(x).backward(dy)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        f8sub.precompute_scales(model)
    return states_of(model)


@on_and_off
@pytest.mark.parametrize("frozen", [False, True], ids=["two-optimizers", "one-layer-frozen"])
def test_each_history_rolls_with_the_steps_of_its_own_weight(rank, world, frozen, all_gather):
    expected = train_with_optimizers(model_of(), range(2), frozen)
    found = train_with_optimizers(shard(model_of(all_gather)), range(rank, rank + 1), frozen)
    assert equal(found, expected)
    w = [(state["history"][:, 1] != 0).sum() for state in expected]
    assert w == [0 if frozen else 2, 2, 2]
    x = batch(STEPS - 2, 0)[0].abs().max(), batch(STEPS - 2, 1)[0].abs().max()
    assert expected[0]["history"][-1, 0] == max(x)


def test_histories_do_not_roll_again_because_another_layer_is_sharded(rank, world):
    model = model_of(all_gather=False)
    fully_shard(model.layers[0])
    train(model, rank, 1)
    with mock.patch.object(rolling, "roll", wraps=rolling.roll) as roll:
        fully_shard(model.layers[1])
        f8sub.precompute_scales(model)
        model.state_dict()
    assert roll.call_count == 0


def state_dicts_before_precompute(rank: int, all_gather: bool, load: str) -> tuple:
    """Steps after each of which a state dict is taken, and loaded again, before the scales are precomputed."""
    model, taken = shard(model_of(all_gather)), []

    def take() -> None:
        taken.append(copy.deepcopy(model.state_dict()))
        if load == "all":
            model.load_state_dict(taken[-1])
        elif load == "nothing":
            model.load_state_dict({}, strict=False)

    outputs, _ = train(model, rank, between=take)
    histories = [{k: v for k, v in state.items() if "scaling_states" in k} for state in taken]
    return outputs, histories, states_of(model)


@pytest.mark.parametrize("load", long_but(["all"], ["all", "nothing", "never"]))
def test_a_state_dict_between_a_step_and_precompute_scales_changes_nothing(rank, world, load):
    """It has the step's amaxes of all ranks, whatever is gathered."""
    usual = shard(model_of())
    expected, _ = train(usual, rank)
    (on, taken, states), (_, taken_off, _) = (
        state_dicts_before_precompute(rank, gather, load) for gather in (True, False)
    )
    assert equal((on, states), (expected, states_of(usual)))
    assert equal(taken, taken_off)


def test_a_state_dict_that_one_rank_takes_leaves_nobody_waiting(rank, world):
    """Nobody waits for the others long, and the step's amaxes are in the histories later."""
    expected, model = shard(model_of()), shard(model_of())
    train(expected, rank, 2)
    with heard() as told:
        train(model, rank, 2, precompute=False)
        if rank == 1:
            with mock.patch.object(agreement, "PATIENCE", datetime.timedelta(milliseconds=1)):
                model.state_dict()
        f8sub.precompute_scales(model)
        states = states_of(model)
    assert len([text for text in told if "state dict" in text]) == rank
    assert equal(states, states_of(expected))


@pytest.mark.parametrize(
    ("all_gather", "compiled"), long_but([(True, False)], [(True, False), (False, False), (True, True)])
)
def test_a_run_goes_on_from_what_was_loaded_in_place(rank, world, all_gather, compiled):
    """A run that goes on from another's state as ``dcp.load`` does it: the tensors of a state dict are written to.

    The optimizer steps once before that, with gradients of zeros, so that it has a state to write to.
    """
    trained, model = shard(model_of(all_gather)), shard(model_of(all_gather))
    train(trained, rank, 2)
    saved = copy.deepcopy(trained.state_dict())
    if compiled:
        model.compile(backend="aot_eager")
        train(model, rank, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loaded = model.state_dict()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    optimizer.step()
    optimizer.zero_grad()
    with torch.no_grad():
        for name, value in loaded.items():
            value.copy_(saved[name])
    model.load_state_dict(loaded)
    resumed, expected = states_of(model), states_of(trained)
    resumed = (resumed, train(model, rank, 2)[0], states_of(model))
    expected = (expected, train(trained, rank, 2)[0], states_of(trained))
    assert equal(resumed, expected)


@pytest.mark.parametrize("all_gather", [True, False])
def test_an_optimizer_that_is_loaded_after_the_model_rolls_nothing(rank, world, all_gather):
    """Torch steps a new optimizer, at a rate of 0, so that there is a state to load into."""
    trained, model, other = (shard(model_of(all_gather)) for _ in range(3))
    train(trained, rank, 3)
    set_model_state_dict(model, copy.deepcopy(get_model_state_dict(trained)))
    optimizer = torch.optim.AdamW(model.parameters())
    saved = copy.deepcopy(get_optimizer_state_dict(other, torch.optim.AdamW(other.parameters())))
    set_optimizer_state_dict(model, optimizer, saved)
    f8sub.precompute_scales(model)
    assert equal(states_of(model), states_of(trained))
    assert equal(train(model, rank, 2)[0], train(trained, rank, 2)[0])
