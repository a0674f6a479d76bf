"""An x that siblings share is cast once in a forward and saved once; nothing of it outlives that forward."""

import contextlib
import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch import nn

import f8sub
from f8sub.linear import shared_input
from tests.counting import Float8Work
from tests.data_sets import gaussian, generator
from tests.layers import on_each_recipe
from tests.models import seed_weights

M, K, N = 24, 32, 48


class Attention(nn.Module):
    """q, k, v of one x; ``between`` runs after q."""

    def __init__(self, between=None) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(K, N, bias=False) for _ in range(3))
        self.between = between or (lambda x: x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q = self.q(x)
        x = self.between(x)
        return q + self.k(x) * self.v(x)


def made(recipe: str = "tensorwise", between=None, model: nn.Module | None = None) -> nn.Module:
    return f8sub.convert_to_float8(seed_weights(model or Attention(between)), recipe=recipe)


def x_of(seed: int = 1) -> torch.Tensor:
    return gaussian((M, K), generator(seed))


def casts_of_x(run) -> int:
    with Float8Work() as work:
        run()
    return work.casts.count((M, K)) + work.casts.count((K, M))


@pytest.fixture(autouse=True)
def no_scope_is_left_behind():
    yield
    assert shared_input._scopes.stack == []


def casts_of(recipe: str) -> int:
    """One cast serves both usages where one scale does."""
    row, col = f8sub.get_recipe(recipe).formats("x")
    if col is None:
        return 1
    return 1 if row == col and row.tile.rows == row.tile.cols else 2


@on_each_recipe
def test_siblings_cast_x_once(recipe):
    model = made(recipe)
    x = x_of().requires_grad_()
    assert casts_of_x(lambda: model(x)) == casts_of(recipe)
    assert casts_of_x(lambda: [layer(x) for layer in (model.q, model.k, model.v)]) == 3 * casts_of(recipe)


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_nothing_is_kept_after_the_forward(recipe):
    """Of a forward without gradients, x itself and its codes are gone when it returns."""
    model = made(recipe)
    kept = []

    def spy_on(original):
        def spy(x, *args):
            made = original(x, *args)
            if x.shape == (M, K):
                kept.extend(weakref.ref(op.data) for op in made[:2] if op is not None)
            return made

        return spy

    x = x_of()
    x_alive = weakref.ref(x)
    with pytest.MonkeyPatch.context() as patch, torch.no_grad():
        patch.setattr(shared_input, "quantize", spy_on(shared_input.quantize))
        model(x)
    del x
    gc.collect()
    assert kept
    assert x_alive() is None
    assert [ref() for ref in kept] == [None] * len(kept)


IN_PLACE = {
    "mul_": lambda x: x.mul_(100.0),
    "view": lambda x: x.view(-1)[:7].fill_(50.0),
    "row": lambda x: x[3].fill_(50.0),
    "copy_": lambda x: x.copy_(x_of(9)),
    "foreach": lambda x: torch._foreach_mul_([x], 100.0),
    "out=": lambda x: torch.mul(x_of(9), 2.0, out=x),
    "detach": lambda x: x.detach().mul_(100.0),
    "data =": lambda x: setattr(x, "data", 100.0 * x),
    "data = twice": lambda x: (setattr(x, "data", 2.0 * x), setattr(x, "data", 50.0 * x)),
    "data = a view": lambda x: setattr(x, "data", torch.stack([x, 100.0 * x])[1]),
}


@pytest.mark.parametrize("change", IN_PLACE, ids=list(IN_PLACE))
@on_each_recipe
def test_a_change_in_place_between_siblings_is_seen(recipe, change):
    def between(x):
        IN_PLACE[change](x)
        return x

    changed = x_of()
    IN_PLACE[change](changed)
    with torch.no_grad():
        found = made(recipe, between)(x_of())
        model = made(recipe)
        expected = model.q(x_of()) + model.k(changed) * model.v(changed)
    assert torch.equal(found, expected)


def test_a_tensor_that_takes_a_dead_ones_place_is_another():
    """The memo refers to x weakly: an object made at the same address is not it."""

    class Chain(Attention):
        def forward(self, x):
            total = torch.zeros(M, N)
            for seed in range(8):
                total = total + self.q(gaussian((M, K), generator(seed)))
            return total

    model = made(model=Chain())
    expected = sum(model.q(gaussian((M, K), generator(seed))) for seed in range(8))
    assert torch.equal(model(x_of()), torch.zeros(M, N) + expected)


def test_autocast_between_siblings():
    class Mixed(Attention):
        def forward(self, x):
            with torch.autocast("cpu", torch.bfloat16):
                k = self.k(x)
            return self.q(x) + k.float()

    model = made(model=Mixed())
    assert torch.equal(model(x_of()), model.q(x_of()) + model.k(x_of().bfloat16()).float())


def test_a_frozen_sibling_does_not_cost_the_others_their_columns():
    model = made("rowwise")
    model.q.weight.requires_grad_(False)
    x = x_of().requires_grad_()
    y = model(x)
    y.backward(gaussian((M, N), generator(2)))
    free = made("rowwise")
    x2 = x_of().requires_grad_()
    free(x2).backward(gaussian((M, N), generator(2)))
    assert torch.equal(model.k.weight.grad, free.k.weight.grad)
    assert torch.equal(x.grad, x2.grad)
    assert model.q.weight.grad is None


class Interrupted(Attention):
    error: type[BaseException] = RuntimeError

    def forward(self, x):
        self.q(x)
        raise self.error("stop")


@pytest.mark.parametrize(("error", "scopes"), [(RuntimeError, 0), (KeyboardInterrupt, 1), (SystemExit, 1)])
def test_a_forward_that_raises_leaves_no_x_behind(error, scopes):
    """torch calls no hook after an interrupt: a scope that stays behind keeps no x and is the last of its kind."""
    model, x = made(model=Interrupted()), x_of()
    model.error = error
    alive = weakref.ref(x)
    for _ in range(3):
        with pytest.raises(error, match="stop"):
            model(x)
    left = len(shared_input._scopes.stack)
    del x
    gc.collect()
    shared_input._scopes.stack.clear()
    assert alive() is None
    assert left == scopes


def test_a_hook_that_raises_leaves_no_scope_behind():
    """See ``no_scope_is_left_behind``."""
    model = made()

    def refuse(module, args):
        raise RuntimeError("stop")

    model.register_forward_pre_hook(refuse)
    with pytest.raises(RuntimeError, match="stop"):
        model(x_of())


def test_an_inner_forward_that_raises_and_is_caught():
    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(K, N), nn.Linear(K, N)
            self.inner = Interrupted()

        def forward(self, x):
            y = self.first(x)
            with contextlib.suppress(RuntimeError):
                self.inner(x)
            return y + self.second(x)

    model = made(model=Outer())
    with torch.no_grad(), Float8Work() as work:
        y = model(x_of())
    assert work.casts.count((M, K)) == 2  # one for the siblings around it, one inside
    assert torch.equal(y, model.first(x_of()) + model.second(x_of()))


def test_a_module_that_calls_itself():
    class Recursive(Attention):
        def forward(self, x, depth=2):
            y = self.q(x) + self.k(x)
            return y + self(x * 2, depth - 1) if depth else y

    model = made(model=Recursive())
    expected = model.q(x_of() * 4) + model.k(x_of() * 4)
    for factor in (2, 1):
        expected = model.q(x_of() * factor) + model.k(x_of() * factor) + expected
    assert torch.equal(model(x_of()), expected)


def test_inference_mode_shares_nothing_and_keeps_nothing():
    model = made()
    with torch.inference_mode():
        assert casts_of_x(lambda: model(x_of())) == 3
        first = model(x_of())
    assert torch.equal(first.clone(), model(x_of()).detach())


def test_threads_have_scopes_of_their_own():
    """Two forwards at once, each waiting inside its scope for the other."""
    meet = threading.Barrier(2, timeout=20)

    class Meeting(Attention):
        def forward(self, x):
            q = self.q(x)
            meet.wait()
            k = self.k(x)
            meet.wait()
            return q + k * self.v(x)

    model = made(model=Meeting())
    with ThreadPoolExecutor(2) as pool:
        for seed, y in zip((1, 2), pool.map(lambda seed: model(x_of(seed)), (1, 2)), strict=True):
            assert torch.equal(y, model.q(x_of(seed)) + model.k(x_of(seed)) * model.v(x_of(seed)))
