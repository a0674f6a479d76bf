"""Delayed scaling of experts: each is a Float8Linear of the same recipe on its own tokens, step by step, bitwise."""

import copy

import pytest
import torch
from torch import nn

import f8sub
from f8sub.kernels.grouped.operands import Groups
from f8sub.kernels.quantize import quantize
from f8sub.kernels.scales import GivenScale, PriorScale
from tests.data_sets import gaussian, generator
from tests.experts.models import OwnExperts
from tests.models import refusal

WIDTH, HIDDEN, TAIL = 32, 48, 3
COUNTS = [[5, 0, 20, 1], [7, 3, 0, 0], [0, 0, 0, 0], [1, 30, 2, 0], [5, 0, 20, 1]]
"""Tokens of each expert in each step: the same data grows, so that scales of the past saturate some of it."""

RECIPES = {
    "default": f8sub.get_recipe("delayed"),
    "short history": f8sub.get_recipe("delayed", amax_history_len=2, dy_margin=0),
    "most recent, every second step": f8sub.get_recipe(
        "delayed", amax_history_len=4, amax_compute_algo="most_recent", interval=2
    ),
    "e4m3, one product in high precision": f8sub.get_recipe(
        "delayed", fp8_format="E4M3", override_linear_precision=(False, False, True)
    ),
}


