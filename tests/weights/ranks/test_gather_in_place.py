"""All-gathers into the weights' own memory: values are those of FSDP2's copy, and no flat memory is filled."""

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import Shard
from torch.utils._python_dispatch import TorchDispatchMode

import f8sub
from f8sub import torch_compat
from f8sub.weights import large_casts
from tests.data_sets import gaussian, generator
from tests.models import checkpointed, equal, loss_of, replicated, shard, train, transformer
from tests.selection import long_but
from tests.wire import ONE_RECIPE_A_WIRE, Wire

BLOCKS = 3
FLAT, IN_PLACE = "_allgather_base_", "allgather_into_tensor_coalesced_"
BF16 = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)


def gather_in_place(model: nn.Module, first: bool = False) -> None:
    """Of its parameters, or the first one alone, as on a GPU."""
    names = [
        (module, name) for module in model.modules() for name, _ in module.named_parameters(recurse=False)
    ]
    torch_compat.gather_in_place(
        names[:1] if first else names, takes=lambda device: True, casts=large_casts.around
    )


def count(model: nn.Module) -> int:
    """How many groups of a model gather in place."""
    modules = set(model.modules())
    groups = {id(g): g for g, param in torch_compat.fsdp_params() if torch_compat.module_of(param) in modules}
    return sum(hasattr(group._all_gather_comm, "places") for group in groups.values())


def model_of(recipe: str | None, in_place: bool, change: Callable[[nn.Module], Any], **how: Any) -> nn.Module:
    model = shard(change(transformer(recipe, blocks=BLOCKS)), **how)
    if in_place:
        gather_in_place(model)
        assert count(model) == BLOCKS + 1
    return model


def weights(model: nn.Module) -> list[torch.Tensor]:
    return [p.full_tensor() for p in model.parameters()]


def bytes_held(model: nn.Module) -> int:
    """Of the memory that FSDP2 gathers into."""
    modules, params = set(model.modules()), (param for _, param in torch_compat.fsdp_params())
    outputs = [param.all_gather_outputs for param in params if torch_compat.module_of(param) in modules]
    assert all(outputs)
    return sum(tensor.untyped_storage().nbytes() for tensors in outputs for tensor in tensors)


def assert_same(rank: int, recipe: str | None, change: Callable = lambda model: model, **how: Any) -> None:
    found, right = (model_of(recipe, in_place, change, **how) for in_place in (True, False))
    assert train(found, rank) == train(right, rank)
    assert equal(weights(found), weights(right))


@pytest.mark.parametrize("world", long_but((3,), (2, 3, 4)))
@pytest.mark.parametrize("recipe", long_but(("tensorwise", None), (*ONE_RECIPE_A_WIRE, "delayed", None)))
def test_losses_and_weights_are_those_of_a_copy(rank, world, recipe):
    """Blocks of 32 and 48 rows do not divide by 3; norms and biases are gathered in bf16 beside codes."""
    assert_same(rank, recipe, policy=BF16)


@pytest.mark.parametrize(
    "how",
    [
        pytest.param({"change": checkpointed}, id="checkpointed"),
        pytest.param({"reshard_after_forward": False}, id="kept", marks=pytest.mark.long),
        pytest.param({}, id="float32", marks=pytest.mark.long),
    ],
)
def test_other_ways_of_training(rank, world, how):
    assert_same(rank, "tensorwise", **how)


@pytest.mark.parametrize("world", [4])
def test_of_replicas(rank, world):
    assert_same(rank, "rowwise", mesh=replicated(2))


def prefetching(model: nn.Module) -> nn.Module:
    for block, following in zip(model.blocks, model.blocks[1:], strict=False):
        block.set_modules_to_forward_prefetch([following])
    return model


@pytest.mark.parametrize(
    ("prefetches", "flat", "in_place"),
    # Forward: of the root, whose parameters stay, and of each block; backward: of each block.
    [(False, 1 + BLOCKS, BLOCKS), (True, 2, 2 * BLOCKS - 1)],
    ids=["implicit", "explicit"],
)
def test_backward_passes_and_prefetches_fill_no_flat_memory(rank, world, prefetches, flat, in_place):
    model = model_of("tensorwise", True, lambda model: model, policy=BF16)
    if prefetches:
        prefetching(model)
    right = model_of("tensorwise", False, lambda model: model, policy=BF16)
    assert train(model, rank) == train(right, rank)
    with Wire() as wire:
        loss_of(model, 9, rank).backward()
    with Wire() as copied:
        loss_of(right, 9, rank).backward()
    assert (wire.calls[FLAT], wire.calls[IN_PLACE]) == (flat, in_place)
    assert wire.gathered == copied.gathered


