"""fuse_step: an optimizer whose steps a kernel takes, interpreted, beside the same one that torch's kernels step."""

import contextlib
import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR

import f8sub
from f8sub.kernels.triton import adamw_launch
from f8sub.optim import fuse_step
from f8sub.weights.fused_step import total_norm
from tests.data_sets import gaussian, generator
from tests.kernels.interpreted import interpreted, launched
from tests.layers import K, N
from tests.models import seed_weights


def network() -> nn.Sequential:
    return seed_weights(nn.Sequential(nn.Linear(K, N), nn.LayerNorm(N), nn.Linear(N, K)))


def adamw(model: nn.Module, **options) -> torch.optim.AdamW:
    """With weight decay for matrices alone, as most training scripts have it."""
    matrices = [p for p in model.parameters() if p.dim() == 2]
    others = [p for p in model.parameters() if p.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, **{"lr": 1e-2, "fused": True, **options})


@torch.no_grad()
def give_gradients(model: nn.Module, seed: int) -> None:
    for number, parameter in enumerate(model.parameters()):
        drawn = torch.randn(parameter.shape, generator=generator(100 * seed + number))
        parameter.grad = torch.empty_like(parameter).copy_(drawn)


class Pair:
    """A model and a copy, the first stepped by f8sub's kernel and the other one by torch's."""

    def __init__(self, dtype: torch.dtype = torch.float32, **options) -> None:
        self.models = network().to(dtype), network().to(dtype)
        self.optimizers = tuple(adamw(model, **options) for model in self.models)
        self.fused = fuse_step(self.optimizers[0])

    def step(self, seed: int, max_norm: float | None = None) -> list[str]:
        """Both; returns the kernels that ran."""
        for model in self.models:
            give_gradients(model, seed)
        is_half = self.models[0][0].weight.dtype is not torch.float32
        with launched() as names:
            if max_norm is not None:
                norm = self.fused.clip_grad_norm_(max_norm)
                others = [p for group in self.optimizers[1].param_groups for p in group["params"]]
                right = nn.utils.clip_grad_norm_(others, max_norm)
                torch.testing.assert_close(norm, right.float(), rtol=2e-2 if is_half else 1e-6, atol=0)
            self.optimizers[0].step()
        self.optimizers[1].step()
        return names

    def check(self, tolerance: float = 2e-6) -> None:
        for mine, right in zip(*(model.parameters() for model in self.models), strict=True):
            torch.testing.assert_close(mine, right, rtol=tolerance, atol=tolerance)
        states = [optimizer.state_dict() for optimizer in self.optimizers]
        torch.testing.assert_close(states[0], states[1], rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("max_norm", [None, 1.0, 1e6], ids=["not-clipped", "clipped", "below-the-norm"])
@interpreted
def test_steps_and_states_are_torchs(max_norm):
    """With a scheduler that was made after; gradients are as they were."""
    pair = Pair()
    schedules = [LambdaLR(optimizer, lambda step: 1 / (1 + step)) for optimizer in pair.optimizers]
    for seed in range(4):
        kernels = {"step_many"} if max_norm is None else {"step_many", "squares_of_many"}
        assert set(pair.step(seed, max_norm)) == kernels
        assert pair.fused.why_torch is None
        for schedule in schedules:
            schedule.step()
        pair.check()
    give_gradients(expected := network(), 3)
    for mine, right in zip(pair.models[0].parameters(), expected.parameters(), strict=True):
        assert torch.equal(mine.grad, right.grad)


@interpreted
def test_weights_in_bfloat16():
    pair = Pair(torch.bfloat16)
    for seed in range(3):
        assert pair.step(seed)[0] == "step_many"
        # One unit of bfloat16, where a sum lies in the middle of two.
        pair.check(2.0**-7)


@interpreted
def test_either_goes_on_with_the_others_state():
    """State dicts load both ways, and so does a step by torch between two of ours."""
    pair = Pair()
    pair.step(0)
    states = [copy.deepcopy(optimizer.state_dict()) for optimizer in pair.optimizers]
    for optimizer, state in zip(pair.optimizers, reversed(states), strict=True):
        optimizer.load_state_dict(state)
    assert pair.step(1)[0] == "step_many"
    pair.check()
    pair.fused.remove()
    assert pair.step(2) == []
    pair.check(0.0 + 2e-6)
    pair.fused = fuse_step(pair.optimizers[0])
    assert pair.step(3)[0] == "step_many"
    pair.check()


@interpreted
def test_what_is_skipped_and_clipped_is_so_by_torch_too():
    """A guard that was made later is not overlooked: once torch steps, and from then on the kernel does."""
    pair = Pair()
    pair.step(0)
    for optimizer in pair.optimizers:
        f8sub.skip_step_if_nonfinite(optimizer)
    assert "step_many" not in pair.step(1, 0.5)
    assert "a hook was registered after" in pair.fused.why_torch
    pair.check()
    assert "step_many" in pair.step(2, 0.5)
    pair.check()
    before = copy.deepcopy(pair.optimizers[0].state_dict())
    for model in pair.models:
        give_gradients(model, 3)
        model[0].weight.grad[0, 0] = torch.nan
    for optimizer in pair.optimizers:
        optimizer.step()
    assert pair.fused.why_torch is None
    torch.testing.assert_close(pair.optimizers[0].state_dict(), before, rtol=0, atol=0)
    pair.check()


@interpreted
def test_what_torch_steps():
    """Whatever the kernel does not take is stepped all the same, with a reason."""
    for options, reason in (
        ({"amsgrad": True}, "amsgrad=True"),
        ({"fused": False, "foreach": True}, "without fused=True"),
    ):
        pair = Pair(**options)
        assert "step_many" not in pair.step(0, 1.0)
        assert reason in pair.fused.why_torch
        pair.check()
    pair = Pair()
    for model in pair.models:
        model[0].weight.data = model[0].weight.data.t().contiguous().t()
    assert "step_many" not in pair.step(0, 1.0)
    assert "not contiguous" in pair.fused.why_torch
    pair.check()
    pair = Pair()
    for model, optimizer in zip(pair.models, pair.optimizers, strict=True):
        optimizer.step(lambda model=model: give_gradients(model, 0))
    assert "closure" in pair.fused.why_torch
    pair.check(0.0)


def doubled(model: nn.Module) -> None:
    model[0].weight.grad.mul_(2.0)


def replaced(model: nn.Module) -> None:
    model[0].weight.grad = torch.ones_like(model[0].weight)


def clamped(model: nn.Module) -> None:
    nn.utils.clip_grad_value_(model.parameters(), 1e-3)


def clipped_again(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 1e-3)


@pytest.mark.parametrize("write", [doubled, replaced, clamped, clipped_again])
@interpreted
def test_gradients_that_are_written_after_they_were_clipped_are_an_error(write):
    """What is written is not to be clipped, and the step cannot tell it from what is."""
    pair = Pair()
    pair.step(0, 1.0)
    give_gradients(model := pair.models[0], 1)
    before = copy.deepcopy(model.state_dict())
    pair.fused.clip_grad_norm_(1.0)
    with torch.no_grad():
        write(model)
    with pytest.raises(
        RuntimeError, match=r"shape \(\d+, \d+\), and \d more, were written to or replaced between"
    ):
        pair.optimizers[0].step()
    assert all(torch.equal(after, before[name]) for name, after in model.state_dict().items())
    # It trains on, and a gradient that was dropped is no error.
    give_gradients(model, 1)
    pair.fused.clip_grad_norm_(1.0)
    model[0].weight.grad = None
    pair.optimizers[0].step()
    assert torch.equal(model[0].weight, before["0.weight"])
    assert not torch.equal(model[2].weight, before["2.weight"])


@interpreted
def test_a_weight_decay_that_is_not_decoupled_is_torchs():
    pair = Pair()
    for optimizer in pair.optimizers:
        for group in optimizer.param_groups:
            group["decoupled_weight_decay"] = False
    assert pair.step(0) == []
    assert pair.fused.why_torch == "its weight decay is part of the gradient, as Adam's"
    pair.check(0.0)


@interpreted
def test_gradients_that_a_scaler_divides_in_the_step_are_stepped_by_torch():
    pair = Pair()
    for optimizer in pair.optimizers:
        optimizer.grad_scale, optimizer.found_inf = torch.tensor(8.0), torch.tensor(0.0)
    assert pair.step(0) == []
    assert pair.fused.why_torch == "GradScaler divides gradients in the step"
    pair.check()
    for optimizer in pair.optimizers:
        optimizer.grad_scale = optimizer.found_inf = None
    assert "step_many" in pair.step(1)
    pair.check()


@interpreted
def test_a_step_that_raises_loses_no_gradient():
    pair = Pair()
    give_gradients(pair.models[0], 0)
    with contextlib.suppress(RuntimeError):
        handle = pair.optimizers[0].register_step_post_hook(
            lambda *step: (_ for _ in ()).throw(RuntimeError())
        )
        pair.optimizers[0].step()
    handle.remove()
    assert all(parameter.grad is not None for parameter in pair.models[0].parameters())


@interpreted
def test_hooks_after_a_step_see_its_gradients_and_one_that_raises_leaves_none_behind():
    """A hook of before ``fuse_step``, such as ``register_precompute_hook``'s, which raises where a weight is NaN."""
    model, seen = network(), []

    def hook(optimizer: torch.optim.Optimizer, args: tuple, kwargs: dict) -> None:
        seen.append(all(parameter.grad is not None for parameter in model.parameters()))
        if len(seen) == 2:
            raise RuntimeError("planned")

    optimizer = adamw(model)
    optimizer.register_step_post_hook(hook)
    fuse_step(optimizer)
    give_gradients(model, 0)
    optimizer.step()
    with pytest.raises(RuntimeError, match="planned"):
        optimizer.step()
    assert seen == [True, True]
    optimizer.zero_grad()
    first, last = model[0].weight, model[2].weight
    before = first.detach().clone(), last.detach().clone()
    last.grad = gaussian(tuple(last.shape), generator(3))
    optimizer.step()
    assert torch.equal(first, before[0])
    assert not torch.equal(last, before[1])


def test_on_a_cpu_torch_steps_and_clips():
    pair = Pair()
    for seed in range(2):
        assert pair.step(seed, 1.0) == []
        assert "where f8sub has no kernels" in pair.fused.why_torch
        pair.check(0.0)


@interpreted
def test_masters_are_stepped_and_rounded():
    models = [network().bfloat16() for _ in range(2)]
    optimizers = [f8sub.optim.MasterWeights(adamw(model)) for model in models]
    fused = fuse_step(optimizers[0])
    for seed in range(3):
        for model in models:
            give_gradients(model, seed)
        norms = fused.clip_grad_norm_(1e6), nn.utils.clip_grad_norm_(models[1].parameters(), 1e6).float()
        torch.testing.assert_close(*norms, rtol=2e-2, atol=0)
        with launched() as names:
            optimizers[0].step()
        optimizers[1].step()
        assert names[0] == "step_many"
    for mine, right in zip(*(optimizer.optimizer.param_groups for optimizer in optimizers), strict=True):
        for one, other in zip(mine["params"], right["params"], strict=True):
            torch.testing.assert_close(one, other, rtol=2e-6, atol=2e-6)


def test_what_it_does_not_take():
    model = network()
    with pytest.raises(f8sub.Float8ConfigError, match=r"takes torch\.optim\.AdamW"):
        fuse_step(torch.optim.SGD(model.parameters(), lr=0.1))
    optimizer = adamw(model)
    fused = fuse_step(optimizer)
    with pytest.raises(f8sub.Float8ConfigError, match="fuse_step was called for this AdamW before"):
        fuse_step(optimizer)
    fused.remove()
    fuse_step(optimizer).remove()


@interpreted
def test_the_norm():
    """Of every dtype, in one read; of other norms, and where an error is asked for, it is torch's."""
    drawn = [
        torch.randn(size, generator=generator(n))
        for n, size in enumerate([(65, 300), (7,), (64, 512), (3, 0)])
    ]
    gradients = [each.to(dtype) for each in drawn for dtype in (torch.float32, torch.bfloat16, torch.float16)]
    gradients.append(drawn[0].t())
    with launched() as names:
        found = total_norm(gradients)
    assert set(names) == {"squares_of_many"}
    right = sum(gradient.double().square().sum() for gradient in gradients).sqrt()
    assert found.dtype is torch.float32
    assert abs(found.double() - right) <= 2.0**-22 * right
    with launched() as names:
        assert total_norm(drawn[:3], 1.0) == nn.utils.get_total_norm(drawn[:3], 1.0)
        with pytest.raises(RuntimeError, match="non-finite"):
            total_norm([torch.tensor([torch.nan])], error_if_nonfinite=True)
    assert names == []
    for bad in (torch.nan, torch.inf):
        assert not total_norm([*drawn[:3], torch.tensor([bad])]).isfinite()


@pytest.mark.parametrize(
    ("looks", "said"),
    [
        ({"is_cuda": True, "dtype": torch.float64}, "a parameter is in torch.float64"),
        ({"is_cuda": True, "dtype": torch.float32}, "a parameter is a SimpleNamespace"),
        (
            {"is_cuda": False, "dtype": torch.float32, "device": "cpu"},
            "a parameter is on cpu, where f8sub has no kernels",
        ),
    ],
)
def test_the_reason_is_the_one_that_holds(looks, said):
    assert adamw_launch.why_not_of([SimpleNamespace(**looks)]) == said
