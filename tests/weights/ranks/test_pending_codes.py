"""A weight is cast right into the memory that FSDP2 sends, once a gather; no codes are kept, nor copied."""

import contextlib
import weakref
from collections import Counter
from collections.abc import Iterator, Sequence
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import f8sub
from f8sub.kernels import cuda
from f8sub.weights import exchange, master_weight, precompute_scales
from f8sub.weights import shard as shards
from f8sub.weights.master_weight import MasterWeight
from f8sub.weights.shard import PendingCodes, Shard
from tests.data_sets import gaussian, generator
from tests.models import Stack, equal, float8_layers, loss_of, seed_weights, shard, shard_of, transformer
from tests.selection import long_but
from tests.weights.ranks.test_fsdp_modes import prefetching
from tests.wire import on_each

RECIPES = ("tensorwise", "rowwise", "blockwise", "delayed", "mxfp8", "nvfp4")
QUICK = [("tensorwise", 3), ("mxfp8", 3)]


def count_casts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Casts of each weight for an all-gather from now on."""
    casts: Counter[str] = Counter()
    cast_into = shards.cast_into

    def counted(pending: Sequence[PendingCodes], outs: Sequence[torch.Tensor]) -> None:
        casts.update(each.shard.fqn for each in pending)
        cast_into(pending, outs)

    monkeypatch.setattr(shards, "cast_into", counted)
    return casts


def trained(rank: int, recipe: str) -> tuple[list[float], dict[str, int], dict[str, int]]:
    """Losses of forwards without training and of microbatches; casts of each weight, and its all-gathers."""
    losses = []
    with pytest.MonkeyPatch.context() as monkeypatch:
        casts = count_casts(monkeypatch)
        model = prefetching(transformer(recipe, spread=2.0))
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        f8sub.precompute_scales(model)
        for step, (looks, microbatches) in enumerate(((0, 1), (2, 1), (1, 3))):
            with torch.no_grad():
                losses += [loss_of(model, step, rank).item() for _ in range(looks)]
            for _ in range(microbatches):
                loss = loss_of(model, step, rank)
                loss.backward()
                losses.append(loss.item())
            optimizer.step()
            optimizer.zero_grad()
            f8sub.precompute_scales(model)
    gathers = {shard_of(layer).fqn: shard_of(layer).gathers for layer in float8_layers(model)}
    return losses, dict(casts), gathers


@pytest.mark.parametrize(
    ("recipe", "world"), long_but(QUICK, [*((recipe, 3) for recipe in RECIPES), ("tensorwise", 1)])
)
def test_a_gather_casts_and_the_losses_are_those_of_codes_that_were_copied(rank, world, recipe):
    losses, casts, gathers = trained(rank, recipe)
    # FSDP2 copies codes that it is given.
    with mock.patch.object(Shard, "pending", lambda own, source: own.layout.stacked(own.cast(source))):
        expected, *_ = trained(rank, recipe)
    assert losses == expected
    assert casts == gathers
    assert min(gathers.values()) >= 8  # three forwards alone, and five microbatches


def test_other_operators_get_the_codes(rank, world):
    model = shard(f8sub.convert_to_float8(seed_weights(Stack(32, 48, 32)), recipe="rowwise"))
    f8sub.precompute_scales(model)
    own = shard_of(model.layers[0])
    pending = own.pending(own.master)
    codes = own.layout.stacked(own.cast(own.master))
    assert isinstance(pending, PendingCodes)
    assert isinstance(pending.view(-1).view(torch.uint8), PendingCodes)
    assert own.pending(own.master) is pending
    assert torch.equal(torch.full_like(codes, 7).copy_(pending), codes)
    assert torch.equal(pending.clone(), codes)
    assert torch.equal(pending.view(codes.numel(), 1)[:, 0], codes.view(-1))
    other = shard_of(model.layers[1])
    others = other.layout.stacked(other.cast(other.master))
    sizes = [codes.numel(), others.numel()]
    both = torch.full((sum(sizes),), 7, dtype=torch.uint8).split(sizes)
    shards.cast_into([pending, other.pending(other.master)], both)
    assert torch.equal(torch.cat(both), torch.cat([codes.view(-1), others.view(-1)]))
    own.pending(MasterWeight(own.master.plain.to("meta")))  # on another device, as under CPU offload
    assert own.pending(own.master) is pending
    offloaded = PendingCodes(own, MasterWeight(own.master.plain.clone()))
    shards.cast_into([offloaded], both[:1])
    copy = weakref.ref(offloaded)
    del offloaded
    assert copy() is None


class Together:
    """Kernels that cast many parts at once, on a CPU."""

    launches: list[int]
    made: int

    def __init__(self) -> None:
        self.launches, self.made = [], 0

    def SliceCasts(self, parts: Sequence[cuda.ShardSlice], offsets: Sequence[int]) -> Any:
        """Each is cast as ``cast_into`` does; codes begin at multiples of 16 bytes."""
        self.made += 1

        def run(memory: torch.Tensor) -> None:
            self.launches.append(len(parts))
            for part, offset in zip(parts, offsets, strict=True):
                assert (memory.data_ptr() + offset) % 16 == 0
                rows, begin = len(part.x), int(memory.storage_offset()) + offset
                out = torch.as_strided(memory, (rows, part.out_stride), (part.out_stride, 1), begin)
                cuda.cast_into(out, part.x, part.scale, part.format, part.offset, part.through)

        return SimpleNamespace(run=run)


@contextlib.contextmanager
def cast_together() -> Iterator[Together]:
    """Have a CPU cast as GPUs do; yield what it launched."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        kernels = Together()
        monkeypatch.setattr(cuda, "takes_slice", lambda part: part.x.numel() > 0)
        monkeypatch.setattr(f8sub.kernels.triton, "quantize_launch", kernels, raising=False)
        monkeypatch.setattr(cuda.support, "takes", lambda x: False)
        monkeypatch.setattr(cuda, "cast_into", reference_into)
        yield kernels


