"""MasterWeights: float32 masters of bf16 and float8 weights, over any optimizer, for all that reads optimizers."""

import copy
import pickle
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.optim.lr_scheduler import LambdaLR

import f8sub
from tests.layers import K, N, dy_of, x_of
from tests.models import equal, seed_weights

OPTIMIZERS = {
    "adamw-foreach": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=True),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, fused=True),
    "adamw-loop": lambda p: torch.optim.AdamW(p, lr=1e-2, foreach=False),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2),
}
WEIGHTS = ["bf16", "float8 of bf16", "float8 of fp32"]
on_each_optimizer = pytest.mark.parametrize("make", OPTIMIZERS.values(), ids=list(OPTIMIZERS))
on_each_kind = pytest.mark.parametrize("kind", WEIGHTS, ids=[name.replace(" ", "-") for name in WEIGHTS])


def network() -> nn.Sequential:
    return seed_weights(nn.Sequential(nn.Linear(K, N), nn.LayerNorm(N), nn.Linear(N, K)))


def made(kind: str) -> nn.Sequential:
    model = network() if kind.endswith("fp32") else network().bfloat16()
    return model if kind == "bf16" else f8sub.convert_to_float8(model, primary_weights=True)


def adamw(model: nn.Module, **options) -> f8sub.optim.MasterWeights:
    return f8sub.optim.MasterWeights(torch.optim.AdamW(model.parameters(), **{"lr": 1e-2, **options}))


def backward(model: nn.Module, seed: int) -> torch.Tensor:
    y = model(x_of(8, K, dtype=next(model.parameters()).dtype, seed=seed))
    y.backward(dy_of(y, seed))
    return y.detach()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, seeds: range) -> list[torch.Tensor]:
    outputs = []
    for seed in seeds:
        outputs.append(backward(model, seed))
        optimizer.step()
        optimizer.zero_grad()
    return outputs


class ByHand:
    """Float32 copies stepped by the optimizer itself, and copied back into the model's weights."""

    def __init__(self, model: nn.Module, make) -> None:
        self.weights = list(model.parameters())
        self.masters = [nn.Parameter(weight.detach().float()) for weight in self.weights]
        self.optimizer = make(self.masters)

    @torch.no_grad()
    def step(self) -> None:
        for weight, master in zip(self.weights, self.masters, strict=True):
            master.grad = weight.grad.float()
        self.optimizer.step()
        for weight, master in zip(self.weights, self.masters, strict=True):
            weight.copy_(master)

    def zero_grad(self) -> None:
        for weight in self.weights:
            weight.grad = None


def masters_of(optimizer: f8sub.optim.MasterWeights) -> list[torch.Tensor]:
    return [p for group in optimizer.optimizer.param_groups for p in group["params"]]


@on_each_optimizer
@on_each_kind
def test_it_steps_float32_copies_and_rounds_them(make, kind):
    """Against copies made and rounded by hand, of a model whose float8 weights are cast anew at every forward."""
    model = made(kind)
    other = network() if kind.endswith("fp32") else network().bfloat16()
    if kind != "bf16":
        f8sub.convert_to_float8(other)
    optimizer, by_hand = f8sub.optim.MasterWeights(make(model.parameters())), ByHand(other, make)
    expected = train(other, by_hand, range(5))
    assert equal(train(model, optimizer, range(5)), expected)
    assert equal(masters_of(optimizer), by_hand.masters)
    assert equal(list(model.parameters()), by_hand.weights)


def test_float32_and_frozen_weights_have_no_master():
    model = network()
    optimizer = adamw(model)
    assert all(a is b for a, b in zip(masters_of(optimizer), model.parameters(), strict=True))
    assert "master" not in str(optimizer.state_dict())
    frozen = network().bfloat16()
    frozen[0].requires_grad_(False)
    optimizer = adamw(frozen)
    assert [m.dtype for m in masters_of(optimizer)] == [torch.bfloat16] * 2 + [torch.float32] * 4
    train(frozen, optimizer, range(2))
    assert torch.equal(frozen[0].weight, network()[0].weight.bfloat16())


