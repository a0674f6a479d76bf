"""What compiled code asks before each call, and that whatever changes a layer's numbers compiles it anew."""

from typing import Any

import pytest
import torch
from torch import nn

import f8sub
from tests.compiling import Compiler, compile_blocks, mlps
from tests.data_sets import gaussian, generator
from tests.layers import M, made, x_of
from tests.models import equal

pytestmark = pytest.mark.usefixtures("fresh_compiler")

MORE = 80
"""Guards of a block with three layers that it has not with nn.Linear: 47 with torch 2.11, and 62 with 2.13, which looks
for marks of dynamic dimensions on each tensor. A layer that dynamo looks into has several times as many."""


def guards(model: nn.Module) -> int:
    """The conditions, as torch prints them, of the one graph that a block of a model is compiled to."""
    compile_blocks(model)
    model(gaussian((2, 12, 32), generator(1)))
    (entry,) = torch._dynamo.eval_frame._debug_get_cache_entry_list(type(model.blocks[0]).forward.__code__)
    lines = [line.partition("+- ")[2] for line in str(entry.guard_manager).splitlines() if "+- " in line]
    torch._dynamo.reset()
    return sum("GuardManager" not in line.partition(":")[0] for line in lines)


def test_few_guards_for_a_layer():
    more = guards(mlps("tensorwise")) - guards(mlps(None))
    assert 0 < more <= MORE


def enter_autocast(layer: nn.Module) -> Any:
    return f8sub.autocast("rowwise_with_gw_hp")


def change_recipe(layer: nn.Module) -> None:
    layer._f8sub.plan = layer._f8sub.plan.with_recipe(f8sub.get_recipe("rowwise_with_gw_hp"))


def change_backend(layer: nn.Module) -> None:
    plan = layer._f8sub.plan
    layer._f8sub.plan = type(plan).make(plan.recipe, plan.device, "reference")


def keep_x(layer: nn.Module) -> None:
    layer._f8sub.keep_x = "high_precision"


def without_gradients(layer: nn.Module) -> Any:
    return torch.no_grad()


def autocast_of_torch(layer: nn.Module) -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def without_bias(layer: nn.Module) -> None:
    layer.bias = None


def plain_weight(layer: nn.Module) -> None:
    layer._parameters["weight"] = nn.Parameter(layer.weight.detach().plain.clone())


CHANGES = {
    "contexts": (enter_autocast, without_gradients, autocast_of_torch),
    "of a layer": (change_recipe, change_backend, keep_x, without_bias, plain_weight),
}


@pytest.mark.parametrize("kind", CHANGES)
def test_a_change_compiles_anew(kind: str):
    """Each change after those before it: fewer than the graphs that dynamo keeps of one function."""
    compiler, eager, layer = Compiler(), made(), made()
    layer.compile(backend=compiler, fullgraph=True)
    first = results(layer)
    assert equal(first, results(eager))
    before = compiler.graphs
    assert equal(results(layer), first)
    assert compiler.graphs == before
    for change in CHANGES[kind]:
        before, found = compiler.graphs, []
        for each in (eager, layer):
            context = change(each)
            with context if context is not None else torch.enable_grad():
                found.append(results(each))
        assert compiler.graphs > before, change.__name__
        assert equal(*found), change.__name__


def test_a_weight_that_lies_elsewhere_is_read_there():
    """``p.data = t`` of the same shape, which calls no operator and fails no guard."""
    eager, layer = made(), made()
    layer.compile(backend="aot_eager", fullgraph=True)
    first = results(layer)
    for each in (eager, layer):
        each.weight.data = gaussian(tuple(each.weight.shape), generator(4)).to(each.weight.dtype)
    found = results(layer)
    assert equal(found, results(eager))
    assert not equal(found, first)


def results(layer: nn.Module) -> list[torch.Tensor]:
    x = x_of(M, layer.in_features).requires_grad_()
    y = layer(x)
    if not y.requires_grad:
        return [y]
    y.backward(gaussian(tuple(y.shape), generator(3)).to(y.dtype))
    gradients = [p.grad.clone() for p in layer.parameters()]
    layer.zero_grad()
    return [y.detach(), x.grad, *gradients]
