"""Delayed scaling of one layer: histories and scales against a simulation, and each trap of TransformerEngine's."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import f8sub
from f8sub.delayed import state
from f8sub.delayed.state import OPERANDS
from f8sub.kernels import reference
from f8sub.kernels.gemm import select
from f8sub.linear import float8_linear
from f8sub.weights.master_weight import rowwise_of
from tests import oracle
from tests.data_sets import gaussian, generator
from tests.delayed.layers import (
    FORMAT,
    K,
    M,
    N,
    assert_same,
    data,
    history_of,
    layer_of,
    on_each_bad_value,
    optimizer_of,
    run,
    siblings,
    snapshot,
    state_of,
    step,
)
from tests.delayed.simulation import FP8_MAX, Simulation
from tests.models import Stack, seed_weights

ALGORITHMS = {
    "max": ("max", "max"),
    "most_recent": ("most_recent", "most_recent"),
    "callable": (
        lambda history: 4 * history[[0, -1]].amax(0),
        lambda history: 4 * max(history[0], history[-1]),
    ),
}
SIZES = [1.0, 8.0, 0.25, 0.01, 3.0, 0.5, 0.5, 16.0, 2.0]


@pytest.mark.parametrize("interval", [1, 3], ids=["every-step", "interval3"])
@pytest.mark.parametrize(
    ("margin", "dy_margin", "margin_of_dy"),
    [(0, 0, 0), (0, None, 4), (2, None, 4), (5, None, 5), (0, 1, 1), (2, 0, 2)],
)
@pytest.mark.parametrize("algorithm", ["max", "most_recent", "callable"])
@pytest.mark.parametrize("length", [1, 3, 31])
def test_histories_and_scales(length, algorithm, margin, dy_margin, margin_of_dy, interval):
    """The simulation's, of two microbatches a step; the weight's amax is that of the weight that is cast next."""
    chosen, simulated = ALGORITHMS[algorithm]
    options = {"amax_history_len": length, "amax_compute_algo": chosen, "interval": interval}
    layer = layer_of(margin=margin, dy_margin=dy_margin, **options)
    margins = {"x": margin, "w": margin, "dy": margin_of_dy}
    largest = {name: FP8_MAX[FORMAT[name]] for name in OPERANDS}
    tensors = {n: Simulation(length, largest[n], simulated, margins[n], interval) for n in OPERANDS}
    optimizer, state = optimizer_of(layer), state_of(layer)
    for number, size in enumerate(SIZES):
        for microbatch in range(2):
            x, dy = data(10 * number + microbatch, size)
            run(layer, x, dy)
            tensors["x"].stage(x.abs().max().item())
            tensors["dy"].stage(dy.abs().max().item())
        staged = [tensors["x"].history[0], 0.0, tensors["dy"].history[0]]
        assert history_of(layer)[0].tolist() == staged
        optimizer.step()
        optimizer.zero_grad()
        tensors["w"].stage(layer.weight.detach().abs().max().item())
        f8sub.precompute_scales(layer)
        for column, name in enumerate(OPERANDS):
            tensors[name].update()
            assert history_of(layer)[:, column].tolist() == tensors[name].history, (name, number)
            assert state.scale[column].item() == tensors[name].scale, (name, number)


@pytest.mark.parametrize(
    ("margin", "dy_margin", "margin_of_dy"), [(0, None, 4), (0, 0, 0), (5, None, 5), (0.3, 4.3, 4.3)]
)
def test_a_first_step_multiplies_what_quantize_shows(margin, dy_margin, margin_of_dy, monkeypatch):
    """Both usages of x, w and dy: the layer's, and the public function's, are the oracle's to the bit."""
    layer, (x, dy), multiplied = layer_of(margin=margin, dy_margin=dy_margin), data(1), []

    def seen(backend, a, b, *how):
        multiplied.append((a, b))
        return select.gemm_nt(backend, a, b, *how)

    monkeypatch.setattr(float8_linear, "gemm_nt", seen)
    run(layer, x, dy)
    (x_row, w_row), (dy_row, w_col), (dy_col, x_col) = multiplied
    cases = {
        "x": (x.detach(), margin, (x_row, x_col)),
        "w": (layer.weight.plain, margin, (w_row, w_col)),
        "dy": (dy, margin_of_dy, (dy_row, dy_col)),
    }
    for name, (matrix, headroom, used) in cases.items():
        spec = oracle.Spec(FORMAT[name], (oracle.ALL, oracle.ALL), margin=headroom)
        shown = f8sub.quantize(matrix, layer._f8sub.plan.recipe, name)
        pairs = ((shown.rowwise, used[0], matrix), (shown.columnwise, used[1], matrix.t()))
        for public, of_layer, as_stored in pairs:
            right = oracle.quantize(oracle.to_numpy(as_stored), spec)
            assert (right.differences(public), right.differences(of_layer)) == ([], []), name