@on_each_kind
def test_schedulers_scalers_and_clipping(kind):
    """Gradients are clipped and unscaled where the model has them."""
    model, other = made(kind), made(kind)
    optimizer, expected = adamw(model), adamw(other, lr=1e-2 * 0.25)
    scheduler = LambdaLR(optimizer, lambda step: 0.25)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for seed in range(2):
        y = model(x_of(8, K, dtype=model[0].weight.dtype, seed=seed))
        scaler.scale((y * dy_of(y)).sum()).backward()
        scaler.unscale_(optimizer)
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        y = other(x_of(8, K, dtype=model[0].weight.dtype, seed=seed))
        (y * dy_of(y)).sum().backward()
        assert torch.equal(norm, nn.utils.clip_grad_norm_(other.parameters(), 0.1))
        expected.step()
        expected.zero_grad()
    assert equal(masters_of(optimizer), masters_of(expected))
    assert optimizer.param_groups[0]["lr"] == optimizer.optimizer.param_groups[0]["lr"] == 1e-2 * 0.25


@pytest.mark.parametrize("by_name", [False, True], ids=["by-number", "by-name"])
@pytest.mark.parametrize("model_first", [True, False], ids=["model-first", "optimizer-first"])
@on_each_kind
def test_resumed_training_is_bitwise_the_same(kind, model_first, by_name):
    """By torch.distributed.checkpoint's names, too: states are named after the model's parameters."""
    model = made(kind)
    optimizer = adamw(model)
    train(model, optimizer, range(3))
    states = get_optimizer_state_dict(model, optimizer) if by_name else optimizer.state_dict()
    weights, states = copy.deepcopy((model.state_dict(), states))
    if by_name:
        assert states["state"].keys() == dict(model.named_parameters()).keys()
        for name, weight in model.named_parameters():
            entries = states["state"][name]
            assert entries["exp_avg"].dtype == torch.float32
            assert torch.equal(entries.get("master", weight).to(weight.dtype), weight)
    expected = train(model, optimizer, range(3, 6))
    resumed = made(kind)
    with torch.no_grad():
        resumed[0].weight.mul_(3.0)
    other = adamw(resumed)
    if model_first:
        resumed.load_state_dict(weights)
    if by_name:
        set_optimizer_state_dict(resumed, other, states)
    else:
        other.load_state_dict(states)
    if not model_first:
        resumed.load_state_dict(weights)
    assert equal(train(resumed, other, range(3, 6)), expected)
    assert equal(masters_of(other), masters_of(optimizer))


def test_a_checkpoint_of_float32_weights_becomes_the_masters():
    model = network()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, optimizer, range(2))
    primary = made("float8 of fp32")
    other = adamw(primary)
    primary.load_state_dict(model.state_dict())
    other.load_state_dict(optimizer.state_dict())
    assert equal(masters_of(other), list(model.parameters()))
    states = other.state_dict()["state"]
    for i, state in optimizer.state_dict()["state"].items():
        assert torch.equal(states[i]["exp_avg"], state["exp_avg"])


def test_what_is_written_to_a_bf16_weight_is_its_masters_next_value():
    model = made("bf16")
    optimizer = adamw(model, lr=0.0)
    train(model, optimizer, range(1))
    with torch.no_grad():
        masters_of(optimizer)[0].mul_(1 + 2**-12)  # a digit that bf16 does not have
        model[0].weight[3] = 2.0
    before = masters_of(optimizer)[0].clone()
    train(model, optimizer, range(1))
    master = masters_of(optimizer)[0]
    assert torch.equal(master[3], torch.full((K,), 2.0))
    assert torch.equal(master[:3], before[:3])


def test_an_optimizer_that_stepped_before_keeps_its_states():
    model = made("bf16")
    inner = torch.optim.AdamW(model.parameters(), lr=1e-2)
    train(model, inner, range(2))
    optimizer = f8sub.optim.MasterWeights(inner)
    assert all(inner.state[master]["step"] == 2 for master in masters_of(optimizer))


