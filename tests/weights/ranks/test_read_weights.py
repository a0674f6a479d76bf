"""A module that reads a weight itself, where FSDP2 gathers that in float8: right, dequantized, with one warning."""

import re
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard

import f8sub
from tests.data_sets import gaussian, generator
from tests.models import BF16, equal, precompute, silenced
from tests.wire import on_each

# What is told once a process is told to each test.
pytestmark = pytest.mark.own_ranks

ROWS, COLS = 80, 48
RECIPES = ["tensorwise", "blockwise", "mxfp8", "nvfp4"]


class Reader(nn.Module):
    """Reads the weight of a layer in every way but by calling the layer; calls the layer too where it is told to."""

    def __init__(self, calls: bool) -> None:
        super().__init__()
        self.layer = nn.Linear(COLS, ROWS, bias=False)
        self.calls = calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = self.layer.weight
        y = F.linear(x, weight) + x @ weight.t()
        penalty = weight.float().pow(2).sum() + torch.linalg.norm(weight).float()
        penalty = penalty + (weight * 2).abs().mean().float() + weight[5].float().sum()
        penalty = penalty + weight.flatten()[7].float()
        y = y + penalty.to(y.dtype)
        return y + self.layer(x) if self.calls else y


def made(values: torch.Tensor, recipe: str | None, gathered: bool, calls: bool) -> nn.Module:
    model = nn.Sequential(Reader(calls))
    with torch.no_grad():
        model[0].layer.weight.copy_(values)
    if recipe is None:
        return model
    return f8sub.convert_to_float8(model, recipe=recipe, float8_all_gather=gathered)


def run(model: nn.Module, policy: Any) -> list[torch.Tensor]:
    """y, dx and dw of two steps; every rank has the same x, so that the mean of gradients is each one's."""
    fully_shard(model[0], mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    precompute(model)
    found = []
    for step in range(2):
        x = gaussian((16, COLS), generator(step)).requires_grad_()
        y = model(x)
        y.backward(gaussian((16, ROWS), generator(10 + step)).to(y.dtype))
        dw = model[0].layer.weight.grad.full_tensor()
        found += [y.detach(), x.grad, dw.clone()]
        model.zero_grad()
    return found


@on_each(RECIPES)
def test_values_and_gradients_are_plain_fsdps(rank, world, recipe):
    """Bitwise, of the weight that the codes stand for; and of the weight itself where that is gathered."""
    weight = gaussian((ROWS, COLS), generator(7))
    codes = f8sub.quantize(weight.to(BF16.param_dtype), recipe, operand="w", columnwise=False)
    with silenced():
        gathered = run(made(weight, recipe, gathered=True, calls=False), BF16)
    assert len(gathered) == 6
    assert equal(gathered, run(made(codes.dequantize().float(), None, gathered=False, calls=False), BF16))
    high = run(made(weight, recipe, gathered=False, calls=False), BF16)
    assert equal(high, run(made(weight, None, gathered=False, calls=False), BF16))


def test_it_says_so_once_for_each_operator_and_gradients_of_both_uses_meet(rank, world):
    weight = gaussian((ROWS, COLS), generator(7))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", f8sub.Float8Warning)
        found = run(made(weight, "tensorwise", gathered=True, calls=True), BF16)
    plain = run(made(weight, None, gathered=False, calls=True), BF16)
    said = [f"{w.message} {w.filename}" for w in caught if issubclass(w.category, f8sub.Float8Warning)]
    errors = [((a - b).norm() / b.norm()).item() for a, b in zip(found, plain, strict=True)]
    operators = [re.match(r"(aten\.\S+) reads Float8Tensor\(\((80, 48|48, 80)\)", text)[1] for text in said]
    assert len(operators) == len(set(operators))
    assert said[0].endswith("test_read_weights.py")
    assert {"aten.mm.default", "aten._to_copy.default", "aten.mul.Tensor"} <= set(operators)
    assert max(errors) < 0.06


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_gathered_weight_that_is_freed_is_an_error(rank, world, recipe):
    """Its memory belongs to nobody: a read on the host was the end of the process."""
    model = f8sub.convert_to_float8(nn.Sequential(nn.Linear(COLS, ROWS)), recipe=recipe)
    fully_shard(model)
    precompute(model)
    with torch.no_grad():
        model(gaussian((16, COLS), generator(0)))
    held = model[0].weight
    assert held.dequantize().isfinite().all()
    model.reshard()
    for read in (held.dequantize, lambda: held * 2, lambda: F.linear(torch.ones(1, COLS), held), held.double):
        with pytest.raises(f8sub.Float8ConfigError, match="its memory is freed since"), silenced():
            read()
