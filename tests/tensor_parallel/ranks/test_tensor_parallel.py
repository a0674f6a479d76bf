"""Tensor parallelism: a weight's codes are those of the whole weight, and products those of each rank's part."""

import copy
import datetime
import math
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import f8sub
from f8sub.tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel
from f8sub.weights import agreement
from tests.data_sets import generator, lognormal
from tests.kernels.products import bits
from tests.models import BF16, heard, seed_weights
from tests.selection import long_but
from tests.tensor_parallel.models import (
    HIDDEN,
    MLP,
    PLAN,
    WIDTH,
    Parts,
    filled,
    inputs,
    mesh_of,
    products_of,
    whole_gradients,
)
from tests.wire import Wire, on_each

RECIPES = ("tensorwise", "rowwise", "blockwise", "gridquant", "mxfp8")
MESHES = {"1x2": (1, 2), "2x1": (2, 1), "2x2": (2, 2), "2 replicas 1x2": (2, 1, 2)}
PARTS = [("tensorwise", "2x2", 4, True), ("mxfp8", "2 replicas 1x2", 4, True)]
PARTS += [("blockwise", mesh, math.prod(shape), False) for mesh, shape in MESHES.items()]
PARTS += [(recipe, "2x2", 4, True) for recipe in ("rowwise", "gridquant")]
on_each_recipe = on_each(RECIPES)

FLOAT8_PLAN = {"up": Float8ColwiseParallel(), "down": Float8RowwiseParallel()}


def mlp(recipe: str | None, *, alike: bool = False, **options: object) -> nn.Module:
    """The largest element of each weight is in the part of the last rank, but where parts are to be alike."""
    model = filled(MLP())
    if not alike:
        with torch.no_grad():
            model.up.weight[-1, 0] = 2 * model.up.weight.abs().max()
            model.down.weight[-1, -1] = 2 * model.down.weight.abs().max()
    return model if recipe is None else f8sub.convert_to_float8(model, recipe=recipe, **options)


def two_dimensional(recipe: str, mesh: DeviceMesh, policy: MixedPrecisionPolicy | None = None) -> nn.Module:
    model = parallelize_module(mlp(recipe), mesh["tp"], PLAN)
    data = mesh["replicas", "dp"] if mesh.ndim == 3 else mesh["dp"]
    return fully_shard(model, mesh=data, mp_policy=policy or MixedPrecisionPolicy())


def part_of(whole: torch.Tensor, like: DTensor) -> torch.Tensor:
    """This rank's part of a tensor."""
    (placement,), mesh = like.placements, like.device_mesh
    return whole.tensor_split(mesh.size(), dim=placement.dim)[mesh.get_local_rank()]


def differences(model: nn.Module, whole: nn.Module, recipe: str) -> list[str]:
    """What of the gathered parts is not the part of the whole weight's codes, and of what those stand for."""
    found = []
    for name in ("up", "down"):
        weight = getattr(model, name).weight
        assert isinstance(weight, DTensor)
        gathered = weight._local_tensor
        full = getattr(whole, name).weight.detach().to(gathered.dtype)
        expected = f8sub.quantize(full, recipe, operand="w", columnwise=False)
        same = torch.equal(bits(gathered.rowwise_data), bits(part_of(expected.rowwise_data, weight)))
        found += [] if same else [f"{name}: codes"]
        values = part_of(expected.dequantize(), weight)
        found += [] if torch.equal(gathered.clone().dequantize(), values) else [f"{name}: values"]
    return found


@pytest.mark.parametrize(("recipe", "mesh", "world", "in_bf16"), long_but(PARTS[:2], PARTS))
def test_gathered_codes_are_a_part_of_the_whole_weight_s(rank, world, recipe, mesh, in_bf16):
    """First; after a change that precompute_scales was called for; after one that each rank finds by itself."""
    model = two_dimensional(recipe, mesh_of(*MESHES[mesh]), BF16 if in_bf16 else None)
    whole, found = mlp(None), []
    for announced in (True, True, False):
        if announced:
            f8sub.precompute_scales(model)
        model.unshard()
        found.append(differences(model, whole, recipe))
        model.reshard()
        with torch.no_grad():
            for sharded, plain in zip(model.parameters(), whole.parameters(), strict=True):
                sharded.to_local().mul_(3.0)
                plain.mul_(3.0)
    assert found == [[], [], []]


def spread_products(rank: int, world: int, recipe: str, how: str, alike: bool) -> dict[str, torch.Tensor]:
    if how == "with fully_shard":
        mesh = mesh_of(2, 2)
        model = parallelize_module(mlp(recipe, alike=alike), mesh["tp"], PLAN)
        model = fully_shard(model, mesh=mesh["dp"])
    elif how == "gathered in high precision":
        mesh = mesh_of(2, 2)
        model = mlp(recipe, alike=alike, float8_all_gather=False)
        model = fully_shard(parallelize_module(model, mesh["tp"], PLAN), mesh=mesh["dp"])
    else:
        keep_x = "auto" if how == "alone" else "high_precision"
        model = parallelize_module(mlp(recipe, alike=alike, keep_x=keep_x), mesh_of(2)["tp"], PLAN)
    return products_of(model, *inputs())


