"""The amax table that kernels fill: what torch's operators fill it with, bitwise, on every rank and for every recipe.

The kernels are interpreted, in ranks that were forked before anything imported triton.
"""

import importlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard

import f8sub
from f8sub.kernels import cuda
from f8sub.kernels.triton import multi_tensor_launch
from tests.data_sets import gaussian, generator
from tests.kernels import interpreted
from tests.kernels.interpreted import needs_triton
from tests.models import Stack, seed_weights
from tests.selection import long_but


def tables_of(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Every tensor of each table, by name."""
    for table in model.layers[0]._f8sub.conversion.exchanges.values():
        table.settle()
        for name in ("whole", "_scale", "_scale_inv"):
            yield name, getattr(table.table, name).cpu().clone()


def change(model: nn.Module, step: int) -> None:
    with torch.no_grad():
        for number, layer in enumerate(model.layers):
            local = layer.weight.to_local()
            noise = gaussian(tuple(local.shape), generator(10 * step + number)) * (step < 3)
            local.copy_(0.25 * noise.to(local) + (0.5 + number))
            if step == 2 and local.numel():
                local[-1, 0] = (float("nan"), float("inf"), 3.0)[number]
        if step == 3:
            master = model.layers[0].weight._local_tensor
            master.data = 2.0 * master.plain


def steps(recipe: str, columns: bool, device: str) -> list[tuple[str, torch.Tensor]]:
    """Tables after the first call, a change, with NaN and infinity in shards, and after a weight got other memory."""
    model = seed_weights(Stack(96, 304, 160, 48)).bfloat16().to(device)
    f8sub.convert_to_float8(model, recipe=recipe)
    model.layers[1].float()
    placement = (lambda parameter: Shard(1)) if columns else None
    for layer in model.layers:
        fully_shard(layer, shard_placement_fn=placement)
    fully_shard(model)
    found = []
    for step in range(4):
        change(model, step)
        try:
            f8sub.precompute_scales(model)
        except f8sub.Float8NumericsError:
            assert step == 3
        found += tables_of(model)
    return found


def differences(recipe: str, columns: bool, device: str) -> tuple[list[str], list[str], int]:
    """Tensors that differ from what torch's operators make, kernels launched, and how often launches were planned."""
    planned = mock.Mock(wraps=multi_tensor_launch.amaxes)
    with interpreted.launched() as launched, mock.patch.object(multi_tensor_launch, "amaxes", planned):
        found = steps(recipe, columns, device)
    with mock.patch.object(cuda.support, "takes", return_value=False):
        expected = steps(recipe, columns, device)
    wrong = [
        name
        for (name, ours), (_, right) in zip(found, expected, strict=True)
        if not bool(((ours == right) | (ours.isnan() & right.isnan())).all())
    ]
    assert len(expected) == 12
    assert any(tensor.isinf().any() for _, tensor in expected)
    return wrong, launched, planned.call_count


CASES = [("tensorwise", 2, False), ("blockwise", 3, False), ("delayed", 1, False), ("mxfp8", 2, False)]
CASES += [("rowwise", 3, False), ("blockwise", 2, True), ("gridquant", 2, False)]


@needs_triton
@pytest.mark.own_ranks  # triton is imported anew, which goes well once in a process
@pytest.mark.parametrize(("recipe", "world", "columns"), long_but(CASES[:2], CASES))
def test_tables_are_those_of_torchs_operators(rank, world, recipe, columns):
    # What decides whether kernels are interpreted is read when triton's own are defined.
    for name in list(sys.modules):
        if name.startswith(("triton", "f8sub.kernels.triton.")) and not name.startswith("triton._C"):
            del sys.modules[name]
    interpreted._start()
    importlib.import_module("f8sub.kernels.triton.launch")  # or it is what another file of tests imported
    wrong, launched, planned = differences(recipe, columns, "cpu")
    assert wrong == []
    assert launched.count("amaxes_of_many") in (4, 8)
    assert launched.count("scales_of_many") >= 4 * (recipe != "mxfp8")
    assert planned == 2


def test_launches_are_planned_anew_for_another_dtype_at_the_same_address(rank, world):
    """A model that goes to the CPU, to bfloat16 and back may lie where it lay in float32."""
    model = f8sub.convert_to_float8(seed_weights(Stack(32, 32)), recipe="tensorwise")
    fully_shard(model)
    f8sub.precompute_scales(model)
    (exchange,) = model.layers[0]._f8sub.conversion.exchanges.values()
    table, (own,) = exchange.table, exchange.table.shards
    memory = own.master.plain.clone()
    other = memory.view(torch.bfloat16).view(-1)[: memory.numel()].view(memory.shape)
    dtypes = []

    def planned(matrices: Sequence[multi_tensor_launch.ShardInTable], amax: torch.Tensor) -> list[Any]:
        dtypes.append(matrices[0].data.dtype)
        return []

    table._by_kernels = True
    with mock.patch.multiple(multi_tensor_launch, amaxes=planned, takes=lambda matrix, device: True):
        for values in (memory, memory, other):
            own.master.data = values
            table._ways_of(frozenset())
    assert dtypes == [torch.float32, torch.bfloat16]