@on_each_kind
def test_parameters_added_later_have_masters_too(kind):
    model = made(kind)
    optimizer = f8sub.optim.MasterWeights(torch.optim.AdamW(model[0].parameters(), lr=1e-2))
    optimizer.add_param_group({"params": list(model[2].parameters()), "lr": 5e-3})
    assert [group["lr"] for group in optimizer.optimizer.param_groups] == [1e-2, 5e-3]
    before = [master.clone() for master in masters_of(optimizer)]
    train(model, optimizer, range(1))
    assert all(m.dtype == torch.float32 for m in before)
    assert not any(torch.equal(a, b) for a, b in zip(masters_of(optimizer), before, strict=True))


def frozen_until_now(kind: str, *, frozen_first: bool) -> tuple[nn.Module, f8sub.optim.MasterWeights]:
    """A model whose first layer was frozen for two steps: before its masters were made, or after."""
    model = made(kind)
    model[0].requires_grad_(not frozen_first)
    optimizer = adamw(model)
    model[0].requires_grad_(False)
    train(model, optimizer, range(2))
    return model, optimizer


@on_each_kind
def test_a_weight_gets_its_master_when_it_is_unfrozen(kind):
    """As one that had its master all along, and in a group that is added too."""
    found = []
    for frozen_first in (True, False):
        model, optimizer = frozen_until_now(kind, frozen_first=frozen_first)
        model[0].requires_grad_(True)
        found.append((train(model, optimizer, range(2, 5)), masters_of(optimizer), list(model.parameters())))
    for late, early in zip(*found, strict=True):
        assert equal(late, early)
    assert all(master.dtype == torch.float32 for master in found[0][1])
    model = made(kind)
    model[2].requires_grad_(False)
    optimizer = f8sub.optim.MasterWeights(torch.optim.AdamW(model[0].parameters(), lr=1e-2))
    optimizer.add_param_group({"params": list(model[2].parameters())})
    model[2].requires_grad_(True)
    train(model, optimizer, range(1))
    assert [m.dtype for m in masters_of(optimizer)] == [torch.float32] * 4


@on_each_kind
def test_a_saved_master_is_loaded_though_its_weight_is_frozen(kind):
    model, optimizer = frozen_until_now(kind, frozen_first=True)
    model[0].requires_grad_(True)
    train(model, optimizer, range(2, 4))
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    expected = train(model, optimizer, range(4, 6))
    resumed, other = frozen_until_now(kind, frozen_first=True)
    resumed.load_state_dict(saved[0])
    other.load_state_dict(saved[1])
    resumed[0].requires_grad_(True)
    assert equal(train(resumed, other, range(4, 6)), expected)
    assert equal(masters_of(other), masters_of(optimizer))


def test_a_primary_weight_that_something_holds_on_to_says_so_when_it_is_unfrozen():
    """It would become another tensor. Once it can, the step works."""
    model, optimizer = frozen_until_now("float8 of bf16", frozen_first=True)
    model[0].requires_grad_(True)
    backward(model, 0)
    held = weakref.ref(model[0].weight)
    with pytest.raises(f8sub.Float8ConfigError, match=r"^0: its weight cannot become float8"):
        optimizer.step()
    del held
    optimizer.step()
    assert [master.dtype for master in masters_of(optimizer)] == [torch.float32] * 6


@on_each_kind
def test_closures_see_the_weights_of_their_step(kind):
    """LBFGS evaluates its closure at several points of one step."""
    model = made(kind)
    lbfgs = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=6, tolerance_change=0)
    optimizer = f8sub.optim.MasterWeights(lbfgs)
    losses = []

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = model(x_of(8, K, dtype=model[0].weight.dtype)).float().square().mean()
        loss.backward()
        losses.append(loss.item())
        return loss

    assert optimizer.step(closure).item() == losses[0]
    assert len(losses) > 2
    assert losses[-1] < losses[0]


def test_hooks_and_profilers_see_one_optimizer():
    model = made("float8 of bf16")
    optimizer = adamw(model)
    seen = []
    optimizer.register_step_post_hook(lambda stepped, *_: seen.append(stepped))
    handle = f8sub.register_precompute_hook(optimizer, model)
    train(model, optimizer, range(2))
    handle.remove()
    assert seen == [optimizer, optimizer]
    assert "MasterWeights" in repr(optimizer)


