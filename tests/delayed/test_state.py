"""The recipe's arguments, and its state: buffers, checkpoints, copies, contexts, optimizers."""

import copy
import dataclasses
import io
from itertools import product

import pytest
import torch
from torch import nn

import f8sub
from f8sub.host_copy import HostCopy
from tests.delayed.layers import (
    K,
    M,
    N,
    assert_same,
    data,
    history_of,
    layer_of,
    optimizer_of,
    run,
    siblings,
    snapshot,
    state_of,
    step,
)
from tests.models import seed_weights, update
from tests.selection import long_but


class Unhashable:
    """As every dataclass with ``eq`` is."""

    __hash__ = None

    def __call__(self, *amaxes: torch.Tensor) -> torch.Tensor:
        return amaxes[0]


WRONG = {
    "margin": [-1, 128, float("nan"), "2", True, None],
    "dy_margin": [-1, 128, float("nan"), "2", True],
    "interval": [0, 1.5, True],
    "fp8_format": ["E5M2", "e4m3"],
    "amax_history_len": [0, -3, 2.0],
    "amax_compute_algo": ["mean", None, Unhashable()],
    "scaling_factor_compute_algo": ["max", Unhashable()],
    "reduce_amax": [1, None],
    "override_linear_precision": [(True,) * 3, (True, False), False],
    "amax_histroy_len": [16],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in WRONG.items() for value in values]
)
def test_an_unknown_or_ineffective_argument_is_refused(name, value):
    with pytest.raises(f8sub.Float8ConfigError, match=name):
        f8sub.get_recipe("delayed", **{name: value})


def test_formats_and_overrides():
    hybrid, e4m3 = (f8sub.get_recipe("delayed", fp8_format=name) for name in ("HYBRID", "E4M3"))
    assert hybrid == f8sub.get_recipe("delayed")
    assert {hybrid.dgrad.a.dtype, hybrid.wgrad.a.dtype} == {torch.float8_e5m2}
    assert {e4m3.dgrad.a.dtype, e4m3.wgrad.a.dtype, e4m3.fprop.b.dtype} == {torch.float8_e4m3fn}
    assert (hybrid.delayed.margin_of("dy"), e4m3.delayed.margin_of("dy")) == (4, 0)
    kept = f8sub.get_recipe("delayed", override_linear_precision=(False, True, False))
    assert kept.fprop.a is not None
    assert kept.dgrad.a is None
    assert kept.wgrad.a is not None


@pytest.mark.parametrize("keep", [keep for keep in product((False, True), repeat=3) if 0 < sum(keep) < 3])
def test_gemms_in_high_precision_stage_what_the_others_read(keep):
    layer = layer_of(override_linear_precision=keep, amax_history_len=2)
    optimizer = optimizer_of(layer)
    for number in range(3):
        x, dy = data(number)
        run(layer, x, dy)
        read = [not (keep[0] and keep[2]), False, not (keep[1] and keep[2])]
        assert (history_of(layer)[0] > 0).tolist() == read
        optimizer.step()
        optimizer.zero_grad()
    with_scale = [read[0], not (keep[0] and keep[1]), read[2]]
    assert (state_of(layer).scale > 0).tolist() == with_scale


def test_a_recipe_of_finer_tiles_cannot_be_delayed():
    rowwise = f8sub.get_recipe("rowwise")
    with pytest.raises(f8sub.Float8ConfigError, match=r"one scale per tensor, but x is read as"):
        dataclasses.replace(rowwise, delayed=f8sub.get_recipe("delayed").delayed)


def test_ranks_compare_recipes_by_what_their_algorithms_are_called():
    text = str(f8sub.get_recipe("delayed", amax_compute_algo=sorted, scaling_factor_compute_algo=data))
    assert "amax_compute_algo=sorted" in text
    assert "scaling_factor_compute_algo=data" in text
    assert "0x" not in text


