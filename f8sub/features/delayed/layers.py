"""Delayed scaling of a layer: its states, one for each recipe that it was run under."""

from collections.abc import Iterable
from typing import Any

import torch
from typing_extensions import override

from f8sub.errors import Float8ConfigError
from f8sub.features.delayed.state import ScalingState
from f8sub.kernels.scales import Sources
from f8sub.linear import sockets
from f8sub.linear.float8_linear import Float8Linear
from f8sub.recipe import Recipe
from f8sub.weights.conversion import Conversion
from f8sub.weights.weight import local_tensor

_STATES = "scaling_states"
"""Name of the states in their layer, and so in its state dict."""


class ScalingStates(torch.nn.ModuleList):
    """The states of one layer.

    Args:
        states: one for each recipe.
        fqn: the layer's name.
    """

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
    return list(layer._modules.get(_STATES) or ())  # type: ignore[arg-type]


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
    setattr(layer, _STATES, ScalingStates([*states, state], layer.fqn))
    Conversion.counts_steps = True
    return state


class DelayedLayers(sockets.LayerGuest):
    """What delayed scaling does for layers whose recipe has it."""

    @override
    def entered(self, layer: Float8Linear) -> None:
        if layer.plan.recipe.delayed is not None:
            state_of(layer, layer.plan.recipe)

    @override
    def left(self, layer: Float8Linear) -> None:
        layer._modules.pop(_STATES, None)

    @override
    def loaded(self, layer: Float8Linear, state_dict: dict[str, Any], prefix: str) -> None:
        """Histories that a state dict with the weight lacks begin anew."""
        for index, state in enumerate(states_of(layer)):
            kept = any(key.startswith(f"{prefix}{_STATES}.{index}.") for key in state_dict)
            if f"{prefix}weight" in state_dict and not kept:
                state.reset()

    @override
    def alike(self, layer: Float8Linear) -> dict[str, str]:
        return {"amax histories": str(layer.plan.recipe.delayed)}


def sources_of(layer: Float8Linear, recipe: Recipe) -> Sources:
    """Those of the layer's state; amaxes of a forward in training count."""
    state = state_of(layer, recipe)
    if not torch.compiler.is_compiling():
        state.notice_writes()
    frozen = layer.training and not layer.weight.requires_grad
    return state.sources(stage=torch.is_grad_enabled() and layer.training, frozen=frozen)


sockets.guests.append(DelayedLayers())
sockets.scaling = sources_of
