"""Attention in float8 on ranks: FSDP2, heads on ranks of their own, and context parallelism."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import f8sub
from f8sub.attention.state import CHILD
from tests.attention.models import Attention, blocks, gradients, same, tokens


def in_float8(model: nn.Module, **options) -> nn.Module:
    f8sub.attend_in_float8(model, backend="reference", min_length=0, **options)
    return model


def whole(grads: list) -> list[torch.Tensor]:
    return [g.full_tensor() if hasattr(g, "full_tensor") else g for g in grads]


@pytest.mark.parametrize("float8_layers", [False, True])
def test_fsdp_is_bitwise_the_unsharded_model(rank, world, float8_layers):
    """Both ranks have the same tokens, so their mean is what one rank has."""

    def model():
        made = in_float8(blocks())
        if float8_layers:
            f8sub.convert_to_float8(made, min_dim=0)
        return made

    plain, sharded = model(), model()
    for block in sharded:
        fully_shard(block)
    fully_shard(sharded)
    for step in range(3):
        x = tokens(seed=step)
        for each in (plain, sharded):
            if float8_layers:
                f8sub.precompute_scales(each)
        assert same(whole(gradients(sharded, x)), gradients(plain, x))
    history = getattr(sharded[0].attention, CHILD).history
    assert torch.equal(history, getattr(plain[0].attention, CHILD).history)
    assert (history[:3] > 0).all()


def test_heads_on_ranks_of_their_own(rank, world):
    """Each rank has scales of its heads: bitwise the sum of modules that have these heads alone."""
    torch.manual_seed(0)
    attention = Attention()
    model = nn.Sequential(copy.deepcopy(attention))
    in_float8(model)
    mesh = init_device_mesh("cpu", (world,))
    plan = {name: ColwiseParallel() for name in "qkv"} | {"o": RowwiseParallel()}
    parallelize_module(model[0], mesh, plan)
    parts = []
    for i in range(world):
        part = Attention(heads=2, kv_heads=1)
        with torch.no_grad():
            for name in "qkv":
                getattr(part, name).weight.copy_(getattr(attention, name).weight.chunk(world)[i])
            part.o.weight.copy_(attention.o.weight.chunk(world, 1)[i])
        parts.append(in_float8(nn.Sequential(part)))
    for step in range(2):
        x = tokens(seed=step)
        found = gradients(model, x)
        expected = gradients(nn.ModuleList(parts), x, lambda x: parts[0](x) + parts[1](x))
        assert torch.equal(found[0], expected[0])
        own = [p.grad for p in parts[rank].parameters()]
        assert same([g.to_local() for g in found[1:]], own)


def test_sharded_heads_of_dtensors_stay(rank, world):
    from torch.distributed.tensor import DTensor, Shard

    mesh = init_device_mesh("cpu", (world,))
    model = in_float8(nn.Sequential(Attention()))
    state = getattr(model[0], CHILD)
    q = DTensor.from_local(torch.randn(1, 2, 8, 16), mesh, [Shard(1)])
    assert "DTensors" in state.why_not(q, q, q)


@pytest.mark.parametrize("how", ["fsdp", "heads"])
def test_a_model_that_is_sharded_is_an_error(rank, world, how):
    """The ranks that share its histories were to be known."""
    model = blocks()
    if how == "fsdp":
        fully_shard(model)
    else:
        parallelize_module(model[0], init_device_mesh("cpu", (world,)), {"attention.q": ColwiseParallel()})
    with pytest.raises(f8sub.Float8ConfigError, match=r"is already sharded .*: call attend_in_float8 before"):
        in_float8(model)
    assert not any(hasattr(module, CHILD) for module in model.modules())
