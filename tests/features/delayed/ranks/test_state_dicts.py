"""State dicts of delayed scaling across ranks: whenever one is taken or loaded, the histories lack no step."""

import copy
import datetime
import warnings
from unittest import mock

import pytest
import torch
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import f8sub
from f8sub.weights import agreement
from tests.features.delayed.ranks.test_histories import (
    STEPS,
    batch,
    model_of,
    on_and_off,
    sharded,
    states_of,
    train,
)
from tests.models import equal, shard
from tests.selection import long_but


def state_dicts_before_precompute(rank: int, world: int, all_gather: bool, load: str) -> tuple:
    """Steps after each of which a state dict is taken, and loaded again, before the scales are precomputed."""
    agreement.PATIENCE = datetime.timedelta(seconds=20)  # on a busy machine
    model = shard(model_of(all_gather))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    f8sub.precompute_scales(model)
    outputs, taken = [], []
    for step in range(STEPS):
        x, dy = batch(step, rank)
        y = model(x)
        y.backward(dy)
        outputs.append(y.detach())
        optimizer.step()
        optimizer.zero_grad()
        taken.append(copy.deepcopy(model.state_dict()))
        if load == "all":
            model.load_state_dict(taken[-1])
        elif load == "nothing":
            model.load_state_dict({}, strict=False)
        f8sub.precompute_scales(model)
    histories = [{k: v for k, v in state.items() if "scaling_states" in k} for state in taken]
    return outputs, histories, states_of(model)


@pytest.mark.parametrize("load", ["all", "nothing", "never"])
def test_a_state_dict_between_a_step_and_precompute_scales_changes_nothing(ranks, load):
    """It has the step's amaxes of all ranks, whatever is gathered."""
    expected, _, expected_states = ranks(2, sharded, True)[0]
    on, off = (ranks(2, state_dicts_before_precompute, gather, load) for gather in (True, False))
    assert equal(on[0][0], expected)
    for (_, histories, states), (_, expected_histories, _) in zip(on, off, strict=True):
        assert equal(states, expected_states)
        assert equal(histories, expected_histories)


def taken_on_one_rank(rank: int, world: int) -> tuple:
    """Nobody waits for the others long, and the step's amaxes are in the histories later."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", f8sub.Float8Warning)
        model = shard(model_of())
        train(model, rank, 2, precompute=False)
        if rank == 1:
            with mock.patch.object(agreement, "PATIENCE", datetime.timedelta(milliseconds=1)):
                model.state_dict()
        f8sub.precompute_scales(model)
        return [str(w.message) for w in told if "state dict" in str(w.message)], states_of(model)


def test_a_state_dict_that_one_rank_takes_leaves_nobody_waiting(ranks):
    (expected, _) = ranks(2, trained_twice)
    for rank, (told, states) in enumerate(ranks(2, taken_on_one_rank)):
        assert len(told) == rank
        assert equal(states, expected)


def trained_twice(rank: int, world: int) -> list[dict[str, torch.Tensor]]:
    model = shard(model_of())
    train(model, rank, 2)
    return states_of(model)


def loaded_in_place(rank: int, world: int, all_gather: bool, compiled: bool) -> list[tuple]:
    """A run that goes on from another's state as ``dcp.load`` does it: the tensors of a state dict are written to.

    Torch steps the optimizer once before that, with gradients of zeros, so that it has a state to write to.
    """
    trained, model = shard(model_of(all_gather)), shard(model_of(all_gather))
    train(trained, rank, 2)
    saved = copy.deepcopy(trained.state_dict())
    if compiled:
        model.compile(backend="aot_eager")
        train(model, rank, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    loaded = model.state_dict()
    get_optimizer_state_dict(model, optimizer)
    with torch.no_grad():
        for name, value in loaded.items():
            value.copy_(saved[name])
    model.load_state_dict(loaded)
    resumed, expected = states_of(model), states_of(trained)
    return [
        (resumed, train(model, rank, 2)[0], states_of(model)),
        (expected, train(trained, rank, 2)[0], states_of(trained)),
    ]


@on_and_off
@pytest.mark.parametrize("compiled", long_but([False], [False, True]), ids=["eager", "compiled"])
def test_a_run_goes_on_from_what_was_loaded_in_place(ranks, all_gather, compiled):
    for resumed, expected in ranks(2, loaded_in_place, all_gather, compiled):
        assert equal(resumed, expected)