def test_gathered_memory_is_freed(rank, world):
    model = model_of("tensorwise", True, lambda model: model, reshard_after_forward=True)
    train(model, rank)
    assert not bytes_held(model)


def test_blocks_that_backward_does_not_gather_hold_nothing(rank, world):
    """``set_unshard_in_backward(False)`` of an embedding, whose backward needs no weights."""
    layers = f8sub.convert_to_float8(nn.ModuleList([nn.Embedding(16, 32), nn.Linear(32, 32)]), min_dim=1)
    for layer in layers:
        fully_shard(layer, reshard_after_forward=True)
    embedding, linear = layers
    embedding.set_unshard_in_backward(False)
    f8sub.precompute_scales(layers)
    gather_in_place(layers)
    assert count(layers) == 2
    for _ in range(2):
        linear(embedding(torch.arange(16))).square().mean().backward()
    assert not bytes_held(layers)


def test_a_prefetch_that_nothing_reads_is_freed_and_changes_no_later_step(rank, world):
    """A block is gathered for a backward that it has no part in; then weights change."""
    found, right = (model_of("tensorwise", in_place, lambda model: model) for in_place in (True, False))
    for model in (found, right):
        model.blocks[2].set_modules_to_backward_prefetch([model.blocks[0]])
        train(model, rank, steps=1)
        x = gaussian((4, 4, 32), generator(rank))
        model.blocks[2](model.blocks[1](x)).square().mean().backward()
        assert not bytes_held(model)
    assert train(found, rank, start=1) == train(right, rank, start=1)
    assert equal(weights(found), weights(right))


@pytest.mark.parametrize(
    "around", long_but([torch.inference_mode], [torch.no_grad, torch.inference_mode, nullcontext])
)
def test_unsharded_by_hand(rank, world, around):
    model = model_of("tensorwise", True, lambda model: model)
    right = model_of("tensorwise", False, lambda model: model)
    train(model, rank), train(right, rank)
    for block in (*model.blocks, *right.blocks):
        block.unshard()
    pending = model.blocks[0].unshard(async_op=True)
    if pending is not None:
        pending.wait()
    with around():
        x = gaussian((4, 4, 32), generator(3))
        assert torch.equal(model(x), right(x))


@pytest.mark.parametrize("trained", [False, True], ids=["never", "before"])
def test_prefetches_in_inference_mode(rank, world, trained):
    """Views that are made in it have no version to keep, nor has memory that is."""
    found, right = (
        prefetching(model_of("tensorwise", in_place, lambda model: model)) for in_place in (True, False)
    )
    x = gaussian((4, 4, 32), generator(3))
    if trained:
        assert train(found, rank) == train(right, rank)
    with torch.inference_mode():
        for _ in range(2):
            assert torch.equal(found(x), right(x))


class Casts(TorchDispatchMode):
    """Counts large tensors that were cast, with others or by themselves, and gathers that copied what was cast."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.name()
        if name in ("aten::copy_", "aten::_foreach_copy_"):
            pairs = [args[:2]] if name == "aten::copy_" else zip(*args[:2], strict=True)
            large = (to for to, source in pairs if to.dtype != source.dtype)
            self.calls[name] += sum(to.numel() >= large_casts.LARGE for to in large)
        self.calls[name] += name == torch_compat.ALL_GATHER_COPY_IN
        return func(*args, **(kwargs or {}))


def half_converted(recipe: str | None) -> nn.Module:
    """Blocks' first layers in float8: the others are gathered in bf16 in the same all-gather."""
    model = transformer(None, blocks=BLOCKS)
    if recipe is not None:
        f8sub.convert_to_float8(model, recipe={"*.q": recipe, "*.up": recipe})
    return model


@pytest.mark.parametrize("recipe", ["tensorwise", None])
def test_large_weights_in_bf16_are_cast_by_themselves(rank, world, monkeypatch, recipe):
    """And where nothing else is gathered, right into the memory of the all-gather."""
    monkeypatch.setattr(large_casts, "LARGE", 256)
    found, right = (shard(half_converted(recipe), BF16) for _ in range(2))
    gather_in_place(found)
    assert train(found, rank) == train(right, rank)
    assert equal(weights(found), weights(right))
    with Casts() as casts:
        found(gaussian((4, 4, 32), generator(3)))
    assert casts.calls["aten::_foreach_copy_"] == 0
    # q, k, v, o, gate, up, down; those that are in float8 are not cast by copies
    assert casts.calls["aten::copy_"] == (5 if recipe else 7) * BLOCKS
    # of the root, whose weights are small, and of bytes
    assert casts.calls[torch_compat.ALL_GATHER_COPY_IN] == 1 + (BLOCKS if recipe else 0)


