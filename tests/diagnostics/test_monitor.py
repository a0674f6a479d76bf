"""A monitor changes no bit, samples the steps it was asked for, and tells what a layer's own operands are."""

import contextlib
import json
import resource
import sys
from unittest import mock

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.utils.checkpoint import checkpoint

import f8sub
from f8sub.diagnostics import monitor as monitoring
from f8sub.diagnostics import sample, writers
from f8sub.linear import float8_linear
from tests.data_sets import gaussian, generator
from tests.models import float8_layers, learning_shapes, loss_of, transformer
from tests.selection import long_but

RECIPES = ("tensorwise", "rowwise", "blockwise", "mxfp8", "delayed", "nvfp4")


STOCHASTIC = f8sub.get_recipe("nvfp4", stochastic_rounding=True)


def run(recipe: str | f8sub.Recipe, monitored: bool, steps: int = 4, **options):
    torch.manual_seed(0)  # stochastic rounding
    model = transformer(recipe)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    monitor = f8sub.Monitor(model, every=2, **options) if monitored else mock.MagicMock()
    losses = []
    for step in range(steps):
        with monitor:
            loss = loss_of(model, step, 0)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        f8sub.precompute_scales(model)
        losses.append(loss.item())
    return losses, [p.detach().clone() for p in model.parameters()], monitor


@pytest.mark.parametrize(
    "recipe",
    long_but(("tensorwise", "delayed", STOCHASTIC), (*RECIPES, STOCHASTIC)),
    ids=lambda recipe: recipe if isinstance(recipe, str) else "stochastic",
)
def test_losses_and_weights_are_the_same_bitwise(recipe):
    losses, weights, monitor = run(recipe, True)
    expected, expected_weights, _ = run(recipe, False)
    monitor.flush()
    assert losses == expected
    assert all(map(torch.equal, weights, expected_weights))
    assert {row.step for row in monitor.rows} == {0, 2}
    assert len(monitor.rows) == 2 * 3 * 14


@pytest.mark.parametrize(
    "recipe",
    long_but(("tensorwise", "delayed", STOCHASTIC), (*RECIPES, STOCHASTIC)),
    ids=lambda recipe: recipe if isinstance(recipe, str) else "stochastic",
)
def test_what_is_measured_is_what_the_layer_multiplies(recipe):
    """The codes of x, w and dy that fprop and dgrad multiply are those that are measured."""
    torch.manual_seed(0)
    model = transformer(recipe)
    multiplied, measured = set(), []
    multiply, measure = float8_linear.gemm_nt, sample.add_measured

    def record_product(backend, a, b, *rest):
        multiplied.update(operand.data.view(torch.uint8).numpy().tobytes() for operand in (a, b))
        return multiply(backend, a, b, *rest)

    def record_measured(values, operand, *row):
        measured.append(operand.data.view(torch.uint8).numpy().tobytes())
        measure(values, operand, *row)

    monitor = f8sub.Monitor(model, every=1)
    with (
        mock.patch.object(float8_linear, "gemm_nt", record_product),
        mock.patch.object(sample, "add_measured", record_measured),
        monitor,
    ):
        loss_of(model, 0, 0).backward()
    siblings = 0 if recipe == "delayed" else 2 * 3  # k, v and up have q's and gate's x, and its scale
    assert len(measured) == 3 * 14 - siblings
    assert multiplied.issuperset(measured)
    monitor.flush()
    told = {(row.layer, row.role): row[4:] for row in monitor.rows}
    assert len(told) == 3 * 14
    for block in ("blocks.0", "blocks.1"):
        assert told[f"{block}.q", "x"] == told[f"{block}.k", "x"] == told[f"{block}.v", "x"]