def test_buffers_stay_float32_and_are_never_left_uninitialized():
    layer = layer_of(amax_history_len=4)
    step(layer, optimizer_of(layer), 1)
    before = snapshot(layer)
    layer.bfloat16().half().float()
    assert_same(snapshot(layer), before)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(K, N))
    model = f8sub.convert_to_float8(model, recipe="delayed").to_empty(device="cpu")
    assert all(not buffer.any() and not buffer.is_meta for buffer in model.buffers())
    for buffer in layer.buffers():
        assert buffer.dtype == torch.float32


def test_a_state_dict_restores_bitwise_and_one_without_histories_begins_anew():
    layer, other = layer_of(amax_history_len=4), layer_of(amax_history_len=4)
    for number in range(3):
        step(layer, optimizer_of(layer), number)
    other.load_state_dict(layer.state_dict())
    x, _ = data(9)
    with torch.no_grad():
        assert torch.equal(other(x), layer(x))
    assert_same(snapshot(other), snapshot(layer))
    plain = {name: value for name, value in layer.state_dict().items() if name in ("weight", "bias")}
    other.load_state_dict(plain)
    assert all(not buffer.any() for buffer in other.buffers())
    layer.load_state_dict({"bias": plain["bias"]}, strict=False)
    assert history_of(layer).any()


@pytest.mark.parametrize("has_histories", [True, False])
def test_a_model_on_meta_trains_on_a_state_dict_that_is_assigned(has_histories):
    """Flags are in no state dict, histories in none of a model in high precision; both need memory all the same."""
    trained = layer_of(amax_history_len=4)
    for number in range(2):
        step(trained, optimizer_of(trained), number)
    kept = {n: v.clone() for n, v in trained.state_dict().items() if has_histories or "scaling" not in n}
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(K, N))
    layer = f8sub.convert_to_float8(model, f8sub.get_recipe("delayed", amax_history_len=4))[0]
    layer.load_state_dict({name: value.clone() for name, value in kept.items()}, assign=True, strict=False)
    expected = layer_of(amax_history_len=4)
    expected.load_state_dict(kept, strict=False)
    for each in (layer, expected):
        optimizer = optimizer_of(each)
        for number in range(3):
            step(each, optimizer, number)
    assert_same(dict(layer.state_dict()), dict(expected.state_dict()))
    assert history_of(layer).any()


def test_histories_on_meta_follow_a_model_that_is_moved():
    layer = layer_of(amax_history_len=4)
    layer.scaling_states.to("meta")
    layer.to("cpu")
    assert all(not buffer.is_meta and not buffer.any() for buffer in layer.buffers())
    step(layer, optimizer_of(layer), 1)
    assert history_of(layer).any()


def test_a_copy_has_a_history_of_its_own():
    layer = layer_of(amax_history_len=4)
    step(layer, optimizer_of(layer), 1)
    twin = copy.deepcopy(layer)
    before = snapshot(layer)
    step(twin, optimizer_of(twin), 2, size=10.0)
    assert_same(snapshot(layer), before)
    assert history_of(twin)[:, 0].max() > 10 * 2


def test_a_pickle_trains_on_as_a_copy_does():
    """Its weights are known, so that its optimizer's steps roll histories."""
    model = nn.Sequential(layer_of(amax_history_len=4), nn.Linear(N, K), nn.Linear(N, K))
    model[2].weight = model[1].weight
    f8sub.convert_to_float8(model, f8sub.get_recipe("delayed", amax_history_len=4))
    step(model[0], optimizer_of(model[0]), 1)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    arrived, copied = torch.load(file, weights_only=False), copy.deepcopy(model)
    assert arrived[2].weight is arrived[1].weight
    for each in (arrived, copied):
        optimizer = optimizer_of(each)
        for number in range(3):
            x, _ = data(number)
            for tied in each[1:]:
                tied(each[0](x)).square().sum().backward()
            update(each, optimizer)
    assert_same(dict(arrived.state_dict()), dict(copied.state_dict()))
    assert not torch.equal(history_of(arrived[0]), history_of(model[0]))


def test_a_context_rolls_a_state_of_its_own():
    layer = f8sub.convert_to_float8(seed_weights(nn.Sequential(nn.Linear(K, N))), recipe="tensorwise")[0]
    optimizer = optimizer_of(layer)
    for number in range(2):
        with f8sub.autocast(recipe="delayed"):
            y = layer(data(number)[0])
        y.backward(data(number)[1])
        optimizer.step()
    assert (history_of(layer) != 0).sum(0).tolist() == [2, 2, 2]
    assert (state_of(layer).scale > 0).all()


