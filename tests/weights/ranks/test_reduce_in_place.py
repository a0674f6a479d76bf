"""Gradients are reduced where products write them, in float32, and not rounded to bf16 before that."""

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard

import f8sub
from f8sub import torch_compat
from f8sub.tensor.float8_tensor import Float8Tensor, UnroundedGradient
from tests.data_sets import gaussian, generator
from tests.experts.ranks import test_experts_sharded as experts_sharded
from tests.models import (
    BF16,
    Choice,
    Stack,
    checkpointed,
    equal,
    float8_layers,
    loss_of,
    refusal,
    replicated,
    seed_weights,
    shard,
    transformer,
)
from tests.selection import long_but
from tests.weights.ranks.test_gather_in_place import gather_in_place
from tests.wire import Wire

FLAT, IN_PLACE = "_reduce_scatter_base_", "reduce_scatter_tensor_coalesced_"
EXPERTS = 4
WAYS = [("plain", "tensorwise"), ("checkpointed", "tensorwise"), ("kept", "tensorwise")]
WAYS += [("plain", recipe) for recipe in ("rowwise", "blockwise", "mxfp8", "delayed")]
COMPILERS = ["aot_eager", "inductor"]
KINDS = [
    (experts_sharded.OwnExperts, False, 3),
    # What is stored or read transposed is copied, and rounded, on its way to the weight.
    (experts_sharded.TransposedExperts, False, 0),
    (experts_sharded.OwnExperts, True, 3),
    (experts_sharded.SeamedExperts, True, 3),
]
BF16_SUMS = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)


def reduce_in_place(model: nn.Module) -> nn.Module:
    """As a GPU does."""
    names = [
        (module, name) for module in model.modules() for name, _ in module.named_parameters(recurse=False)
    ]
    torch_compat.copy_gradients(names, lambda device: True, lambda gradients, out: False)
    gather_in_place(model)
    return model


def unrounded(model: nn.Module) -> int:
    """How many weights have gradients that are not rounded."""
    params, modules = (param for _, param in torch_compat.fsdp_params()), set(model.modules())
    of_model = [param.unsharded_param for param in params if torch_compat.module_of(param) in modules]
    return sum(getattr(weight, "gradient_dtype", None) is not None for weight in of_model)


def gradients(model: nn.Module, rank: int, *, steps: int = 2, micro: int = 1) -> list[torch.Tensor]:
    """Whole gradients of steps of SGD, each of micro-batches of which the last one reduces."""
    optimizer, found = torch.optim.SGD(model.parameters(), lr=0.1), []
    for step in range(steps):
        f8sub.precompute_scales(model)
        for each in range(micro):
            model.set_requires_gradient_sync(each == micro - 1)
            loss_of(model, micro * step + each, rank).backward()
        found += [parameter.grad.full_tensor().clone() for parameter in model.parameters()]
        assert all(type(parameter.grad.to_local()) is torch.Tensor for parameter in model.parameters())
        optimizer.step()
        optimizer.zero_grad()
    return found


@contextlib.contextmanager
def side_by_side() -> Iterator[None]:
    """Gradients that are not rounded are copied into one flat input by torch's operator."""

    def fill(held: Any, given: list[torch.Tensor], dtype: torch.dtype, ranks: int) -> None:
        out = held.memory.view(ranks, -1)
        wide = [each.exact if isinstance(each, UnroundedGradient) else each.float() for each in given]
        torch.ops.fsdp.chunk_cat([each.to(dtype) for each in wide], dim=0, num_chunks=ranks, out=out)

    with mock.patch.object(torch_compat._Input, "fill", fill):
        yield


