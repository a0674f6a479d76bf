"""f8sub's own process groups: one user at a time, used again when that is gone, never mistaken for each other."""

import datetime
import functools
import gc
import os
import weakref
from collections.abc import Callable
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import f8sub
from f8sub import torch_compat
from f8sub.weights import agreement
from f8sub.weights.exchange import Exchange
from tests.data_sets import gaussian, generator
from tests.layers import dy_of
from tests.models import Stack, replicated, seed_weights, shard


def taken() -> tuple[int, int, int]:
    """File descriptors, threads and process groups of this process."""
    gc.collect()
    descriptors, threads = (len(os.listdir(f"/proc/self/{kind}")) for kind in ("fd", "task"))
    return descriptors, threads, len(dist.distributed_c10d._world.pg_map)


def model_of(recipe: str = "tensorwise", seed: int = 0, **options: object) -> nn.Module:
    return f8sub.convert_to_float8(seed_weights(Stack(16, 32, 16), seed=seed), recipe=recipe, **options)


def prepared(seed: int = 0) -> nn.Module:
    model = shard(model_of(seed=seed))
    f8sub.precompute_scales(model)
    return model


two_replicas = functools.cache(lambda: replicated(2))


def use(model: nn.Module, masters: bool = False) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    if masters:
        optimizer = f8sub.optim.MasterWeights(optimizer)
    for _ in range(2):
        f8sub.precompute_scales(model)
        y = model(gaussian((4, 16), generator(1)))
        y.backward(dy_of(y))
        optimizer.step()


USES: dict[str, tuple[Callable[[], nn.Module], int, int]] = {
    "fsdp": (lambda: fully_shard(model_of()), 2, 10),
    "hsdp": (lambda: fully_shard(model_of("delayed"), mesh=two_replicas()), 4, 5),
    "ddp": (lambda: DistributedDataParallel(model_of("delayed")), 2, 5),
}
"""What makes a model, on how many ranks, and how many of them."""


@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize(("name", "world"), [(name, world) for name, (_, world, _) in USES.items()])
def test_one_model_after_another_takes_no_more_than_the_first(rank, world, name):
    build, _, count = USES[name]
    use(build())
    gc.collect()
    gc.freeze()  # what was imported: f8sub looks for each model's garbage
    before = taken()
    for _ in range(count):
        use(build())
    assert taken() == before


FREED = ({"recipe": "tensorwise"}, {"recipe": "delayed"}, {"primary_weights": True})


@pytest.mark.parametrize("options", FREED, ids=["tensorwise", "delayed", "primary"])
def test_a_model_is_freed_with_all_that_is_kept_for_it(rank, world, options):
    gc.disable()

    def used() -> tuple[weakref.ref, ...]:
        model = shard(model_of(**options))
        use(model, masters="primary_weights" in options)
        return weakref.ref(model), weakref.ref(model.layers[0]._f8sub.conversion)

    found = used()
    gc.collect()
    assert [reference() is None for reference in found] == [True, True]


def exchange_of(model: nn.Module) -> Exchange:
    (exchange,) = model.layers[0]._f8sub.conversion.exchanges.values()
    return exchange


def group_of(model: nn.Module) -> dist.ProcessGroup:
    table = exchange_of(model)
    return table.group_of(table.layout.ranks)._slot.group


def test_models_that_live_at_once_are_reduced_in_any_order(rank, world):
    """Two models at once, whose reductions rank 1 begins in the other order."""
    widths = [(16, 32, 16), (16, 32, 32)]
    stacks = ([seed_weights(Stack(*w)) for w in widths] for _ in range(2))
    models, alone = ([f8sub.convert_to_float8(each, "tensorwise") for each in of] for of in stacks)
    for model in models:
        fully_shard(model)
        f8sub.precompute_scales(model)
    for model in (*models, *alone):
        for parameter in model.parameters():
            parameter.grad = parameter.detach().clone()
        torch.optim.SGD(model.parameters(), lr=3.0).step()
    # Each rank waits for the other at another model, and then does without.
    with mock.patch.object(agreement, "PATIENCE", datetime.timedelta(milliseconds=100)):
        for model in reversed(models) if rank else models:
            f8sub.precompute_scales(model)
    x = gaussian((4, 16), generator(1))
    assert [torch.equal(a(x), b(x)) for a, b in zip(models, alone, strict=True)] == [True, True]


