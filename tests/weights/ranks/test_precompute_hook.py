"""``register_precompute_hook``: one all-reduce a step and no warning, however the optimizer is stepped."""

import copy
from collections.abc import Callable

import pytest
import torch
from torch.distributed.fsdp import FSDPModule, fully_shard

import f8sub
from tests.models import loss_of, refusal, shard, transformer
from tests.selection import long_but
from tests.wire import Wire

STEPS = 3


class Wrapper(torch.optim.Optimizer):
    """As accelerate's: passes steps on, and was never constructed as an optimizer."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    def step(self, closure: Callable[[], torch.Tensor] | None = None) -> None:
        self.optimizer.step(closure)


WAYS = ("by hand", "by hand, with a closure", "hooked", "hooked, with a closure", "through a wrapper")


def train_in(way: str, recipe: str, rank: int) -> tuple[list[float], list[int]]:
    """Losses, and the all-reduces from one step to the next."""
    hooked = not way.startswith("by hand")
    model = shard(transformer(recipe))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    f8sub.precompute_scales(model)
    stepping = Wrapper(optimizer) if way == "through a wrapper" else optimizer
    if hooked:
        handle = f8sub.register_precompute_hook(stepping, model)
    losses: list[float] = []
    reduced = []

    def run_model() -> torch.Tensor:
        optimizer.zero_grad()
        loss = loss_of(model, len(losses), rank)
        loss.backward()
        losses.append(loss.item())
        return loss

    for _ in range(STEPS):
        with Wire() as wire:
            if "with a closure" in way:
                stepping.step(run_model)
            else:
                run_model()
                stepping.step()
            if not hooked:
                f8sub.precompute_scales(model)
        reduced.append(wire.all_reduces)
    if hooked:
        handle.remove()
        with Wire() as wire:
            optimizer.step()
        assert wire.all_reduces == 0
        f8sub.precompute_scales(model)
    return losses, reduced


@pytest.mark.parametrize("recipe", long_but(["tensorwise"], ["tensorwise", "delayed"]))
def test_one_all_reduce_a_step(rank, world, recipe):
    """A Float8Warning raises: that scales were not precomputed, above all."""
    found = {way: train_in(way, recipe, rank) for way in WAYS}
    losses, _ = found["by hand"]
    assert len(set(losses)) == STEPS
    assert found == dict.fromkeys(found, (losses, [1] * STEPS))


def converted() -> torch.nn.Module:
    return f8sub.convert_to_float8(torch.nn.Sequential(torch.nn.Linear(32, 32)))


@pytest.mark.parametrize("asked", ["call", "hook"])
def test_a_model_that_was_never_converted_is_refused(asked):
    plain = torch.nn.Sequential(torch.nn.Linear(32, 32))
    optimizer = torch.optim.SGD(plain.parameters())

    def ask(model: object) -> str:
        if asked == "call":
            return refusal(f8sub.Float8ConfigError, f8sub.precompute_scales, model)
        return refusal(f8sub.Float8ConfigError, f8sub.register_precompute_hook, optimizer, model)

    assert "convert_to_float8" in ask(plain)
    assert "Sequential at index 1 of 3" in ask([converted(), plain, converted()])
    assert "got an SGD of torch" in ask(optimizer)
    assert "got 3 at index 2 of 3" in ask(iter([converted(), converted(), 3]))
    once = converted()
    f8sub.precompute_scales(once)
    assert "convert_to_float8" in ask(f8sub.convert_from_float8(once))
    optimizer.step()


def test_an_optimizer_that_steps_nothing_of_the_model_is_refused(rank, world):
    model, other = converted(), converted()

    def told(optimizer: torch.optim.Optimizer, *parts: torch.nn.Module) -> str:
        return refusal(
            f8sub.Float8ConfigError, f8sub.register_precompute_hook, optimizer, list(parts) or model
        )

    others = "SGD steps no parameter of the model: it is another model's, or was created before fully_shard"
    assert others in told(torch.optim.SGD(other.parameters()))
    assert others in told(Wrapper(torch.optim.SGD(other.parameters())))
    early = torch.optim.SGD(model.parameters())
    f8sub.register_precompute_hook(early, model).remove()
    f8sub.register_precompute_hook(early, [other, model]).remove()
    fully_shard(model)
    assert others in told(early)
    of_bias = torch.optim.SGD([model[0].bias])  # one of several optimizers of a model
    for optimizer in (of_bias, f8sub.optim.MasterWeights(torch.optim.SGD(model.parameters()))):
        f8sub.register_precompute_hook(optimizer, model).remove()


def test_an_optimizer_that_was_made_before_fully_shard_is_told_once(rank, world):
    """torch lets it step, and nothing is trained."""
    model = converted()
    early = torch.optim.SGD(model.parameters(), lr=0.1)
    fully_shard(model)
    late = torch.optim.SGD(model.parameters(), lr=0.1)

    def step(optimizer: torch.optim.Optimizer) -> torch.Tensor:
        before = model[0].weight.full_tensor().clone()
        model(torch.ones(32, 32)).square().mean().backward()
        optimizer.step()
        f8sub.precompute_scales(model)
        return (model[0].weight.full_tensor() != before).any()

    with pytest.warns(
        f8sub.Float8Warning, match=r"^0: the SGD was created before fully_shard, .* it trains nothing"
    ):
        assert not step(early)
    assert not step(early)
    assert step(late)


ASKED = {
    "hook": lambda optimizer, model: f8sub.register_precompute_hook(optimizer, model),
    "guard": lambda optimizer, model: f8sub.skip_step_if_nonfinite(optimizer),
    "masters": lambda optimizer, model: f8sub.optim.MasterWeights(optimizer),
    "one pass": lambda optimizer, model: f8sub.optim.fuse_step(optimizer),
}


def looked_at(blocks: bool) -> torch.nn.Module:
    """A model after a forward without a backward, from which on FSDP2 has the root's parameters gathered."""
    model = torch.nn.Sequential(torch.nn.Embedding(8, 32), torch.nn.Linear(32, 32, dtype=torch.bfloat16))
    f8sub.convert_to_float8(model.bfloat16())
    if blocks:
        fully_shard(model[1])
    fully_shard(model)
    f8sub.precompute_scales(model)
    with torch.no_grad():
        model(torch.arange(8))
    return model


