"""What crosses the wire: one byte an element, one all-reduce a step, and never a rank that waits for ever."""

import datetime
import itertools
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

import f8sub
from f8sub.weights import agreement
from tests.data_sets import gaussian, generator
from tests.models import BF16, Stack, heard, seed_weights, shard, silenced, take_step
from tests.selection import long_but
from tests.wire import ONE_RECIPE_A_WIRE, Wire, gathered_bytes, least_decibels, on_each, wire_of

RECIPES = f8sub.recipe_names()
WIDTHS = (64, 96, 48, 64)
on_each_recipe = on_each(RECIPES)
on_each_wire = on_each(ONE_RECIPE_A_WIRE)
QUICK = [("tensorwise", 0, False, False), ("tensorwise", 0, True, True), ("mxfp8", 1, False, True)]
MORE = [("tensorwise", *flags) for flags in itertools.product((0, 1), (False, True), (False, True))]


def test_every_recipe_s_wire_is_tested():
    assert {wire_of(recipe) for recipe in RECIPES} == {wire_of(recipe) for recipe in ONE_RECIPE_A_WIRE}


def stack(recipe: str | None, widths: tuple[int, ...] = WIDTHS) -> nn.Module:
    model = seed_weights(Stack(*widths))
    return model if recipe is None else f8sub.convert_to_float8(model, recipe=recipe)


def forward_bytes(model: nn.Module) -> int:
    with Wire() as wire:
        model(gaussian((16, model.layers[0].in_features), generator(1)))
    return wire.gathered


@pytest.mark.parametrize(
    ("widths", "world", "rows"),
    [(WIDTHS, 2, WIDTHS[1:]), ((64, 80, 16), 3, (3 * 27, 3 * 6))],
    ids=["even", "uneven"],
)
@on_each_recipe
def test_a_weight_is_gathered_once_as_one_byte_an_element(rank, world, recipe, widths, rows):
    """With its padding and no more. All ranks know that all loaded: they make scales before the gather."""
    shapes = list(zip(rows, widths, strict=False))
    numel, in_float8 = sum(a * b for a, b in shapes), sum(gathered_bytes(recipe, *shape) for shape in shapes)
    for policy, size in ((None, 4), (BF16, 2)):
        float8 = shard(stack(recipe, widths), policy)
        f8sub.precompute_scales(float8)
        assert forward_bytes(float8) == in_float8
        assert forward_bytes(shard(stack(None, widths), policy)) == size * numel
    float8.load_state_dict({name: 8 * value for name, value in float8.state_dict().items()})
    with silenced():
        assert forward_bytes(float8) == in_float8


def forgetful_and_not(rank: int, recipe: str, precompute: bool) -> dict[str, list]:
    """All-reduces and gathered bytes of each step but the first, the warnings of the run, its losses."""
    model = shard(stack(recipe))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found: dict[str, list] = {"all_reduces": [], "gathered": [], "losses": []}
    with heard() as told:
        for step in range(4):
            with Wire() as wire:
                if precompute:
                    f8sub.precompute_scales(model)
                loss = model(gaussian((16, WIDTHS[0]), generator(step + 100 * rank))).square().mean()
                found["losses"].append(take_step(optimizer, loss))
            if step:
                found["all_reduces"].append(wire.all_reduces)
                found["gathered"].append(wire.gathered)
    return found | {"warnings": told}


@on_each_recipe
def test_all_reduces_with_and_without_precompute_scales(rank, world, recipe):
    float8 = sum(gathered_bytes(recipe, fan_out, fan_in) for fan_in, fan_out in itertools.pairwise(WIDTHS))
    called, forgotten = (forgetful_and_not(rank, recipe, precompute) for precompute in (True, False))
    assert called["all_reduces"] == [1, 1, 1]
    assert called["gathered"] == [2 * float8] * 3
    assert called["warnings"] == []
    assert max(forgotten["all_reduces"]) < len(WIDTHS)
    (told,) = forgotten["warnings"]
    assert "precompute_scales" in told
    assert forgotten["losses"] == called["losses"]


