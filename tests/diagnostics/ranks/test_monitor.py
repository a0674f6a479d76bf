"""Sharded models: the bits of an unmonitored run, and statistics of the whole weight and of all ranks' tokens."""

from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.tensor.parallel import parallelize_module

import f8sub
from f8sub.diagnostics import sample as module
from f8sub.tensor_parallel import Float8ColwiseParallel, Float8RowwiseParallel
from tests.data_sets import gaussian, generator
from tests.models import BF16, Stack, loss_of, seed_weights, shard, train, transformer
from tests.selection import long_but
from tests.tensor_parallel.models import MLP, mesh_of


def sampled(rank: int, world: int, recipe: str) -> tuple[bool, list]:
    plain = shard(transformer(recipe), BF16)
    expected = train(plain, rank, steps=3)
    model = shard(transformer(recipe), BF16)
    monitor = f8sub.Monitor(model, every=2)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    detach = monitor.attach(optimizer)
    losses = train(model, rank, steps=3, optimizer=optimizer)
    detach()
    monitor.flush()
    return losses == expected, monitor.rows


def unsharded(recipe: str, world: int) -> list:
    """Rows of the first step, w's alone: the weights before training."""
    model = transformer(recipe)
    monitor = f8sub.Monitor(model, every=1, roles=("w",))
    with monitor, torch.autocast("cpu", torch.bfloat16):
        loss_of(model, 0, 0).backward()
    monitor.flush()
    return monitor.rows


CASES = [("tensorwise", 3), ("rowwise", 2), ("blockwise", 3), ("mxfp8", 2), ("delayed", 3)]


@pytest.mark.parametrize(("recipe", "world"), long_but(CASES[:1], CASES))
def test_fsdp(ranks, recipe, world):
    found = ranks(world, sampled, recipe)
    assert all(same for same, _ in found)
    assert all(rows == found[0][1] for _, rows in found)
    assert len(found[0][1]) == 2 * 42
    weights = [row for row in found[0][1] if row.role == "w" and row.step == 0]
    for row, expected in zip(weights, unsharded(recipe, world), strict=True):
        assert row.layer == expected.layer
        assert row[4:] == pytest.approx(expected[4:], rel=1e-4), row.layer


def cut(rank: int, world: int, recipe: str) -> list:
    model = f8sub.convert_to_float8(seed_weights(nn.Sequential(MLP())), recipe=recipe)
    if world > 1:
        plan = {"up": Float8ColwiseParallel(), "down": Float8RowwiseParallel()}
        parallelize_module(model[0], mesh_of(1, world)["tp"], plan)
    monitor = f8sub.Monitor(model, every=1)
    with monitor:
        y = model(gaussian((24, 64), generator(0)).requires_grad_())
        y.backward(gaussian((24, 64), generator(1)))
    monitor.flush()
    return monitor.rows


@pytest.mark.parametrize("recipe", long_but(("tensorwise",), ("tensorwise", "blockwise")))
def test_tensor_parallel(ranks, recipe):
    """Shares are the whole matrices', since each rank has as many elements; so are scales, but of what is cut.

    Of the parts of an x or a dy that is cut the one with the largest element has the whole's scale, and no other a
    smaller one.
    """
    found = ranks(2, cut, recipe)
    expected = ranks(1, cut, recipe)[0]
    assert found[0] == found[1]
    for row, whole in zip(found[0], expected, strict=True):
        assert (row.layer, row.role) == (whole.layer, whole.role)
        assert row.scale_min == whole.scale_min, row.layer
        if (row.layer, row.role) in (("0.down", "x"), ("0.up", "dy")):
            assert row.scale_max >= whole.scale_max
            assert whole.sqnr - 0.05 < row.sqnr < whole.sqnr + 1
        else:
            assert row.scale_max == whole.scale_max, row.layer
            assert row.sqnr == pytest.approx(whole.sqnr, abs=0.05)


@pytest.mark.parametrize("world", [1])
def test_tools_that_need_whole_weights_say_what_comes_first(rank, world):
    with pytest.raises(f8sub.Float8ConfigError, match="spread over ranks; call it before fully_shard"):
        f8sub.compare(shard(seed_weights(Stack(32, 32))), [torch.ones(2, 32)])
    model = shard(transformer("tensorwise"))
    with pytest.raises(
        f8sub.Float8ConfigError, match="weight is sharded; call sensitivity before fully_shard"
    ):
        f8sub.sensitivity(model, lambda model: loss_of(model, 0, 0))


@pytest.mark.parametrize("world", [1])
def test_a_sample_lies_where_layers_run_and_not_where_offloaded_shards_do(rank, world):
    """The type of the device, where the mesh's is not that of the shards, as with CPU offload."""
    model = shard(transformer("tensorwise"))
    layer = model.blocks[0].q
    with mock.patch.object(type(layer.weight.device_mesh), "device_type", "meta"):
        sample = module.Sample(0, {"blocks.0.q": layer}, {("blocks.0.q", "x"): 0})
    sample.close()
    assert sample.reduced(None).device.type == "meta"