HOWS = {"with fully_shard": 4, "gathered in high precision": 4, "alone": 2, "x kept": 2}
"""Each with its number of ranks, of which two share a layer. All ranks are given the same batch, so that fully_shard's
mean of gradients changes nothing."""


@pytest.mark.parametrize("how", HOWS)
@on_each_recipe
def test_products_are_those_of_the_ranks_parts(ranks, recipe, how):
    """Bitwise those of layers as large as a part; x of down and dy of up have another scale on each rank."""
    parts = f8sub.convert_to_float8(Parts(mlp(None, alike=True), 2), recipe=recipe)
    expected = whole_gradients(products_of(parts, *inputs()))
    for found in ranks(HOWS[how], spread_products, recipe, how, True):
        assert found.keys() == expected.keys()
        assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@on_each_recipe
def test_a_weight_has_one_scale_however_it_is_held(ranks, recipe):
    """The largest element of each weight is one rank's."""
    first, *others = (ranks(world, spread_products, recipe, how, False)[0] for how, world in HOWS.items())
    assert [[name for name in first if not torch.equal(first[name], other[name])] for other in others] == [
        []
    ] * 3


@pytest.mark.parametrize("recipe", ["tensorwise", "rowwise"])
def test_tokens_of_a_whole_weight(rank, world, recipe):
    """Each rank's are multiplied as if there were no others; gradients are added."""
    mesh = mesh_of(world)
    layer = distribute_module(mlp(recipe).up, mesh)
    whole_x, whole_dy = inputs()
    whole_dy = torch.cat([whole_dy] * (HIDDEN // WIDTH), 2)
    x, dy = (DTensor.from_local(t, mesh, [Replicate()]) for t in (whole_x, whole_dy))
    x = x.redistribute(placements=[Shard(1)]).detach().requires_grad_()
    y = layer(x)
    assert y.placements == (Shard(1),)
    y.backward(dy.redistribute(placements=[Shard(1)]))
    chunks = zip(whole_x.chunk(world, 1), whole_dy.chunk(world, 1), strict=True)
    parts = [products_of(mlp(recipe).up, *chunk) for chunk in chunks]
    assert torch.equal(y.detach().full_tensor(), torch.cat([part["y"] for part in parts], 1))
    assert torch.equal(x.grad.full_tensor(), torch.cat([part["dx"] for part in parts], 1))
    for name, parameter in layer.named_parameters():
        assert torch.equal(parameter.grad.full_tensor(), sum(part[name] for part in parts))


def used_before_it_is_distributed(rank: int, world: int, src_data_rank: int | None) -> tuple:
    """dx of a second step: alone and spread over the ranks."""
    found = []
    for spread in (False, True):
        layer = mlp("rowwise").up
        x, dy = inputs()
        dy = torch.cat([dy] * (HIDDEN // WIDTH), 2)
        layer(x)
        if spread:
            mesh = mesh_of(world)
            for name, parameter in list(layer.named_parameters()):
                whole = distribute_tensor(parameter, mesh, [Replicate()], src_data_rank=src_data_rank)
                layer.register_parameter(name, nn.Parameter(whole))
            x, dy = (DTensor.from_local(t, mesh, [Replicate()]) for t in (x, dy))
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
        for _ in range(2):
            x = x.detach().requires_grad_()
            layer(x).backward(dy)
            optimizer.step()
        found.append(x.grad.full_tensor() if spread else x.grad)
    return tuple(found)


def after_compiled_code_wrote(rank: int, world: int, recipe: str) -> tuple[torch.Tensor, torch.Tensor]:
    """y after compiled code wrote to the weights, which counts no version of a DTensor's part; and a new model's y."""
    mesh, (x, dy) = mesh_of(world), inputs()
    model, twin = (parallelize_module(mlp(recipe), mesh, PLAN) for _ in range(2))

    @torch.compile(backend="aot_eager")
    def write() -> None:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(-3.0)

    for _ in range(2):
        model(x).backward(dy)
        write()
    twin.load_state_dict(model.state_dict())
    return tuple(each(x).detach() + 0 for each in (model, twin))


class Writes(nn.Module):
    """Writes to the x that its two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = (nn.Linear(WIDTH, HIDDEN, bias=False) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.first(x)
        return self.second(x.mul_(3.0))


def written_between_siblings(rank: int, world: int, recipe: str) -> tuple[torch.Tensor, torch.Tensor]:
    model, mesh = f8sub.convert_to_float8(seed_weights(Writes()), recipe=recipe), mesh_of(world)
    for layer in (model.first, model.second):
        layer.weight = nn.Parameter(distribute_tensor(layer.weight, mesh, [Shard(0)]))
    x = lognormal((16, WIDTH), generator(6))
    with torch.no_grad():
        found = model(DTensor.from_local(x.clone(), mesh, [Replicate()]))
        right = model.second(DTensor.from_local(x * 3.0, mesh, [Replicate()]))
    return found.full_tensor(), right.full_tensor()


@pytest.mark.parametrize(
    ("body", "argument"),
    [
        *((used_before_it_is_distributed, src_data_rank) for src_data_rank in (0, None)),
        *((after_compiled_code_wrote, recipe) for recipe in ("rowwise", "tensorwise")),
        *((written_between_siblings, recipe) for recipe in ("rowwise", "delayed")),
    ],
)
def test_codes_from_before_a_change_are_not_used(ranks, body, argument):
    for found, right in ranks(2, body, argument):
        assert torch.equal(found, right)


@pytest.mark.parametrize("world", [4])
@on_each(["tensorwise", "rowwise", "blockwise"])
def test_bytes_and_collectives_of_a_step(rank, world, recipe):
    codes = 2 * WIDTH * HIDDEN // 2
    biases = 4 * (HIDDEN // 2 + WIDTH)
    model = two_dimensional(recipe, mesh_of(2, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    for _ in range(2):
        with Wire() as wire:
            f8sub.precompute_scales(model)
            loss = model(inputs()[0].requires_grad_()).square().mean()
            gathered = wire.gathered
            loss.backward()
            optimizer.step()
    assert gathered == codes + biases
    # That of scales; and over tensor-parallel ranks y of down and dx of up.
    assert (wire.calls["allreduce_"], wire.calls["all_reduce"]) == (1, 2)


@pytest.mark.parametrize("world", [4])
def test_checkpoints_are_plain_tensors_of_any_mesh(rank, world, tmp_path):
    model = two_dimensional("rowwise", mesh_of(2, 2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.to_local().mul_(2.0)
    dcp.save(model.state_dict(), checkpoint_id=str(tmp_path))
    other = two_dimensional("rowwise", mesh_of(4, 1))
    f8sub.precompute_scales(other)
    dcp.load(state := other.state_dict(), checkpoint_id=str(tmp_path))
    other.load_state_dict(state)
    whole = mlp(None)
    with torch.no_grad():
        for parameter in whole.parameters():
            parameter.mul_(2.0)
    f8sub.precompute_scales(other)
    other.unshard()
    assert differences(other, whole, "rowwise") == []
    assert list(tmp_path.glob("*.distcp"))
    assert not any(b"f8sub" in path.read_bytes() for path in tmp_path.iterdir())


def test_what_cannot_be_spread_is_told(rank, world):
    mesh = mesh_of(2)["tp"]
    plain = parallelize_module(mlp("tensorwise"), mesh, {"up": ColwiseParallel()})
    wide = f8sub.convert_to_float8(nn.Sequential(nn.Linear(64, 384)), recipe="blockwise")
    parallelize_module(wide, mesh, {"0": ColwiseParallel()})
    packed = parallelize_module(mlp("nvfp4"), mesh, PLAN)
    for model, told in (
        (plain.up, "up: its weight has placements.*parallelize_module"),
        (wide, "parts of 192 of 384 rows.*tile has 128"),
        (packed, "two-level scales"),
    ):
        with pytest.raises(f8sub.Float8ConfigError, match=told):
            model.forward(inputs()[0])


@pytest.mark.parametrize("world", [4])
def test_a_weight_changed_on_some_tensor_parallel_ranks_is_visible(rank, world):
    """Values that the old scale cannot hold are NaN, and all ranks are warned."""
    mesh = mesh_of(2, 2)
    model = two_dimensional("tensorwise", mesh)
    f8sub.precompute_scales(model)
    model.unshard()
    model.reshard()
    if mesh["tp"].get_local_rank() == 0:
        with torch.no_grad():
            model.up.weight.to_local().mul_(100.0)
    with mock.patch.object(agreement, "PATIENCE", datetime.timedelta(milliseconds=100)):
        model.unshard()
    gathered = model.up.weight._local_tensor.clone().dequantize()
    model.reshard()
    dist.barrier()  # ranks whose part changed waited to hear of the others
    with heard() as told:
        f8sub.precompute_scales(model)
        f8sub.precompute_scales(model)
    assert gathered.isnan().any() == (mesh["tp"].get_local_rank() == 0)
    assert any("up" in text for text in told)


def test_a_copy_of_a_tensor_parallel_model_is_sharded_as_the_model(rank, world):
    mesh, found = mesh_of(1, 2), []
    model = parallelize_module(mlp("tensorwise"), mesh["tp"], FLOAT8_PLAN)
    for each in (copy.deepcopy(model), model):
        fully_shard(each, mesh=mesh["dp"])
        found.append(each(inputs()[0]).detach() + 0)  # waits for the collective
        assert type(each.up.weight._local_tensor) is f8sub.Float8Tensor  # the root stays unsharded
    assert torch.equal(*found)
