"""A step whose gradients are not finite changes nothing, bit for bit, on any rank, whatever the optimizer."""

import warnings

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy

import f8sub
from tests.data_sets import gaussian, generator
from tests.models import Stack, seed_weights, shard

OPTIMIZERS = {
    "adamw-fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "adam-fused-amsgrad": (torch.optim.Adam, {"lr": 1e-2, "fused": True, "amsgrad": True}),
    "sgd-fused-momentum": (torch.optim.SGD, {"lr": 1e-2, "fused": True, "momentum": 0.9, "nesterov": True}),
    "sgd-fused": (torch.optim.SGD, {"lr": 1e-2, "fused": True}),
    "adagrad-fused": (torch.optim.Adagrad, {"lr": 1e-2, "fused": True}),
    "adamw-foreach": (torch.optim.AdamW, {"lr": 1e-2, "foreach": True}),
    "adamw-loop": (torch.optim.AdamW, {"lr": 1e-2, "foreach": False}),
    "sgd-momentum": (torch.optim.SGD, {"lr": 1e-2, "momentum": 0.9}),
    "adadelta": (torch.optim.Adadelta, {"lr": 1.0}),
    "adafactor": (torch.optim.Adafactor, {"lr": 1e-2}),
    "adamax": (torch.optim.Adamax, {"lr": 1e-2}),
    "asgd": (torch.optim.ASGD, {"lr": 1e-2}),
    "nadam": (torch.optim.NAdam, {"lr": 1e-2}),
    "radam": (torch.optim.RAdam, {"lr": 1e-2}),
    "rmsprop": (torch.optim.RMSprop, {"lr": 1e-2, "momentum": 0.9, "centered": True}),
    "rprop": (torch.optim.Rprop, {"lr": 1e-2}),
}
FUSED = [name for name in OPTIMIZERS if "fused" in name]
on_each_optimizer = pytest.mark.parametrize("name", OPTIMIZERS, ids=list(OPTIMIZERS))
STEPS, BAD_STEPS = 6, (0, 2, 3)
"""The first step, before there is any state, and two in a row."""


def make(name: str, parameters) -> torch.optim.Optimizer:
    kind, options = OPTIMIZERS[name]
    return kind(parameters, **options)


def gradients(model: nn.Module, step: int) -> None:
    rng = generator(100 + step)
    for parameter in model.parameters():
        parameter.grad = gaussian(tuple(parameter.shape), rng).to(parameter.dtype)


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {name: value.clone() for name, value in model.state_dict().items()}
    for index, state in enumerate(optimizer.state.values()):
        for name, value in state.items():
            if value is not None:
                found[f"{index}.{name}"] = torch.as_tensor(value).clone()
    return found


