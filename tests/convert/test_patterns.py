"""A pattern takes the same layers wherever one is given."""

from collections.abc import Callable

import pytest
import torch
from torch import nn

import f8sub
from tests.convert.models import K
from tests.models import silenced


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.self_attn = nn.ModuleDict({"q_proj": nn.Linear(K, K), "o_proj": nn.Linear(K, K)})
        self.mlp = nn.ModuleDict({"up_proj": nn.Linear(K, K), "down_proj": nn.Linear(K, K)})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in (*self.self_attn.values(), *self.mlp.values()):
            x = layer(x)
        return x


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.ModuleDict({"layers": nn.Sequential(*(Block() for _ in range(11)))})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.model["layers"](x)


NAMES = {name for name, module in Model().named_modules() if isinstance(module, nn.Linear)}


def of(*parts: str) -> set[str]:
    return {name for name in NAMES if any(part in name for part in parts)}


TAKES = {
    "mlp": of(".mlp."),
    "*.mlp": of(".mlp."),
    "*.mlp.*": of(".mlp."),
    "layers.*.mlp": of(".mlp."),
    "model.layers.1": of(".1."),
    "layers.1": of(".1."),
    "up_proj": of("up_proj"),
    "layers.?.self_attn.q_proj": of("q_proj") - of(".10."),
    "[qo]_proj": of("q_proj", "o_proj"),
    "model.layers.10.mlp.up_proj": of(".10.mlp.up"),
}


def converted(**options: object) -> nn.Module:
    with silenced():
        return f8sub.convert_to_float8(Model(), min_dim=0, **options)


def layers_of(model: nn.Module) -> dict[str, f8sub.Float8Linear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, f8sub.Float8Linear)}


def skipped(pattern: str) -> set[str]:
    return NAMES - set(layers_of(converted(skip=pattern)))


def with_recipe(pattern: str) -> set[str]:
    layers = layers_of(converted(recipe={pattern: "rowwise", "*": "tensorwise"}))
    return {name for name, layer in layers.items() if layer._f8sub.plan.recipe.name == "rowwise"}


def with_keep_x(pattern: str) -> set[str]:
    layers = layers_of(converted(keep_x={pattern: "high_precision", "*": "float8"}))
    return {name for name, layer in layers.items() if layer._f8sub.keep_x == "high_precision"}


def measured(pattern: str) -> set[str]:
    model = converted()
    with f8sub.Monitor(model, layers=pattern, roles=("w",)) as monitor:
        model(torch.ones(4, K))
    monitor.flush()
    return {row.layer for row in monitor.rows}


def rounded(pattern: str) -> set[str]:
    return set(f8sub.keep_swiglu_input_in_float8(Model(), layers=pattern))


def estimated(pattern: str) -> set[str]:
    with silenced():
        products = f8sub.estimate(Model(), tokens=64, skip=pattern).shapes.products
    return {product.fqn for product in products if product.reason == f"skip={pattern!r}"}


PLACES: dict[str, Callable[[str], set[str]]] = {
    "skip": skipped,
    "recipe": with_recipe,
    "keep_x": with_keep_x,
    "Monitor": measured,
    "keep_swiglu_input_in_float8": rounded,
    "estimate": estimated,
}


@pytest.mark.parametrize("pattern", TAKES)
@pytest.mark.parametrize("place", PLACES)
def test_a_pattern_takes_the_same_layers_everywhere(place, pattern):
    assert PLACES[place](pattern) == TAKES[pattern] != set()


@pytest.mark.parametrize(
    ("pattern", "expected"), [("*", NAMES), ("*.layers*q_proj", of("q_proj")), ("model.*proj", NAMES)]
)
def test_a_monitor_also_takes_whole_names_with_a_star_over_dots(pattern, expected):
    assert measured(pattern) == expected