def test_a_compiled_optimizer_rolls_too():
    torch._dynamo.reset()
    layer = layer_of(amax_history_len=4)
    compiled_step = torch.compile(optimizer_of(layer).step, backend="aot_eager")
    for number in range(3):
        run(layer, *data(number))
        compiled_step()
        assert (history_of(layer) != 0).sum(0).tolist() == [number + 1] * 3


@pytest.mark.parametrize(
    ("last_first", "rolls_between"), [pytest.param(False, False, marks=pytest.mark.long), (True, True)]
)
def test_a_compiled_backward_pass_keeps_what_was_staged_since_its_forward(last_first, rolls_between):
    """Two forward passes before the first backward pass, as pipelines and layers that run twice have them."""
    torch._dynamo.reset()
    histories = []
    for compiled in (False, True):
        layers = (nn.Linear(K, N) for _ in range(2))
        model = f8sub.convert_to_float8(seed_weights(nn.Sequential(*layers)), "delayed")
        layer, other = model
        if compiled:
            layer.compile(backend="aot_eager", fullgraph=True)
        optimizers = [optimizer_of(part) for part in (layer, other)]
        for number in range(3):
            batches = [data(2 * number, 8.0), data(2 * number + 1)]
            runs = [(layer(x), dy) for x, dy in batches]
            if rolls_between:
                optimizers[1].step()
            for y, dy in reversed(runs) if last_first else runs:
                y.backward(dy)
            optimizers[0].step()
        histories.append(snapshot(layer))
    assert_same(histories[1], histories[0])
    assert histories[0]["scaling_states.0.history_x"].count_nonzero() == 3


def test_a_frozen_layer_is_scaled_by_its_current_amaxes_whatever_it_was_trained_on():
    """An adapter's optimizer steps no weight of the layer, so that its histories do not roll."""
    layer = layer_of(amax_history_len=1)
    step(layer, optimizer_of(layer), 1)
    expected = f8sub.convert_to_float8(seed_weights(nn.Sequential(nn.Linear(K, N))), recipe="tensorwise")[0]
    with torch.no_grad():
        expected.weight.copy_(layer.weight)
        expected.bias.copy_(layer.bias)
    layer.requires_grad_(False)
    adapter = nn.Parameter(torch.zeros(N))
    optimizer = torch.optim.SGD([adapter], lr=1e-3)
    for number in range(2):
        results = []
        for each in (layer, expected):
            x, dy = data(number, 1000.0)
            y = each(x)
            (y + adapter).backward(dy)
            results.append((y.detach(), x.grad))
        assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))
        optimizer.step()
        f8sub.precompute_scales(layer)
    x, _ = data(0, 1000.0)
    assert not torch.equal(layer.eval()(x), expected(x))  # what was trained is evaluated as it was trained


def test_masters_in_the_optimizer():
    """The weights are rounded from them after the wrapped optimizer stepped; their amax is taken after that."""
    layer = f8sub.convert_to_float8(nn.Sequential(nn.Linear(K, N)).bfloat16(), recipe="delayed")[0]
    optimizer = f8sub.optim.MasterWeights(torch.optim.SGD(layer.parameters(), lr=1.0))
    for number in range(3):
        x, dy = data(number)
        layer(x.bfloat16()).backward(dy.bfloat16())
        optimizer.step()
        assert history_of(layer)[-1, 1] == layer.weight.detach().abs().max()
        assert (history_of(layer) != 0).sum(0).tolist() == [number + 1] * 3


def test_scales_are_known_once_all_are_made_and_change_nothing():
    """From then on a cast does not wait for the current amax, whose scale it would not take."""
    layer, waits = layer_of(), layer_of()
    optimizers = [optimizer_of(layer), optimizer_of(waits)]
    for seed in range(4):
        assert state_of(layer).is_known == (seed > 0)
        state_of(waits).is_known = False
        for each, optimizer in zip((layer, waits), optimizers, strict=True):
            step(each, optimizer, seed, 4.0**seed)
        assert_same(snapshot(layer), snapshot(waits))
        assert torch.equal(layer.weight, waits.weight)