def outcome(model: nn.Module, forward: Callable[[], torch.Tensor], x: torch.Tensor) -> str:
    """ "right", "right or NaN", "wrong" or the name of f8sub's error; by float64 and the weights of all ranks."""
    try:
        y = forward()
    except (f8sub.Float8RankMismatchError, f8sub.Float8NumericsError) as error:
        return type(error).__name__
    expected = x.double()
    for parameter in model.parameters():
        expected = expected @ parameter.full_tensor().double().t()
    seen = torch.where(y.isnan(), expected, y.double())
    error = ((seen - expected).norm() / expected.norm()).item()
    if error > 10 ** (-least_decibels(model.layers[0]._f8sub.plan.recipe.name) / 20):
        return "wrong"
    return "right or NaN" if y.isnan().any() else "right"


def prepared(recipe: str, at_once: bool = False) -> tuple[nn.Module, torch.Tensor]:
    """A model one step into training, its weights changed since its scales were computed; ``at_once``: just sharded."""
    model, x = shard(stack(recipe, (64, 96))), gaussian((16, 64), generator(3))
    if at_once:
        return model, x
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    f8sub.precompute_scales(model)
    (3 * model(x).square().sum()).backward()
    optimizer.step()
    return model, x


def one_rank_forgets(rank, world, recipe: str, forgetful: int, with_all_reduce: bool, at_once: bool) -> str:
    # Whatever ranks decide, the outcome is right, so that nothing depends on how long they wait.
    agreement.PATIENCE = datetime.timedelta(milliseconds=100)
    warnings.simplefilter("ignore", f8sub.Float8Warning)
    model, x = prepared(recipe, at_once)

    def forward() -> torch.Tensor:
        if rank != forgetful:
            f8sub.precompute_scales(model)
        if with_all_reduce:
            loss = torch.tensor([1.0 + rank])
            dist.all_reduce(loss)
            assert loss.item() == world * (world + 1) / 2, f"the user's own all-reduce gave {loss.item()}"
        return model(x)

    return outcome(model, forward, x)


def assert_nobody_waits(outcomes: list[str], *allowed: str) -> None:
    """A rank that waits for one that never comes has no outcome: the ranks' deadline ends the test."""
    assert len(set(outcomes)) == 1, outcomes
    assert outcomes[0] in allowed, outcomes


@pytest.mark.parametrize(
    ("recipe", "forgetful", "with_all_reduce", "at_once"), long_but(QUICK, dict.fromkeys(QUICK + MORE))
)
def test_a_rank_that_forgets_precompute_scales_leaves_nobody_waiting(
    ranks, recipe, forgetful, with_all_reduce, at_once
):
    outcomes = ranks(2, one_rank_forgets, recipe, forgetful, with_all_reduce, at_once)
    assert_nobody_waits(outcomes, "right", "Float8RankMismatchError")


def one_rank_changes_its_shard(rank, world, recipe: str, precompute: bool) -> tuple[list[str], list[str]]:
    """Outcomes of the next forward, and of two more after a precompute_scales each; what the ranks are told."""
    model, x = prepared(recipe)
    f8sub.precompute_scales(model)
    model(x)
    if rank == 0:
        with torch.no_grad():
            model.layers[0].weight.to_local().mul_(4.0)

    def after_precompute() -> torch.Tensor:
        f8sub.precompute_scales(model)
        return model(x)

    with heard() as told:
        first = outcome(model, after_precompute if precompute else lambda: model(x), x)
        found = [first, *(outcome(model, after_precompute, x) for _ in range(2))]
    return found, told


@pytest.mark.parametrize("precompute", [False, True], ids=["forgotten", "precompute"])
@on_each_wire
def test_a_weight_that_one_rank_changed_is_reported_and_leaves_nobody_waiting(ranks, recipe, precompute):
    """Until scales are computed again no rank uses a code that the old scale cannot hold: it is NaN.

    e2m1 has no NaN: there the code is the largest, and the next precompute_scales says so, see below. Scales that cross
    the wire with their codes are right at once, and nothing is reported.
    """
    outcomes, messages = zip(*ranks(2, one_rank_changes_its_shard, recipe, precompute), strict=True)
    first, *others = zip(*outcomes, strict=True)
    clamped = ["wrong"] if recipe == "nvfp4" else []
    usual = [] if precompute else ["right or NaN", "Float8RankMismatchError", *clamped]
    assert_nobody_waits(list(first), "right", *usual)
    for later in others:
        assert_nobody_waits(list(later), "right")
    if not precompute:
        for told in messages:
            assert len(told) == (0 if recipe == "mxfp8" else 1), told
            assert all("layers.0" in message for message in told)
