"""Checkpoints are plain tensors: other processes, other formats and plain models read them, bit for bit."""

import copy
import gc
import subprocess
import sys

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import f8sub
from tests.data_sets import gaussian, generator
from tests.layers import K, N, x_of
from tests.models import Transformer, seed_weights, shard, train, transformer
from tests.selection import long_but
from tests.weights.test_state_dict import M, made
from tests.wire import ONE_RECIPE_A_WIRE, on_each

RECIPES = ONE_RECIPE_A_WIRE
on_each_recipe = on_each(RECIPES)
READ = [("tensorwise", 2), ("mxfp8", 3), ("rowwise", 3), ("blockwise", 3), ("nvfp4", 3)]

WITHOUT_F8SUB = """
import sys
sys.modules["f8sub"] = None  # importing it fails
import torch, torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
folder, expected = sys.argv[1], torch.load(sys.argv[1] + "/expected.pt", weights_only=True)
pickled = torch.load(folder + "/model.pt", weights_only=True)
tensors = load_file(folder + "/model.safetensors")
sharded = {name: torch.zeros_like(value) for name, value in expected.items()}
dcp.load(sharded, checkpoint_id=folder + "/dcp", no_dist=True)
for found in (pickled, tensors, sharded):
    assert found.keys() == expected.keys(), (found.keys(), expected.keys())
    for name, value in expected.items():
        assert type(found[name]) in (torch.Tensor, torch.nn.Parameter), (name, type(found[name]))
        assert torch.equal(found[name], value), name
print("read", len(expected), "tensors without f8sub")
"""


def full_state(model: nn.Module) -> dict[str, torch.Tensor]:
    return get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))


def stepped(model: nn.Module, rank: int) -> torch.optim.Optimizer:
    """One training step, so that scales, codes and optimizer states exist."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, rank, steps=1, optimizer=optimizer)
    return optimizer


def save_every_format(rank: int, world: int, folder: str, sharded: bool) -> None:
    model = transformer(RECIPES[0])
    if sharded:
        shard(model)
    optimizer = stepped(model, rank)
    dcp.save(model.state_dict(), checkpoint_id=f"{folder}/dcp", no_dist=not sharded)
    state = full_state(model) if sharded else model.state_dict()
    for parameter_state in get_optimizer_state_dict(model, optimizer)["state"].values():
        for value in parameter_state.values():
            local = value.to_local() if hasattr(value, "to_local") else value
            assert type(local) is torch.Tensor, type(local)
    if rank == 0:
        torch.save(state, f"{folder}/model.pt")
        save_file(state, f"{folder}/model.safetensors")
        new = {name: torch.tensor((value + 0).tolist()) for name, value in state.items()}  # made from numbers
        torch.save(new, f"{folder}/expected.pt")


@pytest.mark.parametrize("sharded", long_but([True], [True, False]), ids=["sharded", "unsharded"])
def test_a_process_without_f8sub_reads_a_model(ranks, tmp_path, sharded):
    if sharded:
        ranks(2, save_every_format, str(tmp_path), True)
    else:
        save_every_format(0, 1, str(tmp_path), False)
    command = [sys.executable, "-c", WITHOUT_F8SUB, str(tmp_path)]
    finished = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert finished.returncode == 0, finished.stderr[-3000:]
    assert "tensors without f8sub" in finished.stdout


@pytest.mark.parametrize(("recipe", "world"), long_but(READ[:2], READ))
def test_dcp_to_a_plain_model_and_back_is_bitwise(rank, world, recipe, tmp_path):
    folder = str(tmp_path)
    model = shard(transformer(recipe))
    stepped(model, rank)
    weights = full_state(model)
    dcp.save(model.state_dict(), checkpoint_id=folder)

    plain = shard(seed_weights(Transformer(), seed=9))
    state = plain.state_dict()
    dcp.load(state, checkpoint_id=folder)
    plain.load_state_dict(state)
    back = shard(transformer(recipe, spread=1.0))
    back.load_state_dict({name: value.clone() for name, value in plain.state_dict().items()})
    broadcast = shard(transformer(recipe, spread=1.0))
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(broadcast, dict(weights) if rank == 0 else {}, options=options)
    f8sub.precompute_scales(back)
    f8sub.precompute_scales(broadcast)
    f8sub.precompute_scales(model)
    x = gaussian((2, 4, 32), generator(7))
    if f8sub.get_recipe(recipe).delayed is None:  # its histories do not go through a plain model
        assert torch.equal(model(x), back(x))
        assert torch.equal(model(x), broadcast(x))
    states = {"plain": full_state(plain), "back": full_state(back), "broadcast": full_state(broadcast)}
    differing = {
        name: [key for key in states["plain"] if not torch.equal(state[key], weights[key])]
        for name, state in states.items()
    }
    assert differing == {"plain": [], "back": [], "broadcast": []}


def test_an_asynchronous_checkpoint_is_of_the_step_that_it_began_at(rank, world, tmp_path):
    """By torch's own stager, which copies attributes of tensors, too; copies are freed between the steps."""
    model, group = shard(transformer("tensorwise")), dist.new_group(backend="gloo")
    optimizer = stepped(model, rank)
    for step in range(3):
        expected = {name: value.to_local().clone() for name, value in model.state_dict().items()}
        saved = dcp.async_save(model.state_dict(), checkpoint_id=f"{tmp_path}/{step}", process_group=group)
        train(model, rank, steps=1, optimizer=optimizer)
        saved.result()
        del saved
        gc.collect()
        found = {name: torch.zeros_like(value) for name, value in model.state_dict().items()}
        dcp.load(found, checkpoint_id=f"{tmp_path}/{step}")
        assert [name for name in found if not torch.equal(found[name].to_local(), expected[name])] == []
    dist.destroy_process_group(group)
    assert not any(b"f8sub" in path.read_bytes() for path in tmp_path.glob("*/*"))


