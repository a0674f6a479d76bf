"""Gradients of several dtypes in one FSDP2 group with e4m3 codes on the wire: the bits are an oracle's."""

import pytest
import torch
from torch.distributed.fsdp import fully_shard

import f8sub
from tests.gradients import oracle
from tests.mixed_dtypes import (
    dtype_of,
    gradients,
    names_of_others,
    needs_overrides,
    overriding,
    own_gradients,
    plain,
    products,
    sharded,
)

pytestmark = needs_overrides
NARROW = ("bias", "up")
"""Parameters, by parts of their names, that are given gradients of bfloat16."""


@pytest.mark.parametrize("reduce_dtype", [torch.float32, None], ids=["float32", "the parameters' own"])
def test_gradients_come_in_the_dtypes_of_their_parameters(rank, world, reduce_dtype):
    """Some in bfloat16 and some in float32. Where no dtype is asked for sums are float32, as sharded parameters are."""
    model = sharded(reduce_dtype=reduce_dtype)
    reduction = f8sub.reduce_gradients_in_float8(model, measure=True)
    products(model, rank)
    right = {name: oracle.summed(each) for name, each in own_gradients(world).items()}
    assert names_of_others(gradients(model), right) == []
    exact = {name: sum(g.float() for g in each) / world for name, each in own_gradients(world).items()}
    for name, found in reduction.decibels().items():
        of_block = [n for n in right if n.startswith(name)]
        signal, error = (
            sum(float(t[n].double().square().sum()) for n in of_block)
            for t in (exact, {n: exact[n] - right[n] for n in of_block})
        )
        assert found == pytest.approx(10 * torch.tensor(signal / error).log10().item(), abs=1e-3)


@pytest.mark.parametrize("narrow", [NARROW, ("",)], ids=["some", "all"])
def test_gradients_have_the_dtypes_that_were_asked_for(rank, world, narrow):
    """Sums are in what those of a group promote to, and each is rounded to its own afterwards."""
    model = plain()
    policy = overriding(model)
    for name, parameter in model.named_parameters():
        if any(part in name for part in narrow):
            parameter.grad_dtype = torch.bfloat16
    for block in model.blocks:
        fully_shard(block, mp_policy=policy)
    fully_shard(model, mp_policy=policy)
    if narrow == NARROW:
        f8sub.reduce_gradients_in_float8(model)
    else:
        with pytest.warns(f8sub.Float8Warning, match="2 FSDP2 modules, blocks.0 first, are rounded"):
            f8sub.reduce_gradients_in_float8(model)
    products(model, rank)
    right = {}
    for name, each in own_gradients(world).items():
        dtype = torch.bfloat16 if any(part in name for part in narrow) else torch.float32
        # Autograd accumulates in that dtype; what is wider than the parameter's own waits for the sum.
        own = [g.to(dtype) if dtype_of(name) is torch.float32 else g for g in each]
        right[name] = oracle.summed(own).to(dtype)
    assert names_of_others(gradients(model), right) == []
