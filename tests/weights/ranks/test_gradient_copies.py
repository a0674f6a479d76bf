"""Gradients are copied into FSDP2's memory by f8sub, and nothing else changes; here a CPU copies them."""

import contextlib
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

import f8sub
from f8sub import torch_compat
from f8sub.kernels import chunk_cat
from tests.data_sets import gaussian, generator
from tests.models import Stack, seed_weights

BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


@contextlib.contextmanager
def copies() -> Iterator[list[int]]:
    """How many gradients each copy has, which a CPU makes as a GPU does."""
    counts: list[int] = []

    def copied(gradients: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        counts.append(len(gradients))
        assert type(out) is torch.Tensor
        begin = 0
        for gradient in gradients:
            rows = -(-gradient.shape[0] // len(out))
            padded = gradient.new_zeros((len(out) * rows, *gradient.shape[1:]))
            padded[: gradient.shape[0]] = gradient
            chunks = padded.view(len(out), -1)
            out[:, begin : begin + chunks.shape[1]] = chunks
            begin += chunks.shape[1]

    as_on_gpus = {"takes": lambda gradients, out: True, "runs_on": lambda device: True, "chunk_cat": copied}
    with mock.patch.multiple(chunk_cat, **as_on_gpus):
        yield counts


def trained(rank: int, *, mesh: Any = None, passes: int = 1, reduce: Any = None) -> list[torch.Tensor]:
    """Whole gradients of two steps, each of some micro-batches of which the last one reduces; uneven shards."""
    model = f8sub.convert_to_float8(seed_weights(Stack(32, 48, 16, 32)))
    for layer in model.layers:
        fully_shard(layer, mp_policy=BF16, mesh=mesh)
    fully_shard(model, mp_policy=BF16, mesh=mesh)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for step in range(2):
        f8sub.precompute_scales(model)
        if step == 0 and reduce is not None:
            reduce(model)
        for each in range(passes):
            model.set_requires_gradient_sync(each == passes - 1)
            x = gaussian((8, 32), generator(10 * rank + 100 * step + each)).bfloat16()
            y = model(x)
            y.backward(gaussian(tuple(y.shape), generator(1000 * rank + step)).to(y.dtype))
        found += [parameter.grad.full_tensor().clone() for parameter in model.parameters()]
        assert all(type(p.grad.to_local()) is torch.Tensor for p in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return found


def same(found: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(found) == len(right) and all(map(torch.equal, found, right))


@contextlib.contextmanager
def seen_by_buffers() -> Iterator[Counter[str]]:
    """What operators meet FSDP2's input, and how often."""
    names: Counter[str] = Counter()
    dispatch = torch_compat._InputBuffer.__torch_dispatch__

    def counted(func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names[func.name()] += 1
        return dispatch(func, types, args, kwargs)

    with mock.patch.object(torch_compat._InputBuffer, "__torch_dispatch__", staticmethod(counted)):
        yield names


def as_torchs(rank: int, world: int) -> None:
    right = trained(rank, passes=2)
    with copies() as counts, seen_by_buffers() as names:
        assert same(trained(rank, passes=2), right)
    # Each step reduces each layer's weight once, and the output of that is a plain tensor.
    assert counts == [1] * 6
    assert names.pop(next(name for name in torch_compat.CHUNK_CATS if name in names)) == 6
    assert names == {"aten::view": 6} | ({"aten::copy_": 6} if world == 1 else {})


@pytest.mark.parametrize("world", [1, 3])
def test_gradients_are_bitwise_those_of_torchs_copy(ranks, world):
    ranks(world, as_torchs)


def with_replicas(rank: int, world: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    right = trained(rank, mesh=mesh)
    with copies() as counts:
        assert same(trained(rank, mesh=mesh), right)
    assert counts == [1] * 6


def test_replicas(ranks):
    ranks(4, with_replicas)


class Own:
    """A reduce-scatter of a user."""

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: Any) -> torch.Tensor:
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Any, input_tensor: Any, group: Any, op: Any, async_op: bool = False
    ) -> Any:
        assert type(input_tensor) is torch.Tensor
        return dist.reduce_scatter_tensor(output_tensor, input_tensor, op, group, async_op)


def beside_others(rank: int, world: int) -> None:
    def own(model: nn.Module) -> None:
        for layer in model.layers:
            layer.set_custom_reduce_scatter(Own())

    def in_float8(model: nn.Module) -> None:
        f8sub.reduce_gradients_in_float8(model)

    def and_back(model: nn.Module) -> None:
        f8sub.reduce_gradients_in_float8(model).remove()

    right, of_float8 = trained(rank), trained(rank, reduce=in_float8)
    assert not same(right, of_float8)
    with copies() as counts:
        assert same(trained(rank, reduce=own), right)
        assert counts == []
        assert same(trained(rank, reduce=in_float8), of_float8)
        assert counts == []
        assert same(trained(rank, reduce=and_back), right)
        assert counts == [1] * 6


def test_other_reductions(ranks):
    """A user's comes in its place; float8 gradients, too, which give it back."""
    ranks(2, beside_others)


def after_an_error(rank: int, world: int) -> None:
    right = trained(rank)

    def fail(gradients: Sequence[torch.Tensor], out: torch.Tensor) -> None:
        raise MemoryError("once")

    with copies() as counts:
        copied, calls = chunk_cat.chunk_cat, []

        def once(gradients: Sequence[torch.Tensor], out: torch.Tensor) -> None:
            calls.append(1)
            (fail if len(calls) == 1 else copied)(gradients, out)

        with mock.patch.object(chunk_cat, "chunk_cat", once):
            with pytest.raises(MemoryError):
                trained(rank)
            assert same(trained(rank), right)
    assert counts == [1] * 6


def test_an_error_in_a_copy(ranks):
    ranks(1, after_an_error)


def after_what_failed(rank: int, world: int) -> None:
    """The next pass of the same model asks for an input, whether the copy raised or the output's allocation."""
    model = f8sub.convert_to_float8(seed_weights(Stack(32, 48)))
    fully_shard(model, mp_policy=BF16)
    with copies():
        f8sub.precompute_scales(model)
        y = model(gaussian((8, 32), generator(1)).bfloat16())
        y.backward(gaussian(tuple(y.shape), generator(2)).to(y.dtype))
        ((group, _),) = torch_compat.parameter_groups({(model.layers[0], "weight"): None})
        comm, gradient, how = group._reduce_scatter_comm, torch.ones(48, 32), {"device": torch.device("cpu")}
        default = type(comm).__mro__[1]

        def asked() -> torch.Tensor:
            return comm.allocate((gradient.numel(),), dtype=torch.float32, **how)

        def fill(out: torch.Tensor) -> None:
            torch_compat.chunk_cat([gradient], 1, out.view(1, -1))

        with mock.patch.object(chunk_cat, "chunk_cat", side_effect=MemoryError), pytest.raises(MemoryError):
            fill(asked())
        for _ in range(2):
            fill(given := asked())
            assert type(given) is torch_compat._InputBuffer
            assert torch.equal(given.held.memory, gradient.view(-1))
            with mock.patch.object(default, "allocate", side_effect=MemoryError), pytest.raises(MemoryError):
                asked()
        fill(asked())
        assert type(asked()) is torch.Tensor


def test_what_failed_is_forgotten(ranks):
    ranks(1, after_what_failed)