@pytest.mark.parametrize("master", [torch.float32, torch.bfloat16], ids=["fp32-masters", "bf16-masters"])
@on_each_recipe
def test_a_bf16_checkpoint_into_a_float8_model_and_back(recipe, master):
    checkpoint = seed_weights(Transformer()).bfloat16().state_dict()
    model = f8sub.convert_to_float8(seed_weights(Transformer(), seed=5).to(master), recipe=recipe)
    model(gaussian((2, 4, 32), generator(1)).to(master))
    model.load_state_dict(checkpoint)
    again = Transformer().bfloat16()
    state = {name: value for name, value in model.state_dict().items() if ".scaling_states." not in name}
    again.load_state_dict(state)
    for name, value in again.state_dict().items():
        assert torch.equal(value, checkpoint[name]), name
    assert state.keys() == checkpoint.keys()


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Parameter(gaussian((4, 64, 64), generator(1)))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return f8sub.grouped_linear(x, self.up, torch.tensor([2, 4, 6, 8]))


f8sub.register_experts(Experts)


def differing(held: dict[str, DTensor], now: dict[str, DTensor]) -> list[str]:
    """The names of the weights of which this rank has other values in two state dicts."""
    return [name for name in now if not torch.equal(held[name].to_local(), now[name].to_local())]


@pytest.mark.parametrize("world", [3])
@pytest.mark.parametrize("gathered", [True, False])
def test_a_state_dict_from_before_training_follows_uneven_shards(rank, world, gathered):
    """FSDP2's first forward pads them again, into other memory, where it finds no plain tensors."""
    model = nn.Sequential(nn.Linear(64, 64), Experts())
    f8sub.convert_to_float8(model, "rowwise", experts=True, skip_defaults=False, float8_all_gather=gathered)
    fully_shard(model)
    held, x = model.state_dict(), gaussian((8, 64), generator(rank))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    model(x).square().mean().backward()
    optimizer.step()
    f8sub.precompute_scales(model)
    assert differing(held, model.state_dict()) == []
    before = model(x)
    model.reshard()
    with torch.no_grad():
        for value in held.values():  # as dcp.load writes
            value.to_local().mul_(2)
    f8sub.precompute_scales(model)
    assert not torch.allclose(model(x), before)
    model.reshard()
    assert differing(held, model.state_dict()) == []


@pytest.mark.parametrize("world", [3])
@pytest.mark.parametrize("primary", [False, True], ids=["high-precision", "primary"])
def test_copies_of_what_a_sharded_model_holds_are_plain(rank, world, primary):
    """Itself it is a DTensor whose local tensor is watched: what writes to DTensors counts no versions."""
    model = made(primary)
    fully_shard(model)
    if primary:
        f8sub.optim.MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1))
    held = model.state_dict()["0.weight"]
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))["0.weight"]
    copies = held.clone(), held[:4].detach().clone(), held.to(torch.bfloat16), copy.deepcopy(held)
    plain = fully_shard(nn.Sequential(nn.Linear(K, N, bias=False)))
    plain.load_state_dict({"0.weight": copies[0]}, assign=True)
    x = x_of(M, K)
    assert type(held) is DTensor
    local = [each._local_tensor for each in (*copies, torch.empty_like(held), plain[0].weight)]
    assert {type(each) for each in (*local, full, held.full_tensor())} == {torch.Tensor}
    assert torch.allclose(plain(x), x @ full.t(), rtol=1e-5, atol=1e-5)