def test_masters_are_sets_of_their_own():
    """Two optimizers of one model, one after the other: the second takes over the masters."""
    model = made("float8 of bf16")
    first = adamw(model)
    train(model, first, range(2))
    second = adamw(model)
    assert torch.equal(masters_of(second)[0], masters_of(first)[0])
    before = masters_of(second)[0].clone()
    train(model, second, range(1))
    assert not torch.equal(masters_of(second)[0], before)


@pytest.mark.parametrize("name", ["AdamW8bit", "AdamWFp8"], ids=["8bit", "fp8"])
@on_each_kind
def test_torchao_low_bit_optimizers(kind, name, monkeypatch):
    low_bit = pytest.importorskip("torchao.optim")
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    model = made(kind)
    optimizer = f8sub.optim.MasterWeights(getattr(low_bit, name)(model.parameters(), lr=1e-2))
    outputs = train(model, optimizer, range(3))
    assert all(output.isfinite().all() for output in outputs)
    saved = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    assert not torch.equal(masters_of(optimizer)[0], network()[0].weight)
    expected = train(model, optimizer, range(3, 4))
    model.load_state_dict(saved[0])
    optimizer.load_state_dict(saved[1])
    assert torch.equal(train(model, optimizer, range(3, 4))[0], expected[0])


def test_what_it_does_not_wrap():
    model = made("float8 of bf16")
    for given in (adamw(model), model.parameters()):
        with pytest.raises(f8sub.Float8ConfigError, match=rf"wraps an optimizer.*got {type(given).__name__}"):
            f8sub.optim.MasterWeights(given)


@on_each_kind
@pytest.mark.parametrize("copied", [copy.deepcopy, pickle.dumps])
def test_a_copy_is_refused(kind, copied):
    """It would have neither the wrapped optimizer nor weights whose masters it steps."""
    optimizer = adamw(made(kind))
    with pytest.raises(f8sub.Float8ConfigError, match="cannot be copied or pickled"):
        copied(optimizer)


class Averaging(torch.optim.SGD):
    """As schedule-free optimizers do, evaluates at the average of the weights that it trains."""

    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            group["steps"] = group.get("steps", 0) + 1
            for p in group["params"]:
                state = self.state[p]
                average = state.setdefault("average", torch.zeros_like(p))
                average.lerp_(p, 1 / group["steps"])
        return loss

    def _exchange(self, training: bool) -> None:
        for group in self.param_groups:
            for p in group["params"] if group.get("training", True) is not training else ():
                other = self.state[p]["average"].clone()
                self.state[p]["average"].copy_(p)
                p.data.copy_(other)
            group["training"] = training

    def train(self) -> None:
        self._exchange(True)

    def eval(self) -> None:
        self._exchange(False)


@on_each_kind
def test_an_optimizer_that_exchanges_weights_exchanges_masters(kind):
    model, by_hand = made(kind), network() if kind.endswith("fp32") else network().bfloat16().float()
    optimizer = f8sub.optim.MasterWeights(Averaging(model.parameters(), lr=0.5))
    expected = Averaging(by_hand.parameters(), lr=0.5)
    optimizer.train()
    for seed in range(3):
        backward(model, seed)
        for p, mine in zip(by_hand.parameters(), model.parameters(), strict=True):
            p.grad = mine.grad.float()
        optimizer.step(), optimizer.zero_grad(), expected.step()
    trained = backward(model, 9)
    for exchange in ("eval", "train"):
        with torch.no_grad():
            getattr(optimizer, exchange)(), getattr(expected, exchange)()
        masters = {id(weight): state.get("master", weight) for weight, state in optimizer.state.items()}
        for weight, p in zip(model.parameters(), by_hand.parameters(), strict=True):
            assert torch.equal(masters[id(weight)].float(), p)
        assert torch.equal(backward(model, 9), trained) is (exchange == "train")
    assert optimizer.param_groups[0]["training"] is True


def test_other_optimizers_have_no_modes():
    """Trainers call ``train`` and ``eval`` wherever they find them."""
    optimizer = adamw(made("bf16"))
    assert not any(hasattr(optimizer, name) for name in ("train", "eval", "swap"))
