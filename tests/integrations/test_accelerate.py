"""f8sub.integrations.accelerate.prepare on one process; two ranks of FSDP2 are in tests/recipes/test_trainers.py."""

import pytest
import torch
from accelerate import Accelerator, cpu_offload, disk_offload, dispatch_model, load_checkpoint_and_dispatch
from accelerate.state import AcceleratorState, GradientState, PartialState
from accelerate.utils import set_module_tensor_to_device
from safetensors.torch import save_file
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


def dispatched(how: str, folder) -> nn.Module:
    """A converted model that accelerate moved, with the weights of ``build``."""
    model = f8sub.convert_to_float8(build()[0])
    model(gaussian((16, 32), generator(9)))  # what it caches of its weights must not stay
    if how == "to the CPU":
        return cpu_offload(model, execution_device="cpu")
    if how == "to the disk":
        disk_offload(model, folder, execution_device="cpu")
        return model
    if how == "by a map":
        map = {"0": "cpu", "1": "cpu", "2": "disk"}
        return dispatch_model(model, map, main_device="cpu", offload_dir=folder)
    values = {name: value.clone() for name, value in model.state_dict().items()}
    if how == "loaded":
        file = str(folder / "model.safetensors")
        save_file(values, file, {"format": "pt"})
        with torch.device("meta"):
            empty = f8sub.convert_to_float8(build()[0])
        return load_checkpoint_and_dispatch(empty, file, device_map={"": "cpu"})
    for name, value in values.items():
        set_module_tensor_to_device(model, name, "meta")
        set_module_tensor_to_device(model, name, "cpu", value=value)
    return model


@pytest.mark.parametrize("how", ["to the CPU", "to the disk", "by a map", "loaded", "one by one"])
def test_a_converted_model_is_offloaded_and_dispatched(how, tmp_path):
    """Accelerate moves parameters by ``type(p)(values, requires_grad=...)``."""
    wanted, moved = f8sub.convert_to_float8(build()[0]), dispatched(how, tmp_path)
    assert type(moved[0]) is type(wanted[0])
    with torch.no_grad():
        for step in range(2):
            x = gaussian((16, 32), generator(step))
            assert torch.equal(moved(x), wanted(x))


def test_a_dispatched_model_trains():
    model, optimizer = build()
    wanted = losses(f8sub.convert_to_float8(model), optimizer, torch.Tensor.backward)
    moved = dispatched("one by one", None)
    assert all(isinstance(p, nn.Parameter) and p.requires_grad for p in moved.parameters())
    optimizer = torch.optim.AdamW(moved.parameters(), lr=1e-2)
    assert losses(moved, optimizer, torch.Tensor.backward) == wanted


def test_primary_weights_are_not_offloaded():
    model = f8sub.convert_to_float8(build()[0].requires_grad_(False), primary_weights=True)
    f8sub.drop_high_precision(model)
    with pytest.raises(f8sub.Float8ConfigError, match="cannot be created of values"):
        cpu_offload(model, execution_device="cpu")
