"""A step whose gradients are not finite changes nothing, bit for bit, whatever the optimizer."""

import pytest
import torch
from torch import nn

import f8sub
from f8sub.diagnostics.step_guard import StepGuard
from tests.data_sets import gaussian, generator
from tests.models import Stack, equal, seed_weights

OPTIMIZERS = {
    "adamw-fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "adam-fused-amsgrad": (torch.optim.Adam, {"lr": 1e-2, "fused": True, "amsgrad": True}),
    "sgd-fused-momentum": (torch.optim.SGD, {"lr": 1e-2, "fused": True, "momentum": 0.9, "nesterov": True}),
    "sgd-fused": (torch.optim.SGD, {"lr": 1e-2, "fused": True}),
    "adagrad-fused": (torch.optim.Adagrad, {"lr": 1e-2, "fused": True}),
    "adamw-foreach": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
    "adamw-loop": (torch.optim.AdamW, {"lr": 1e-2, "foreach": False}),
    "sgd-momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.9, "centered": True}),
    **{
        name.lower(): (getattr(torch.optim, name), {"lr": 1e-2})
        for name in ("Adadelta", "Adafactor", "Adamax", "ASGD", "NAdam", "RAdam", "Rprop")
    },
}
FUSED = [name for name in OPTIMIZERS if "fused" in name]
STEPS, BAD_STEPS = 6, (0, 2, 3)
"""The first step, before there is any state, and two in a row."""
on_fused_and_foreach = pytest.mark.parametrize("name", ["adamw-fused", "adamw-foreach"])


def make(name: str, parameters) -> torch.optim.Optimizer:
    kind, options = OPTIMIZERS[name]
    return kind(parameters, **options)


def guarded(name: str, *widths: int) -> tuple[nn.Module, torch.optim.Optimizer, StepGuard]:
    model = f8sub.convert_to_float8(seed_weights(Stack(*widths)))
    optimizer = make(name, model.parameters())
    return model, optimizer, f8sub.skip_step_if_nonfinite(optimizer)


def set_gradients(model: nn.Module, step: int, bad: float | None = None) -> None:
    """New gradients; with ``bad`` as one element of them."""
    rng = generator(100 + step)
    for parameter in model.parameters():
        parameter.grad = gaussian(tuple(parameter.shape), rng).to(parameter.dtype)
    if bad is not None:
        model.layers[-1].weight.grad[3, 5] = bad


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[dict[str, torch.Tensor]]:
    states = [model.state_dict(), *optimizer.state.values()]
    return [{k: torch.as_tensor(v).clone() for k, v in s.items() if v is not None} for s in states]


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_with_bad_steps_is_the_run_without_them(name, value):
    runs = []
    for bad_steps in ((), BAD_STEPS):
        model, optimizer, guard = guarded(name, 32, 48, 32)
        for step in range(STEPS):
            if step in BAD_STEPS and not bad_steps:
                continue
            set_gradients(model, step, value if step in bad_steps else None)
            before = snapshot(model, optimizer)
            optimizer.step()
            if step in bad_steps:
                assert equal(snapshot(model, optimizer), before)
                assert not model.layers[-1].weight.grad.isfinite().all()
            f8sub.precompute_scales(model)
        assert int(guard.skipped) == len(bad_steps)
        assert not hasattr(optimizer, "found_inf")
        runs.append(snapshot(model, optimizer))
    assert equal(*runs)


@pytest.mark.parametrize("name", FUSED)
def test_the_host_does_not_wait_after_the_first_step(name, monkeypatch):
    model, optimizer, guard = guarded(name, 32, 48)
    if not getattr(optimizer, "_step_supports_amp_scaling", False):
        pytest.skip(
            f"this optimizer of torch {torch.__version__} cannot be told on the device to skip a step"
        )
    set_gradients(model, 0)
    optimizer.step()

    def refuse(*args):
        raise AssertionError("the host waits for the device")

    for step, bad in ((1, torch.nan), (2, None)):
        set_gradients(model, step, bad)
        with monkeypatch.context() as patch:
            for read in ("item", "__bool__", "tolist", "__float__", "__int__", "cpu"):
                patch.setattr(torch.Tensor, read, refuse)
            optimizer.step()
    assert guard.skipped.item() == 1


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "foreach"])
def test_masters_are_spared_too(fused):
    runs = []
    for bad in (False, True):
        model = f8sub.convert_to_float8(seed_weights(Stack(32, 48)).bfloat16(), primary_weights=True)
        optimizer = f8sub.optim.MasterWeights(torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused))
        guard = f8sub.skip_step_if_nonfinite(optimizer)
        for step in range(3):
            set_gradients(model, step)
            optimizer.step()
        if bad:
            set_gradients(model, 0, torch.inf)
            optimizer.step()
        assert int(guard.skipped) == int(bad)
        runs.append(snapshot(model, optimizer))
    assert equal(*runs)


