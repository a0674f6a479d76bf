"""Weights are known by their records: through ties, copies, moves and models that are converted in parts."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import f8sub
from tests.data_sets import gaussian, generator

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
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


def converted(model: nn.Module, recipe: str = "tensorwise", **options: object) -> nn.Module:
    return f8sub.convert_to_float8(model, recipe, skip_defaults=False, **options)


def losses(model: nn.Module) -> list[float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(3):
        loss = model(gaussian((8, WIDTH), generator(step))).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        f8sub.precompute_scales(model)
        found.append(loss.item())
    return found


def tied(rank: int, world: int, recipe: str) -> list[list[float]]:
    """Losses of a model that was converted as a whole, and in parts."""
    whole, parts = converted(Tied(), recipe), Tied()
    converted(parts.a, recipe)
    converted(parts, recipe)
    return [losses(fully_shard(model)) for model in (whole, parts)]


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
def test_a_weight_that_two_conversions_share_trains_as_of_one(ranks, recipe):
    for whole, parts in ranks(2, tied, recipe):
        assert whole == parts


def tied_apart(rank: int, world: int, gathered: tuple[bool, bool]) -> str:
    model = Tied()
    for part, float8_all_gather in zip((model.a, model.b), gathered, strict=True):
        converted(part, "delayed", float8_all_gather=float8_all_gather)
    fully_shard(model)
    try:
        losses(model)
    except f8sub.Float8ConfigError as error:
        return str(error)
    model.unshard()
    return type(model.a[0].weight).__name__


def test_a_weight_that_two_conversions_gather_differently(ranks):
    for name in ranks(2, tied_apart, (True, False)):
        assert name == "Float8Tensor"
    for text in ranks(2, tied_apart, (False, True)):
        assert "would gather its weight in high precision" in text


def moved(rank: int, world: int) -> list[torch.Tensor]:
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
    return found


def test_a_model_that_comes_to_another_dtype_is_rounded_to_that(ranks):
    for late, early in ranks(2, moved):
        assert torch.equal(late, early)