@pytest.mark.parametrize("world", [3])
def test_a_group_is_used_again_once_it_is_free_on_all_ranks(rank, world):
    first = prepared()
    group = group_of(first)
    if rank:
        del first
    second = prepared()
    assert group_of(second) is not group
    first = None
    third = prepared()
    x = gaussian((4, 16), generator(1))
    assert group_of(third) is group
    assert torch.equal(third(x), model_of()(x))


def test_a_group_whose_collectives_do_not_pair_is_used_no_more(rank, world):
    """The first model ends with a reduction that rank 1 alone began, and that pairs with none."""
    first = prepared()
    for parameter in first.parameters():
        parameter.grad = torch.zeros_like(parameter)
    torch.optim.SGD(first.parameters(), lr=1.0).step()
    if rank:
        exchange_of(first).reduce()
    group = group_of(first)
    del first, parameter
    second = prepared(seed=3)
    x = gaussian((4, 16), generator(1))
    assert group_of(second) is not group
    assert torch.equal(second(x), model_of(seed=3)(x))


def test_process_groups_that_were_destroyed_are_not_used_again(rank, world, tmp_path):
    folder = str(tmp_path)
    found = []
    for life in range(3):
        model, alone = prepared(seed=life), model_of(seed=life)
        x = gaussian((4, 16), generator(life))
        found += [torch.equal(model(x), alone(x)), group_of(model) in dist.distributed_c10d._world.pg_map]
        del model
        dist.barrier()
        dist.destroy_process_group()
        store = dist.FileStore(f"{folder}/store{life}", world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    assert found == [True] * 6


def in_other_groups(rank: int, world: int, reduced: bool) -> list[str]:
    """The names of the groups that f8sub created; one rank is in a group of its own, and one left such a group."""
    for one in range(2):
        group = dist.new_group([one])
        if rank == one == 1:
            dist.destroy_process_group(group)
    model = shard(model_of())
    if reduced:
        f8sub.reduce_gradients_in_float8(model, ranks_per_host=1)
    f8sub.precompute_scales(model)
    x = gaussian((4, 16), generator(1))
    y = model(x)
    assert torch.equal(y, model_of()(x))
    y.backward(dy_of(y))
    # Whoever looks at torch's names from now on, such as another use of f8sub, finds what f8sub knows.
    torch_compat._found.clear()
    assert torch_compat.problems(torch_compat.GROUPS) == ()
    names = dist.distributed_c10d._world.pg_names.values()
    return sorted(name for name in names if name.startswith("f8sub"))


@pytest.mark.own_ranks  # whose groups these are the first of
@pytest.mark.parametrize("reduced", [False, True], ids=["weights", "gradients"])
def test_ranks_are_in_different_numbers_of_groups(ranks, reduced):
    first, second, third = ranks(3, in_other_groups, reduced, timeout=60)
    assert first == second == third != []


@pytest.mark.own_ranks  # whose default group is changed
@pytest.mark.parametrize("world", [3])
def test_a_group_of_some_ranks_is_not_split_from_all_of_them(rank, world, monkeypatch):
    """As after ``init_process_group(device_id=...)``: to split is a collective of all ranks, which do not come."""
    asked = []
    monkeypatch.setattr(dist.distributed_c10d, "_get_split_source", asked.append)
    everybody, device = dist.group.WORLD, torch.device("cuda", rank)
    everybody.bound_device_id = device
    if rank:
        group = torch_compat.new_group([1, 2])
        found = torch.tensor([rank])
        dist.all_reduce(found, group=group)
        assert found.item() == 3
    assert asked == []
    assert everybody.bound_device_id == device
    everybody.bound_device_id = None