@pytest.mark.parametrize("blocks", [False, True], ids=["float8 in the root", "none in the root"])
@pytest.mark.parametrize("asked", ASKED)
def test_an_optimizer_of_gathered_parameters_is_refused(rank, world, asked, blocks):
    model = looked_at(blocks)
    early = torch.optim.AdamW(model.parameters(), fused=True)
    text = refusal(f8sub.Float8ConfigError, ASKED[asked], early, model)
    assert f"{1 if blocks else 3} of the 3 parameters of the AdamW, the first one of shape (8, 32)" in text
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()
    ASKED[asked](torch.optim.AdamW(model.parameters(), fused=True), model)


@pytest.mark.parametrize("blocks", [False, True], ids=["float8 in the root", "none in the root"])
def test_a_step_of_gathered_parameters_warns_once(rank, world, blocks):
    """torch lets it step, and trains nothing that the root holds."""
    model = looked_at(blocks)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    before = full(model)

    def step() -> None:
        model(torch.arange(8)).square().sum().backward()
        optimizer.step()
        f8sub.precompute_scales(model)

    with pytest.warns(
        f8sub.Float8Warning, match=r"of the 3 parameters of the SGD, .* trains nothing of them"
    ):
        step()
    step()
    after = full(model)
    assert torch.equal(after["0.weight"], before["0.weight"])
    assert torch.equal(after["1.weight"], before["1.weight"]) is not blocks


def full(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


def test_what_conversion_left_alone_and_parts_of_a_converted_model_are_not_refused():
    with pytest.warns(f8sub.Float8Warning, match="nothing to convert"):
        left = f8sub.convert_to_float8(torch.nn.Sequential(torch.nn.Embedding(8, 8)), strict=False)
    model = f8sub.convert_to_float8(torch.nn.Sequential(torch.nn.Embedding(8, 32), torch.nn.Linear(32, 32)))
    stages = [torch.nn.Sequential(copy.deepcopy(model)[i]) for i in range(2)]
    for given in (left, model, model[0], stages, stages[0], [], torch.nn.ModuleList(stages), converted()):
        f8sub.precompute_scales(given)
