"""Options that FSDP2's modules got since torch 2.12: gradients are those without the float8 all-gather, bit for bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule, fully_shard

import f8sub
from tests.data_sets import gaussian, generator
from tests.models import BF16, Choice, equal, seed_weights, shard, transformer

Options = Callable[[Any], None]


def used(model: nn.Module, rank: int, set_up: Options = lambda model: None) -> list[torch.Tensor]:
    """Gradients of two microbatches, whose weights the second one gathers into the memory of the first."""
    set_up(model)
    f8sub.precompute_scales(model)
    for micro in range(2):
        rng = generator(10 * micro + rank)
        y = model(gaussian((2, 4, 32), rng))
        y.backward(gaussian(tuple(y.shape), rng).to(y.dtype))
        if set_up is by_hand:
            model.finalize_backward()
    return [p.grad.full_tensor() for p in model.parameters()]


def by_hand(model: Any) -> None:
    model.set_manual_backward_finalization(True)


OPTIONS: dict[str, Options] = {
    "set_keep_unsharded_storage": lambda model: model.set_keep_unsharded_storage(True),
    "set_manual_backward_finalization": by_hand,
    "set_reduce_scatter_max_input_buffers": lambda model: model.set_reduce_scatter_max_input_buffers(3),
    "set_separate_reduce_scatter_group": lambda model: model.set_separate_reduce_scatter_group(),
}


def needs(option: str) -> pytest.MarkDecorator:
    why = f"FSDPModule of torch {torch.__version__} has no {option}"
    return pytest.mark.skipif(not hasattr(FSDPModule, option), reason=why)


@pytest.mark.parametrize("option", [pytest.param(option, marks=needs(option)) for option in OPTIONS])
def test_on_is_off(rank, world, option):
    on, off = (
        used(shard(transformer("tensorwise", all_gather=all_gather), BF16), rank, OPTIONS[option])
        for all_gather in (True, False)
    )
    assert equal(on, off)
    assert equal(on, used(shard(transformer("tensorwise"), BF16), rank))


@needs("set_reduce_scatter_unused_params")
@pytest.mark.parametrize("reduced", [False, True], ids=["", "with float8 gradients"])
def test_weights_that_a_rank_does_not_use_get_gradients_from_the_others(rank, world, reduced):
    found = []
    for all_gather in (True, False):
        model = seed_weights(Choice(32))
        f8sub.convert_to_float8(model, recipe="tensorwise", float8_all_gather=all_gather)
        fully_shard(model, mp_policy=BF16).set_reduce_scatter_unused_params(True)
        if reduced:
            f8sub.reduce_gradients_in_float8(model)
        f8sub.precompute_scales(model)
        rng = generator(rank)
        y = model(gaussian((16, 32), rng), rank)
        y.backward(gaussian((16, 32), rng).to(y.dtype))
        found.append([p.grad.full_tensor() for p in model.parameters()])
    assert equal(*found)
    assert all(gradient.any() for gradient in found[0])


def backward_without_weights(rank: int, world: int, recipe: str, compiled: bool) -> str:
    model = shard(transformer(recipe), BF16)
    if compiled:
        model.blocks[1].compile(backend="aot_eager")
    model.blocks[1].set_unshard_in_backward(False)
    y = model(gaussian((2, 4, 32), generator(rank)))
    dy = gaussian(tuple(y.shape), generator(10 + rank)).to(y.dtype)
    with pytest.raises(RuntimeError) as raised:
        y.backward(dy)
    return str(raised.value)


@pytest.mark.parametrize(
    ("recipe", "compiled"), [("tensorwise", False), ("rowwise", False), ("mxfp8", False), ("blockwise", True)]
)
def test_a_weight_that_backward_needs_and_was_told_not_to_gather(ranks, recipe, compiled):
    """Freed codes have no memory, which kernels would read all the same."""
    for said in ranks(1, backward_without_weights, recipe, compiled):
        assert "backward reads the codes of a gathered weight of shape" in said