class OneExpert(nn.Module):
    """What each expert must be: gate, up and down as linear layers."""

    def __init__(self, experts: OwnExperts, index: int) -> None:
        super().__init__()
        for name in ("gate", "up", "down"):
            weight = getattr(experts, name)[index].detach().clone()
            layer = nn.Linear(weight.shape[1], weight.shape[0], bias=False, dtype=weight.dtype)
            layer.weight = nn.Parameter(weight)
            setattr(self, name, layer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(nn.functional.silu(self.gate(x)) * self.up(x))


def converted(module: nn.Module, recipe: f8sub.Recipe) -> nn.Module:
    f8sub.register_experts(OwnExperts)
    return f8sub.convert_to_float8(module, recipe, experts=True, skip_defaults=False, backend="reference")


def batch(step: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    rng, rows = generator(step), sum(COUNTS[step]) + TAIL
    x = gaussian((rows, WIDTH), rng) * gaussian((rows, 1), rng).exp() * 2.0**step
    x[rows - TAIL :] = torch.nan
    return x.to(dtype), gaussian((rows, WIDTH), rng).to(dtype), torch.tensor(COUNTS[step]).cumsum(0)


def optimizer_of(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=1e-2)


def steps(recipe: f8sub.Recipe, dtype: torch.dtype, microbatches: int = 1) -> None:
    plain = OwnExperts(len(COUNTS[0]), WIDTH, HIDDEN).to(dtype)
    oracles = [converted(OneExpert(plain, index), recipe) for index in range(len(COUNTS[0]))]
    model = converted(copy.deepcopy(plain), recipe)
    optimizers = [optimizer_of(module) for module in (model, *oracles)]
    for step in range(len(COUNTS)):
        for micro in range(microbatches):
            x, dy, ends = batch((step + micro) % len(COUNTS), dtype)
            given = x.clone().requires_grad_()
            y = model(given, ends)
            y.backward(dy)
            start = 0
            for index, end in enumerate(ends.tolist()):
                part = x[start:end].clone().requires_grad_()
                expected = oracles[index](part)
                expected.backward(dy[start:end])
                assert torch.equal(y[start:end], expected), (step, index, "y")
                assert torch.equal(given.grad[start:end], part.grad), (step, index, "dx")
                start = end
            assert not y[start:].any()
            assert not given.grad[start:].any()
        for name in ("gate", "up", "down"):
            for index, oracle in enumerate(oracles):
                expected = getattr(oracle, name).weight.grad
                assert torch.equal(getattr(model, name).grad[index], expected), (step, index, name)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        for module in (model, *oracles):
            f8sub.precompute_scales(module)
    for name in ("gate", "up", "down"):
        (state,) = model.get_submodule(f"{name}_scaling_states")
        for index, oracle in enumerate(oracles):
            (expected,) = getattr(oracle, name).scaling_states
            assert torch.equal(state.scale[index], expected.scale)
            for ours, theirs in zip(state.histories, expected.histories, strict=True):
                assert torch.equal(ours[:, index], theirs)
    assert not torch.equal(state.history_x[:, 0], state.history_x[:, 1])


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=list(RECIPES))
def test_each_expert_is_a_float8_linear_with_a_past_of_its_own(recipe):
    steps(recipe, torch.bfloat16)


def test_microbatches_and_float32():
    steps(RECIPES["default"], torch.float32, microbatches=2)


def test_an_expert_without_tokens_keeps_its_scales_but_its_weights():
    recipe = f8sub.get_recipe("delayed", amax_compute_algo="most_recent")
    model = converted(OwnExperts(4, WIDTH, HIDDEN), recipe)
    optimizer, found = optimizer_of(model), []
    for step in (0, 1):
        x, dy, ends = batch(step, torch.float32)
        model(x, ends).backward(dy)
        optimizer.step()
        found.append(model.gate_scaling_states[0].scale.clone())
    before, after = found
    unseen, seen_now = [2, 3], 1
    assert torch.equal(after[unseen][:, [0, 2]], before[unseen][:, [0, 2]])
    assert (after[unseen, 1] != before[unseen, 1]).all()
    assert not before[seen_now, [0, 2]].any()
    assert after[seen_now, [0, 2]].all()


def test_casts_with_a_past_read_nothing_back_and_may_begin_at_multiples():
    """On the meta device reading a value raises. GPUs want groups from multiples on, zeros between."""
    format = RECIPES["default"].fprop.a
    for device in ("meta", "cpu"):
        x, ends = (
            each.to(device) for each in (batch(0, torch.float32)[0], torch.tensor([5, 5, 25, 26]).int())
        )
        prior = PriorScale(torch.tensor([[0.0], [2.0], [3.0], [0.0]], device=device), 1.0, covers=False)
        groups = Groups.of(ends, len(x))
        plain, spread = (
            quantize(x, format, format, GivenScale(prior), groups=groups, multiple=m) for m in (1, 16)
        )
    for index, (a, b) in enumerate(
        zip(plain.columnwise.groups.host_bounds, spread.columnwise.groups.host_bounds, strict=True)
    ):
        assert b[0] % 16 == 0
        one, other = plain.columnwise.of_group(index, *a), spread.columnwise.of_group(index, *b)
        assert torch.equal(one.data.float(), other.data.float())
        assert torch.equal(one.scale_inv, other.scale_inv)
    used = torch.zeros(spread.columnwise.groups.rows, dtype=torch.bool)
    for first, end in spread.columnwise.groups.host_bounds:
        used[first:end] = True
    assert not spread.columnwise.data[:, ~used].float().any()


class Copied(OwnExperts):
    """Gives a copy of its weight, which has no past."""

    def forward(self, x: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
        return f8sub.grouped_linear(x, self.gate * 1, ends)


def test_a_weight_that_has_no_past_is_refused():
    model, (x, _, ends) = converted(Copied(4, WIDTH, HIDDEN), RECIPES["default"]), batch(0, torch.float32)
    for call in ((model, x, ends), (f8sub.grouped_linear, x, model.gate, ends, "delayed")):
        assert "no parameter of a converted module" in refusal(f8sub.Float8ConfigError, *call)


def test_nan_in_one_experts_tokens_names_it_and_leaves_the_others_alone():
    model, (x, dy, ends) = (
        converted(OwnExperts(4, WIDTH, HIDDEN), RECIPES["default"]),
        batch(0, torch.float32),
    )
    optimizer = torch.optim.SGD([model.gate], lr=0.0)
    x[7, 3] = torch.inf
    model(x, ends).backward(dy)
    optimizer.step()
    message = refusal(f8sub.Float8NumericsError, lambda: [f8sub.precompute_scales(model) for _ in range(2)])
    assert "x of (root).gate[2]" in message
    assert not any(f"x of (root).gate[{index}]" in message for index in (0, 1, 3))
    assert (model.gate_scaling_states[0].scale[:, 0] > 0).tolist() == [True, False, False, True]


def test_state_dicts_copies_and_the_way_back():
    model = converted(OwnExperts(4, WIDTH, HIDDEN), RECIPES["default"])
    optimizer = optimizer_of(model)
    for step in range(2):
        x, dy, ends = batch(step, torch.float32)
        model(x, ends).backward(dy)
        optimizer.step()
    x, _, ends = batch(3, torch.float32)
    expected = model(x, ends)
    assert torch.equal(copy.deepcopy(model)(x, ends), expected)
    loaded = converted(OwnExperts(4, WIDTH, HIDDEN), RECIPES["default"])
    loaded.load_state_dict(model.state_dict())
    assert torch.equal(loaded(x, ends), expected)
    without = {name: value for name, value in model.state_dict().items() if "scaling" not in name}
    loaded.load_state_dict(without, strict=False)
    assert not any(buffer.any() for buffer in loaded.buffers())
    assert set(f8sub.convert_from_float8(model).state_dict()) == {"gate", "up", "down"}