def assert_same(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> None:
    assert found.keys() == expected.keys()
    assert [name for name in found if not torch.equal(found[name], expected[name])] == []


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@on_each_optimizer
def test_a_run_with_bad_steps_is_the_run_without_them(name, value):
    runs = {}
    for bad_steps in ((), BAD_STEPS):
        model = f8sub.convert_to_float8(seed_weights(Stack(32, 48, 32)))
        optimizer = make(name, model.parameters())
        guard = f8sub.skip_step_if_nonfinite(optimizer)
        for step in range(STEPS):
            if step in BAD_STEPS and not bad_steps:
                continue
            gradients(model, step)
            if step in bad_steps:
                model.layers[1].weight.grad[3, 5] = value
                before = snapshot(model, optimizer)
            optimizer.step()
            if step in bad_steps:
                assert_same(snapshot(model, optimizer), before)
                assert not model.layers[1].weight.grad.isfinite().all()
            f8sub.precompute_scales(model)
        assert int(guard.skipped) == len(bad_steps)
        assert not hasattr(optimizer, "found_inf")
        runs[bool(bad_steps)] = snapshot(model, optimizer)
    assert_same(runs[True], runs[False])


@pytest.mark.parametrize("name", FUSED)
def test_the_host_does_not_wait_after_the_first_step(name, monkeypatch):
    model = f8sub.convert_to_float8(seed_weights(Stack(32, 48)))
    optimizer = make(name, model.parameters())
    guard = f8sub.skip_step_if_nonfinite(optimizer)
    gradients(model, 0)
    optimizer.step()

    def refuse(*args):
        raise AssertionError("the host waits for the device")

    for step in (1, 2):
        gradients(model, step)
        model.layers[0].weight.grad[0, 0] *= torch.nan if step == 1 else 1
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
        for step in range(4):
            gradients(model, step % 3)
            if step == 3:
                if not bad:
                    break
                model.layers[0].weight.grad[0, 0] = torch.inf
            optimizer.step()
        assert int(guard.skipped) == int(bad)
        runs.append(snapshot(model, optimizer))
    assert_same(*runs)


@pytest.mark.parametrize("fused", [True, False], ids=["fused", "foreach"])
def test_under_a_grad_scaler(fused):
    """What the scaler leaves on the optimizer is the scaler's to take off, and both see the same steps."""
    model = f8sub.convert_to_float8(seed_weights(Stack(32, 48)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=fused)
    guard = f8sub.skip_step_if_nonfinite(optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for step in range(4):
        scaler.scale(model(gaussian((8, 32), generator(step))).square().mean()).backward()
        if step == 2:
            before = snapshot(model, optimizer)
            model.layers[0].weight.grad[0, 0] = torch.nan
        scaler.step(optimizer)
        scaler.update()
        if step == 2:
            assert_same(snapshot(model, optimizer), before)
        optimizer.zero_grad()
    assert scaler.get_scale() == 1.0
    assert int(guard.skipped) == int(fused)  # else the scaler itself does not call step


def test_a_compiled_step_of_a_fused_optimizer():
    torch._dynamo.reset()
    model = f8sub.convert_to_float8(seed_weights(Stack(32, 48)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    guard = f8sub.skip_step_if_nonfinite(optimizer)
    step = torch.compile(optimizer.step, backend="aot_eager")
    for index in range(4):
        gradients(model, index)
        before = snapshot(model, optimizer)
        if index == 2:
            model.layers[0].weight.grad[0, 0] = torch.nan
        step()
        if index == 2:
            assert_same(snapshot(model, optimizer), before)
        else:
            assert not torch.equal(model.layers[0].weight, before["layers.0.weight"])
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
    assert_same(snapshot(model, optimizer), before)
    assert int(guard.skipped) == 1


def test_a_closure_is_refused():
    model = seed_weights(Stack(32, 48))
    optimizer = torch.optim.LBFGS(model.parameters())
    guard = f8sub.skip_step_if_nonfinite(optimizer)
    for arguments in ({"closure": lambda: 0.0}, (lambda: 0.0,)):
        with pytest.raises(f8sub.Float8ConfigError, match=r"guard\.remove\(\)"):
            optimizer.step(*arguments) if isinstance(arguments, tuple) else optimizer.step(**arguments)
    guard.remove()
    optimizer.step(lambda: model(torch.ones(2, 32)).sum())


@pytest.mark.parametrize("name", ["adamw-fused", "adamw-foreach"])
def test_a_step_that_raised_leaves_nothing_behind(name):
    model = seed_weights(Stack(32, 48))
    optimizer = make(name, model.parameters())
    guard = f8sub.skip_step_if_nonfinite(optimizer)
    gradients(model, 0)
    optimizer.step()
    model.layers[0].weight.grad[0, 0] = torch.nan
    raising = optimizer.register_step_pre_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        optimizer.step()
    raising.remove()
    gradients(model, 1)
    before = model.layers[0].weight.detach().clone()
    optimizer.step()
    assert model.layers[0].weight.isfinite().all()
    assert not torch.equal(model.layers[0].weight, before)
    assert model.layers[0].weight.grad.isfinite().all()
    assert not hasattr(optimizer, "found_inf")
    assert int(guard.skipped) == 1


def test_removed_it_lets_bad_steps_through():
    model = f8sub.convert_to_float8(seed_weights(Stack(32, 48)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    f8sub.skip_step_if_nonfinite(optimizer).remove()
    gradients(model, 0)
    model.layers[0].weight.grad[0, 0] = torch.nan
    optimizer.step()
    assert model.layers[0].weight.isnan().any()


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


def trained(rank: int, world: int, name: str, recipe: str, bad_steps: tuple[int, ...]) -> list:
    """Losses and skipped steps; rank 1 alone has a bad batch in the bad steps, which the others take out."""
    model = f8sub.convert_to_float8(seed_weights(Stack(32, 48, 32)), recipe=recipe)
    model = shard(model, MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32))
    optimizer = make(name, model.parameters())
    guard = f8sub.skip_step_if_nonfinite(optimizer)
    f8sub.precompute_scales(model)
    losses, heard = [], []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(STEPS):
            if step in BAD_STEPS and not bad_steps:
                continue
            x = gaussian((16, 32), generator(10 * step + rank))
            if step in bad_steps and rank == 1:
                x[3, 4] = torch.nan
            loss = model(x).float().square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            f8sub.precompute_scales(model)
            if step not in bad_steps:
                losses.append(loss.item())
    heard = [str(w.message) for w in caught if issubclass(w.category, f8sub.Float8Warning)]
    return [losses, int(guard.skipped), heard]


@pytest.mark.parametrize("name", ["adamw-fused", "adamw-foreach", "sgd-momentum"])
def test_one_rank_s_bad_batch_skips_the_step_of_all(ranks, name):
    skipped = ranks(3, trained, name, "tensorwise", BAD_STEPS)
    clean = ranks(3, trained, name, "tensorwise", ())
    for (losses, count, heard), (expected, none, _) in zip(skipped, clean, strict=True):
        assert losses == expected
        assert (count, none, heard) == (len(BAD_STEPS), 0, [])


@pytest.mark.parametrize("name", ["adamw-fused", "adamw-foreach"])
def test_delayed_histories_are_those_of_the_finite_amaxes_and_training_goes_on(ranks, name):
    """A bad x or dy is told, and no error; device and host decide alike, so the losses are the same bitwise."""
    for losses, count, heard in ranks(2, trained, name, "delayed", BAD_STEPS):
        assert count == len(BAD_STEPS)
        assert torch.tensor(losses).isfinite().all()
        assert heard
        assert all("NaN or infinity in" in message and "histories" in message for message in heard)


def unequal_gradients(rank: int, world: int) -> int:
    """A rank whose parameters have no gradient joins the others' decision."""
    model = seed_weights(Stack(16, 16))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    guard = f8sub.skip_step_if_nonfinite(optimizer)
    if rank == 0:
        model.layers[0].weight.grad = torch.full((16, 16), torch.nan)
    optimizer.step()
    return int(guard.skipped)


def test_a_rank_without_gradients_skips_with_the_others(ranks):
    assert ranks(3, unequal_gradients) == [1, 1, 1]
