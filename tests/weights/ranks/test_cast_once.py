"""A weight is cast once a step, whatever gathers it; into a CUDA graph a cast is recorded with every gather."""

import contextlib
import functools
from collections import Counter
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import nn

import f8sub
from f8sub.linear import weight_cast
from f8sub.weights import exchange
from f8sub.weights import precompute_scales as precompute
from f8sub.weights import shard as shards
from tests.data_sets import gaussian, generator
from tests.models import Stack, float8_layers, loss_of, seed_weights, shard, shard_of, transformer
from tests.weights.ranks.test_fsdp_modes import prefetching
from tests.wires import on_each

RECIPES = ("tensorwise", "rowwise", "blockwise", "delayed", "mxfp8", "nvfp4")


def count_casts(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Casts of each weight from now on."""
    casts: Counter[str] = Counter()
    cast_into = shards.Shard._cast_into

    def counted(self: shards.Shard, *args: object) -> None:
        casts[self.fqn] += 1
        cast_into(self, *args)

    monkeypatch.setattr(shards.Shard, "_cast_into", counted)
    return casts


def forget_casts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have every gather cast the weight anew."""
    cast = shards.Shard.cast

    def anew(self: shards.Shard, *args: object, **options: object) -> torch.Tensor:
        self._wire_key = None
        return cast(self, *args, **options)

    monkeypatch.setattr(shards.Shard, "cast", anew)


def holds_codes(model: nn.Module) -> set[bool]:
    """Of the model's shards, whether codes of theirs are kept."""
    return {shard_of(layer)._wire is not None for layer in float8_layers(model)}


def held(
    rank: int, world: int, recipe: str, steps: tuple[tuple[int, int], ...], monkeypatch: pytest.MonkeyPatch
) -> tuple:
    """Losses, casts a step, and whether codes are kept after each backward; a step is how often its weights are looked
    at before they are trained with, and its microbatches."""
    casts = count_casts(monkeypatch)
    model = prefetching(transformer(recipe, spread=2.0))
    optimizer, losses, counts, found = torch.optim.AdamW(model.parameters(), lr=3e-3), [], [], []
    f8sub.precompute_scales(model)
    for step, (looks, microbatches) in enumerate(steps):
        before = casts.copy()
        with torch.no_grad():
            losses += [loss_of(model, step, rank).item() for _ in range(looks)]
        found.append([])
        for _ in range(microbatches):
            loss = loss_of(model, step, rank)
            assert holds_codes(model) == {True}
            loss.backward()
            found[-1] += holds_codes(model)
            losses.append(loss.item())
        counts.append({number - before[name] for name, number in casts.items()})
        optimizer.step()
        optimizer.zero_grad()
        f8sub.precompute_scales(model)
    return losses, counts, found


def held_and_forgotten(rank: int, world: int, recipe: str, steps: tuple[tuple[int, int], ...]) -> tuple:
    with pytest.MonkeyPatch.context() as monkeypatch:
        found = held(rank, world, recipe, steps, monkeypatch)
    with pytest.MonkeyPatch.context() as monkeypatch:
        forget_casts(monkeypatch)
        return *found, held(rank, world, recipe, steps, monkeypatch)[:2]


@on_each(RECIPES)
def test_codes_are_let_go_with_the_last_gather_of_a_step(ranks, recipe):
    """As many as the step before had in backward, whatever evaluations come between; a step that has more casts once
    more, and one that has fewer keeps them."""
    steps = ((0, 1), (0, 1), (5, 1), (0, 3), (1, 3), (0, 2), (0, 2))
    for losses, casts, found, (expected, anew) in ranks(2, held_and_forgotten, recipe, steps):
        assert losses == expected
        assert all(
            min(counts) >= 2 * microbatches for counts, (_, microbatches) in zip(anew, steps, strict=True)
        )
        assert casts == [{1}, {1}, {1}, {2}, {1}, {1}, {1}]
        kept, let_go = True, False
        assert found == [
            [kept],
            [let_go],
            [let_go],
            [let_go, kept, kept],
            [kept, kept, let_go],
            [kept, kept],
            [kept, let_go],
        ]


class Recorder:
    """A CUDA graph of the casts alone, on a CPU: what is captured runs too, and runs again at a replay."""

    def __init__(self) -> None:
        self.casts: list[Callable[[], None]] = []

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        cast_into = shards.Shard._cast_into

        def recorded(*args: object) -> None:
            self.casts.append(functools.partial(cast_into, *args))
            cast_into(*args)

        with pytest.MonkeyPatch.context() as monkeypatch:
            for module in (exchange, shards, precompute):
                monkeypatch.setattr(module, "is_capturing", lambda tensor: True)
            monkeypatch.setattr(shards.Shard, "_cast_into", recorded)
            yield

    def replay(self) -> None:
        with torch.no_grad():
            for cast in self.casts:
                cast()


def gathered_inputs(model: nn.Module) -> list[torch.Tensor]:
    """This rank's codes as they are gathered now."""
    shards = [shard_of(layer) for layer in model.layers]
    return [shard.exchange.gather_input(shard, shard.master)[0].clone() for shard in shards]


def captured(rank: int, world: int, recipe: str) -> tuple[str, int, bool, bool]:
    """The error of a capture that comes too early, casts of a good one, and whether a replay casts what is there."""
    model = shard(f8sub.convert_to_float8(seed_weights(Stack(32, 48, 32)), recipe=recipe))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    x, graph = gaussian((8, 32), generator(rank)), Recorder()

    def update() -> None:
        model(x).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        f8sub.precompute_scales(model)

    f8sub.precompute_scales(model)
    update()
    with graph.capture(), pytest.raises(f8sub.Float8ConfigError) as early:
        model.layers[0].unshard()
    model(x).square().sum().backward()
    before = gathered_inputs(model)
    with graph.capture():
        model(x)
        model(x)
    recorded = len(graph.casts)
    optimizer.step()
    f8sub.precompute_scales(model)
    of_layers = [shard_of(layer) for layer in model.layers]
    with graph.capture(), pytest.raises(f8sub.Float8ConfigError, match="call it after each optimizer step"):
        f8sub.precompute_scales(model)
    graph.replay()
    written = [of_layer._wire for of_layer in of_layers]
    replayed = [codes.clone() for codes in written]
    now = gathered_inputs(model)
    fresh = all(torch.equal(a, b) for a, b in zip(replayed, now, strict=True))
    optimizer.param_groups[0]["lr"] = 0.0
    for _ in range(3):
        update()
    assert all(of_layer._wire is kept for of_layer, kept in zip(of_layers, written, strict=True))
    return str(early.value), recorded, fresh, any(torch.equal(a, b) for a, b in zip(before, now, strict=True))


@on_each(RECIPES)
def test_a_graph_casts_at_every_gather_and_replays_cast_the_weight_as_it_is(ranks, recipe):
    for early, recorded, fresh, unchanged in ranks(2, captured, recipe):
        assert "layers.0" in early
        assert "precompute_scales" in early
        assert recorded == 2 * 2
        assert fresh
        assert not unchanged


@on_each(RECIPES)
def test_codes_of_an_unsharded_weight_are_not_kept_in_a_graph(recipe, monkeypatch):
    layer = f8sub.convert_to_float8(seed_weights(Stack(32, 48)), recipe=recipe).layers[0]
    x = gaussian((8, 32), generator(1))
    layer(x)
    kept = layer.weight.cell.cast
    assert kept is not None
    monkeypatch.setattr(weight_cast, "is_capturing", lambda tensor: True)
    y = layer(x)
    assert layer.weight.cell.cast is None
    y.backward(gaussian((8, 48), generator(2)))
    assert layer.weight.cell.cast is None
