"""Delayed scaling of a layer: its weights' states, one for each recipe that it was run under."""

from collections.abc import Iterable
from typing import Any

import torch

from f8sub.delayed.state import ALL_MEMBERS, ScalingState
from f8sub.errors import Float8ConfigError
from f8sub.kernels.scales import Sources
from f8sub.recipe import Recipe
from f8sub.torch_compat import is_metadata_inference
from f8sub.weights.conversion import Conversion
from f8sub.weights.layout import ShardLayout
from f8sub.weights.weight import local_tensor

STATES = "scaling_states"
"""Name of the states in their layer, and so in its state dict; behind a weight's name where there are several."""


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


def _place_of(name: str) -> str:
    """Where a layer has the states of the weight ``name``."""
    return STATES if name == "weight" else f"{name}_{STATES}"


def states_of(layer: torch.nn.Module, name: str = "weight") -> list[ScalingState]:
    """The states of all recipes with delayed scaling that a weight of the layer was run under."""
    return list(layer._modules.get(_place_of(name)) or ())  # type: ignore[arg-type]


def state_of(layer: Any, recipe: Recipe, name: str = "weight") -> ScalingState:
    """The state of a recipe with delayed scaling, begun at its first use; recipes that differ share none."""
    states = states_of(layer, name)
    for state in states:
        if state.recipe == recipe:
            return state
    if torch.compiler.is_compiling():
        raise Float8ConfigError(
            f"{layer.fqn}: recipe {recipe.name!r} keeps amax histories, and the layer has none for it yet; run it "
            "once in the same context before torch.compile"
        )
    weight = local_tensor(getattr(layer, name))
    members = len(weight) if weight.dim() == 3 else None
    state = ScalingState(recipe, weight.device, members).train(layer.training)
    setattr(layer, _place_of(name), ScalingStates([*states, state], layer.fqn))
    Conversion.counts_steps = True
    return state


def forget(layer: torch.nn.Module) -> None:
    """Take out all states of the layer's weights."""
    for place in [place for place, module in layer._modules.items() if isinstance(module, ScalingStates)]:
        del layer._modules[place]


def forget_missing(layer: torch.nn.Module, name: str, state_dict: dict[str, Any], prefix: str) -> None:
    """Begin histories anew that a state dict with the weight lacks."""
    for index, state in enumerate(states_of(layer, name)):
        kept = any(key.startswith(f"{prefix}{_place_of(name)}.{index}.") for key in state_dict)
        if f"{prefix}{name}" in state_dict and not kept:
            state.reset()


def take_part(state: ScalingState, layout: ShardLayout) -> None:
    """Have a stack's state scale the experts that FSDP2 puts together on this rank.

    Its amaxes are reduced over all ranks of the mesh, those of expert parallelism too, so that every rank has the past
    of every expert, and a checkpoint of any rank all of it.
    """
    if state.members is not None:
        rows = layout.whole[0] // state.members
        first, count = layout.origin[0] // rows, layout.shape[0] // rows
        state.here = ALL_MEMBERS if count == state.members else slice(first, first + count)


def check_members(state: ScalingState, experts: int, fqn: str) -> None:
    """Raise a Float8ConfigError where this rank has other experts than the state scales."""
    if (known := len(range(state.members or 0)[state.here])) != experts:
        raise Float8ConfigError(
            f"{fqn}: delayed scaling knows {known} experts of this rank, which has {experts}: where expert parallelism "
            "alone cuts the weight, no reduction brings together the amax histories of all ranks. Call fully_shard "
            "over a mesh that has a dimension for expert parallelism, too, or take a recipe with current scaling"
        )


def sources_of(layer: Any, recipe: Recipe, name: str = "weight") -> Sources:
    """Those of a weight's state; amaxes of a forward in training count."""
    state = state_of(layer, recipe, name)
    stage = torch.is_grad_enabled() and layer.training
    if not torch.compiler.is_compiling():
        state.notice_writes()
        stage = stage and not is_metadata_inference()
    weight = getattr(layer, name)
    if state.members is not None:
        check_members(state, len(local_tensor(weight)), f"{layer.fqn}.{name}")
    frozen = layer.training and not weight.requires_grad
    return state.sources(stage=stage, frozen=frozen)