def test_rows_are_lines_of_json_and_calls(tmp_path):
    called, fails = [], mock.Mock(side_effect=ConnectionError("no network"))
    with pytest.warns(f8sub.Float8Warning, match="ConnectionError at step 0: no network") as warned:
        _, _, monitor = run(
            *("rowwise", True),
            to=[fails, tmp_path / "a" / "n.jsonl", lambda step, rows: called.append((step, len(rows)))],
        )
    monitor.flush()
    assert (len(warned), fails.call_count) == (1, 2)
    lines = [json.loads(line) for line in (tmp_path / "a" / "n.jsonl").read_text().splitlines()]
    assert lines == [row._asdict() for row in monitor.rows]
    assert called == [(0, 42), (2, 42)]


def test_a_long_run_holds_a_bounded_number_of_rows_and_writes_all(monkeypatch):
    """Whenever there is no room for a fifth sample, every second one goes, so older ones are further apart."""
    monkeypatch.setattr(monitoring, "MOST_ROWS", 4 * 42)
    written, held = [], []

    def write(step, rows):
        written.append(step)
        held.append(sorted({row.step for row in monitor.rows}))

    model = transformer("tensorwise")
    monitor = f8sub.Monitor(model, every=1, to=write)
    same = monitor.rows
    for step in range(9):
        with monitor:
            loss_of(model, step, 0).backward()
        monitor.flush()
    assert written == list(range(9))
    assert held == [
        [0],
        [0, 1],
        [0, 1, 2],
        [0, 1, 2, 3],
        [0, 2, 4],
        [0, 2, 4, 5],
        [0, 4, 6],
        [0, 4, 6, 7],
        [0, 6, 8],
    ]
    assert monitor.rows is same
    assert len(same) == 3 * 42


def test_a_disk_that_fills_loses_a_steps_rows_and_ends_no_run(tmp_path):
    _, _, monitor = run("rowwise", True)
    monitor.flush()
    file, rows = tmp_path / "n.jsonl", monitor.rows[:42]
    write = writers.jsonl(file)
    write(0, rows)
    whole = file.read_bytes()
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(whole) + 100, before[1]))
    try:
        with pytest.warns(f8sub.Float8Warning, match=r"rows of step 2 are lost, because .*n\.jsonl"):
            write(2, rows)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert file.read_bytes() == whole
    write(4, rows)
    assert file.read_bytes() == whole * 2


def test_tensorboard_and_wandb():
    board, logged = mock.MagicMock(), mock.MagicMock()
    _, _, monitor = run(
        "rowwise", True, to=[writers.tensorboard(board), writers.wandb(logged)], roles=("w",), layers="*.q"
    )
    monitor.flush()
    names = {call.args[0] for call in board.add_scalar.call_args_list}
    assert "float8/w.row_sqnr/blocks.1.q" in names
    assert logged.log.call_count == 2
    assert set(logged.log.call_args.args[0]) == names


def test_layers_and_roles_are_chosen():
    _, _, monitor = run("rowwise", True, layers=["blocks.0.*"], roles=("dy",))
    monitor.flush()
    assert {(row.layer.rpartition(".")[0], row.role) for row in monitor.rows} == {("blocks.0", "dy")}


def test_an_optimizer_that_is_attached_ends_steps():
    model = transformer("tensorwise")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = f8sub.Monitor(model, every=2)
    detach = monitor.attach(optimizer)
    for step in range(4):
        for micro in range(2):
            loss_of(model, 2 * step + micro, 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        f8sub.precompute_scales(model)
    detach()
    monitor.flush()
    assert [row.step for row in monitor.rows] == [0] * 42 + [2] * 42
    assert not any(layer._forward_pre_hooks or layer._forward_hooks for layer in float8_layers(model))


@pytest.mark.parametrize("as_keyword", [False, True])
def test_a_step_with_a_closure_is_sampled(as_keyword):
    model = transformer("tensorwise")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    monitor = f8sub.Monitor(model, every=2)
    detach = monitor.attach(optimizer)
    for step in range(4):

        def closure(step: int = step) -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, step, 0)
            loss.backward()
            return loss

        optimizer.step(closure=closure) if as_keyword else optimizer.step(closure)
    detach()
    monitor.flush()
    assert [row.step for row in monitor.rows] == [0] * 42 + [2] * 42