def test_a_launch_is_made_anew_for_another_dtype_at_the_same_address(rank, world):
    """A model that goes to the CPU, to bfloat16 and back may lie where it lay in float32."""
    model = shard(f8sub.convert_to_float8(seed_weights(Stack(32, 32)), recipe="tensorwise"))
    f8sub.precompute_scales(model)
    own = shard_of(model.layers[0])
    memory = own.master.plain.clone()
    other = memory.view(torch.bfloat16).view(-1)[: memory.numel()].view(memory.shape)
    out = torch.empty(memory.numel(), dtype=torch.uint8)
    with cast_together() as kernels:
        for values in (memory, other):
            values.copy_(gaussian(tuple(memory.shape), generator(rank)))
            expected = own.cast(MasterWeight(values)).view(-1)
            shards.cast_into([PendingCodes(own, MasterWeight(values))], [out])
            assert torch.equal(out, expected)
    assert kernels.made == 2


@on_each(("tensorwise", "rowwise", "gridquant"))
@pytest.mark.parametrize("aligned", [True, False])
def test_one_launch_casts_the_weights_of_a_group(rank, world, recipe, aligned):
    """Three, and it is made once. The losses are the reference's."""

    def losses() -> list[float]:
        model = f8sub.convert_to_float8(seed_weights(Stack(32, 48, 32, 32)), recipe=recipe)
        if not aligned:
            model.last = nn.Parameter(torch.ones(6))  # 12 bytes a rank, after which the second rank's begin
        fully_shard(model)
        found = []
        for _ in range(3):
            f8sub.precompute_scales(model)
            found.append(model(gaussian((8, 32), generator(rank))).square().sum().item())
            model.reshard()
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.mul_(-0.75)
        return found

    expected = losses()
    with cast_together() as kernels:
        assert losses() == expected
    is_launched = aligned or rank == 0
    assert (kernels.launches, kernels.made) == (([3, 3, 3], 1) if is_launched else ([], 0))
    assert len(set(expected)) == 3