@on_each_bad_value
@pytest.mark.parametrize("operand", ["x", "dy"])
def test_a_non_finite_amax_never_enters_the_history_and_is_reported(operand, bad):
    layer = layer_of(amax_history_len=4)
    optimizer = optimizer_of(layer)
    step(layer, optimizer, 1)
    x, dy = data(2)
    with torch.no_grad():
        (x if operand == "x" else dy)[3, 4] = bad
    y = run(layer, x, dy)
    spoiled = torch.arange(M) == 3
    result = y if operand == "x" else x.grad
    assert result[spoiled].isnan().all()
    assert result[~spoiled].isfinite().all()
    assert history_of(layer).isfinite().all()
    layer.weight.grad = layer.bias.grad = None
    run(layer, *data(3))
    staged = history_of(layer)[0].clone()
    optimizer.step()
    with pytest.raises(f8sub.Float8NumericsError, match=rf"{operand} of 0 "):
        f8sub.precompute_scales(layer)
    assert history_of(layer).isfinite().all()
    assert state_of(layer).scale.isfinite().all()
    assert torch.equal(history_of(layer)[-1, [0, 2]], staged[[0, 2]])
    f8sub.precompute_scales(layer)  # told once


@on_each_bad_value
def test_a_non_finite_weight_never_enters_the_history_and_is_reported(bad):
    layer = layer_of(amax_history_len=4)
    optimizer = optimizer_of(layer)
    step(layer, optimizer, 1)
    before = history_of(layer)[:, 1].clone()
    layer.weight.grad = torch.zeros_like(layer.weight)
    with torch.no_grad():
        layer.weight[0, 0] = bad
    optimizer.step()
    with pytest.raises(f8sub.Float8NumericsError, match="w of 0 "):
        f8sub.precompute_scales(layer)
    assert torch.equal(history_of(layer)[:, 1], before)
    with torch.no_grad():
        assert layer(data(2)[0])[:, 0].isnan().all()


def test_eval_and_no_grad_leave_the_state_alone():
    layer = layer_of()
    step(layer, optimizer_of(layer), 1)
    before = snapshot(layer)
    with torch.no_grad():
        layer(data(2, 100.0)[0])
    with torch.inference_mode():
        layer(data(2, 100.0)[0])
    layer.eval()
    run(layer, *data(3, 100.0))
    assert_same(snapshot(layer), before)
    layer.train()
    run(layer, *data(3, 100.0))
    assert history_of(layer)[0, 0] > 100


def test_histories_roll_once_a_step_whoever_asks():
    """Not per microbatch, not per call of precompute_scales, not for load_state_dict."""
    layer = layer_of(amax_history_len=8)
    optimizer = optimizer_of(layer)
    for _ in range(3):
        run(layer, *data(1))
    optimizer.step()
    rolled = snapshot(layer)
    assert (history_of(layer) != 0).sum(0).tolist() == [1, 1, 1]
    for _ in range(2):
        f8sub.precompute_scales(layer)
    layer.load_state_dict(copy.deepcopy(layer.state_dict()))
    f8sub.precompute_scales(layer)
    with torch.no_grad():
        layer(data(2)[0])
    assert_same(snapshot(layer), rolled)


def test_a_tensor_that_is_all_zero_keeps_its_scale_and_its_history():
    layer = layer_of(amax_history_len=2)
    optimizer = optimizer_of(layer)
    step(layer, optimizer, 1)
    before = snapshot(layer)
    for _ in range(3):
        run(layer, torch.zeros(M, K, requires_grad=True), torch.zeros(M, N))
        optimizer.step()
    after = snapshot(layer)
    for name in ("history_x", "history_dy"):
        assert torch.equal(after[f"scaling_states.0.{name}"], before[f"scaling_states.0.{name}"])
    assert torch.equal(after["scaling_states.0.scale"][[0, 2]], before["scaling_states.0.scale"][[0, 2]])


def test_the_weight_never_saturates():
    """Its amax enters before it is cast; where the interval or a callable leaves a larger scale, that is lowered."""
    for options in ({}, {"interval": 100}, {"scaling_factor_compute_algo": lambda a, s, m, r: 100 * m / a}):
        layer = layer_of(amax_history_len=1, **options)
        optimizer = torch.optim.SGD(layer.parameters(), lr=0.0)
        for number in range(3):
            with torch.no_grad():
                layer.weight.mul_(10.0)
            step(layer, optimizer, number)
            format = layer._f8sub.plan.recipe.fprop.b
            source = state_of(layer).sources(stage=False, frozen=False).w
            operand = rowwise_of(layer.weight, format, torch.float32, source)
            found = reference.dequantize(operand, torch.float32)
            assert (found - layer.weight).abs().max() <= layer.weight.abs().max() / 16


