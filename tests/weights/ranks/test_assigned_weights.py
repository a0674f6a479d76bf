"""Weights that take another's place: gathered in float8 all the same, or refused with the layer's name."""

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor

import f8sub
from tests.data_sets import gaussian, generator
from tests.models import refusal


def plain() -> nn.Module:
    torch.manual_seed(5)
    return nn.Sequential(nn.Linear(64, 48, bias=False), nn.Linear(48, 64, bias=False))


def losses(model: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(2):
        f8sub.precompute_scales(model)
        loss = model(gaussian((8, 64), generator(step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def in_each_order(rank: int, world: int) -> dict[str, tuple[list[float], str]]:
    """Losses and the class of the local weight, for every order of converting, sharding and assigning."""
    found = {}
    for order in ("copied", "assigned-then-sharded", "sharded-then-assigned", "meta-then-assigned"):
        with torch.device("meta" if order.startswith("meta") else "cpu"):
            model = f8sub.convert_to_float8(plain())
        state = plain().state_dict()
        if order == "assigned-then-sharded":
            model.load_state_dict(state, assign=True)
        fully_shard(model)
        if order in ("sharded-then-assigned", "meta-then-assigned"):
            parameters = dict(model.named_parameters())
            state = {
                k: distribute_tensor(v, parameters[k].device_mesh, parameters[k].placements)
                for k, v in state.items()
            }
            model.load_state_dict(state, assign=True)
        found[order] = losses(model), type(model[0].weight._local_tensor).__name__
    return found


def test_assigning_a_state_dict_keeps_the_float8_all_gather(ranks):
    for found in ranks(2, in_each_order):
        assert len({str(one) for one in found.values()}) == 1, found
        assert found["copied"][1] == "MasterWeight"


def assigned_by_hand(rank: int, world: int) -> str:
    model = f8sub.convert_to_float8(plain())
    model[1].weight = nn.Parameter(torch.randn(64, 48))
    fully_shard(model)
    return refusal(f8sub.Float8ConfigError, f8sub.precompute_scales, model)


def test_a_parameter_put_in_its_place_is_refused(ranks):
    for message in ranks(2, assigned_by_hand):
        assert message.startswith("1: ")
        assert "high precision" in message