@on_fused_and_foreach
def test_under_a_grad_scaler(name):
    """What the scaler leaves on the optimizer is the scaler's to take off, and both see the same steps."""
    model, optimizer, guard = guarded(name, 32, 48)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for step in range(4):
        scaler.scale(model(gaussian((8, 32), generator(step))).square().mean()).backward()
        before = snapshot(model, optimizer)
        if step == 2:
            model.layers[0].weight.grad[0, 0] = torch.nan
        scaler.step(optimizer)
        scaler.update()
        assert equal(snapshot(model, optimizer), before) == (step == 2)
        optimizer.zero_grad()
    assert scaler.get_scale() == 1.0
    assert int(guard.skipped) == int(name == "adamw-fused")  # else the scaler itself does not call step


def test_a_compiled_step_of_a_fused_optimizer():
    torch._dynamo.reset()
    model, optimizer, guard = guarded("adamw-fused", 32, 48)
    compiled = torch.compile(optimizer.step, backend="aot_eager")
    for step in range(4):
        set_gradients(model, step, torch.nan if step == 2 else None)
        before = snapshot(model, optimizer)
        compiled()
        assert equal(snapshot(model, optimizer), before) == (step == 2)
    assert int(guard.skipped) == 1


def test_an_embedding_with_sparse_gradients():
    model = nn.Embedding(16, 4, sparse=True)
    optimizer = torch.optim.SparseAdam(model.parameters(), lr=1e-2)
    guard = f8sub.skip_step_if_nonfinite(optimizer)
    for factor in (1.0, torch.nan):
        optimizer.zero_grad()
        (model(torch.tensor([1, 5])).sum() * factor).backward()
        before = snapshot(model, optimizer)
        optimizer.step()
    assert equal(snapshot(model, optimizer), before)
    assert int(guard.skipped) == 1


def test_a_closure_is_refused():
    model = seed_weights(Stack(32, 48))
    optimizer = torch.optim.LBFGS(model.parameters())
    guard = f8sub.skip_step_if_nonfinite(optimizer)
    for step in (lambda: optimizer.step(lambda: 0.0), lambda: optimizer.step(closure=lambda: 0.0)):
        with pytest.raises(f8sub.Float8ConfigError, match=r"guard\.remove\(\)"):
            step()
    guard.remove()
    optimizer.step(lambda: model(torch.ones(2, 32)).sum())


@on_fused_and_foreach
def test_a_step_that_raised_leaves_nothing_behind(name):
    model, optimizer, guard = guarded(name, 32, 48)
    set_gradients(model, 0)
    optimizer.step()
    set_gradients(model, 0, torch.nan)
    raising = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    raising.remove()
    set_gradients(model, 1)
    before = snapshot(model, optimizer)
    optimizer.step()
    assert model.layers[0].weight.isfinite().all()
    assert not equal(snapshot(model, optimizer), before)
    assert model.layers[0].weight.grad.isfinite().all()
    assert not hasattr(optimizer, "found_inf")
    assert int(guard.skipped) == 1


def test_each_optimizer_has_its_own_guard_and_groups_that_are_added_have_it_too():
    """A NaN in an x is an error of delayed scaling where no optimizer of the layers skips the step."""
    model = f8sub.convert_to_float8(seed_weights(Stack(32, 48, 32)), recipe="delayed")
    other = f8sub.convert_to_float8(seed_weights(Stack(32, 48)), recipe="delayed")
    guarded, plain = (torch.optim.SGD(layer.parameters(), lr=1e-2) for layer in model.layers)
    guard = f8sub.skip_step_if_nonfinite(guarded)
    f8sub.skip_step_if_nonfinite(plain).remove()
    guarded.add_param_group({"params": list(other.parameters())})
    x = torch.full((8, 32), torch.nan)

    def step() -> None:
        for trained in (model, other):
            y = trained(x)
            y.backward(gaussian(tuple(y.shape), generator(2)))
        guarded.step()
        guarded.zero_grad()
        f8sub.precompute_scales([model, other])

    for _ in range(3):
        with pytest.warns(f8sub.Float8Warning, match=r"x of layers\.0"):
            step()
    assert int(guard.skipped) == 3
    guard.remove()
    with pytest.raises(f8sub.Float8NumericsError, match=r"x of layers\.0"):
        step()


def test_a_second_guard_is_refused_until_the_first_is_removed():
    model = seed_weights(Stack(32, 48))
    optimizer = make("adamw-fused", [{"params": []}, {"params": list(model.parameters())}])
    guard = f8sub.skip_step_if_nonfinite(optimizer)
    with pytest.raises(f8sub.Float8ConfigError, match=r"AdamW before.*guard\.remove\(\)"):
        f8sub.skip_step_if_nonfinite(optimizer)
    guard.remove()
    f8sub.skip_step_if_nonfinite(optimizer)