def test_a_scaling_factor_algorithm_is_asked_with_amaxes_scales_and_the_recipe():
    asked = []

    def algorithm(amax, scale, fp8_max, recipe):
        asked.append((amax.clone(), scale.clone(), fp8_max, recipe))
        return torch.full_like(amax, fp8_max / 7.0)

    layer = layer_of(scaling_factor_compute_algo=algorithm, margin=3)
    x, dy = data(1)
    run(layer, x, dy)
    optimizer_of(layer).step()
    by_max = {fp8_max: (amax, scale, recipe) for amax, scale, fp8_max, recipe in asked}
    assert set(by_max) == {448.0, 57344.0}
    assert by_max[448.0][0].tolist() == [x.abs().max().item(), layer.weight.abs().max().item()]
    assert by_max[57344.0][0].tolist() == [dy.abs().max().item()]
    assert all(scale.eq(0).all() and recipe.margin == 3 for _, scale, recipe in by_max.values())
    assert state_of(layer).scale.tolist() == pytest.approx([64.0, 64.0, 8192.0])


@pytest.mark.parametrize("value", [0.0, -1.0, float("inf"), float("nan")])
def test_what_is_no_scale_is_not_used(value):
    layer = layer_of(scaling_factor_compute_algo=lambda amax, *_: torch.full_like(amax, value))
    run(layer, *data(1))
    optimizer_of(layer).step()
    assert state_of(layer).scale.tolist() == [0.0, 0.0, 0.0]
    assert layer(data(2)[0]).isfinite().all()


@pytest.mark.parametrize("name", ["amax_compute_algo", "scaling_factor_compute_algo"])
def test_an_algorithm_that_returns_something_else_is_told(name):
    layer = layer_of(**{name: lambda *_: torch.ones(())})
    run(layer, *data(1))
    with pytest.raises(f8sub.Float8ConfigError, match=rf"{name}.*shape \(\).*return a tensor of shape"):
        optimizer_of(layer).step()


def test_recipes_that_differ_in_an_algorithm_share_no_state():
    first, second = (f8sub.get_recipe("delayed", amax_compute_algo=name) for name in ("max", "most_recent"))
    layer = layer_of(amax_compute_algo="max")
    assert state.state_of(layer, first) is state_of(layer)
    other = state.state_of(layer, second)
    assert other is not state.state_of(layer, first)
    assert state.state_of(layer, second) is other
    run(layer, *data(1))
    assert not any(history.any() for history in other.histories)
    assert len({key for key in layer.state_dict() if key.endswith("history_x")}) == 2


def test_an_optimizer_that_steps_in_the_backward_pass_does_not_change_what_is_recomputed():
    """The second layer's step comes before the first layer is recomputed; y's gradient is of the forward's x."""
    model = f8sub.convert_to_float8(seed_weights(Stack(K, N, K)), recipe="delayed")
    scales = []
    for layer in model.layers:
        optimizer = torch.optim.SGD([layer.weight], lr=1e-2)
        layer.weight.register_post_accumulate_grad_hook(lambda w, optimizer=optimizer: optimizer.step())
        layer.register_forward_pre_hook(lambda layer, _: scales.append(state_of(layer).scale.clone()))
    for number in range(2):
        scales.clear()
        x, _ = data(number, 5.0**number)
        for layer in model.layers:
            x = checkpoint(layer, x, use_reentrant=False)
        x.backward(gaussian((M, K), generator(number)))
        f8sub.precompute_scales(model)
        first, second, second_again, first_again = scales
        assert torch.equal(second, second_again)
        assert torch.equal(first, first_again)
        assert torch.equal(first == 0, torch.tensor([number == 0] * 3))


def test_a_sibling_that_sat_out_does_not_lend_its_scale():
    """k was given larger x's without q, which runs first: k is cast by its own past, as it is alone."""
    model = siblings(amax_history_len=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-6)
    run(model, *data(1))
    optimizer.step()
    run(model.k, *data(2, 1000.0))
    optimizer.step()
    x, _ = data(3, 1000.0)
    with torch.no_grad():
        assert torch.equal(model(x), model.q(x) + model.k(x))
    for number in range(2):
        run(model, *data(4 + number, 1000.0))
        optimizer.step()
        model.load_state_dict(copy.deepcopy(model.state_dict()))
    assert state_of(model.q).x_past == state_of(model.k).x_past


def test_a_pruned_layer_keeps_histories():
    layer = f8sub.convert_to_float8(nn.Sequential(nn.Linear(64, 64)), "delayed", skip_defaults=False)[0]
    prune.l1_unstructured(layer, "weight", 0.3)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    y = layer(gaussian((32, 64), generator(1)))
    y.backward(gaussian((32, 64), generator(2)))
    optimizer.step()
    assert state_of(layer).scale[0] > 0
