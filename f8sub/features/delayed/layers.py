"""Delayed scaling of a layer: its states, one for each recipe that it was run under."""

from collections.abc import Iterable
from typing import Any

import torch

from f8sub.errors import Float8ConfigError
from f8sub.features.delayed.state import ScalingState
from f8sub.kernels.scales import Sources
from f8sub.linear import sockets
from f8sub.linear.float8_linear import Float8Linear
from f8sub.recipe import Recipe
from f8sub.weights.conversion import Conversion
from f8sub.weights.weight import local_tensor

STATES = "scaling_states"
"""Name of the states in their layer, and so in its state dict."""


class ScalingStates(torch.nn.ModuleList):
    """The states of one layer, one for each recipe; ``fqn`` is the layer's name."""

    def __init__(self, states: Iterable[ScalingState] = (), fqn: str = "") -> None:
        super().__init__(states)
        self.fqn = fqn

    def __getattr__(self, name: str) -> Any:
        if name == "weight":
            raise AttributeError(
                f"{self.fqn}: its amax histories were asked for a weight, as torch's ColwiseParallel and "
                "RowwiseParallel ask all modules of a layer; delayed scaling takes Float8ColwiseParallel and "
                "Float8RowwiseParallel of f8sub.tensor_parallel"
            )
        return super().__getattr__(name)


def states_of(layer: torch.nn.Module) -> list[ScalingState]:
    """The states of all recipes with delayed scaling that the layer was run under."""
    return list(layer._modules.get(STATES) or ())  # type: ignore[arg-type]


def state_of(layer: Float8Linear, recipe: Recipe) -> ScalingState:
    """The state of a recipe with delayed scaling, begun at its first use; recipes that differ share none."""
    states = states_of(layer)
    for state in states:
        if state.recipe == recipe:
            return state
    if torch.compiler.is_compiling():
        raise Float8ConfigError(
            f"{layer.fqn}: recipe {recipe.name!r} keeps amax histories, and the layer has none for it yet; run it "
            "once in the same context before torch.compile"
        )
    state = ScalingState(recipe, local_tensor(layer.weight).device).train(layer.training)
    setattr(layer, STATES, ScalingStates([*states, state], layer.fqn))
    Conversion.counts_steps = True
    return state


def sources_of(layer: Float8Linear, recipe: Recipe) -> Sources:
    """Those of the layer's state; amaxes of a forward in training count."""
    state = state_of(layer, recipe)
    if not torch.compiler.is_compiling():
        state.notice_writes()
    frozen = layer.training and not layer.weight.requires_grad
    return state.sources(stage=torch.is_grad_enabled() and layer.training, frozen=frozen)


sockets.scaling = sources_of