def layers(rank: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Gradients under FSDP2, and means over ranks of those of a model that is not sharded, with float32 weights."""
    model, whole = (f8sub.convert_to_float8(seed_weights(Stack(32, 48, 16, 32))) for _ in range(2))
    reduce_in_place(shard(model, BF16))
    found, right = [], []
    for step in range(2):
        x, y = (gaussian((8, 32), generator(10 * step + rank + 100 * n)).bfloat16() for n in range(2))
        f8sub.precompute_scales(model)
        for each in (model, whole):
            each(x).backward(y)
        found += [parameter.grad.full_tensor() for parameter in model.parameters()]
        for parameter in whole.parameters():
            dist.all_reduce(parameter.grad)
            right.append(parameter.grad / 2)
        for each in (model, whole):
            each.zero_grad()
    assert unrounded(model) == 3
    return found, right


def test_gradients_are_not_rounded(rank, world):
    found, right = layers(rank)
    assert equal(found, right)
    # The test tells them from rounded ones.
    assert not any(torch.equal(each, each.bfloat16().float()) for each in found)


@pytest.mark.parametrize(("way", "recipe"), long_but(WAYS[:2], WAYS))
def test_they_are_those_of_one_flat_input(rank, world, way, recipe):
    """Norms and biases in bf16 beside weights."""
    change, how = (checkpointed if way == "checkpointed" else lambda model: model), {}
    if way == "kept":
        how["reshard_after_forward"] = False
    found, right = (reduce_in_place(shard(change(transformer(recipe)), BF16, **how)) for _ in range(2))
    with Wire() as wire:
        of_found = gradients(found, rank)
    with side_by_side(), Wire() as flat:
        assert equal(of_found, gradients(right, rank))
    # Each block's; ranks do not divide the rows of the root's head.
    assert (wire.calls[IN_PLACE], wire.calls[FLAT]) == (4, 2)
    assert (flat.calls[IN_PLACE], flat.calls[FLAT]) == (0, 6)
    reduced = [sum(w.output_bytes[name] for name in (FLAT, IN_PLACE)) for w in (wire, flat)]
    assert reduced[0] == reduced[1]
    # Of the seven layers of a block.
    assert unrounded(found) == 14


@pytest.mark.parametrize("world", [4])
def test_of_replicas(rank, world):
    found, right = (
        reduce_in_place(shard(transformer("tensorwise"), BF16, mesh=replicated(2))) for _ in range(2)
    )
    of_found = gradients(found, rank)
    with side_by_side():
        assert equal(of_found, gradients(right, rank))
    assert unrounded(found) == 14


def as_torch(
    rank: int, policy: MixedPrecisionPolicy | None = BF16, *, recipe: str = "tensorwise", micro: int = 1
) -> tuple[int, int]:
    """Numbers are FSDP2's own; how many reductions are in place, and how many of a flat input."""
    found, right = (shard(transformer(recipe), policy) for _ in range(2))
    reduce_in_place(found)
    with Wire() as wire:
        of_found = gradients(found, rank, micro=micro)
    assert equal(of_found, gradients(right, rank, micro=micro))
    return wire.calls[IN_PLACE], wire.calls[FLAT]


def test_sums_over_micro_batches_stay_in_bf16(rank, world):
    # Sums are in float32, and lie in memory of their own.
    assert as_torch(rank, micro=2) == (4, 2)


def test_a_run_that_begins_to_accumulate(rank, world):
    found, right = (shard(transformer("tensorwise"), BF16) for _ in range(2))
    reduce_in_place(found)
    gradients(found, rank)
    assert unrounded(found) == 14
    right.load_state_dict(found.state_dict())
    assert equal(gradients(found, rank, micro=2), gradients(right, rank, micro=2))
    assert unrounded(found) == 0


@pytest.mark.parametrize("world", [3])
def test_ranks_that_do_not_divide_rows(rank, world):
    assert as_torch(rank) == (0, 6)


@pytest.mark.parametrize("policy", [BF16_SUMS, None], ids=["bf16", "float32"])
def test_gradients_of_the_dtype_of_the_sum(rank, world, policy):
    assert as_torch(rank, policy) == (4, 2)


def test_products_in_high_precision_round(rank, world):
    # Ranks cannot know of each other what came, so weights alone decide how they reduce.
    assert as_torch(rank, recipe="rowwise_with_gw_hp") == (4, 2)


@pytest.mark.parametrize("replaces", [False, True])
def test_a_hook_on_one_rank(rank, world, replaces):
    """Ranks agree in how they reduce, whatever a hook holds or gives on one of them."""
    found, right = (shard(transformer("tensorwise"), BF16) for _ in range(2))
    reduce_in_place(found)
    held, rounds = [], replaces and rank == 0

    def hook(gradient: torch.Tensor) -> torch.Tensor | None:
        held.append(gradient)
        return gradient * 1 if replaces else None

    def before(layer: nn.Module, args: Any) -> None:
        if not layer.weight._backward_hooks:
            layer.weight.register_hook(hook)

    for layer in float8_layers(found) if rank == 0 else ():
        layer.register_forward_pre_hook(before)
    with Wire() as wire:
        of_found = gradients(found, rank)
    assert wire.calls[IN_PLACE] == 4
    assert len(held) == (28 if rank == 0 else 0)
    reduce_in_place(right)
    with side_by_side(), rounded_gradients() if rounds else contextlib.nullcontext():
        assert equal(of_found, gradients(right, rank))


@contextlib.contextmanager
def rounded_gradients() -> Iterator[None]:
    """What products make is rounded on this rank."""
    with mock.patch.object(Float8Tensor, "wgrad_dtype", property(lambda self: self.dtype)):
        yield


def test_an_error_of_the_first_forward_is_told(rank, world):
    model = reduce_in_place(shard(transformer("tensorwise"), BF16))
    groups = [g for g, p in torch_compat.fsdp_params() if torch_compat.module_of(p) in set(model.modules())]
    torchs = type(groups[0]).__mro__[1]
    with mock.patch.object(torchs, "wait_for_unshard", side_effect=KeyError("torch's own")):
        assert "torch's own" in refusal(KeyError, model.blocks[0], gaussian((4, 4, 32), generator(rank)))


def test_what_is_divided_before_it_is_added(rank, world):
    """In float16 FSDP2 divides its flat input, which gradients are copied into; they live until it is reduced."""
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float16)
    found, right = (shard(transformer("tensorwise"), policy) for _ in range(2))
    reduce_in_place(found)
    for model in (found, right):
        for module in (model, *model.blocks):
            module.set_gradient_divide_factor(16.0)
    assert equal(gradients(found, rank), gradients(right, rank))


