"""Attention in float8 on ranks: FSDP2, heads on ranks of their own, and context parallelism."""

import copy

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

import f8sub
from f8sub.attention.state import CHILD
from tests.attention.models import WIDTH, Attention, blocks, gradients, same, tokens
from tests.selection import long_but


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


def trained_on(
    device: str, recipe: str | None, backward: str, histories: bool, compiled: bool
) -> list[torch.Tensor]:
    """Losses, weights and histories of a model that begins with a state dict, assigned where it is on meta."""
    first = torch.device(device)
    with first:
        model = blocks()
    if recipe is not None:
        f8sub.convert_to_float8(model, recipe, min_dim=0)
    in_float8(model, backward=backward)
    for block in model:
        if compiled:
            block.compile(backend="eager", fullgraph=first.type == "meta")
        fully_shard(block)
    fully_shard(model)
    named, values = dict(model.named_parameters()), blocks().state_dict()
    given = {n: distribute_tensor(v, named[n].device_mesh, named[n].placements) for n, v in values.items()}
    if histories:
        rows = {n: b for n, b in model.state_dict().items() if n not in values}
        given |= {n: torch.full(b.shape, 0.5) for n, b in rows.items()}
    model.load_state_dict(given, assign=first.type == "meta", strict=False)
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    optimizer, losses = torch.optim.SGD(model.parameters(), lr=1e-3), []
    for step in range(3):
        if recipe is not None:
            f8sub.precompute_scales(model)
        loss = (model(tokens(seed=2 * step + dist.get_rank())) * torch.linspace(-1, 1, WIDTH)).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    model.reshard()
    return [*losses, *whole(model.parameters()), *model.buffers()]


ON_META = [(None, "float8", False), ("delayed", "float8", True)]


@pytest.mark.parametrize("world", [1, 2])
@pytest.mark.parametrize("compiled", [False, pytest.param(True, marks=pytest.mark.long)])
@pytest.mark.parametrize(
    ("recipe", "backward", "histories"),
    long_but(
        ON_META,
        [*ON_META, (None, "float8", True), ("delayed", "bf16", False), ("tensorwise", "float8", False)],
    ),
)
@pytest.mark.usefixtures("fresh_compiler")
def test_a_sharded_model_on_meta_trains_on_a_state_dict_that_is_assigned(
    rank, world, recipe, backward, histories, compiled
):
    found, expected = (trained_on(d, recipe, backward, histories, compiled) for d in ("meta", "cpu"))
    assert same(found, expected)


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
