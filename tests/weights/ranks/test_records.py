"""Weights are known by their records: through ties, moves, assignments and stacks, and in parts of a model."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.nn.utils import prune

import f8sub
from tests.data_sets import gaussian, generator
from tests.models import take_step

WIDTH = 32


class Tied(nn.Module):
    """Two layers with one weight."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.a, self.b = (nn.Sequential(nn.Linear(WIDTH, WIDTH, bias=False)) for _ in range(2))
        self.b[0].weight = self.a[0].weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.relu(self.a(x)))


def pair() -> nn.Module:
    torch.manual_seed(3)
    return nn.Sequential(nn.Linear(WIDTH, 48, bias=False), nn.Linear(48, WIDTH, bias=False))


def converted(model: nn.Module, recipe: str = "tensorwise", **options: object) -> nn.Module:
    return f8sub.convert_to_float8(model, recipe, skip_defaults=False, **options)


def losses(model: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(3):
        found.append(take_step(optimizer, model(gaussian((8, WIDTH), generator(step))).square().mean()))
        f8sub.precompute_scales(model)
    return found


@pytest.mark.parametrize("kept", [False, True], ids=["let go", "kept"])
def test_a_shallow_copy_of_a_layer_leaves_it_as_it_was(rank, world, kept):
    expected = losses(fully_shard(converted(pair())))
    model = converted(pair())
    copies = [copy.copy(model[0])]
    if not kept:
        copies.clear()
    assert losses(fully_shard(model)) == expected
    assert len(copies) == kept


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_a_weight_that_two_conversions_share_trains_as_of_one(rank, world, recipe):
    """Losses of a model that was converted as a whole, and in parts."""
    whole, parts = converted(Tied(), recipe), Tied()
    converted(parts.a, recipe)
    converted(parts, recipe)
    whole, parts = [losses(fully_shard(model)) for model in (whole, parts)]
    assert whole == parts


def test_a_weight_that_two_conversions_gather_differently(rank, world):
    models = [Tied(), Tied()]
    for model, first_in_float8 in zip(models, (True, False), strict=True):
        converted(model.a, "delayed", float8_all_gather=first_in_float8)
        converted(model.b, "delayed", float8_all_gather=not first_in_float8)
        fully_shard(model)
    losses(models[0])
    models[0].unshard()
    assert type(models[0].a[0].weight) is f8sub.Float8Tensor
    with pytest.raises(f8sub.Float8ConfigError, match="would gather its weight in high precision"):
        losses(models[1])


def test_pruned_weights_are_gathered_in_high_precision_or_the_error_says_how(rank, world):
    def pruned(*, in_float8: bool) -> nn.Module:
        model = converted(pair(), float8_all_gather=in_float8)
        for layer in model:
            prune.l1_unstructured(layer, "weight", 0.5)
        return model

    with pytest.raises(f8sub.Float8ConfigError, match="prune needs float8_all_gather=False"):
        losses(fully_shard(pruned(in_float8=True)))
    assert losses(fully_shard(pruned(in_float8=False))) == losses(pruned(in_float8=False))


def test_a_model_that_comes_to_another_dtype_is_rounded_to_that(rank, world):
    found = []
    for first in (f8sub.precompute_scales, lambda model: None):
        model = fully_shard(converted(pair().bfloat16()))
        first(model)
        model.to(torch.float32)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
        f8sub.precompute_scales(model)
        found.append(model(gaussian((8, WIDTH), generator(1))).detach())
    assert torch.equal(*found)


def test_assigning_a_state_dict_keeps_the_float8_all_gather(rank, world):
    """Losses and the class of the local weight, for every order of converting, sharding and assigning."""
    found = {}
    for order in ("copied", "assigned-then-sharded", "sharded-then-assigned", "meta-then-assigned"):
        with torch.device("meta" if order.startswith("meta") else "cpu"):
            model = converted(pair())
        state = pair().state_dict()
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
    assert len({str(one) for one in found.values()}) == 1, found
    assert found["copied"][1] == "MasterWeight"


def test_a_parameter_put_in_its_place_is_refused(rank, world):
    model = converted(pair())
    model[1].weight = nn.Parameter(torch.randn(WIDTH, 48))
    fully_shard(model)
    with pytest.raises(f8sub.Float8ConfigError, match=r"^1: .*high precision"):
        f8sub.precompute_scales(model)