def test_the_first_microbatch_is_measured():
    rows = []
    for micros in (1, 2):
        model = transformer("tensorwise")
        monitor = f8sub.Monitor(model, every=1)
        with monitor:
            for micro in range(micros):
                loss_of(model, micro, 0).backward()
        monitor.flush()
        rows.append(monitor.rows)
    assert rows[0] == rows[1]


def test_the_forward_by_which_a_pipeline_learns_shapes_is_not_measured():
    rows = []
    for is_pipeline in (False, True):
        model = transformer("tensorwise")
        monitor = f8sub.Monitor(model, every=1)
        with monitor:
            if is_pipeline:
                learning_shapes(lambda model=model: loss_of(model, 7, 0).backward())
            loss_of(model, 0, 0).backward()
        monitor.flush()
        rows.append(monitor.rows)
    assert rows[0] == rows[1]


def test_the_first_forward_of_a_layer_that_is_called_twice_is_measured():
    layer = f8sub.convert_to_float8(nn.Sequential(nn.Linear(32, 32)), recipe="tensorwise")
    monitor = f8sub.Monitor(layer, every=1)
    x, dy = gaussian((2, 8, 32), generator(0)), gaussian((2, 8, 32), generator(1))
    dy[1] *= 10
    with monitor:
        torch.stack([layer(x[0]), layer(3 * x[1])]).backward(dy)
    monitor.flush()
    found = {row.role: row.amax for row in monitor.rows}
    assert (found["x"], found["dy"]) == (x[0].abs().max().item(), dy[0].abs().max().item())


def test_what_a_context_asks_for_is_measured():
    rows = []
    for recipe, context in (("rowwise", contextlib.nullcontext()), ("tensorwise", f8sub.autocast("rowwise"))):
        model = transformer(recipe)
        monitor = f8sub.Monitor(model, every=1)
        with monitor, context:
            loss_of(model, 0, 0).backward()
        monitor.flush()
        rows.append(monitor.rows)
    assert rows[0] == rows[1]


