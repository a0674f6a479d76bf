"""What is kept of x makes no difference to the numbers of tensor-parallel layers, and costs no bytes on the wire."""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.data_sets import gaussian, generator
from tests.features.tensor_parallel.models import PLANS, feed_forward, mesh_of
from tests.kept_x import Block, model_of, tokens
from tests.models import equal
from tests.wire import Wire


def _attention_cut_by_heads(rank: int, world: int, recipe: str, way: str):
    """q, k, v cut by rows, o by columns: x of o is this rank's part, and its amax reaches over ranks."""
    found, reductions = [], []
    for keep_x in (way, "float8"):
        model = model_of(recipe, keep_x, Heads())
        plan = {name: ColwiseParallel() for name in "qkv"} | {"o": RowwiseParallel()}
        parallelize_module(model, mesh_of(world), plan)
        x = tokens()
        with Wire() as wire:
            y = model(x)
            y.backward(gaussian(tuple(y.shape), generator(3)))
        grads = [p.grad.full_tensor() for name, p in model.named_parameters() if name[0] in "qkvo"]
        found.append([y.detach(), x.grad, *grads])
        reductions.append(wire.calls["all_reduce"])
    return equal(*found), reductions


class Heads(Block):
    def attention(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = (layer(x).unflatten(-1, (-1, 16)).transpose(1, 2) for layer in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.o(self.attention(x))


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
@pytest.mark.parametrize("way", ["auto", "high_precision"])
def test_tensor_parallelism(ranks, recipe, way):
    for same, (found, expected) in ranks(2, _attention_cut_by_heads, recipe, way):
        assert same
        # The amax of a part is not the whole x's: it is reduced once more, where columns of x are not the rank's own.
        again = recipe == "tensorwise" and way == "high_precision"
        assert found == expected + again


def _received(rank: int, world: int, way: str) -> list[torch.Tensor]:
    model = feed_forward("tensorwise", keep_x=way)
    parallelize_module(model, mesh_of(world), PLANS["one gather"])
    x = gaussian((2, 12, 64), generator(6)).requires_grad_()
    y = model(x.tensor_split(world, 1)[rank])
    y.backward(gaussian(tuple(y.shape), generator(7 + rank)))
    return [y.detach().clone(), x.grad, *(p.grad.full_tensor() for p in model.parameters())]


@pytest.mark.parametrize("way", ["high_precision", "recompute", "float8"])
def test_an_x_that_came_in_float8_stays_as_it_came(ranks, way):
    for found, expected in zip(ranks(2, _received, way), ranks(2, _received, "auto"), strict=True):
        assert equal(found, expected)
