"""f8sub.integrations.accelerate.prepare on one process; two ranks of FSDP2 are in tests/recipes/test_trainers.py."""

import pytest
import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState, GradientState, PartialState
from torch import nn

import f8sub
from f8sub.integrations.accelerate import prepare
from tests.data_sets import gaussian, generator

STEPS = 3


@pytest.fixture(autouse=True)
def _of_this_test():
    """Accelerate keeps its state for the process."""
    yield
    for state in (AcceleratorState, GradientState, PartialState):
        state._reset_state()


def build() -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def losses(model, optimizer, backward) -> list[float]:
    found = []
    for step in range(STEPS):
        loss = model(gaussian((16, 32), generator(step))).square().mean()
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_it_is_converting_preparing_and_hooking_by_hand(capsys):
    accelerator = Accelerator(cpu=True)
    model, optimizer = build()
    f8sub.convert_to_float8(model, "rowwise", skip_defaults=False)
    model, optimizer = accelerator.prepare(model, optimizer)
    f8sub.register_precompute_hook(optimizer, model)
    by_hand = losses(model, optimizer, accelerator.backward)
    model, optimizer = build()
    weight = model[0].weight
    optimizer, model = prepare(accelerator, optimizer, model, recipe="rowwise", skip_defaults=False)
    assert model[0].weight is weight
    assert losses(model, optimizer, accelerator.backward) == by_hand
    assert len(set(by_hand)) == STEPS
    assert "f8sub: 2 of 2 linear layers" in capsys.readouterr().out


def test_a_model_that_was_converted_stays_as_it_is():
    model, optimizer = build()
    f8sub.convert_to_float8(model, "rowwise")
    prepare(Accelerator(cpu=True), model, optimizer)
    assert model[0]._f8sub.plan.recipe.name == "rowwise"
    with pytest.raises(
        f8sub.Float8ConfigError, match="already converted with recipe rowwise, asked for tensorwise"
    ):
        prepare(Accelerator(cpu=True), model, optimizer, recipe="tensorwise")


def test_other_than_one_model_and_one_optimizer_is_an_error():
    model, optimizer = build()
    with pytest.raises(f8sub.Float8ConfigError, match="takes one model and one optimizer, got 1 and 0"):
        prepare(Accelerator(cpu=True), model)
    with pytest.raises(f8sub.Float8ConfigError, match="got 2 and 1"):
        prepare(Accelerator(cpu=True), model, build()[0], optimizer)


def test_float8_of_accelerate_is_an_error():
    with pytest.raises(f8sub.Float8ConfigError, match='mixed_precision="fp8" has accelerate convert'):
        prepare(Accelerator(cpu=True, mixed_precision="fp8"), *build())