def test_casts_are_put_off_until_an_operator_may_read_them(monkeypatch):
    monkeypatch.setattr(large_casts, "LARGE", 4)
    large, small = gaussian((8,), generator(0)), gaussian((2,), generator(1))
    flat = torch.empty(10, dtype=torch.bfloat16)
    with large_casts.around([large])():
        torch._foreach_copy_(flat.split([8, 2]), [large, small])
        assert torch.equal(flat[:8].view(torch.int16), large.bfloat16().view(torch.int16))
    flat.zero_()
    with large_casts.around([large])():
        torch._foreach_copy_(flat.split([8, 2]), [large, small])
    assert torch.equal(flat, torch.cat([large, small]).bfloat16())


def test_other_all_gathers_and_other_shards_are_left_alone(rank, world):
    class Own(torch_compat._at("torch.distributed.fsdp._fully_shard._fsdp_collectives.DefaultAllGather")):
        pass

    own, columns = nn.Linear(32, 32), nn.Linear(32, 32)
    fully_shard(own).set_custom_all_gather(Own())
    fully_shard(columns, shard_placement_fn=lambda p: Shard(1) if p.dim() == 2 else None)
    layers = nn.ModuleList([own, columns])
    gather_in_place(layers)
    assert count(layers) == 0
    dist.barrier()


def test_gathers_that_torch_checks_on_all_ranks_are_left_alone(rank, world):
    """``TORCH_DISTRIBUTED_DEBUG=DETAIL`` checks none of several tensors, and cannot run one until torch 2.11."""
    before = dist.get_debug_level()
    dist.set_debug_level(dist.DebugLevel.DETAIL)
    try:
        group = dist.new_group(list(range(world)))
    finally:
        dist.set_debug_level(before)
    mesh = DeviceMesh.from_group(group, "cpu")
    model = shard(transformer("tensorwise", blocks=BLOCKS), mesh=mesh)
    gather_in_place(model)
    assert count(model) == 0
    train(model, rank)


def test_an_all_gather_that_is_set_later_is_used(rank, world):
    class Own(torch_compat._at("torch.distributed.fsdp._fully_shard._fsdp_collectives.DefaultAllGather")):
        calls = 0

        def __call__(self, *args: Any, **kwargs: Any) -> Any:
            Own.calls += 1
            return super().__call__(*args, **kwargs)

    model = model_of("tensorwise", True, lambda model: model)
    train(model, rank)
    for block in model.blocks:
        block.set_custom_all_gather(Own())
    assert count(model) == 1
    train(model, rank)
    assert Own.calls


def test_all_groups_of_a_model_gather_so_from_its_first_forward_on(rank, world):
    """An embedding or a head has no float8 weight; another model is another matter."""
    model, other = (shard(transformer("tensorwise", blocks=BLOCKS)) for _ in range(2))
    train(other, rank, steps=1)
    gather_in_place(model, first=True)
    assert count(model) == 1
    train(model, rank)
    assert (count(model), count(other)) == (BLOCKS + 1, 0)


def test_gradients_of_all_groups_are_copied_by_what_copies_those_of_one(rank, world):
    copies = []

    def copied(gradients: Sequence[torch.Tensor], out: torch.Tensor) -> bool:
        copies.append(sum(each.numel() for each in gradients))
        return False

    # In bf16, because gradients of the dtype that they are reduced in are not copied.
    found, right = (shard(transformer(None, blocks=BLOCKS), BF16) for _ in range(2))
    first = [(found.blocks[0].q, "weight")]
    torch_compat.copy_gradients(first, lambda device: True, copied)
    gather_in_place(found, first=True)
    assert train(found, rank, steps=1) == train(right, rank, steps=1)
    assert equal(weights(found), weights(right))
    assert sum(copies) == sum(p.numel() for p in found.parameters())


def test_a_second_call_changes_nothing(rank, world):
    model = model_of("tensorwise", True, lambda model: model)
    kinds = [(type(group), type(group._all_gather_comm)) for group, _ in torch_compat.fsdp_params()]
    gather_in_place(model)
    assert kinds == [(type(group), type(group._all_gather_comm)) for group, _ in torch_compat.fsdp_params()]