def reference_into(out, x, scale, format, offset, through) -> None:
    spread = cuda.reference.spread(scale, format.tile, x.shape, offset)
    codes = cuda.reference.codes_as_stored(x.to(through), spread, format)
    out[:, : codes.shape[1]] = codes.view(torch.uint8)


class Recorder:
    """A CUDA graph of the casts alone, on a CPU: what is captured runs too, and runs again at a replay."""

    def __init__(self) -> None:
        self.casts: list[tuple[list[PendingCodes], list[torch.Tensor]]] = []

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        cast_into = shards.cast_into

        def recorded(pending: Sequence[PendingCodes], outs: Sequence[torch.Tensor]) -> None:
            self.casts.append((list(pending), list(outs)))
            cast_into(pending, outs)

        with pytest.MonkeyPatch.context() as monkeypatch:
            for module in (exchange, precompute_scales):
                monkeypatch.setattr(module, "is_capturing", lambda tensor: True)
            monkeypatch.setattr(shards, "cast_into", recorded)
            yield

    def replay(self) -> list[torch.Tensor]:
        """What the casts of the last gathers wrote."""
        for pending, outs in self.casts:
            shards.cast_into(pending, outs)
        return [out.clone() for _, outs in self.casts for out in outs]


def gathered_inputs(model: nn.Module) -> list[torch.Tensor]:
    """This rank's codes as they are gathered now."""
    shards = [shard_of(layer) for layer in model.layers]
    return [own.exchange.gather_input(own, own.master)[0].clone().view(-1) for own in shards]


@on_each(RECIPES)
def test_a_graph_casts_at_every_gather_and_replays_cast_the_weight_as_it_is(rank, world, recipe):
    """The error of a capture that comes too early, casts of a good one, and whether a replay casts what is there.

    The good one comes right after ``precompute_scales``, as torchtitan's does.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(exchange.Exchange, "settles_at_once", True)
        capture_and_replay(rank, recipe)


def capture_and_replay(rank, recipe):
    model = shard(f8sub.convert_to_float8(seed_weights(Stack(32, 48, 32)), recipe=recipe))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, graph = gaussian((8, 32), generator(rank)), Recorder()
    f8sub.precompute_scales(model)
    model(x).square().sum().backward()
    optimizer.step()
    with graph.capture(), pytest.raises(f8sub.Float8ConfigError, match=r"layers\.0.*precompute_scales"):
        model.layers[0].unshard()
    f8sub.precompute_scales(model)
    before = gathered_inputs(model)
    with graph.capture():
        model(x)
        model(x)
    assert len(graph.casts) == 2 * 2
    optimizer.step()
    f8sub.precompute_scales(model)
    with graph.capture(), pytest.raises(f8sub.Float8ConfigError, match="call it after each optimizer step"):
        f8sub.precompute_scales(model)
    replayed, now = graph.replay(), gathered_inputs(model)
    assert equal(replayed, now * 2)
    assert not any(map(torch.equal, before, now))


@on_each(RECIPES)
def test_codes_of_an_unsharded_weight_are_not_kept_in_a_graph(recipe, monkeypatch):
    layer = f8sub.convert_to_float8(seed_weights(Stack(32, 48)), recipe=recipe).layers[0]
    x = gaussian((8, 32), generator(1))
    layer(x)
    kept = layer.weight.cell.cast
    assert kept is not None
    monkeypatch.setattr(master_weight, "is_capturing", lambda tensor: True)
    y = layer(x)
    assert layer.weight.cell.cast is None
    y.backward(gaussian((8, 48), generator(2)))
    assert layer.weight.cell.cast is None