FORGET = {
    "reset": lambda layer: state_of(layer).reset(),
    "load": lambda layer: layer.load_state_dict(layer_of().state_dict()),
    "to": lambda layer: layer.to("meta"),
}


@pytest.mark.parametrize("forget", FORGET)
def test_scales_that_may_be_others_are_not_known(forget):
    layer = layer_of()
    step(layer, optimizer_of(layer), 1)
    assert state_of(layer).is_known
    FORGET[forget](layer)
    assert not state_of(layer).is_known


LOADS = {"eager": (False, False), "eager, kept": (False, True), "compiled": (True, False)}
"""Whether the model is compiled, and whether the state dict was taken long before it is written to."""


@pytest.mark.parametrize("load", long_but(("eager", "eager, kept"), LOADS))
@pytest.mark.parametrize("history", [0.0, 30.0], ids=["zero", "another"])
def test_histories_that_are_loaded_in_place(history, load):
    """As ``dcp.load`` does: what a module would be told of is written to the tensors of a state dict.

    Compiled code looks at the scales until they are known again, which it was compiled for in its first step.
    """
    compiled, kept = LOADS[load]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    model, twin = siblings(), siblings()
    if history:
        optimizer = optimizer_of(twin)
        run(twin, *data(1, history))
        run(twin.k, *data(2, 3 * history))
        optimizer.step()
        optimizer.zero_grad()
    saved = copy.deepcopy(twin.state_dict())
    if compiled:
        model.compile(backend="aot_eager", fullgraph=True)
    optimizer, state_dict = optimizer_of(model), model.state_dict()
    for number in range(3):
        step(model, optimizer, number)
    assert state_of(model.q).is_known
    with torch.no_grad():
        for name, value in (state_dict if kept else model.state_dict()).items():
            value.copy_(saved[name])
    twin.load_state_dict(saved)
    for each in (model, twin):
        for number in (7, 8):
            step(each, optimizer_of(each), number)
        assert state_of(each.k).is_known
    assert_same(snapshot(model), snapshot(twin))
    assert torch.equal(model.q.weight, twin.q.weight)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2 * compiled


def test_an_operand_that_was_not_seen_has_no_known_scale():
    layer = layer_of()
    optimizer = optimizer_of(layer)
    x, _ = data(1)
    run(layer, x, torch.zeros(M, N))
    optimizer.step()
    f8sub.precompute_scales(layer)
    assert not state_of(layer).is_known
    step(layer, optimizer, 2)
    # Each later roll reads what the one before found, which it need not wait for.
    assert not state_of(layer).is_known
    step(layer, optimizer, 3)
    assert state_of(layer).is_known


@pytest.mark.parametrize("unseen", [0, 2])
def test_how_far_the_device_is_does_not_matter(monkeypatch, unseen):
    """Code that is compiled for known scales may round in another order, so the same step of each run has it first."""
    found = []
    for there in (True, False):
        monkeypatch.setattr(HostCopy, "there", there)
        layer = layer_of()
        optimizer = optimizer_of(layer)
        found.append([])
        for number in range(5):
            run(layer, data(number)[0], torch.zeros(M, N) if number < unseen else data(number)[1])
            optimizer.step()
            f8sub.precompute_scales(layer)
            found[-1].append(state_of(layer).is_known)
    first = unseen + 1 if unseen else 0
    assert found[0] == found[1] == [number >= first for number in range(5)]


def test_layers_that_roll_together_know_together():
    """Compiled blocks are compiled anew for that, so that all are at once."""
    model = f8sub.convert_to_float8(nn.ModuleList([nn.Linear(K, N), nn.Linear(K, N)]), recipe="delayed")
    optimizer = optimizer_of(model)
    for seed, layers in ((1, model[:1]), (2, model), (3, model)):
        for layer in layers:
            run(layer, *data(seed))
        optimizer.step()
        f8sub.precompute_scales(model)
        assert [state_of(layer).is_known for layer in model] == [seed == 3] * 2
