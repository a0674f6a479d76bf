"""Ranks that hold the same attention have one history after each optimizer step: a checkpoint may have any rank's."""

import copy
import datetime
import functools
import pickle
import warnings
from itertools import product
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import f8sub
from f8sub.attention.state import CHILD
from f8sub.weights import agreement
from tests.attention.models import WIDTH, blocks, same, tokens
from tests.graphs.tape import imitate
from tests.selection import long_but
from tests.wire import Wire

ENTRIES = 16 * 4
"""Of one module's history."""


def model_of(how: str, *, attend_first: bool = False, recipe: str | None = "tensorwise") -> nn.Module:
    """Two blocks, on all ranks: ``how`` names the way in which they are sharded; None for attention alone in float8."""
    made = blocks()
    attend = functools.partial(f8sub.attend_in_float8, made, backend="reference", min_length=0)
    if attend_first:
        attend()
    if recipe is not None:
        f8sub.convert_to_float8(
            made, recipe, min_dim=0, float8_all_gather=how != "high precision", backend="reference"
        )
    if not attend_first:
        attend()
    return sharded(made, how)


def sharded(made: nn.Module, how: str) -> nn.Module:
    world = dist.get_world_size()
    if how == "ddp":
        return DistributedDataParallel(made)
    mesh = {
        "hsdp": functools.partial(
            init_device_mesh, "cpu", (2, world // 2), mesh_dim_names=("replicas", "shards")
        ),
        "heads": functools.partial(init_device_mesh, "cpu", (world,), mesh_dim_names=("heads",)),
        "shards and heads": functools.partial(
            init_device_mesh, "cpu", (world // 2, 2), mesh_dim_names=("shards", "heads")
        ),
    }.get(how, functools.partial(init_device_mesh, "cpu", (world,)))()
    if "heads" in how:
        plan = {f"attention.{name}": ColwiseParallel() for name in "qkv"} | {"attention.o": RowwiseParallel()}
        for block in made:
            parallelize_module(block, mesh["heads"], plan)
    if how == "heads":
        return made
    of_shards = mesh["shards"] if how == "shards and heads" else mesh
    for block in made:
        fully_shard(block, mesh=of_shards)
    return fully_shard(made, mesh=of_shards)


def states_of(model: nn.Module) -> list[Any]:
    return [module for name, module in model.named_modules() if name.endswith(CHILD)]


def histories(model: nn.Module) -> torch.Tensor:
    return torch.stack([state.history.clone() for state in states_of(model)])


def data_of(rank: int, how: str, step: int) -> torch.Tensor:
    """Ranks that share a batch are those of tensor parallelism; all others have larger or smaller tokens."""
    part = {"heads": 0, "shards and heads": rank // 2}.get(how, rank)
    return (1 + part) * tokens(length=16, seed=10 * step + part)


def train(
    model: nn.Module, optimizer: Any, rank: int, how: str, steps: range, precompute: bool = True
) -> list:
    found = []
    for step in steps:
        for micro in range(2):
            x = data_of(rank, how, 2 * step + micro)
            loss = (model(x) * torch.linspace(-1, 1, WIDTH)).square().mean()
            loss.backward()
            found.append(loss.detach())
        before = histories(model)
        with Wire() as wire:
            optimizer.step()
            if precompute:
                f8sub.precompute_scales(model)
            model.state_dict()  # a reduction under way ends
        optimizer.zero_grad()
        found += [before, histories(model), wire.all_reduces, sum(wire.output_bytes.values())]
    return found


def run(rank: int, how: str, **options: Any) -> tuple[nn.Module, Any, list]:
    model = options.pop("model", None) or model_of(how, **options)
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.SGD(learning, lr=0.05, momentum=0.9)
    if how not in ("ddp", "heads"):
        f8sub.precompute_scales(model)
    return model, optimizer, train(model, optimizer, rank, how, range(2))


WAYS = [
    (2, "fsdp"),
    (2, "high precision"),
    (2, "heads"),
    (2, "ddp"),
    (4, "hsdp"),
    (4, "shards and heads"),
]


ALONE = {"attend_first": False, "recipe": None}
"""No layer is converted."""


@pytest.mark.parametrize(("world", "how"), WAYS, ids=[how for _, how in WAYS])
@pytest.mark.parametrize(
    "options", long_but([{"attend_first": True}], [{"attend_first": False}, {"attend_first": True}, ALONE])
)
def test_histories_are_the_maximum_over_the_ranks(rank, world, how, options):
    _, _, found = run(rank, how, **options)
    for step in range(2):
        before, after, reduces, _ = found[6 * step + 2 : 6 * step + 6]
        expected = before.clone()
        dist.all_reduce(expected, dist.ReduceOp.MAX)
        assert torch.equal(after, expected)
        assert (before[:, 0] > 0).all()
        # The mlp, of which tensor parallelism has no part, is shared by other ranks.
        assert reduces == (2 if how == "shards and heads" and options != ALONE else 1)
    differ = torch.tensor(float(not torch.equal(before, after)))
    dist.all_reduce(differ)
    assert differ > 0


@pytest.mark.parametrize("recipe", ["tensorwise", "delayed"])
def test_they_ride_along(rank, world, recipe):
    """No collective more than without them, and 256 bytes for each module."""
    _, _, found = run(rank, "fsdp", recipe=recipe)
    plain = sharded(f8sub.convert_to_float8(blocks(), recipe, min_dim=0, backend="reference"), "fsdp")
    f8sub.precompute_scales(plain)
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.05, momentum=0.9)
    for step in range(2):
        for micro in range(2):
            plain(data_of(rank, "fsdp", 2 * step + micro)).square().mean().backward()
        with Wire() as wire:
            optimizer.step()
            f8sub.precompute_scales(plain)
            plain.state_dict()
        optimizer.zero_grad()
        reduces, sent = found[6 * step + 4 : 6 * step + 6]
        assert reduces == wire.all_reduces == 1
        assert sent - sum(wire.output_bytes.values()) == 2 * ENTRIES * 4


class WithAdapter(nn.Module):
    """A frozen block, and what is trained beside it."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.adapter = block.requires_grad_(False), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.adapter(x + self.block(x))


@pytest.mark.parametrize("how", ["fsdp", "high precision", "ddp"])
@pytest.mark.parametrize("recipe", ["tensorwise", "delayed", None])
def test_adapters_beside_frozen_layers_share_them(rank, world, how, recipe):
    """No optimizer steps a layer that was converted."""
    made = blocks()
    if recipe is not None:
        all_gather = how != "high precision"
        f8sub.convert_to_float8(made, recipe, min_dim=0, float8_all_gather=all_gather, backend="reference")
    made = nn.Sequential(*(WithAdapter(block) for block in made))
    f8sub.attend_in_float8(made, backend="reference", min_length=0)
    _, _, found = run(rank, how, model=sharded(made, how))
    for step in range(2):
        before, after, reduces, _ = found[6 * step + 2 : 6 * step + 6]
        dist.all_reduce(expected := before.clone(), dist.ReduceOp.MAX)
        assert torch.equal(after, expected)
        assert reduces == 1
    differ = torch.tensor(float(not torch.equal(before, after)))
    dist.all_reduce(differ)
    assert differ > 0


def test_two_optimizers_of_one_model_count_as_one_step_of_its_layers(rank, world):
    model = model_of("fsdp")
    f8sub.precompute_scales(model)
    norms = [p for name, p in model.named_parameters() if "norm" in name]
    others = [p for name, p in model.named_parameters() if "norm" not in name]
    optimizers = [torch.optim.SGD(each, lr=0.05) for each in (norms, others)]
    model(data_of(rank, "fsdp", 0)).square().mean().backward()
    with Wire() as wire:
        for optimizer in optimizers:
            optimizer.step()
        f8sub.precompute_scales(model)
    assert wire.all_reduces == 1


def test_copies_of_a_model_without_layers_share_their_own(rank, world):
    made = blocks()
    f8sub.attend_in_float8(made, backend="reference", min_length=0)
    copies = [copy.deepcopy(made), pickle.loads(pickle.dumps(made))]
    run(rank, "fsdp", model=sharded(made, "fsdp"))
    for each in copies:
        _, _, found = run(rank, "fsdp", model=sharded(each, "fsdp"))
        before, after, reduces, _ = found[-4:]
        dist.all_reduce(before, dist.ReduceOp.MAX)
        assert torch.equal(after, before)
        assert reduces == 1
        del found


def test_an_optimizer_of_another_model_does_not_count(rank, world):
    model, _, _ = run(rank, "fsdp", recipe=None)
    model(data_of(rank, "fsdp", 9)).square().mean().backward()
    before, other = histories(model), nn.Linear(2, 2)
    y = other(torch.randn(1, 2))
    y.backward(torch.randn_like(y))
    with Wire() as wire:
        torch.optim.SGD(other.parameters(), lr=1.0).step()
        f8sub.precompute_scales(model)
    assert wire.all_reduces == 0
    assert torch.equal(histories(model), before)


def test_optimizers_that_step_within_backward_share_them_once(rank, world):
    """One for each parameter; precompute_scales reduces."""
    model = model_of("fsdp", recipe=None)
    optimizers = {p: torch.optim.SGD([p], lr=0.05) for p in model.parameters()}
    for p in optimizers:
        p.register_post_accumulate_grad_hook(lambda p: optimizers[p].step())
    for step in range(2):
        model(data_of(rank, "fsdp", step)).square().mean().backward()
        dist.all_reduce(expected := histories(model), dist.ReduceOp.MAX)
        with Wire() as wire:
            f8sub.precompute_scales(model)
        assert wire.all_reduces == 1
        assert torch.equal(histories(model), expected)


@pytest.mark.parametrize(
    ("world", "how", "recipe"),
    long_but(
        [(4, "shards and heads", "tensorwise")],
        [(*way, recipe) for way in WAYS for recipe in ("tensorwise", None)],
    ),
)
def test_a_resumed_run_is_bitwise_the_same(rank, world, how, recipe, tmp_path):
    model, optimizer, _ = run(rank, how, recipe=recipe)
    save(model, optimizer, tmp_path)
    expected = train(model, optimizer, rank, how, range(2, 4))
    resumed = model_of(how, recipe=recipe)
    optimizer = torch.optim.SGD(resumed.parameters(), lr=0.05, momentum=0.9)
    load(resumed, optimizer, tmp_path)
    found = train(resumed, optimizer, rank, how, range(2, 4))
    assert all(
        torch.equal(a, b) if isinstance(a, torch.Tensor) else True
        for a, b in zip(expected, found, strict=True)
    )


def compiled_whole(made: nn.Module, how: str) -> nn.Module:
    compile = functools.partial(torch.compile, backend="eager")
    if how == "in place":
        made.compile(backend="eager")
    if how == "inside":
        return DistributedDataParallel(compile(made))
    return compile(DistributedDataParallel(made)) if how == "outside" else DistributedDataParallel(made)


@pytest.mark.parametrize(
    ("how", "recipe"),
    long_but([("inside", None)], product(("inside", "outside", "in place"), (None, "tensorwise"))),
)
def test_models_that_are_compiled_whole_under_ddp_share_them(rank, world, how, recipe):
    """No hook of theirs runs in a forward."""
    torch._dynamo.reset()
    made = blocks(1)
    if recipe is not None:
        f8sub.convert_to_float8(made, recipe, min_dim=0, backend="reference")
    f8sub.attend_in_float8(made, backend="reference", min_length=0)
    call = compiled_whole(made, how)
    optimizer = torch.optim.SGD(made.parameters(), lr=0.05)
    for step in range(2):
        call(data_of(rank, "ddp", step)).square().mean().backward()
        before = histories(made)
        optimizer.step()
        dist.all_reduce(before, dist.ReduceOp.MAX)
        assert torch.equal(histories(made), before)
    assert (before[:, :2] > 0).all()


def saved_by_two(rank: int, world: int, folder: Path) -> torch.Tensor:
    model, optimizer, _ = run(rank, "fsdp")
    save(model, optimizer, folder)
    return histories(model)


def loaded(rank: int, world: int, folder: Path, how: str) -> tuple[torch.Tensor, torch.Tensor]:
    model = model_of(how)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
    load(model, optimizer, folder)
    found = histories(model)
    train(model, optimizer, rank, how, range(2, 3))
    return found, histories(model)


def test_a_run_goes_on_with_other_ranks(ranks, tmp_path):
    """The numbers of ranks, and what they share, may be others than those of the run that saved."""
    expected, again = ranks(2, saved_by_two, tmp_path)
    assert torch.equal(expected, again)
    for world, how in ((1, "fsdp"), (3, "fsdp"), (2, "heads"), (4, "hsdp"), (2, "high precision")):
        found = ranks(world, loaded, tmp_path, how)
        assert all(torch.equal(at_load, expected) for at_load, _ in found)
        assert all(torch.equal(later, found[0][1]) for _, later in found)
        assert not torch.equal(found[0][1], expected)


def test_a_state_dict_before_precompute_scales_has_those_of_all_ranks(rank, world):
    (model, optimizer, _), (other, other_optimizer, _) = run(rank, "fsdp"), run(rank, "fsdp")
    found = train(model, optimizer, rank, "fsdp", range(2, 4), precompute=False)
    expected = train(other, other_optimizer, rank, "fsdp", range(2, 4))
    assert same(found[2:4] + found[8:10], expected[2:4] + expected[8:10])


def graphed(rank: int, how: str, recipe: str | None, imitated: bool) -> tuple[list[torch.Tensor], str]:
    with pytest.MonkeyPatch.context() as patch:
        model = model_of(how, recipe=recipe)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
        if imitated:
            imitate(patch)

        def forward_backward(x: torch.Tensor) -> torch.Tensor:
            loss = (model(x) * torch.linspace(-1, 1, WIDTH)).square().mean()
            loss.backward()
            return loss

        step = f8sub.graph_step(forward_backward, model, optimizer)
        losses = [step(data_of(rank, how, i)).clone() for i in range(6)]
        model.state_dict()
        return [*losses, histories(model)], step.how


@pytest.mark.parametrize(
    ("how", "recipe"), [("fsdp", "tensorwise"), ("high precision", "tensorwise"), ("fsdp", None)]
)
def test_replays_of_a_graph_reduce_them(rank, world, how, recipe):
    (launched, _), (replayed, kind) = (graphed(rank, how, recipe, imitated) for imitated in (False, True))
    assert kind == "replayed"
    assert same(launched, replayed)
    dist.all_reduce(maximum := replayed[-1].clone(), dist.ReduceOp.MAX)
    assert torch.equal(replayed[-1], maximum)


def test_a_state_dict_that_one_rank_takes_leaves_nobody_waiting(rank, world):
    model, _, _ = run(rank, "fsdp")
    for x in (data_of(rank, "fsdp", step) for step in range(2)):
        model(x).square().mean().backward()
    torch.optim.SGD(model.parameters(), lr=0.05).step()
    if rank == 1:
        with mock.patch.object(agreement, "PATIENCE", datetime.timedelta(milliseconds=1)):
            model.state_dict()
    f8sub.precompute_scales(model)
    model.state_dict()
    own = histories(model)
    dist.all_reduce(maximum := own.clone(), dist.ReduceOp.MAX)
    assert torch.equal(own, maximum)


def test_ranks_that_step_without_the_others_are_told_once(rank, world):
    _, optimizer, _ = run(rank, "heads")
    told = "some ranks stepped an optimizer and others did not"
    with mock.patch.object(agreement, "PATIENCE", datetime.timedelta(milliseconds=50)):
        if rank == 0:
            with pytest.warns(f8sub.Float8Warning, match=told):
                optimizer.step()
        dist.barrier()
        if rank == 1:
            with pytest.warns(f8sub.Float8Warning, match=told):
                optimizer.step()
    # Asked again, a rank would wait for the others.
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(1 + rank):
            optimizer.step()


def save(model: nn.Module, optimizer: Any, folder: Path) -> None:
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)


def load(model: nn.Module, optimizer: Any, folder: Path) -> None:
    weights, states = get_state_dict(model, optimizer)
    held = {"model": weights, "optimizer": states}
    dcp.load(held, checkpoint_id=folder)
    set_state_dict(model, optimizer, model_state_dict=held["model"], optim_state_dict=held["optimizer"])