class Checkpointed(nn.Module):
    def __init__(self, recipe: str, reentrant: bool) -> None:
        super().__init__()
        self.inner, self.reentrant = transformer(recipe), reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.inner.blocks:
            x = checkpoint(block, x, use_reentrant=self.reentrant)
        return self.inner.lm_head(x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed_blocks_have_the_same_rows(reentrant):
    found = []
    for model in (transformer("tensorwise"), Checkpointed("tensorwise", reentrant)):
        monitor = f8sub.Monitor(model, every=1)
        x = torch.randn(4, 4, 32, generator=torch.Generator().manual_seed(0)).requires_grad_()
        with monitor:
            y = model(x)
            y.backward(torch.randn(y.shape, generator=torch.Generator().manual_seed(1)))
        monitor.flush()
        found.append([row._replace(layer=row.layer.removeprefix("inner.")) for row in monitor.rows])
    assert found[0] == found[1]
    assert len(found[0]) == 42


def test_compiled_blocks_are_sampled_and_not_compiled_again():
    model = transformer("tensorwise")
    torch._dynamo.reset()
    counted = CompileCounterWithBackend("aot_eager")
    for block in model.blocks:
        block.compile(backend=counted)
    monitor = f8sub.Monitor(model, every=3)
    frames = []
    for step in range(6):
        with monitor:
            loss_of(model, step, 0).backward()
        frames.append(counted.frame_count)
    monitor.flush()
    assert {row.step for row in monitor.rows} == {0, 3}
    assert len(monitor.rows) == 84
    assert frames[0] == 0
    assert frames[1] == frames[-1] > 0


def test_evaluation_is_not_measured():
    model = transformer("tensorwise")
    monitor = f8sub.Monitor(model, every=1)
    with monitor, torch.no_grad():
        loss_of(model, 0, 0)
    monitor.flush()
    assert monitor.rows == []


def test_a_step_that_fails_is_not_told():
    model = transformer("tensorwise")
    monitor = f8sub.Monitor(model, every=1)
    loss = loss_of(model, 0, 0)
    with pytest.raises(RuntimeError, match="scalar outputs"), monitor:
        (loss * torch.ones(2)).backward()
    monitor.flush()
    assert monitor.rows == []
    assert not any(layer._forward_pre_hooks for layer in float8_layers(model))


def test_worst_operands_with_advice_and_a_picture(tmp_path, monkeypatch):
    model = transformer("tensorwise")
    with torch.no_grad():
        model.blocks[1].q.weight[3] *= 1e6
    monitor = f8sub.Monitor(model, every=1)
    with monitor:
        loss_of(model, 0, 0).backward()
    empty = f8sub.Monitor(transformer("rowwise"), every=5)
    with pytest.raises(
        f8sub.Float8ConfigError, match="nothing to draw: no step was sampled yet; enter the monitor"
    ):
        empty.heatmap("w", tmp_path / "w.png")
    none = empty.worst()
    assert none.startswith(
        "no sample yet: the first step has one, and then one step in 5. A forward pass under no_grad"
    )
    first = monitor.worst(3).splitlines()
    assert len(first) == 4
    assert any(
        "blocks.1.q" in line and " w " in line and "scales of rows or blocks" in line for line in first
    )
    monitor.heatmap("w", tmp_path / "w.png")
    assert (tmp_path / "w.png").read_bytes()[:4] == b"\x89PNG"
    monitor.heatmap("dy", tmp_path / "amax.png", "amax")  # powers of ten apart
    monitor.heatmap("x", tmp_path / "cut.png", "saturated")  # all 0
    with monkeypatch.context() as patched:
        patched.setitem(sys.modules, "matplotlib.figure", None)
        with pytest.raises(f8sub.Float8ConfigError, match="draws with matplotlib, which is not installed"):
            monitor.heatmap("w", tmp_path / "w.png")
    with pytest.raises(f8sub.Float8ConfigError, match="no sample has 'median' of 'w'"):
        monitor.heatmap("w", tmp_path / "w.png", "median")
    with pytest.raises(f8sub.Float8ConfigError, match=r"w\.foo has the end of no picture; .* png, "):
        monitor.heatmap("w", tmp_path / "w.foo")
    with pytest.raises(f8sub.Float8ConfigError, match="1 or more, got 'a'"):
        monitor.worst("a")


def test_operands_that_are_not_finite_come_first_and_zeros_last(tmp_path):
    model = f8sub.convert_to_float8(
        nn.Sequential(*(nn.Linear(32, 32) for _ in range(4))), recipe="tensorwise"
    )
    model[1].register_forward_hook(lambda layer, args, y: 0 * y)
    model[2].register_forward_hook(lambda layer, args, y: torch.nan * y)
    monitor = f8sub.Monitor(model, every=1, to=tmp_path / "n.jsonl")
    with monitor:
        y = model(gaussian((8, 32), generator(0)))
        y.backward(gaussian((8, 32), generator(1)))
    operands = [line.split()[:2] for line in monitor.worst(12).splitlines()[1:]]
    spoiled = [["0", "dy"], ["1", "dy"], ["2", "dy"], ["3", "x"]]
    assert sorted(operands[:4]) == spoiled
    assert operands[-1] == ["2", "x"]
    refuse = mock.Mock(side_effect=AssertionError("NaN is no JSON"))
    lines = [json.loads(line, parse_constant=refuse) for line in (tmp_path / "n.jsonl").open()]
    assert [[row["layer"], row["role"]] for row in lines if row["amax"] is None] == spoiled


WRONG = [
    ("layers", "a.*", r"no float8 layer that a\.\* names; f8sub\.conversion_report"),
    ("layers", "blocks.0.Q", r"no float8 layer that blocks\.0\.Q names \(nearest: blocks\.0\.q"),
    ("roles", ("x", "z"), "unknown role 'z'; choose one of x, w, dy, y, dx, dw"),
    ("every", 0, "1 or more"),
    ("every", 1.5, "1.5"),
    *(
        ("roles", (), "of x, w"),
        ("roles", 3, "of x, w"),
        ("layers", 3, "a pattern of names"),
        ("to", 3, "got 3"),
    ),
    ("to", ["a", 3], r"or a list of these, got \['a', 3\]"),
]


@pytest.mark.parametrize(("option", "value", "told"), WRONG)
def test_what_cannot_be_monitored(option, value, told):
    with pytest.raises(f8sub.Float8ConfigError, match=told):
        f8sub.Monitor(transformer("tensorwise"), **{option: value})


@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise"])
def test_results_on_request_are_cast_for_the_statistics_alone(recipe):
    """y as x, dx as dy, dw as w; and no bit of a loss or a weight is another."""
    roles = ("x", "w", "dy", "y", "dx", "dw")
    losses, weights, monitor = run(recipe, True, roles=roles)
    expected, expected_weights, _ = run(recipe, False)
    monitor.flush()
    assert losses == expected
    assert all(map(torch.equal, weights, expected_weights))
    assert {row.role for row in monitor.rows} == set(roles)
    layer = f8sub.convert_to_float8(nn.Linear(64, 32, bias=False), recipe, skip_defaults=False)
    with torch.no_grad():
        layer.weight.copy_(gaussian((32, 64), generator(2)))
    x, dy = gaussian((16, 64), generator(0)).requires_grad_(), gaussian((16, 32), generator(1))
    alone = f8sub.Monitor(layer, every=1, roles=("y", "dx", "dw"))
    with alone:
        y = layer(x)
        y.backward(dy)
    alone.flush()
    formats = f8sub.get_recipe(recipe)
    results = {
        "y": (y, formats.fprop.a),
        "dx": (x.grad, formats.dgrad.a),
        "dw": (layer.weight.grad, formats.fprop.b),
    }
    for row in alone.rows:
        found, format = results[row.role]
        made = f8sub.quantize(found.detach().clone(), format, columnwise=False)
        error = (made.dequantize().double() - found.double()).square().sum()
        assert row.amax == found.abs().max().item()
        assert row.sqnr == pytest.approx(
            10 * (found.double().square().sum() / error).log10().item(), abs=1e-3
        )
    assert len(alone.rows) == 3


def test_a_sampled_step_without_a_forward_is_told(tmp_path):
    """As of a CUDA graph that is replayed: it calls no hook. Once, and ``sampling`` says which steps to launch."""
    model = f8sub.convert_to_float8(nn.Sequential(nn.Linear(64, 64)), skip_defaults=False)
    optimizer, steps, sampled = torch.optim.SGD(model.parameters()), [], []
    monitor = f8sub.Monitor(model, 2, to=lambda step, rows: steps.append((step, len(rows))))
    detach = monitor.attach(optimizer)

    def step(launched: bool) -> None:
        sampled.append(monitor.sampling)
        if launched:
            model(gaussian((16, 64), generator(1))).square().sum().backward()
        optimizer.step()

    step(True)
    step(False)
    with pytest.warns(f8sub.Float8Warning, match="step 2 and saw no forward.*monitor.sampling"):
        step(False)
    for launched in (False, False, False, True):
        step(launched)
    detach()
    monitor.flush()
    assert sampled == [True, False, True, False, True, False, True]
    assert steps == [(0, 3), (2, 0), (4, 0), (6, 3)]