def test_gradients_that_are_copied_later_are_kept():
    """Their copy may be on the stream of reductions, and they are of another."""
    comm = mock.Mock(is_in_place=True, copies_by=lambda gradients, out: False)
    held = torch_compat._Input(comm, lambda: torch.empty(24))
    gradient = gaussian((4, 6), generator(0))
    held.fill([gradient], torch.float32, 2)
    alive = weakref.ref(gradient)
    assert torch.equal(held.memory, gradient.flatten())
    del gradient
    assert alive() is not None


def test_gradients_in_float8(rank, world):
    """They are packed as ever, also where they are switched on after steps without."""
    found, right = (shard(transformer("tensorwise"), BF16) for _ in range(2))
    reduce_in_place(found)
    gradients(found, rank)
    right.load_state_dict(found.state_dict())
    for model in (found, right):
        f8sub.reduce_gradients_in_float8(model)
    assert equal(gradients(found, rank), gradients(right, rank))


@pytest.mark.parametrize("backend", long_but(COMPILERS[:1], COMPILERS))
def test_compiled_blocks(rank, world, backend):
    def compiled(model: nn.Module) -> nn.Module:
        for index, block in enumerate(model.blocks):
            model.blocks[index] = torch.compile(block, backend=backend, fullgraph=True)
        return model

    found, right = (reduce_in_place(shard(compiled(transformer("tensorwise")), BF16)) for _ in range(2))
    of_found = gradients(found, rank)
    with side_by_side():
        assert equal(of_found, gradients(right, rank))
    assert unrounded(found) == 14
    weights = [
        p
        for p, name in zip(of_found, dict(found.named_parameters()), strict=False)
        if name.endswith("q.weight")
    ]
    assert weights
    assert not any(torch.equal(each, each.bfloat16().float()) for each in weights)


def of_experts(kind: type[nn.Module], compiled: bool) -> tuple[nn.Module, list[torch.Tensor]]:
    model = experts_sharded.sharded(experts_sharded.converted(EXPERTS, "tensorwise", kind), mp_policy=BF16)
    reduce_in_place(model)
    call = torch.compile(model, backend="aot_eager") if compiled else model
    found = []
    for step in range(2):
        f8sub.precompute_scales(model)
        x, ends = experts_sharded.batch(EXPERTS, step)
        y = call(x.bfloat16(), ends)
        y.backward(gaussian(tuple(y.shape), generator(step)).to(y.dtype))
        found += [parameter.grad.full_tensor() for parameter in model.experts.parameters()]
        model.zero_grad()
    return model, found


@pytest.mark.parametrize(("kind", "compiled", "count"), long_but(KINDS[:2], KINDS))
def test_experts(rank, world, kind, compiled, count):
    model, found = of_experts(kind, compiled)
    with side_by_side():
        right = of_experts(kind, compiled)[1]
    assert equal(found, right)
    is_rounded = [torch.equal(each, each.bfloat16().float()) for each in found]
    # The mean of two ranks' equal gradients is one of them.
    assert is_rounded.count(False) == 2 * count
    assert unrounded(model) >= count


@pytest.mark.skipif(not hasattr(FSDPModule, "set_reduce_scatter_unused_params"), reason="wants torch 2.13")
def test_layers_that_some_ranks_do_not_use(rank, world):
    """A rank without a gradient gives zeros in bf16, and takes part in the reduction that the others begin."""

    def found() -> list[torch.Tensor]:
        model = f8sub.convert_to_float8(seed_weights(Choice(32)))
        fully_shard(model, mp_policy=BF16)
        model.set_reduce_scatter_unused_params(True)
        reduce_in_place(model)
        whole = []
        for step in range(3):
            f8sub.precompute_scales(model)
            y = model(gaussian((8, 32), generator(10 * step + rank)).bfloat16(), (rank + step) % 2)
            y.backward(gaussian(tuple(y.shape), generator(100 * step + rank)).to(y.dtype))
            whole += [parameter.grad.full_tensor() for parameter in model.parameters()]
            model.zero_grad()
        return whole

    with Wire() as wire:
        in_place = found()
    assert (wire.calls[IN_PLACE], wire.calls[FLAT]) == (3, 0)
    with side_by_side():
        assert equal(in_place, found())
    assert all(each.any() for each in in_place)
