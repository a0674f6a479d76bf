"""Rows of experts are those of each expert's own layer on its own tokens, put together."""

import pytest
import torch
from torch import nn

import f8sub
from f8sub.diagnostics.statistics import (
    MAXIMA,
    WIDTH,
    measure,
    statistics_of,
)
from tests.data_sets import gaussian, generator
from tests.experts.models import OwnExperts, of_transformers
from tests.experts.ranks.test_experts_sharded import SeamedExperts
from tests.models import equal, learning_shapes

EXPERTS, WIDTH_OF_X, HIDDEN = 4, 128, 256
ENDS = torch.tensor([16, 16, 40, 48])


class Model(nn.Module):
    def __init__(self, kind: type[nn.Module] = OwnExperts) -> None:
        super().__init__()
        self.experts = kind(EXPERTS, WIDTH_OF_X, HIDDEN)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.experts(x, ENDS)


def monitored(recipe: str, kind: type[nn.Module] = OwnExperts, **options: object) -> tuple[nn.Module, dict]:
    f8sub.register_experts(kind)
    model = f8sub.convert_to_float8(Model(kind), recipe, experts=True)
    monitor = f8sub.Monitor(model, every=1, **options)
    x = gaussian((48, WIDTH_OF_X), generator(0)).requires_grad_()
    with monitor:
        model(x).backward(gaussian((48, WIDTH_OF_X), generator(1)))
    monitor.flush()
    return model, {(row.layer, row.role): row for row in monitor.rows}


def added(recipe: str, parts: list[torch.Tensor], role: str):
    """The statistics of parts that are cast one by one."""
    sums, maxima = torch.zeros(WIDTH), torch.full((len(MAXIMA),), -torch.inf)
    operand = {"x": "x", "w": "w", "dy": "dy"}[role]
    for part in parts:
        if len(part):
            made = f8sub.quantize(part, recipe, operand, columnwise=False).rowwise
            of_part = measure(part, made)
            sums, maxima = sums + of_part.sums, torch.maximum(maxima, of_part.maxima)
    return statistics_of(0, "", role, made.format, sums.tolist(), maxima.tolist())


@pytest.mark.parametrize("kind", [OwnExperts, SeamedExperts])
@pytest.mark.parametrize("recipe", ["tensorwise", "blockwise", "rowwise", "mxfp8", "gridquant", "nvfp4"])
def test_rows_are_those_of_each_experts_own_layer(recipe, kind):
    model, rows = monitored(recipe, kind)
    names = ["experts.gate", "experts.up", "experts.down"]
    assert set(rows) == {(name, role) for name in names for role in ("x", "w", "dy")}
    weights = [each.detach() for each in model.experts.up.detach().clone()]
    x = gaussian((48, WIDTH_OF_X), generator(0))
    dy = gaussian((48, WIDTH_OF_X), generator(1))
    starts = [0, *ENDS[:-1].tolist()]
    given = {
        ("experts.up", "w"): weights,
        ("experts.up", "x"): [x[a:b] for a, b in zip(starts, ENDS.tolist(), strict=True)],
        ("experts.down", "dy"): [dy[a:b] for a, b in zip(starts, ENDS.tolist(), strict=True)],
    }
    for (name, role), parts in given.items():
        expected, found = added(recipe, parts, role), rows[name, role]
        for field in ("amax", "rms", "saturated", "flushed", "subnormal", "sqnr", "row_sqnr"):
            assert getattr(found, field) == pytest.approx(getattr(expected, field), rel=1e-4), (
                name,
                role,
                field,
            )
        assert found.scale_max == pytest.approx(expected.scale_max, rel=1e-6)


# Experts of the second are products of their own.
@pytest.mark.parametrize("recipe", ["rowwise", "nvfp4"])
def test_results_on_request(recipe):
    _, rows = monitored(recipe, roles=("y", "dx", "dw"))
    assert set(rows) == {(f"experts.{n}", role) for n in ("gate", "up", "down") for role in ("y", "dx", "dw")}
    least, most = (20, 40) if recipe == "rowwise" else (14, 25)
    assert all(least < row.sqnr < most for row in rows.values())


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral"])
def test_models_of_transformers_and_no_bit_is_another(kind):
    found = []
    for every in (1, 0):
        model = f8sub.convert_to_float8(of_transformers(kind), "rowwise", experts=True)
        tokens = torch.randint(0, 64, (2, 16), generator=generator(4))
        monitor = f8sub.Monitor(model, every=1) if every else None
        if monitor is not None:
            monitor.__enter__()
        loss = model(tokens, labels=tokens).loss
        loss.backward()
        if monitor is not None:
            monitor.__exit__(None, None, None)
            monitor.flush()
            layers = {row.layer for row in monitor.rows}
            assert {f"model.layers.0.mlp.experts.{name}" for name in ("gate_up_proj", "down_proj")} <= layers
        found.append([loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)])
    assert equal(*found)


def test_the_forward_by_which_a_pipeline_learns_shapes_is_not_measured():
    f8sub.register_experts(OwnExperts)
    rows = []
    for is_pipeline in (False, True):
        model = f8sub.convert_to_float8(Model(), "tensorwise", experts=True)
        x = gaussian((48, WIDTH_OF_X), generator(0)).requires_grad_()
        monitor = f8sub.Monitor(model, every=1)
        with monitor:
            if is_pipeline:
                learning_shapes(lambda model=model, x=x: model(9 * x).sum().backward())
            model(x).backward(gaussian((48, WIDTH_OF_X), generator(1)))
        monitor.flush()
        rows.append(monitor.rows)
    assert rows[0] == rows[1] != []


def test_tokens_are_told_with_the_scales_of_their_past():
    """Tokens that outgrew their past are cut off, those of one expert alone."""
    f8sub.register_experts(OwnExperts)
    model = f8sub.convert_to_float8(Model(), "delayed", experts=True)
    x, dy = (gaussian((48, WIDTH_OF_X), generator(seed)) for seed in (0, 1))
    model(x).backward(dy)
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    x[16:40] *= 16
    monitor = f8sub.Monitor(model, every=1)
    with monitor:
        model(x).backward(dy)
    monitor.flush()
    (row,) = [row for row in monitor.rows if (row.layer, row.role) == ("experts.gate", "x")]
    scale = model.experts.gate_scaling_states[0].scale[2, 0]
    cut_off = (x[16:40].abs() * scale > 448 * 1.125).sum() / x.numel()
    assert 0 < row.saturated == pytest.approx(float(cut_off), rel=0.05)
