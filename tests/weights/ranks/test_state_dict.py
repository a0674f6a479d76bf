"""What a sharded model's ``state_dict()`` holds: DTensors whose local tensor is watched, and whose copies are plain."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import f8sub
from tests.layers import K, N, x_of
from tests.weights.test_state_dict import M, made


def sharded(rank: int, world: int, primary: bool) -> dict[str, type]:
    """Types of what a sharded model's state dict holds and of copies, and whether a plain model takes those over."""
    model = made(primary)
    fully_shard(model)
    if primary:
        f8sub.optim.MasterWeights(torch.optim.SGD(model.parameters(), lr=0.1))
    held = model.state_dict()["0.weight"]
    full = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))["0.weight"]
    copies = {
        "clone": held.clone(),
        "clone of a view": held[:4].detach().clone(),
        "to": held.to(torch.bfloat16),
        "deepcopy": copy.deepcopy(held),
        "new": torch.empty_like(held),
    }
    plain = fully_shard(nn.Sequential(nn.Linear(K, N, bias=False)))
    plain.load_state_dict({"0.weight": copies["clone"]}, assign=True)
    x = x_of(M, K)
    found = {name: type(tensor._local_tensor) for name, tensor in copies.items()}
    found |= {"full": type(full), "full_tensor": type(held.full_tensor()), "held": type(held)}
    found["plain model"] = type(plain[0].weight._local_tensor)
    assert torch.allclose(plain(x), x @ full.t(), rtol=1e-5, atol=1e-5)
    return {name: kind.__name__ for name, kind in found.items()}


@pytest.mark.parametrize("primary", [False, True], ids=["high-precision", "primary"])
def test_copies_of_what_a_sharded_model_holds_are_plain(ranks, primary):
    """Itself it is a DTensor whose local tensor is watched: what writes to DTensors counts no versions."""
    for found in ranks(3, sharded, primary):
        assert found.pop("held") == DTensor.__name__
        assert found == dict.fromkeys(found, "Tensor")
