"""AdamW steps under each wrapper: the same losses with the float8 all-gather, without it, and without sharding.

What may differ between a sharded and an unsharded run is the order in which gradients are summed. One rank
sums nothing and two ranks add two numbers, so an unsharded run that adds the two ranks' gradients has the
same sums, and equality is bitwise. Of more ranks, y and dx are: tests/faults/ranks/test_properties.py.
"""

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import f8sub
from tests.models import BF16, equal, loss_of, shard, train, transformer
from tests.selection import long_but
from tests.wires import ONE_RECIPE_A_WIRE, QUICK, on_each

STEPS = {"bf16": 10, "fp32": 4}
SPREAD = 4.0
OTHERS = ("tensorwise", "rowwise", "blockwise", "delayed")
"""Recipes that are trained without a policy, under each wrapper."""
CASES = [*((r, "bf16") for r in ONE_RECIPE_A_WIRE), *((r, "fp32") for r in OTHERS)]
CHOSEN = [*((r, "bf16") for r in QUICK), ("tensorwise", "fp32"), ("delayed", "fp32")]

Result = tuple[list[float], list[torch.Tensor]]


def made(recipe: str, all_gather: bool = True) -> nn.Module:
    chosen = f8sub.get_recipe("delayed", amax_history_len=3) if recipe == "delayed" else recipe
    return transformer(chosen, spread=SPREAD, all_gather=all_gather)


def optimizer_of(parameters: Any) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=3e-3, weight_decay=0.1)


def wrapped(recipe: str, policy: str) -> dict[str, nn.Module]:
    if policy == "bf16":
        return {"on": shard(made(recipe), BF16), "off": shard(made(recipe, False), BF16)}
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(), 1), mesh_dim_names=("r", "s"))
    return {
        "on": shard(made(recipe)),
        "off": shard(made(recipe, False)),
        "shards of one": shard(made(recipe), mesh=mesh),
        "DDP": DistributedDataParallel(made(recipe)),
    }


def whole(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor + 0


def state_of(model: nn.Module) -> list[torch.Tensor]:
    """Weights and, of delayed scaling, histories and scales."""
    model.state_dict()  # what is under way is finished
    return [whole(tensor) for tensor in (*model.parameters(), *model.buffers())]


def on_a_rank(rank: int, world: int, recipe: str, policy: str) -> dict[str, Result]:
    return {
        name: (
            train(model, rank, steps=STEPS[policy], optimizer=optimizer_of(model.parameters())),
            state_of(model),
        )
        for name, model in wrapped(recipe, policy).items()
    }


class Bf16Copies(nn.Module):
    """MixedPrecisionPolicy(bf16), unsharded: bf16 copies of float32 masters, made anew each step."""

    def __init__(self, recipe: str) -> None:
        super().__init__()
        self.masters = list(transformer(None, spread=SPREAD).parameters())
        self.model = made(recipe).bfloat16()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model(x.bfloat16())

    def copy_masters(self) -> None:
        with torch.no_grad():
            for copy, master in zip(self.model.parameters(), self.masters, strict=True):
                copy.copy_(master)

    def add_gradients(self) -> None:
        """Summed in float32, the policy's reduce_dtype."""
        for copy, master in zip(self.model.parameters(), self.masters, strict=True):
            gradient = copy.grad.float()
            master.grad = gradient if master.grad is None else master.grad + gradient
            copy.grad = None


def unsharded(recipe: str, policy: str, ranks: int) -> tuple[list[list[float]], list[torch.Tensor]]:
    """Losses of each rank's part of the batch, in one process."""
    model = Bf16Copies(recipe) if policy == "bf16" else made(recipe)
    parameters = model.masters if policy == "bf16" else list(model.parameters())
    optimizer = optimizer_of(parameters)
    losses: list[list[float]] = [[] for _ in range(ranks)]
    for step in range(STEPS[policy]):
        if policy == "bf16":
            model.copy_masters()
        for rank in range(ranks):
            loss = loss_of(model, step, rank)
            loss.backward()
            losses[rank].append(loss.item())
            if policy == "bf16":
                model.add_gradients()
        for parameter in parameters:
            parameter.grad /= ranks
        optimizer.step()
        optimizer.zero_grad()
    return losses, parameters if policy == "bf16" else state_of(model)


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("world", [1, 2], ids=["world1", "world2"])
@pytest.mark.parametrize(("recipe", "policy"), long_but(CHOSEN, [*CASES, ("delayed", "bf16")]))
def test_each_wrapper_is_the_unsharded_run(ranks, recipe, policy, world):
    expected_losses, expected = unsharded(recipe, policy, world)
    for rank, found in enumerate(ranks(world, on_a_rank, recipe, policy)):
        losses, state = found["on"]
        assert len(set(losses)) == len(losses)
        assert [name for name in found if not equal(found[name], found["on"])] == []
        if (recipe, policy) == ("delayed", "bf16"):
            continue  # the optimizer of Bf16Copies steps none of the converted weights
        assert losses == expected_losses[rank]
        assert equal(state, [whole(tensor) for tensor in expected])


@on_each(ONE_RECIPE_A_WIRE)
def test_a_high_precision_run_has_other_losses(recipe):
    """What makes the equalities above mean something: float8 shows in the losses."""
    losses, _ = unsharded(recipe, "fp32", 1)
    assert loss_of(transformer(None, spread=SPREAD), 0, 0).item() != losses[0][0]
