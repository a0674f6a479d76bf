"""Experts that checkpoint inside their own forward: backward repeats what the forward computed, to the bit."""

import functools
import gc
from collections import OrderedDict
from collections.abc import Callable, Iterator
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import f8sub
from tests.data_sets import gaussian, generator
from tests.models import equal, refusal
from tests.selection import long_but

E, K, N = 4, 32, 48
ENDS = torch.tensor([6, 6, 20, 24])
RECIPES = f8sub.recipe_names()


class Experts(nn.Module):
    """Its products are wrapped by ``around``, which is ``run`` in place of a call where backward repeats them."""

    hidden = N

    def __init__(self, around: Callable[..., Any] | None = None) -> None:
        super().__init__()
        rng = generator(0)
        self.up = nn.Parameter(gaussian((E, self.hidden, K), rng) * 0.3)
        self.down = nn.Parameter(gaussian((E, K, self.hidden), rng) * 0.3)
        self.around = around or (lambda function, *args: function(*args))

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.up, self.down.transpose(1, 2)

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        up, down = self.read()
        h = torch.relu(f8sub.grouped_linear(x, up, ENDS))
        return f8sub.grouped_linear(h, down, ENDS, transposed=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.around(self.mlp, x)


class Copies(Experts):
    """Multiplies by copies of its weights."""

    def read(self) -> tuple[torch.Tensor, torch.Tensor]:
        return self.up * 2, self.down.transpose(1, 2) * 2


class Handed(Experts):
    """Hands its weights to what is repeated."""

    def mlp(self, x: torch.Tensor, up: torch.Tensor, down: torch.Tensor) -> torch.Tensor:
        h = torch.relu(f8sub.grouped_linear(x, up, ENDS))
        return f8sub.grouped_linear(h, down, ENDS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.around(self.mlp, x, self.up, self.down)


class Wide(Experts):
    """Its weights have shapes that those of no other module have in any test, which may leave modules alive."""

    hidden = 208


class WideCopies(Copies):
    """The same of copies."""

    hidden = 208


for kind in (Experts, Copies, Handed, Wide, WideCopies):
    f8sub.register_experts(kind)

reentrant = functools.partial(checkpoint, use_reentrant=True)
non_reentrant = functools.partial(checkpoint, use_reentrant=False)


selective = functools.partial(non_reentrant, context_fn=f8sub.checkpoint_policy())


def nested(function: Callable[..., Any], *args: Any) -> Any:
    return non_reentrant(lambda *inner: non_reentrant(function, *inner), *args)


AROUND = {"reentrant": reentrant, "non_reentrant": non_reentrant, "selective": selective, "nested": nested}
on_each_checkpoint = pytest.mark.parametrize("around", AROUND.values(), ids=AROUND)


def results(model: nn.Module, run=lambda model, x: model(x)) -> list[torch.Tensor]:
    x = gaussian((int(ENDS[-1]), K), generator(1)).requires_grad_()
    y = run(model, x)
    y.backward(gaussian(tuple(y.shape), generator(2)))
    return [y.detach(), x.grad, *(p.grad for p in model.parameters())]


def converted(kind: type[Experts], around: Any = None, recipe: Any = "rowwise") -> nn.Module:
    return f8sub.convert_to_float8(nn.Sequential(kind(around)), recipe, experts=True)


@on_each_checkpoint
@pytest.mark.parametrize("recipe", RECIPES)
def test_what_is_repeated_is_what_ran(recipe, around):
    assert equal(results(converted(Experts, around, recipe)), results(converted(Experts, None, recipe)))


@on_each_checkpoint
@pytest.mark.parametrize("kind", [Copies, Handed])
def test_copies_and_weights_that_are_handed_over(kind, around):
    expected = results(converted(kind))
    assert equal(results(converted(kind, around)), expected)
    assert not equal(results(kind()), expected)


@on_each_checkpoint
def test_experts_that_were_not_converted_stay_in_high_precision(around):
    """Beside converted ones of the same shape."""
    beside, plain = converted(Experts, around), Experts(around)
    expected = results(Experts())
    results(beside)
    assert equal(results(plain), expected)


@on_each_checkpoint
def test_of_several_recipes_each_weight_tells_its_own(around):
    class Two(nn.Module):
        def __init__(self, around: Any) -> None:
            super().__init__()
            self.first, self.second = Experts(around), Experts(around)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x))

    recipes = {"first": "tensorwise", "second": "rowwise"}
    found, expected = (
        results(f8sub.convert_to_float8(Two(way), recipes, experts=True)) for way in (around, None)
    )
    assert equal(found, expected)


def test_copies_of_several_recipes_cannot_be_told_apart():
    models = [converted(Copies, reentrant, recipe) for recipe in ("tensorwise", "rowwise")]

    def run() -> None:
        x = torch.randn(int(ENDS[-1]), K, requires_grad=True)
        y = sum(model(x) for model in models)
        y.backward(torch.randn_like(y))

    message = refusal(f8sub.Float8ConfigError, run)
    assert "repeats a product in backward" in message
    assert "Give f8sub.grouped_linear the parameter itself" in message


@pytest.fixture
def uncollected() -> Iterator[Callable[..., None]]:
    """Converts modules of another recipe, runs them, and leaves them in cycles that nothing else holds."""

    def leave(kind: type[Experts]) -> None:
        gone = converted(kind, recipe="tensorwise")
        gone.itself = [gone]
        results(gone)

    gc.collect()
    gc.disable()
    yield leave
    gc.enable()


