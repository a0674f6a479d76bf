"""The first layer, role and rank of NaN or infinity, for a fault injected at each of them."""

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.pipelining import PipelineStage, ScheduleGPipe

import f8sub
from tests.data_sets import gaussian, generator
from tests.experts.models import OwnExperts
from tests.models import Stack, checkpointed, precompute, seed_weights, shard, transformer
from tests.selection import long_but
from tests.wire import on_each

RECIPES = ("tensorwise", "rowwise", "mxfp8", "nvfp4", "delayed")


class Spoil(torch.autograd.Function):
    """The identity, with one bad element in the value or in its gradient."""

    @staticmethod
    def forward(ctx, x, in_forward):
        ctx.in_forward = in_forward
        x = x.clone()
        if in_forward:
            x.view(-1)[5] = torch.inf
        return x

    @staticmethod
    def backward(ctx, dy):
        dy = dy.clone()
        if not ctx.in_forward:
            dy.view(-1)[7] = torch.nan
        return dy, None


@torch.no_grad()
def spoil(model: torch.nn.Module, role: str) -> None:
    layer = model.blocks[1].up
    if role == "x":
        layer.register_forward_pre_hook(lambda module, args: Spoil.apply(args[0], True))
    elif role == "w":
        layer.weight.to_local()[2, 3] = torch.nan
    elif role == "y":
        layer.bias.to_local()[0] = -torch.inf
    elif role == "dy":
        layer.register_forward_hook(lambda module, args, y: Spoil.apply(y, False))


ROLES = ("x", "w", "y", "dy")
CASES = [("tensorwise", role) for role in ROLES]
CASES += [("mxfp8", "w"), ("delayed", "dy"), ("checkpointed", "dy"), ("not converted", "x")]
MORE = [(case, role) for case in ("mxfp8", "delayed", "nvfp4") for role in ROLES[:2]]


@pytest.mark.parametrize("world", [3])
@pytest.mark.parametrize(("case", "role"), long_but(CASES, dict.fromkeys(CASES + MORE)))
def test_the_first_layer_role_and_rank(rank, world, case, role):
    """The last rank is the bad one; but a bias is gathered in high precision, so all have it."""
    model = transformer({"not converted": None, "checkpointed": "tensorwise"}.get(case, case))
    precompute(shard(checkpointed(model) if case == "checkpointed" else model))
    if rank == world - 1:
        spoil(model, role)
    with f8sub.find_nonfinite(model) as search:
        model(gaussian((2, 4, 32), generator(rank))).square().mean().backward()
    where = "ranks 0, 1, 2" if role == "y" else "rank 2"
    assert str(search).replace("_checkpoint_wrapped_module.", "") == f"{role} of blocks.1.up on {where}"


@on_each(RECIPES)
def test_gradients_that_overflow_on_the_way(recipe):
    """Products beyond the dtype: the layer's dy is finite, and its dx or dw is not."""
    model = f8sub.convert_to_float8(seed_weights(Stack(32, 32)).half(), recipe=recipe)
    x = (100 * gaussian((64, 32), generator(0))).half().requires_grad_()
    with f8sub.find_nonfinite(model) as search:
        model(x).backward(torch.full((64, 32), 3e4, dtype=torch.float16))
    assert search.first is not None
    assert (search.first.layer, search.first.ranks) == ("layers.0", (0,))
    assert search.first.role in ("dx", "dw")


def test_where_there_is_nothing_to_find_or_an_exception_passes_through(rank, world):
    model = shard(f8sub.convert_to_float8(seed_weights(Stack(32, 32))))
    hooks = len(model.layers[0]._forward_hooks), len(model.layers[0]._forward_pre_hooks)
    with f8sub.find_nonfinite(model) as search:
        model(gaussian((4, 32), generator(0))).square().mean().backward()
    layer = model.layers[0]
    assert str(search) == "every tensor is finite"
    assert (len(layer._forward_hooks), len(layer._forward_pre_hooks)) == hooks
    with pytest.raises(KeyError), f8sub.find_nonfinite(model) as search:
        raise KeyError
    assert search.first is None
    assert (len(layer._forward_hooks), len(layer._forward_pre_hooks)) == hooks


def test_memory_on_which_a_pipeline_learns_shapes_is_not_searched(rank, world):
    group = dist.group.WORLD
    model = f8sub.convert_to_float8(seed_weights(Stack(32, 32)))
    torch.use_deterministic_algorithms(True)  # fills that memory with NaN
    stage = PipelineStage(model, rank, world, torch.device("cpu"), group=group)
    schedule = ScheduleGPipe(stage, 2, loss_fn=F.mse_loss)
    x = gaussian((4, 32), generator(0))
    with f8sub.find_nonfinite(model) as search:
        schedule.step(*(x,) * (rank == 0), **({"target": x} if rank else {}))
    torch.use_deterministic_algorithms(False)
    assert str(search) == "every tensor is finite"


def test_compiled_blocks_run_eagerly_inside():
    model = f8sub.convert_to_float8(seed_weights(Stack(32, 32, 32)))
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    x = gaussian((4, 32), generator(0))
    compiled(x)
    x[1, 1] = torch.nan
    with f8sub.find_nonfinite(model) as search:
        model.layers[0](input=x)
    assert str(search) == "x of layers.0 on rank 0"
    with f8sub.find_nonfinite(model) as search:
        y = compiled(x)
        y.backward(gaussian(tuple(y.shape), generator(2)))
    assert str(search) == "x of layers.0 on rank 0"


@pytest.mark.parametrize("name", ["gate", "up", "down"])
def test_an_evaluation_is_searched_too(name):
    """Of layers and of experts, where no result has a gradient."""
    f8sub.register_experts(OwnExperts)
    layers = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    f8sub.convert_to_float8(layers, min_dim=0)
    experts = f8sub.convert_to_float8(OwnExperts(2, 32, 48), "rowwise", experts=True)
    x, ends = gaussian((8, 32), generator(0)), torch.tensor([3, 8])
    with torch.no_grad():
        with f8sub.find_nonfinite(experts) as search:
            experts(x, ends)
        assert str(search) == "every tensor is finite"
        layers[1].bias[2] = torch.inf
        getattr(experts, name)[1, 0, 0] = torch.nan
        with f8sub.find_nonfinite(layers) as search:
            layers(x)
        assert str(search) == "y of 1 on rank 0"
        with f8sub.find_nonfinite(experts) as search:
            experts(x, ends)
        assert str(search) == f"w of {name} on rank 0"
