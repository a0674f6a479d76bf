"""What is set up and taken off, which ranks share a host, and what is refused, with the reason."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard import _fsdp_common
from torch.distributed.tensor import Shard

import f8sub
from f8sub import torch_compat
from f8sub.gradients import reduction
from tests.gradients.models import (
    backward,
    gradients,
    network,
    own_gradients,
    reduced,
    same,
    sharded,
)
from tests.gradients.oracle import decibels, summed
from tests.wire import Wire


def on_and_off(rank: int, world: int) -> None:
    """A second call replaces the first one's options; without it FSDP2 reduces as before."""
    plain = sharded(network())
    backward(plain, rank)
    model = sharded(network())
    first = f8sub.reduce_gradients_in_float8(model)
    second = f8sub.reduce_gradients_in_float8(model, measure=True)
    assert str(first) == "gradients of 2 FSDP2 modules: e4m3 1x128, float32 sums, one hop"
    backward(model, rank)
    assert set(second.decibels()) == {"", "0"}
    assert first.decibels() == {}
    second.remove()
    model.zero_grad()
    with Wire() as wire:
        backward(model, rank)
    assert all(map(torch.equal, gradients(model), gradients(plain)))
    assert wire.calls["_reduce_scatter_base_"] == 2
    assert "alltoall_base_" not in wire.calls
    assert str(second) == "gradients: as FSDP2 reduces them"
    second.remove()


def groups_of_one(rank: int, world: int) -> None:
    """Nothing is sent where one rank has all of a module; and of two modules in one group there is one reduction."""
    mesh = init_device_mesh("cpu", (world, 1), mesh_dim_names=("replicate", "shard"))
    model = sharded(network(), mesh=mesh["shard"])
    found = reduced(rank, model)
    assert same(found, [each[rank] for each in own_gradients(world)])
    model = network()
    fully_shard([model[0], model[3]])
    fully_shard(model)
    with Wire() as wire:
        found = reduced(rank, model)
    assert wire.calls["alltoall_base_"] == 2
    assert same(found, [summed(each) for each in own_gradients(world)])


def alone(rank: int, world: int) -> None:
    assert same(reduced(rank, sharded(network())), [each[0] for each in own_gradients(1)])


def on_hosts(rank: int, world: int) -> None:
    irregular = r"the hosts \[0, 0, 1\], .* more bytes than in bfloat16.*flat=True"
    with pytest.raises(f8sub.Float8ConfigError, match=irregular):
        f8sub.reduce_gradients_in_float8(sharded(network()), ranks_per_host=2)
    model = sharded(network())
    assert "one hop" in str(f8sub.reduce_gradients_in_float8(model, ranks_per_host=2, flat=True))
    backward(model, rank)
    assert same(gradients(model), [summed(each) for each in own_gradients(world)])
    # A rank of each host: one exchange is half of a ring's bytes in bfloat16.
    assert "one hop" in str(f8sub.reduce_gradients_in_float8(sharded(network()), ranks_per_host=1))