@pytest.mark.usefixtures("fresh_compiler")
def test_modules_that_nobody_has_any_more_do_not_count(uncollected):
    expected = results(converted(WideCopies))
    uncollected(WideCopies)
    assert equal(results(converted(WideCopies, reentrant)), expected)
    uncollected(WideCopies)
    model = converted(Wide)
    expected = results(model)
    model.zero_grad()
    run = compiled(model[0].mlp)
    assert equal(results(model, run=lambda _, x: run(x)), expected)


@on_each_checkpoint
@pytest.mark.parametrize("recipe", ["tensorwise", "nvfp4"])
def test_in_the_recipe_of_the_context_around(recipe, around):
    def inside(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        with f8sub.autocast(recipe):
            return model(x)

    if around is reentrant:
        message = refusal(f8sub.Float8ConfigError, results, converted(Experts, around), inside)
        assert "Enter f8sub.autocast inside the checkpointed function" in message
        return
    found = results(converted(Experts, around), run=inside)
    assert equal(found, results(converted(Experts, None, recipe)))


@on_each_checkpoint
def test_a_context_inside_of_what_is_repeated(around):
    def within(function: Callable[..., Any], *args: Any) -> Any:
        @f8sub.autocast("tensorwise")
        def run(*args: Any) -> Any:
            return function(*args)

        return around(run, *args)

    assert equal(results(converted(Experts, within)), results(converted(Experts, None, "tensorwise")))


@on_each_checkpoint
def test_without_gradients_inside(around):
    """A section of the forward that learns nothing is computed in float8 the second time, too."""

    def half(function: Callable[..., Any], x: torch.Tensor) -> torch.Tensor:
        def both(x: torch.Tensor) -> torch.Tensor:
            with torch.no_grad():
                h = function(x)
            return function(x) * h

        return both(x) if around is None else around(both, x)

    found = results(converted(Experts, half))
    around = None
    assert equal(found, results(converted(Experts, half)))


def test_a_weight_that_is_multiplied_outside_of_its_modules_forward():
    """A block may call a method of its experts."""
    expected = results(converted(Experts))
    assert equal(results(converted(Experts), run=lambda model, x: model[0].mlp(x)), expected)
    model = converted(Experts)
    f8sub.convert_from_float8(model)
    assert equal(results(model, run=lambda model, x: model[0].mlp(x)), results(Experts()))


def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function, backend="aot_eager")


def within_compiled(around: Callable[..., Any]) -> Callable[..., Any]:
    """A checkpoint around compiled code, as who compiles parts of a block has it."""
    made: dict[Any, Callable[..., Any]] = {}
    return lambda function, *args: around(made.setdefault(function, compiled(function)), *args)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", long_but(["non_reentrant"], AROUND))
def test_a_compiled_module_that_checkpoints(name):
    model = converted(Experts, AROUND[name])
    model.compile(backend="aot_eager", fullgraph=name in ("non_reentrant", "selective"))
    assert equal(results(model), results(converted(Experts)))


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize("name", long_but(["reentrant"], AROUND))
def test_a_checkpoint_around_compiled_code(name):
    assert equal(results(converted(Experts, within_compiled(AROUND[name]))), results(converted(Experts)))


@pytest.mark.usefixtures("fresh_compiler")
def test_compiled_code_where_no_forward_of_a_module_runs():
    """The module's name has a dot, which dynamo does not take in an attribute's name."""
    model = f8sub.convert_to_float8(nn.Sequential(nn.Sequential(Experts())), "rowwise", experts=True)
    expected = results(model)

    def run(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return torch.compile(model[0][0].mlp, backend="aot_eager", fullgraph=True)(x)

    model.zero_grad()
    assert equal(results(model, run=run), expected)


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("dtype", "fullgraph"),
    long_but(
        [(torch.float32, True), (torch.bfloat16, False)],
        product([torch.float32, torch.bfloat16], [True, False]),
    ),
)
def test_compiled_code_that_cannot_tell_recipes_apart(dtype, fullgraph):
    """Where graphs may break the error does not break one: pieces would compute in high precision, or not at all."""
    model = nn.Sequential(OrderedDict(first=Wide(), second=Wide())).to(dtype)
    f8sub.convert_to_float8(model, {"first": "tensorwise", "second": "rowwise"}, experts=True)
    x = gaussian((int(ENDS[-1]), K), generator(1)).to(dtype)
    run = torch.compile(model.second.mlp, backend="aot_eager", fullgraph=fullgraph)
    kind = torch._dynamo.exc.Unsupported if fullgraph else f8sub.Float8ConfigError
    message = refusal(kind, run, x)
    assert "first, second: torch.compile traces a product with a weight of (4, 208, 32)" in message
    assert "Compile the module, or the checkpointed function together with it" in message


@pytest.mark.usefixtures("fresh_compiler")
def test_equal_modules_share_their_code():
    model = f8sub.convert_to_float8(nn.Sequential(Experts(), Experts()), "rowwise", experts=True)
    for layer in model:
        layer.compile(backend="aot_eager", fullgraph=True)
    results(model)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 1


@pytest.mark.usefixtures("fresh_compiler")
@pytest.mark.parametrize(
    ("around", "is_compiled"),
    long_but([(non_reentrant, True), (selective, False)], product([non_reentrant, selective], [False, True])),
)
def test_weights_of_another_module_are_not_computed(around, is_compiled):
    """A repeated product looks for its module among all; to compute a normed weight there is an operator more."""
    other = converted(Experts)
    for name in ("up", "down"):
        nn.utils.parametrizations.weight_norm(other[0], name)
    around = within_compiled(around) if is_compiled else around
    assert equal(results(converted(Experts, around)), results(converted(Experts)))
    assert equal(results(other), results(other))