def by_name(rank: int, world: int) -> None:
    """torchrun's number of the host and its name tell ranks of several hosts, where nobody gives ranks_per_host."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("GROUP_RANK", str(rank // 2))
        assert "two hops" in str(f8sub.reduce_gradients_in_float8(sharded(network())))
        assert "one hop" in str(f8sub.reduce_gradients_in_float8(sharded(network()), flat=True))
        patch.setenv("GROUP_RANK", str(rank % 2))
        with pytest.raises(f8sub.Float8ConfigError, match="one after another"):
            f8sub.reduce_gradients_in_float8(sharded(network()))
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        assert "one hop" in str(f8sub.reduce_gradients_in_float8(sharded(network(), mesh=mesh)))


def mismatched(rank: int, world: int) -> None:
    for options in ({"measure": rank == 0}, {"flat": rank == 1}, {"ranks_per_host": 1 + rank}):
        with pytest.raises(
            f8sub.Float8RankMismatchError, match=r"different options: flat, .* on rank . and .* on rank ."
        ):
            f8sub.reduce_gradients_in_float8(sharded(network()), **options)


def refused(rank: int, world: int) -> None:
    with pytest.raises(f8sub.Float8ConfigError, match="Sequential has no FSDP2 module: call fully_shard"):
        f8sub.reduce_gradients_in_float8(network())
    for options in ({"measure_every": 0}, {"ranks_per_host": 0}):
        with pytest.raises(f8sub.Float8ConfigError, match="are 1 or more"):
            f8sub.reduce_gradients_in_float8(sharded(network()), **options)
    model = sharded(network())
    model[0].set_custom_reduce_scatter(OwnReduceScatter())
    with pytest.raises(
        f8sub.Float8ConfigError, match=r"^0 has a reduce-scatter of its own, OwnReduceScatter"
    ):
        f8sub.reduce_gradients_in_float8(model)


class OwnReduceScatter:
    pass


@pytest.mark.parametrize("world", [4])
@pytest.mark.skipif(
    not hasattr(_fsdp_common, "ShardPlacementResult"), reason="before torch 2.12 a module has one mesh"
)
def test_parameters_on_several_meshes(rank, world):
    """Parameters of one module."""
    pairs = init_device_mesh("cpu", (2, 2), mesh_dim_names=("a", "b"))
    infos = {name: _fsdp_common.FSDPMeshInfo(pairs[name], shard_mesh_dim=0) for name in ("a", "b")}
    model = network()

    def place(parameter: nn.Parameter) -> object:
        info = infos["a" if parameter is model[0].weight else "b"]
        return _fsdp_common.ShardPlacementResult(Shard(0), info)

    fully_shard(model, mesh=pairs["b"], shard_placement_fn=place)
    with pytest.raises(f8sub.Float8ConfigError, match="the model has parameters on 2 meshes"):
        f8sub.reduce_gradients_in_float8(model)


def in_backward(rank: int, world: int) -> None:
    """By an operation that is no sum, or by operators that are not known."""
    comm = reduction.Float8ReduceScatter(None, None, 0)
    buffer = comm.allocate((8,), dtype=torch.float32, device="cpu")
    with pytest.raises(
        f8sub.Float8ConfigError, match=r"aten::mul_\.Tensor was called on FSDP2's flat buffer"
    ):
        buffer.mul_(2)
    torch.ops.fsdp.chunk_cat([torch.ones(4, 2)], dim=0, num_chunks=2, out=buffer.view(2, -1))
    out = comm.allocate((4,), dtype=torch.float32, device="cpu")
    with pytest.raises(f8sub.Float8ConfigError, match=r"reduce gradients by RedOpType.MAX"):
        comm(out, buffer, torch.distributed.group.WORLD, torch.distributed.ReduceOp.MAX)


def by_other_copies(rank: int, world: int) -> None:
    """Into the flat buffer, or past it."""

    def copied(given: list[torch.Tensor], **options: int) -> None:
        comm = reduction.Float8ReduceScatter(None, None, 0)
        buffer = comm.allocate((8,), dtype=torch.float32, device="cpu")
        torch.ops.fsdp.chunk_cat(given, **{"dim": 0, "num_chunks": 2, **options}, out=buffer.view(2, -1))

    ones = torch.ones(4, 2)
    for given, options, words in (
        ([ones], {"dim": 1}, r"2 chunks of dimension 1 into .* of shape \(2, 4\)"),
        ([ones], {"num_chunks": 4}, "4 chunks of dimension 0"),
        ([ones, ones], {}, r"shapes \[\(4, 2\), \(4, 2\)\] were copied"),
    ):
        with pytest.raises(f8sub.Float8ConfigError, match=words):
            copied(given, **options)
    comm = reduction.Float8ReduceScatter(None, None, 0)
    buffer = comm.allocate((8,), dtype=torch.float32, device="cpu")
    arguments = torch.distributed.group.WORLD, torch.distributed.ReduceOp.SUM
    with pytest.raises(f8sub.Float8ConfigError, match="reduced a GradientBuffer that it did not fill"):
        comm(torch.empty(4), buffer, *arguments)
    with pytest.raises(f8sub.Float8ConfigError, match="reduced a Tensor that it did not fill"):
        comm(torch.empty(4), torch.empty(8), *arguments)
    torch.ops.fsdp.chunk_cat([ones], dim=0, num_chunks=2, out=buffer.view(2, -1))
    with pytest.raises(f8sub.Float8ConfigError, match="with 1 before them"):
        torch.ops.fsdp.chunk_cat([ones], dim=0, num_chunks=2, out=buffer.view(2, -1))
    with pytest.raises(f8sub.Float8ConfigError, match="reduced 4 elements of a rank to 8"):
        comm(torch.empty(8), buffer, *arguments)


def by_an_unknown_fsdp2(rank: int, world: int) -> None:
    """Names, parameters and attributes that are not there are told before a backward pass."""
    for where, name, value, words in (
        ("names", "torch.ops.fsdp.chunk_cat.default", "exactly tensors dim", r"chunk_cat\.default takes"),
        ("names", "torch.distributed.fsdp.FSDPModule.set_reducer", "", r"FSDPModule\.set_reducer is missing"),
        ("attributes", "FSDPParamGroup", "_reducer", r"FSDPParamGroup\._reducer is missing"),
        ("attributes", "FSDPMeshInfo", "shard_ranks", r"FSDPMeshInfo\.shard_ranks is missing"),
    ):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch_compat, "_found", {})
            patch.setattr(torch_compat, "_known", set())
            patch.setitem(getattr(torch_compat.REDUCTION, where), name, value)
            known = rf"for reduce_gradients_in_float8: .*{words}.*, or do without reduce_gradients_in_float8$"
            with pytest.raises(f8sub.Float8ConfigError, match=known):
                f8sub.reduce_gradients_in_float8(sharded(network()))


def test_beside_a_float8_all_gather(rank, world):
    """A converted model with float8 weights on the wire, too; a failed backward pass leaves nothing behind."""
    losses = []
    for on in (False, True):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(64, 128), nn.GELU(), nn.Linear(128, 64))
        f8sub.convert_to_float8(model, recipe="rowwise", skip_defaults=False, backend="reference")
        sharded(model, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
        if on:
            f8sub.reduce_gradients_in_float8(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        f8sub.precompute_scales(model)
        for step in range(4):
            x = torch.randn(8, 64, generator=torch.Generator().manual_seed(rank + 10 * step))
            loss = (model(x).float() - x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            f8sub.precompute_scales(model)
        losses.append(loss.item())
    without, with_it = losses
    assert with_it == pytest.approx(without, rel=0.01)
    assert with_it != without


def no_warning(rank: int, world: int) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        found = reduced(rank, sharded(network()))
    right = own_gradients(world)
    for ours, each in zip(found, right, strict=True):
        assert decibels(ours, sum(each) / world) > 29


SET_UPS = {
    on_and_off: 2,
    groups_of_one: 2,
    alone: 1,
    on_hosts: 3,
    by_name: 4,
    mismatched: 2,
    refused: 2,
    in_backward: 2,
    by_other_copies: 2,
    by_an_unknown_fsdp2: 2,
    no_warning: 2,
}
"""What is set up or refused, each with the number of its ranks."""


@pytest.mark.parametrize("body", SET_UPS, ids=lambda body: body.__name__)
def test_set_ups(ranks, body):
    ranks(SET_UPS[body], body)
